# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sampling with drafts on a CPU."""

import pytest
import torch

import vllm_nemotron3_5_transcribe
from vllm.utils import cpu_triton_utils
from vllm_nemotron3_5_transcribe.cpu_sampling import expand_to_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_values_are_repeated_for_the_tokens_of_their_request(dtype):
    """vLLM's own leaves what is not int64 unwritten."""
    output = torch.full((6,), -7, dtype=dtype)
    values = torch.tensor([7, 0, 5, 9], dtype=dtype)
    cu_num_tokens = torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    expand_to_tokens(output, values, cu_num_tokens, 0, 1, MAX_NUM_TOKENS=32)
    assert output.tolist() == [7, 7, 1, 9, 9, 9]


def test_it_is_what_vllm_registers():
    vllm_nemotron3_5_transcribe.register()
    assert cpu_triton_utils._expand_kernel_impl is expand_to_tokens
