# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What Mamba-2 layers lack on the CPU for prefix caching and speculative decoding.

* With prefix caching (vLLM's default) Mamba states live in blocks and move about: a
  long prefill leaves a checkpoint in an earlier block, and accepted drafts carry the
  state over block borders. vLLM copies in Triton, and its CPU scan returns no state
  but the last.
* With speculative decoding a step runs over the drafts and keeps the states after
  each, to go on from the last accepted one. vLLM's CPU kernels for the convolution
  and the state update do not know of that: they go on from the wrong state.

The functions here do it on the CPU, and exactly. Each is a copy, or calls vLLM's own
kernel: a scan by chunks, a step with drafts from the right state, in the very
arithmetic of a decode without drafts.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch


def scan_with_chunk_states(
    scan: Callable[..., torch.Tensor],
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    out: torch.Tensor,
    *,
    seq_idx: torch.Tensor,
    cu_chunk_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    **options,
) -> torch.Tensor:
    """Mamba-2 scan that returns the state at the end of every chunk.

    Args:
        scan: vLLM's CPU scan, which returns one state a sequence.
        x: ``(tokens, heads, head_dim)`` of all sequences, one after the other.
        dt: ``(tokens, heads)``.
        A: ``(heads,)``.
        B: ``(tokens, groups, state)``.
        C: ``(tokens, groups, state)``.
        chunk_size: Handed on.
        out: Result, ``(tokens, heads, head_dim)``, written in place.
        seq_idx: The sequence of each chunk, ``(chunks,)``.
        cu_chunk_seqlens: Where the chunks start and end, ``(chunks + 1,)``.
        initial_states: ``(sequences, heads, head_dim, state)``, if any.
        z: Gate, shaped like ``x``, if any.
        state_dtype: Dtype of the returned states; that of ``x`` if absent.
        options: Handed on.

    Returns:
        ``(chunks, heads, head_dim, state)``.
    """
    for name in ("cu_seqlens", "last_chunk_indices"):
        options.pop(name, None)
    states: list[torch.Tensor] = []
    previous_sequence = None
    state = None
    for sequence, (start, end) in zip(
        seq_idx.tolist(), pairwise(cu_chunk_seqlens.tolist()), strict=True
    ):
        if sequence != previous_sequence:
            state = None if initial_states is None else initial_states[sequence, None]
            previous_sequence = sequence
        part = slice(start, end)
        state = scan(
            x[part],
            dt[part],
            A,
            B[part],
            C[part],
            chunk_size,
            out[part],
            z=None if z is None else z[part],
            initial_states=state,
            cu_seqlens=torch.tensor([0, end - start], dtype=torch.int32),
            # The running state stays in float32, as inside an unbroken scan.
            state_dtype=torch.float32,
            **options,
        )
        states.append(state)
    return torch.cat(states).to(x.dtype if state_dtype is None else state_dtype)


def _equal_lengths(
    query_start_loc: torch.Tensor, blocks: list[int], null_block_id: int
) -> Iterator[tuple[list[int], torch.Tensor | slice, int]]:
    """Group the sequences of a step by their number of tokens: nearly always one group.

    Args:
        query_start_loc: Where the sequences start, ``(sequences + 1,)``.
        blocks: Blocks of the sequences.
        null_block_id: Block of a sequence that is none.

    Yields:
        Sequences of equal length, their tokens one sequence after the other, and the
        length.
    """
    starts = query_start_loc.tolist()
    groups: dict[int, list[int]] = {}
    for sequence, (start, end) in enumerate(pairwise(starts)):
        if blocks[sequence] != null_block_id and end > start:
            groups.setdefault(end - start, []).append(sequence)
    for length, sequences in groups.items():
        if len(sequences) == len(starts) - 1:
            # A slice makes views of what an index would copy.
            yield sequences, slice(starts[0], starts[-1]), length
        else:
            first = torch.tensor([starts[sequence] for sequence in sequences])
            yield sequences, (first[:, None] + torch.arange(length)).flatten(), length


def _take(tensor: torch.Tensor, tokens: torch.Tensor | slice) -> torch.Tensor:
    """Rows of a tensor, without a view where they are all of them."""
    if isinstance(tokens, slice) and tokens == slice(0, len(tensor)):
        return tensor
    return tensor[tokens]


@functools.cache
def _ones(count: int) -> torch.Tensor:
    """Read only: the same tensor each time."""
    return torch.ones(count, dtype=torch.int32)


@functools.cache
def _steps(count: int, step: int) -> torch.Tensor:
    """``count`` multiples of ``step``. Read only: the same tensor each time."""
    return torch.arange(0, count * step, step, dtype=torch.int32)


def convolve_with_drafts(
    convolve: Callable[..., torch.Tensor],
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    null_block_id: int,
) -> torch.Tensor:
    """Causal convolution of a decode step that ends in draft tokens.

    A block's window holds the inputs before the last step's first token and those of
    its tokens. As many as were accepted have become history.

    Args:
        convolve: vLLM's CPU update, for sequences of equal length.
        x: ``(tokens, channels)``.
        conv_state: Paged windows, ``(blocks, channels, width - 1 + drafts)``.
        weight: ``(channels, width)``.
        bias: ``(channels,)``, if any.
        activation: Handed on.
        conv_state_indices: Blocks of the sequences, the first column counts.
        num_accepted_tokens: Accepted in the last step, ``(sequences,)``.
        query_start_loc: Where the sequences start in ``x``, ``(sequences + 1,)``.
        null_block_id: Block of a sequence that is none.

    Returns:
        Shaped like ``x``.
    """
    # Plain numbers: the sequences are few, and indices in tensors cost more.
    indices = conv_state_indices.tolist()
    blocks = [row[0] for row in indices] if conv_state_indices.ndim > 1 else indices
    accepted = num_accepted_tokens.tolist()
    history = weight.shape[1] - 1
    out = torch.empty_like(x)
    for sequences, tokens, length in _equal_lengths(
        query_start_loc, blocks, null_block_id
    ):
        count = len(sequences)
        windows = [conv_state[blocks[sequence]] for sequence in sequences]
        starts = [max(accepted[sequence] - 1, 0) for sequence in sequences]
        old = torch.stack(
            [window.narrow(1, start, history) for window, start in zip(windows, starts)]
        )
        new = _take(x, tokens).view(count, length, -1).transpose(1, 2)
        kept = torch.cat([old.narrow(2, 1, history - 1), new.to(old.dtype)], 2)
        # From here on `old` is the kernel's, which moves its windows on.
        done = convolve(
            new,
            old,
            weight,
            bias,
            activation,
            conv_state_indices=_steps(count, 1),
            null_block_id=-1,
        )
        done = done.transpose(1, 2).reshape(-1, x.shape[1])
        for window, inputs in zip(windows, kept):
            window.narrow(1, 0, inputs.shape[1]).copy_(inputs)
        if len(done) == len(x):
            return done
        out[tokens] = done
    return out


def update_state_with_drafts(
    update: Callable[..., None],
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    out: torch.Tensor,
    state_batch_indices: torch.Tensor,
    dst_state_batch_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    null_block_id: int,
    z: torch.Tensor | None = None,
    **options,
) -> None:
    """State update of a decode step that ends in draft tokens.

    vLLM's kernel goes on in the block that it starts from, whatever was accepted,
    and copies the state after each token from there. So the start is put where the
    state after the last token belongs, and nothing needs to be kept aside.

    Args:
        update: vLLM's CPU update, for sequences of equal length.
        state: Paged states, ``(blocks, heads, head_dim, state)``.
        x: ``(tokens, heads, head_dim)``.
        dt: Shaped like ``x``.
        A: ``(heads, head_dim, state)``.
        B: ``(tokens, groups, state)``.
        C: ``(tokens, groups, state)``.
        D: ``(heads, head_dim)``.
        dt_bias: ``(heads, head_dim)``.
        out: Result, shaped like ``x``, written in place.
        state_batch_indices: Blocks to go on from, ``(sequences, 1 + drafts)``: the
            column of the last token that was accepted counts.
        dst_state_batch_indices: Blocks for the states after each token, likewise.
        num_accepted_tokens: Accepted in the last step, ``(sequences,)``.
        cu_seqlens: Where the sequences start, ``(sequences + 1,)``.
        null_block_id: Block of a sequence that is none.
        z: Gate, shaped like ``x``, if any.
        options: Handed on.
    """
    sources = state_batch_indices.tolist()
    targets = dst_state_batch_indices.tolist()
    accepted = num_accepted_tokens.tolist()
    for sequences, tokens, length in _equal_lengths(
        cu_seqlens, [row[0] for row in targets], null_block_id
    ):
        kept = [targets[sequence][:length] for sequence in sequences]
        for sequence, row in zip(sequences, kept):
            source = sources[sequence][max(accepted[sequence] - 1, 0)]
            if source != row[-1]:
                state[row[-1]] = state[source]
        count = len(sequences)
        part = _take(out, tokens)
        update(
            state,
            _take(x, tokens),
            _take(dt, tokens),
            A,
            _take(B, tokens),
            _take(C, tokens),
            D,
            dt_bias,
            z=None if z is None else _take(z, tokens),
            out=part,
            # It goes on from the only column, whatever was accepted.
            state_batch_indices=torch.tensor(
                [row[-1:] for row in kept], dtype=torch.int32
            ),
            dst_state_batch_indices=torch.tensor(kept, dtype=torch.int32),
            null_block_id=-1,
            num_accepted_tokens=_ones(count),
            cu_seqlens=_steps(count + 1, length),
            **options,
        )
        if not isinstance(tokens, slice):
            out[tokens] = part


def store_prefill_checkpoint(
    x_ptr: torch.Tensor,
    conv_state_ptr: torch.Tensor,
    chunk_states_ptr: torch.Tensor,
    ssm_state_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    checkpoint_offsets_ptr: torch.Tensor,
    state_indices_ptr: torch.Tensor,
    chunk_idx_ptr: torch.Tensor,
    *strides: int,
    STATE_LEN: int,
    **sizes: int,
) -> None:
    """Write each prefill's checkpoint into its block (launched like the kernel).

    Args:
        x_ptr: Inputs of the convolution, ``(channels, tokens)``.
        conv_state_ptr: Paged convolution windows, ``(blocks, channels, width)``.
        chunk_states_ptr: States at the ends of the chunks.
        ssm_state_ptr: Paged states, ``(blocks, heads, head_dim, state)``.
        query_start_loc_ptr: Where the sequences start in ``x_ptr``.
        checkpoint_offsets_ptr: Checkpoint in each sequence; 0 for none.
        state_indices_ptr: Block of each sequence's checkpoint.
        chunk_idx_ptr: Row of ``chunk_states_ptr`` for each sequence.
        strides: Implied by the tensors.
        STATE_LEN: Tokens in a convolution window.
        sizes: Implied by the tensors.
    """
    starts = query_start_loc_ptr.tolist()
    blocks = state_indices_ptr.tolist()
    chunks = chunk_idx_ptr.tolist()
    for row, offset in enumerate(checkpoint_offsets_ptr.tolist()):
        if offset <= 0:
            continue
        end = starts[row] + offset
        conv_state_ptr[blocks[row], :, :STATE_LEN] = x_ptr[:, end - STATE_LEN : end]
        ssm_state_ptr[blocks[row]] = chunk_states_ptr[chunks[row]]


class _StateBlocks:
    """Moves Mamba states between blocks, by vLLM's flat description of them.

    Arguments are those of the kernels: addresses, strides and widths of every
    (layer, state) tensor, and the address of each cache group's block table,
    whose rows are requests and whose columns are positions.
    """

    def __init__(
        self,
        block_table_ptrs: torch.Tensor,
        block_table_stride: int,
        base_addrs: torch.Tensor,
        block_strides: torch.Tensor,
        elem_sizes: torch.Tensor,
        inner_sizes: torch.Tensor,
        conv_widths: torch.Tensor,
        group_indices: torch.Tensor,
        dim_row_count: torch.Tensor,
        dim_row_stride: torch.Tensor,
        conv_state_dim_first: bool,
    ) -> None:
        self.tables = block_table_ptrs.tolist()
        self.table_stride = block_table_stride
        self.states = list(
            zip(
                base_addrs.tolist(),
                block_strides.tolist(),
                elem_sizes.tolist(),
                inner_sizes.tolist(),
                conv_widths.tolist(),
                group_indices.tolist(),
                dim_row_count.tolist(),
                dim_row_stride.tolist(),
                strict=True,
            )
        )
        self.conv_state_dim_first = conv_state_dim_first

    def _block(self, group: int, row: int, column: int) -> int:
        entry = row * self.table_stride + column
        address = self.tables[group] + entry * ctypes.sizeof(ctypes.c_int32)
        return ctypes.c_int32.from_address(address).value

    def copy(self, row: int, source: int, target: int, skip: int) -> None:
        """Copy request ``row``'s states from column ``source`` to ``target``.

        Args:
            row: Row of the block tables.
            source: Column of the running state.
            target: Column to write.
            skip: Accepted draft tokens to move past. Convolution windows slide by
                that many tokens; scan states were saved in that later column.
        """
        for base, stride, elem, inner, width, group, rows, row_stride in self.states:
            to = base + self._block(group, row, target) * stride
            if width == 0:
                origin = base + self._block(group, row, source + skip) * stride
                ctypes.memmove(to, origin, inner * elem)
                continue
            origin = base + self._block(group, row, source) * stride
            if self.conv_state_dim_first:
                for channel in range(rows):
                    shift = channel * row_stride
                    ctypes.memmove(
                        to + shift, origin + shift + skip * elem, (width - skip) * elem
                    )
            else:
                token = inner * elem
                ctypes.memmove(to, origin + skip * token, (width - skip) * token)


def _table_rows(idx_mapping: torch.Tensor | None, num_reqs: int) -> Iterator[int]:
    rows = range(num_reqs) if idx_mapping is None else idx_mapping.tolist()[:num_reqs]
    return (row for row in rows if row >= 0)


def copy_states_before_step(
    mamba_state_idx_ptr: torch.Tensor,
    src_col_ptr: torch.Tensor,
    token_bias_ptr: torch.Tensor,
    block_table_ptrs_ptr: torch.Tensor,
    block_table_stride_req: int,
    state_base_addrs_ptr: torch.Tensor,
    state_block_strides_ptr: torch.Tensor,
    state_elem_sizes_ptr: torch.Tensor,
    state_inner_sizes_ptr: torch.Tensor,
    state_conv_widths_ptr: torch.Tensor,
    state_group_indices_ptr: torch.Tensor,
    state_dim_row_count_ptr: torch.Tensor,
    state_dim_row_stride_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor | None,
    num_reqs: int,
    CONV_STATE_DIM_FIRST: bool,
    **tuning,
) -> None:
    """Bring a request's last state into the block where this step starts.

    Args:
        mamba_state_idx_ptr: Column of this step, by request.
        src_col_ptr: Column of the last step, -1 for a new request.
        token_bias_ptr: Draft tokens accepted in the last step.
        idx_mapping_ptr: Rows of the requests, if they differ from their order.
        num_reqs: Requests in the batch.
        CONV_STATE_DIM_FIRST: Layout of the convolution windows.
        tuning: For the Triton kernel.

    The remaining arguments are those of ``_StateBlocks``.
    """
    blocks = _StateBlocks(
        block_table_ptrs_ptr,
        block_table_stride_req,
        state_base_addrs_ptr,
        state_block_strides_ptr,
        state_elem_sizes_ptr,
        state_inner_sizes_ptr,
        state_conv_widths_ptr,
        state_group_indices_ptr,
        state_dim_row_count_ptr,
        state_dim_row_stride_ptr,
        CONV_STATE_DIM_FIRST,
    )
    for row in _table_rows(idx_mapping_ptr, num_reqs):
        source = int(src_col_ptr[row])
        target = int(mamba_state_idx_ptr[row])
        if source >= 0 and source != target:
            blocks.copy(row, source, target, int(token_bias_ptr[row]))


def copy_states_after_step(
    num_accepted_tokens_ptr: torch.Tensor,
    mamba_state_idx_ptr: torch.Tensor,
    num_scheduled_tokens_ptr: torch.Tensor | None,
    num_computed_tokens_ptr: torch.Tensor,
    num_draft_tokens_ptr: torch.Tensor | None,
    block_table_ptrs_ptr: torch.Tensor,
    block_table_stride_req: int,
    state_base_addrs_ptr: torch.Tensor,
    state_block_strides_ptr: torch.Tensor,
    state_elem_sizes_ptr: torch.Tensor,
    state_inner_sizes_ptr: torch.Tensor,
    state_conv_widths_ptr: torch.Tensor,
    state_group_indices_ptr: torch.Tensor,
    state_dim_row_count_ptr: torch.Tensor,
    state_dim_row_stride_ptr: torch.Tensor,
    num_accepted_tokens_out_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor | None,
    num_reqs: int,
    block_size: int,
    CONV_STATE_DIM_FIRST: bool,
    PRECOMPUTED_NEW_COMPUTED: bool = False,
    **tuning,
) -> None:
    """Save the state at a block border that the accepted tokens went past.

    Args:
        num_accepted_tokens_ptr: Tokens accepted in this step, by request.
        mamba_state_idx_ptr: Column of the running state.
        num_scheduled_tokens_ptr: Tokens of this step.
        num_computed_tokens_ptr: Tokens before this step; after it if
            ``PRECOMPUTED_NEW_COMPUTED``.
        num_draft_tokens_ptr: Draft tokens among those of this step.
        num_accepted_tokens_out_ptr: Set to 1 where the running state itself moved
            to the border.
        idx_mapping_ptr: Rows of the requests, if they differ from their order.
        num_reqs: Requests in the batch.
        block_size: Tokens in a block.
        CONV_STATE_DIM_FIRST: Layout of the convolution windows.
        PRECOMPUTED_NEW_COMPUTED: See ``num_computed_tokens_ptr``.
        tuning: For the Triton kernel.

    The remaining arguments are those of ``_StateBlocks``.
    """
    blocks = _StateBlocks(
        block_table_ptrs_ptr,
        block_table_stride_req,
        state_base_addrs_ptr,
        state_block_strides_ptr,
        state_elem_sizes_ptr,
        state_inner_sizes_ptr,
        state_conv_widths_ptr,
        state_group_indices_ptr,
        state_dim_row_count_ptr,
        state_dim_row_stride_ptr,
        CONV_STATE_DIM_FIRST,
    )
    for row in _table_rows(idx_mapping_ptr, num_reqs):
        accepted = int(num_accepted_tokens_ptr[row])
        computed = int(num_computed_tokens_ptr[row])
        if PRECOMPUTED_NEW_COMPUTED:
            running = computed - accepted + 1
        else:
            running = (
                computed
                + int(num_scheduled_tokens_ptr[row])
                - int(num_draft_tokens_ptr[row])
            )
            computed = running + accepted - 1
        border = computed // block_size * block_size
        if border < running:
            continue
        source = int(mamba_state_idx_ptr[row])
        target = border // block_size - 1
        if source == target:
            num_accepted_tokens_out_ptr[row] = 1
        if source != target or border != running:
            blocks.copy(row, source, target, border - running)
