# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Mamba on the CPU: states at chunk ends, copies between blocks, drafts."""

from itertools import pairwise

import pytest
import torch

import vllm._custom_ops  # noqa: F401  (loads the CPU kernels)
from vllm.config.mamba import MambaConfig
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import (
    causal_conv1d_update_cpu,
)
from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import (
    _mamba_chunk_scan_combined_fwd_cpu as vllm_scan,
)
from vllm.model_executor.layers.mamba.ops.ssu_dispatch import CPUSSUBackend
from vllm.triton_utils import dispatcher
from vllm.v1.attention.backends.mamba2_attn import compute_varlen_chunk_metadata
from vllm_nemotron3_5_transcribe import cpu_mamba, hooks

HEADS, HEAD_DIM, GROUPS, STATE, CHUNK = 4, 8, 2, 16, 16
SSD = "vllm.model_executor.layers.mamba.ops"


def scan_arguments(lengths, dtype):
    torch.manual_seed(0)
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    bounds, last, owner = compute_varlen_chunk_metadata(cu_seqlens, CHUNK)
    return dict(
        x=torch.randn(tokens, HEADS, HEAD_DIM).to(dtype),
        dt=torch.randn(tokens, HEADS).to(dtype),
        A=-torch.rand(HEADS),
        B=torch.randn(tokens, GROUPS, STATE).to(dtype),
        C=torch.randn(tokens, GROUPS, STATE).to(dtype),
        chunk_size=CHUNK,
        out=torch.empty(tokens, HEADS, HEAD_DIM, dtype=dtype),
        D=torch.randn(HEADS),
        dt_bias=torch.randn(HEADS),
        dt_softplus=True,
        cu_seqlens=cu_seqlens,
        cu_chunk_seqlens=bounds,
        last_chunk_indices=last,
        seq_idx=owner,
        state_dtype=torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_initial_states", [False, True])
@pytest.mark.parametrize("lengths", [[1], [16], [17], [130], [5, 40, 16, 33]])
def test_scan_in_pieces_is_the_unbroken_scan(lengths, with_initial_states, dtype):
    """The same outputs and last states, for any chunking of any sequences.

    One sequence is the same bit for bit. With several, softplus meets a vector's
    scalar tail elsewhere, which may change an element's last bit.
    """
    whole = scan_arguments(lengths, dtype)
    if with_initial_states:
        whole["initial_states"] = torch.randn(len(lengths), HEADS, HEAD_DIM, STATE)
    last_states = vllm_scan(**whole)
    pieces = {**whole, "out": torch.empty_like(whole["out"])}
    states = cpu_mamba.scan_with_chunk_states(vllm_scan, **pieces)
    assert states.shape[0] == len(whole["seq_idx"])
    tolerance = 0.0 if len(lengths) == 1 else 1e-5
    exact = dict(rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        states[whole["last_chunk_indices"]], last_states, **exact
    )
    if dtype == torch.bfloat16 and len(lengths) > 1:
        exact = {}
    torch.testing.assert_close(pieces["out"], whole["out"], **exact)


def test_chunk_states_are_those_of_shorter_prompts():
    arguments = scan_arguments([70], torch.float32)
    states = cpu_mamba.scan_with_chunk_states(vllm_scan, **arguments)
    for chunk in range(4):
        end = (chunk + 1) * CHUNK
        shorter = {
            name: value[:end] if name in ("x", "dt", "B", "C", "out") else value
            for name, value in arguments.items()
        }
        shorter["cu_seqlens"] = torch.tensor([0, end], dtype=torch.int32)
        assert torch.equal(states[chunk], vllm_scan(**shorter)[0])


def test_states_are_returned_in_the_dtype_asked_for():
    arguments = scan_arguments([40], torch.bfloat16)
    arguments["state_dtype"] = torch.bfloat16
    states = cpu_mamba.scan_with_chunk_states(vllm_scan, **arguments)
    assert states.dtype == torch.bfloat16


def test_checkpoint_is_stored_where_it_belongs():
    """Rows without a checkpoint write nothing; windows end at the checkpoint."""
    torch.manual_seed(0)
    x = torch.randn(6, 50)
    conv = torch.zeros(5, 6, 4)
    ssm = torch.zeros(5, HEADS, HEAD_DIM, STATE)
    chunk_states = torch.randn(4, HEADS, HEAD_DIM, STATE)
    cpu_mamba.store_prefill_checkpoint(
        x,
        conv,
        chunk_states,
        ssm,
        torch.tensor([0, 20, 50], dtype=torch.int32),
        torch.tensor([0, 16], dtype=torch.int32),
        torch.tensor([1, 3]),
        torch.tensor([0, 2]),
        *x.stride(),
        *conv.stride(),
        chunk_states.stride(0),
        ssm.stride(0),
        DIM=6,
        STATE_LEN=3,
        SSM_ROW_SIZE=ssm[0].numel(),
        BLOCK_SIZE=1024,
    )
    assert torch.equal(conv[3, :, :3], x[:, 33:36])
    assert torch.equal(ssm[3], chunk_states[2])
    untouched = [0, 1, 2, 4]
    assert not conv[untouched].any()
    assert not ssm[untouched].any()


class Blocks:
    """Two layers' states in paged blocks, as vLLM's runner describes them."""

    def __init__(self, dim_first, dtype):
        torch.manual_seed(0)
        width, channels = 5, 6
        shape = (channels, width) if dim_first else (width, channels)
        self.conv = [torch.randn(9, *shape).to(dtype) for _ in range(2)]
        # A padded page: the state takes only the front of each row.
        pages = [torch.randn(9, 2 * HEADS * STATE) for _ in range(2)]
        self.ssm = [page[:, : HEADS * STATE] for page in pages]
        self.table = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
        states = [s for pair in zip(self.conv, self.ssm) for s in pair]
        is_conv = [True, False] * 2
        size = [s.element_size() for s in states]
        self.description = (
            torch.tensor([self.table.data_ptr()]),
            self.table.stride(0),
            torch.tensor([s.data_ptr() for s in states]),
            torch.tensor([s.stride(0) * n for s, n in zip(states, size)]),
            torch.tensor(size),
            torch.tensor(
                [
                    (1 if dim_first else channels) if conv else HEADS * STATE
                    for conv in is_conv
                ]
            ),
            torch.tensor([width if conv else 0 for conv in is_conv]),
            torch.zeros(4, dtype=torch.int32),
            torch.tensor([channels if dim_first and conv else 0 for conv in is_conv]),
            torch.tensor(
                [
                    s.stride(1) * n if dim_first and conv else 0
                    for s, n, conv in zip(states, size, is_conv)
                ]
            ),
        )
        self.dim_first = dim_first
        self.before = [s.clone() for s in states]
        self.states = states

    def expect_copy(self, row, source, target, skip):
        """What ``copy`` should leave behind, by plain indexing."""
        table = self.table.tolist()[row]
        expected = [s.clone() for s in self.before]
        for i, state in enumerate(expected):
            if i % 2:
                state[table[target]] = self.before[i][table[source + skip]]
            elif self.dim_first:
                window = self.before[i][table[source]][:, skip:]
                state[table[target]][:, : window.shape[1]] = window
            else:
                window = self.before[i][table[source]][skip:]
                state[table[target]][: window.shape[0]] = window
        return expected

    def assert_equal(self, expected):
        for state, wanted in zip(self.states, expected):
            assert torch.equal(state, wanted)


LAYOUTS = pytest.mark.parametrize("dim_first", [False, True], ids=["SD", "DS"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@LAYOUTS
@DTYPES
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_state_moves_to_the_block_of_the_next_step(dim_first, dtype, skip):
    blocks = Blocks(dim_first, dtype)
    cpu_mamba.copy_states_before_step(
        torch.tensor([1, 3]),  # where this step starts
        torch.tensor([1, 0]),  # the first request stays in its block
        torch.tensor([2, skip]),
        *blocks.description,
        None,
        2,
        COPY_BLOCK_SIZE=1024,
        CONV_STATE_DIM_FIRST=dim_first,
        HAS_IDX_MAPPING=False,
        TEMPORAL_TILES=16,
    )
    blocks.assert_equal(blocks.expect_copy(1, 0, 3, skip))


@LAYOUTS
def test_new_requests_are_left_alone(dim_first):
    blocks = Blocks(dim_first, torch.float32)
    cpu_mamba.copy_states_before_step(
        torch.tensor([1, 3]),
        torch.tensor([-1, 2]),
        torch.tensor([0, 0]),
        *blocks.description,
        torch.tensor([0, -1]),
        2,
        CONV_STATE_DIM_FIRST=dim_first,
    )
    blocks.assert_equal(blocks.before)


def after_step(blocks, *, accepted, column, scheduled, computed, drafts, size=8):
    out = torch.tensor([accepted], dtype=torch.int32)
    cpu_mamba.copy_states_after_step(
        torch.tensor([accepted]),
        torch.tensor([column]),
        torch.tensor([scheduled]),
        torch.tensor([computed]),
        torch.tensor([drafts]),
        *blocks.description,
        out,
        None,
        1,
        block_size=size,
        COPY_BLOCK_SIZE=1024,
        CONV_STATE_DIM_FIRST=blocks.dim_first,
        TEMPORAL_TILES=16,
    )
    return out.item()


@LAYOUTS
@DTYPES
def test_border_inside_the_accepted_tokens_is_saved(dim_first, dtype):
    """6 tokens, then 1 + 3 of which 3 are accepted: the border at 8 is the second."""
    blocks = Blocks(dim_first, dtype)
    accepted = after_step(
        blocks, accepted=3, column=1, scheduled=4, computed=6, drafts=3
    )
    assert accepted == 3
    blocks.assert_equal(blocks.expect_copy(0, 1, 0, 1))


@LAYOUTS
def test_running_state_that_reaches_its_own_border(dim_first):
    """The block that runs is the one to keep: it moves up and counts as one token."""
    blocks = Blocks(dim_first, torch.float32)
    accepted = after_step(
        blocks, accepted=3, column=0, scheduled=4, computed=5, drafts=3
    )
    assert accepted == 1
    blocks.assert_equal(blocks.expect_copy(0, 0, 0, 2))


@LAYOUTS
@pytest.mark.parametrize(("computed", "accepted"), [(1, 3), (8, 2)])
def test_nothing_is_copied_between_borders(dim_first, computed, accepted):
    blocks = Blocks(dim_first, torch.float32)
    after = after_step(
        blocks, accepted=accepted, column=2, scheduled=4, computed=computed, drafts=3
    )
    assert after == accepted
    blocks.assert_equal(blocks.before)


def test_kernels_are_registered_by_vllms_names(monkeypatch):
    """Launched as ``kernel[grid](...)`` they reach ours, and vLLM's own come first."""
    monkeypatch.setattr(dispatcher, "_registry", dict(dispatcher._registry))
    hooks._register_mamba_kernels()
    names = [n for n in dispatcher._registry if "mamba" in n]
    for kernel in (
        "vllm.v1.worker.mamba_utils.precopy_mamba_align_fused_kernel",
        "vllm.v1.worker.mamba_utils.postprocess_mamba_fused_kernel",
        f"{SSD}.ssd_checkpoint._store_prefill_checkpoint_kernel",
    ):
        assert kernel in names
        assert dispatcher._registry[kernel][1].__module__ == cpu_mamba.__name__


# --- Steps with drafts -----------------------------------------------------------

# Three sequences: one whose last step accepted nothing but its own token, one that
# accepted two drafts, and a shorter step. Block 0 is the null block.
BLOCKS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], dtype=torch.int32)
ACCEPTED = torch.tensor([1, 3, 2], dtype=torch.int32)
STARTS = torch.tensor([0, 4, 8, 10], dtype=torch.int32)
TOKENS = 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim_first", [False, True], ids=["SD", "DS"])
@pytest.mark.parametrize("channels", [37, 96])
def test_convolution_goes_on_from_the_accepted_tokens(channels, dim_first, dtype):
    torch.manual_seed(0)
    weight = torch.randn(channels, 4).to(dtype)
    bias = torch.randn(channels).to(dtype)
    x = torch.randn(TOKENS, channels).to(dtype)
    if dim_first:
        state = torch.randn(14, channels, 6).to(dtype)
    else:
        state = torch.randn(14, 6, channels).to(dtype).transpose(1, 2)
    before = state.clone()
    out = cpu_mamba.convolve_with_drafts(
        causal_conv1d_update_cpu,
        x,
        state,
        weight,
        bias,
        "silu",
        conv_state_indices=BLOCKS,
        num_accepted_tokens=ACCEPTED,
        query_start_loc=STARTS,
        null_block_id=0,
    )
    tolerance = {} if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    for sequence, (start, end) in enumerate(pairwise(STARTS.tolist())):
        block, skip = BLOCKS[sequence, 0], ACCEPTED[sequence] - 1
        inputs = torch.cat([before[block][:, skip : skip + 3], x[start:end].T], dim=1)
        expected = torch.nn.functional.conv1d(
            inputs[None].double(),
            weight[:, None].double(),
            bias.double(),
            groups=channels,
        )
        expected = torch.nn.functional.silu(expected)[0].T.to(dtype)
        torch.testing.assert_close(out[start:end], expected, **tolerance)
        kept = inputs[:, 1:]
        assert torch.equal(state[block][:, : kept.shape[1]], kept)
    untouched = [0, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13]
    assert torch.equal(state[untouched], before[untouched])


def ssm_arguments():
    torch.manual_seed(0)
    shape = (HEADS, HEAD_DIM)
    dt = torch.randn(TOKENS, HEADS)
    return dict(
        x=torch.randn(TOKENS, *shape),
        dt=dt[:, :, None].expand(-1, -1, HEAD_DIM),
        A=-torch.rand(HEADS)[:, None, None].expand(-1, HEAD_DIM, STATE),
        B=torch.randn(TOKENS, GROUPS, STATE),
        C=torch.randn(TOKENS, GROUPS, STATE),
        D=torch.randn(HEADS)[:, None].expand(-1, HEAD_DIM),
        dt_bias=torch.randn(HEADS)[:, None].expand(-1, HEAD_DIM),
    )


BY_TOKEN = ("x", "dt", "B", "C")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("uniform", [False, True], ids=["ragged", "uniform"])
def test_states_after_every_token_are_those_of_single_steps(uniform, dtype):
    """Bit for bit: the output and each kept state equal decoding without drafts."""
    update = CPUSSUBackend(MambaConfig())
    arguments = ssm_arguments()
    for name in BY_TOKEN:
        arguments[name] = arguments[name].to(dtype)
    starts = torch.tensor([0, 3, 6, 9], dtype=torch.int32) if uniform else STARTS
    # States lie in pages with others between them.
    pages = torch.randn(14, 3, HEADS * HEAD_DIM * STATE)
    state = pages[:, 1].view(14, HEADS, HEAD_DIM, STATE)
    before = state.clone()
    out = torch.empty_like(arguments["x"])
    cpu_mamba.update_state_with_drafts(
        update,
        state,
        **arguments,
        dt_softplus=True,
        out=out,
        state_batch_indices=BLOCKS,
        dst_state_batch_indices=BLOCKS,
        num_accepted_tokens=ACCEPTED,
        cu_seqlens=starts,
        null_block_id=0,
    )
    expected_state = before.clone()
    for sequence, (start, end) in enumerate(pairwise(starts.tolist())):
        running = before[BLOCKS[sequence, ACCEPTED[sequence] - 1]][None].clone()
        for step, token in enumerate(range(start, end)):
            single = {
                name: value[token : token + 1] if name in BY_TOKEN else value
                for name, value in arguments.items()
            }
            expected = torch.empty_like(single["x"])
            row = torch.zeros(1, 1, dtype=torch.int32)
            update(
                running,
                **single,
                dt_softplus=True,
                out=expected,
                state_batch_indices=row,
                dst_state_batch_indices=row,
                null_block_id=-1,
            )
            assert torch.equal(out[token : token + 1], expected)
            expected_state[BLOCKS[sequence, step]] = running[0]
    assert torch.equal(state, expected_state)


def test_sequences_in_the_null_block_are_left_alone():
    update = CPUSSUBackend(MambaConfig())
    arguments = ssm_arguments()
    blocks = BLOCKS.clone()
    blocks[1] = 0
    state = torch.randn(14, HEADS, HEAD_DIM, STATE)
    before = state.clone()
    cpu_mamba.update_state_with_drafts(
        update,
        state,
        **arguments,
        dt_softplus=True,
        out=torch.empty_like(arguments["x"]),
        state_batch_indices=blocks,
        dst_state_batch_indices=blocks,
        num_accepted_tokens=ACCEPTED,
        cu_seqlens=STARTS,
        null_block_id=0,
    )
    untouched = [0, 5, 6, 7, 8, 11, 12, 13]
    assert torch.equal(state[untouched], before[untouched])
    written = [1, 2, 3, 4, 9, 10]
    assert not any(torch.equal(state[i], before[i]) for i in written)


def test_decode_kernels_are_wrapped_once(monkeypatch):
    """Without drafts vLLM's own kernels are called; wrapping again changes nothing."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    monkeypatch.setattr(mamba_mixer2, "causal_conv1d_update", causal_conv1d_update_cpu)
    monkeypatch.setattr(CPUSSUBackend, "__call__", CPUSSUBackend.__call__)
    hooks._wrap_mamba_decode()
    wrapped = mamba_mixer2.causal_conv1d_update, CPUSSUBackend.__call__
    hooks._wrap_mamba_decode()
    assert (mamba_mixer2.causal_conv1d_update, CPUSSUBackend.__call__) == wrapped
    x, weight = torch.randn(2, 16), torch.randn(16, 4)
    states = torch.randn(3, 16, 3)
    copy = states.clone()
    indices = torch.tensor([1, 2], dtype=torch.int32)
    out = wrapped[0](x, states, weight, None, "silu", conv_state_indices=indices)
    expected = causal_conv1d_update_cpu(
        x, copy, weight, None, "silu", conv_state_indices=indices
    )
    assert torch.equal(out, expected)
    assert torch.equal(states, copy)
