# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Non-gated experts on the CPU against a dense formula."""

import pytest
import torch

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    make_unquantized_moe_kernel,
    select_unquantized_moe_backend,
)
from vllm_nemotron3_5_transcribe import register
from vllm_nemotron3_5_transcribe.cpu_experts import (
    CPUNonGatedExperts,
    run_non_gated_experts,
)

ACTIVATIONS = {
    "relu2_no_mul": lambda x: x.relu().square(),
    "silu_no_mul": torch.nn.functional.silu,
    "gelu_no_mul": torch.nn.functional.gelu,
    "gelu_tanh_no_mul": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
# Of the largest value: float32 sums in another order, bfloat16 roundings between
# the two products.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_layer(experts, dtype, hidden=48, inner=24):
    up = torch.randn(experts, inner, hidden) / hidden**0.5
    down = torch.randn(experts, hidden, inner) / inner**0.5
    return up.to(dtype), down.to(dtype)


def route(tokens, experts, top_k):
    """Top-k of sigmoid scores: distinct experts, weights that do not sum to one."""
    weights, ids = torch.rand(tokens, experts).sigmoid().topk(top_k, sorted=False)
    return weights, ids.to(torch.int32)


def dense(x, up, down, weights, ids, act="relu2_no_mul", up_bias=None, down_bias=None):
    """Every expert on every token in float64, then the router's weights."""
    x, up, down = x.double(), up.double(), down.double()
    inner = torch.einsum("th,eih->tei", x, up)
    if up_bias is not None:
        inner += up_bias.double()
    out = torch.einsum("tei,ehi->teh", ACTIVATIONS[act](inner), down)
    if down_bias is not None:
        out += down_bias.double()
    full = torch.zeros(x.shape[0], up.shape[0], dtype=torch.double)
    full.scatter_add_(1, ids.long(), weights.double())
    return torch.einsum("te,teh->th", full, out)


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    scale = expected.abs().max().clamp(min=1e-6)
    assert ((actual.double() - expected).abs().max() / scale) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 300])
