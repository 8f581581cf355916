# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routed experts without a gate projection (``relu2`` and friends) on the CPU.

vLLM's CPU kernels know gated experts only. NemotronH's experts are
``down(relu(up(x)) ** 2)``, so on a CPU they run here: the (token, expert) pairs
are sorted by expert once, every expert that received tokens does two plain
matrix products on its rows, and each token sums its experts in ``float32``.
"""

import numpy as np
import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import (
    MoEActivation,
    apply_moe_activation,
    apply_moe_activation_supported,
)
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceNoOP,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op


def run_non_gated_experts(
    hidden_states: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of ``weight * down(activation(up(x)))`` over the experts of each token.

    A row's sum runs over its top-k slots in order, so which other tokens share
    the batch changes a result only as far as the matrix product itself does.

    Args:
        hidden_states: Tokens, ``(tokens, hidden)``, bfloat16 or float32.
        up_weight: ``(local experts, intermediate, hidden)``.
        down_weight: ``(local experts, hidden, intermediate)``.
        topk_weights: Router weights, ``(tokens, top_k)``.
        topk_ids: Global expert ids, ``(tokens, top_k)``; a negative id is an
            unused slot.
        activation: Value of a ``MoEActivation`` without a gate.
        up_bias: ``(local experts, intermediate)``, if any.
        down_bias: ``(local experts, hidden)``, if any.
        expert_map: Global to local expert id, -1 for an expert of another rank.

    Returns:
        ``(tokens, hidden)`` in the dtype of ``hidden_states``. Slots without a
        local expert add nothing.
    """
    num_tokens, hidden = hidden_states.shape
    top_k = topk_ids.shape[1]
    num_experts = up_weight.shape[0]

    # In numpy: a decoding step has a handful of pairs, and its calls cost a fraction.
    # Slots without a local expert get the id one past the last and sort behind.
    expert_ids = topk_ids.numpy().reshape(-1)
    unused = expert_ids < 0
    if expert_map is not None:
        expert_ids = expert_map.numpy()[np.where(unused, 0, expert_ids)]
        unused |= expert_ids < 0
    expert_ids = np.where(unused, num_experts, expert_ids)

    order = expert_ids.argsort(kind="stable")
    counts = np.bincount(expert_ids, minlength=num_experts + 1)[:num_experts]
    used = counts.nonzero()[0].tolist()
    sizes = counts[used].tolist()
    num_used = sum(sizes)
    rows = hidden_states.index_select(0, torch.from_numpy(order[:num_used] // top_k))

    inner = rows.new_empty(num_used, up_weight.shape[1])
    # One zero row at the end stands for every unused slot.
    expert_out = rows.new_empty(num_used + 1, hidden)
    expert_out[num_used].zero_()
    for expert, x, out in zip(used, rows.split(sizes), inner.split(sizes)):
        torch.mm(x, up_weight[expert].t(), out=out)
        if up_bias is not None:
            out += up_bias[expert]
    # Once for all: a step with drafts spreads a few rows over many experts.
    apply_moe_activation(MoEActivation.from_str(activation), inner, inner)
    for expert, x, out in zip(used, inner.split(sizes), expert_out.split([*sizes, 1])):
        torch.mm(x, down_weight[expert].t(), out=out)
        if down_bias is not None:
            out += down_bias[expert]

    # Where each (token, slot) pair went in the sorted order.
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    position = position.clip(max=num_used).reshape(num_tokens, top_k)
    total = torch.zeros(num_tokens, hidden, dtype=torch.float32)
    weights = topk_weights.float()
    for slot, picked in enumerate(torch.from_numpy(position).unbind(1)):
        total.addcmul_(expert_out[picked].float(), weights[:, slot, None])
    return total.to(hidden_states.dtype)


def _run_non_gated_experts_fake(
    hidden_states: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    return torch.empty_like(hidden_states)


# An opaque operator: how many rows an expert gets is data, which torch.compile
# could only follow with a graph break in every layer.
direct_register_custom_op(
    op_name="cpu_non_gated_experts",
    op_func=run_non_gated_experts,
    fake_impl=_run_non_gated_experts_fake,
)


class CPUNonGatedExperts(mk.FusedMoEExpertsModular):
    """Unquantised experts without a gate, for vLLM's modular MoE on a CPU.

    Routing stays with vLLM (``CPURouter``): sigmoid scores, correction bias,
    groups, renormalisation and scaling all arrive in ``topk_weights``.
    """

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        # Gated experts have kernels of vLLM's own; never compete with them.
        return not activation.is_gated and apply_moe_activation_supported(activation)

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_parallel_config(parallel_config: FusedMoEParallelConfig) -> bool:
        return True

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspace: sizes depend on the routing. The output is (M, K)."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Nothing is left to do: ``apply`` weighs and sums the experts."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted sum of the experts of each token into ``output``.

        Args:
            output: ``(tokens, hidden)``.
            hidden_states: ``(tokens, hidden)``, already multiplied by the router
                weight if ``apply_router_weight_on_input``.
            w1: ``(local experts, intermediate, hidden)``.
            w2: ``(local experts, hidden, intermediate)``.
            topk_weights: ``(tokens, top_k)``.
            topk_ids: ``(tokens, top_k)``, global expert ids.
            activation: One without a gate.
            expert_map: Global to local expert id under expert parallelism.

        The remaining arguments belong to other kernels.
        """
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        output.copy_(
            torch.ops.vllm.cpu_non_gated_experts(
                hidden_states,
                w1,
                w2,
                topk_weights,
                topk_ids,
                activation.value,
                self.w1_bias,
                self.w2_bias,
                expert_map,
            )
        )
