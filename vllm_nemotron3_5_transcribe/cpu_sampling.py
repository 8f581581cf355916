# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A sampling step of vLLM's that goes wrong on a CPU."""

import torch


def expand_to_tokens(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat a request's value for each of its draft tokens, as the Triton kernel does.

    Args:
        output: (tokens,) of the values' dtype, written.
        values: (requests,), temperatures for example.
        cu_num_tokens: (requests,) tokens of the requests up to and with each.
        replace_from, replace_to: a value to replace, and by what.
        MAX_NUM_TOKENS: of the kernel's signature, not needed.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(counts))
