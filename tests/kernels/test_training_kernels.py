# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernels that train the demo checkpoint against transformers' own."""

import pytest
import torch
from transformers import NemotronHConfig
from transformers.models.nemotron_h import modeling_nemotron_h as decoder

from tools.reference.training_kernels import CHUNK, chunk_scan, use_fast_scan

HEADS, HEAD_SIZE, STATE = 4, 8, 16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, share: float) -> None:
    """Equal but for the rounding of float32 sums, a share of the largest value."""
    largest = wanted.detach().abs().max().item()
    torch.testing.assert_close(actual, wanted, rtol=0, atol=share * largest)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    "length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 7]
)
def test_scan_and_its_gradients_equal_transformers(length, groups):
    shapes = {
        "hidden_states": (3, length, HEADS, HEAD_SIZE),
        "dt": (3, length, HEADS),
        "B": (3, length, groups, STATE),
        "C": (3, length, groups, STATE),
        "D": (HEADS,),
        "dt_bias": (HEADS,),
    }
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    inputs["A"] = -torch.arange(1.0, HEADS + 1)
    weights = torch.randn(shapes["hidden_states"])

    def run(scan):
        leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
        out = scan(
            chunk_size=64,
            dt_softplus=True,
            dt_limit=(1e-3, float("inf")),
            **leaves,
        )
        (out * weights).sum().backward()
        return out.detach(), {name: leaf.grad for name, leaf in leaves.items()}

    out, gradients = run(chunk_scan)
    wanted, wanted_gradients = run(decoder.mamba2_chunk_scan)
    assert_close(out, wanted, 1e-5)
    for name, gradient in wanted_gradients.items():
        # sums of many terms of either sign
        assert_close(gradients[name], gradient, 2e-4)


def test_mixer_runs_the_scan(monkeypatch):
    config = NemotronHConfig(
        hidden_size=32,
        hybrid_override_pattern="M",
        mamba_num_heads=HEADS,
        mamba_head_dim=HEAD_SIZE,
        n_groups=2,
        ssm_state_size=STATE,
    )
    mixer = decoder.NemotronHMamba2Mixer(config, layer_idx=0).train()
    hidden = torch.randn(2, 50, 32)
    wanted = mixer(hidden)
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return chunk_scan(*args, **kwargs)

    monkeypatch.setattr(decoder, "mamba2_chunk_scan", None)  # undone by monkeypatch
    monkeypatch.setattr("tools.reference.training_kernels.chunk_scan", counted)
    use_fast_scan()
    assert_close(mixer(hidden), wanted, 1e-5)
    assert len(calls) == 1
