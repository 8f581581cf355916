# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tensors on their way between front end and workers."""

import pytest
import torch

from vllm_nemotron3_5_transcribe.worker_extension import pack_tensor, unpack_tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).T,
        torch.zeros(0, 5),
        torch.tensor([True, False]),
        torch.randn(3).bfloat16(),
        # The last chunk of an hour has one frame.
        torch.as_strided(torch.tensor([7, 8], dtype=torch.int32), (1,), (0,)),
    ],
    ids=["transposed", "empty", "bool", "bfloat16", "stride-0"],
)
def test_tensors_survive_packing(tensor):
    unpacked = unpack_tensor(pack_tensor(tensor))
    assert unpacked.dtype == tensor.dtype and torch.equal(unpacked, tensor)