@pytest.mark.parametrize(
    ("experts", "top_k"), [(1, 1), (4, 1), (8, 3), (16, 6), (128, 6), (5, 5)]
)
def test_equals_the_dense_formula(experts, top_k, tokens, dtype):
    up, down = make_layer(experts, dtype)
    x = torch.randn(tokens, 48).to(dtype)
    weights, ids = route(tokens, experts, top_k)
    out = run_non_gated_experts(x, up, down, weights, ids, "relu2_no_mul")
    assert_close(out, dense(x, up, down, weights, ids), dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_without_a_gate(activation):
    up, down = make_layer(8, torch.float32)
    x = torch.randn(33, 48)
    weights, ids = route(33, 8, 3)
    out = run_non_gated_experts(x, up, down, weights, ids, activation)
    assert_close(out, dense(x, up, down, weights, ids, activation), torch.float32)


def test_biases():
    up, down = make_layer(8, torch.float32)
    up_bias, down_bias = torch.randn(8, 24), torch.randn(8, 48)
    x = torch.randn(33, 48)
    weights, ids = route(33, 8, 3)
    out = run_non_gated_experts(
        x, up, down, weights, ids, "relu2_no_mul", up_bias, down_bias
    )
    expected = dense(x, up, down, weights, ids, up_bias=up_bias, down_bias=down_bias)
    assert_close(out, expected, torch.float32)


def test_all_tokens_on_one_expert():
    up, down = make_layer(64, torch.float32)
    x = torch.randn(50, 48)
    weights, ids = torch.rand(50, 1), torch.full((50, 1), 63, dtype=torch.int32)
    out = run_non_gated_experts(x, up, down, weights, ids, "relu2_no_mul")
    assert_close(out, dense(x, up, down, weights, ids), torch.float32)


def test_input_is_left_alone():
    up, down = make_layer(8, torch.float32)
    x = torch.randn(9, 48)
    weights, ids = route(9, 8, 3)
    copies = [t.clone() for t in (x, up, down, weights, ids)]
    run_non_gated_experts(x, up, down, weights, ids, "relu2_no_mul")
    for tensor, copy in zip((x, up, down, weights, ids), copies):
        assert torch.equal(tensor, copy)


def test_expert_parallel_ranks_sum_to_the_whole():
    """Each rank computes its own experts; a token of another rank's adds nothing."""
    up, down = make_layer(8, torch.float32)
    x = torch.randn(40, 48)
    weights, ids = route(40, 8, 3)
    total = torch.zeros_like(x)
    for rank in range(2):
        own = slice(4 * rank, 4 * rank + 4)
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[own] = torch.arange(4, dtype=torch.int32)
        total += run_non_gated_experts(
            x,
            up[own],
            down[own],
            weights,
            ids,
            "relu2_no_mul",
            expert_map=expert_map,
        )
    assert_close(total, dense(x, up, down, weights, ids), torch.float32)


def test_rank_without_any_token():
    up, down = make_layer(2, torch.float32)
    x = torch.randn(5, 48)
    expert_map = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    weights, ids = torch.rand(5, 2), torch.tensor([[0, 1]] * 5, dtype=torch.int32)
    out = run_non_gated_experts(
        x, up, down, weights, ids, "relu2_no_mul", expert_map=expert_map
    )
    assert torch.equal(out, torch.zeros_like(x))


def test_negative_ids_are_unused_slots():
    up, down = make_layer(8, torch.float32)
    x = torch.randn(6, 48)
    weights, ids = route(6, 8, 3)
    ids[2] = -1
    ids[4, 1] = -1
    used = weights.masked_fill(ids < 0, 0)
    out = run_non_gated_experts(x, up, down, weights, ids, "relu2_no_mul")
    assert_close(out, dense(x, up, down, used, ids.clamp(min=0)), torch.float32)


def test_nan_of_one_token_stays_with_it():
    up, down = make_layer(8, torch.float32)
    x = torch.randn(20, 48)
    weights, ids = route(20, 8, 3)
    clean = run_non_gated_experts(x, up, down, weights, ids, "relu2_no_mul")
    x[7] = float("nan")
    out = run_non_gated_experts(x, up, down, weights, ids, "relu2_no_mul")
    assert out[7].isnan().all()
    others = torch.arange(20) != 7
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_result_hardly_depends_on_the_batch(dtype):
    """Alone, in order and shuffled among others: the same up to the matmul's own."""
    up, down = make_layer(16, dtype, hidden=96, inner=64)
    x = torch.randn(200, 96).to(dtype)
    weights, ids = route(200, 16, 4)
    together = run_non_gated_experts(x, up, down, weights, ids, "relu2_no_mul")
    order = torch.randperm(200)
    shuffled = run_non_gated_experts(
        x[order], up, down, weights[order], ids[order], "relu2_no_mul"
    )
    assert_close(shuffled, together[order].double(), dtype)
    for token in (0, 99, 199):
        row = slice(token, token + 1)
        alone = run_non_gated_experts(
            x[row], up, down, weights[row], ids[row], "relu2_no_mul"
        )
        assert_close(alone, together[row].double(), dtype)


def test_compiled_graph_keeps_the_operator_whole():
    """No graph break, whatever the routing, and the number of tokens is dynamic."""
    up, down = make_layer(8, torch.float32)

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def layer(x, weights, ids):
        out = torch.ops.vllm.cpu_non_gated_experts(
            x * 1.0, up, down, weights, ids, "relu2_no_mul", None, None, None
        )
        return out + x

    for tokens in (3, 8, 21):
        x = torch.randn(tokens, 48)
        weights, ids = route(tokens, 8, 3)
        expected = dense(x, up, down, weights, ids) + x.double()
        assert_close(layer(x, weights, ids), expected, torch.float32)


# --- Selection -------------------------------------------------------------------


def moe_config(activation, dtype=torch.bfloat16, **changes):
    parallel = FusedMoEParallelConfig(
        tp_size=1,
        pcp_size=1,
        dp_size=1,
        ep_size=1,
        tp_rank=0,
        pcp_rank=0,
        dp_rank=0,
        ep_rank=0,
        sp_size=1,
        use_ep=False,
        all2all_backend="naive",
        enable_eplb=False,
    )
    values = dict(
        num_experts=8,
        experts_per_token=2,
        hidden_dim=64,
        intermediate_size=64,
        num_local_experts=8,
        num_logical_experts=8,
        activation=activation,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=dtype,
    )
    return FusedMoEConfig(**{**values, **changes})


GATED = [a for a in MoEActivation if a.is_gated]
NON_GATED = [a for a in MoEActivation if not a.is_gated]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", NON_GATED)
def test_non_gated_experts_are_admitted(activation, dtype):
    register()
    config = moe_config(activation, dtype)
    assert config.intermediate_size_per_partition == 64
    backend, experts = select_unquantized_moe_backend(config)
    assert backend == UnquantizedMoeBackend.CPU
    assert experts is CPUNonGatedExperts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_selection_is_vllms_own(dtype):
    register()
    _, experts = select_unquantized_moe_backend(moe_config(MoEActivation.SILU, dtype))
    assert experts.__module__.startswith("vllm.model_executor.layers.fused_moe.")


@pytest.mark.parametrize("activation", GATED)
def test_gated_activations_are_refused(activation):
    register()
    supported, reason = CPUNonGatedExperts.is_supported_config(
        CPUNonGatedExperts,
        moe_config(activation),
        None,
        None,
        CPUNonGatedExperts.activation_format(),
    )
    assert not supported
    assert "activation" in reason


def test_lora_is_refused_with_a_reason():
    register()
    supported, reason = CPUNonGatedExperts.is_supported_config(
        CPUNonGatedExperts,
        moe_config(MoEActivation.RELU2_NO_MUL, is_lora_enabled=True),
        None,
        None,
        CPUNonGatedExperts.activation_format(),
    )
    assert (supported, reason) == (False, "kernel does not support LoRA")


@pytest.mark.parametrize("on_input", [False, True])
def test_through_vllms_modular_kernel(on_input):
    """Prepare, experts and finalise: router weights are applied exactly once."""
    register()
    config = moe_config(MoEActivation.RELU2_NO_MUL, torch.float32)
    kernel = make_unquantized_moe_kernel(
        FusedMoEQuantConfig.make(),
        config,
        UnquantizedMoeBackend.CPU,
        CPUNonGatedExperts,
    )
    up, down = make_layer(8, torch.float32, hidden=64, inner=64)
    x = torch.randn(21, 64)
    weights, ids = route(21, 8, 1 if on_input else 3)
    out = kernel.apply(
        hidden_states=x,
        w1=up,
        w2=down,
        topk_weights=weights,
        topk_ids=ids,
        activation=MoEActivation.RELU2_NO_MUL,
        global_num_experts=8,
        expert_map=None,
        apply_router_weight_on_input=on_input,
    )
    if on_input:
        expected = dense(x * weights, up, down, torch.ones_like(weights), ids)
    else:
        expected = dense(x, up, down, weights, ids)
    assert_close(out, expected, torch.float32)
