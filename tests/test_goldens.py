# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The golden files belong to the committed checkpoints and say what they should."""

import hashlib

import numpy as np
import pytest

from tests.engine import CHECKPOINTS
from tests.goldens import Goldens, build_clip, checksum, synthetic


@pytest.fixture(params=sorted(CHECKPOINTS))
def checkpoint(request):
    return CHECKPOINTS[request.param]


@pytest.fixture
def goldens(request, checkpoint):
    return Goldens(f"{request.node.callspec.params['checkpoint']}.safetensors")


def test_synthetic_signal_is_the_same_everywhere():
    """Integer arithmetic: the bytes depend on no library version."""
    assert checksum(synthetic(3, 32_000)) == "a2a19e136c9f9ae0"
    assert np.array_equal(synthetic(3, 5_000), synthetic(3, 32_000)[:5_000])


def test_clip_of_other_samples_is_refused():
    recipe = {"kind": "synthetic", "seed": 1, "samples": 10, "sha256": "0" * 16}
    with pytest.raises(ValueError, match="other samples"):
        build_clip(recipe)


def test_goldens_belong_to_the_checkpoint(checkpoint, goldens):
    """A replaced checkpoint needs new goldens."""
    content = (checkpoint / "model.safetensors").read_bytes()
    assert goldens.info["checkpoint"]["sha256"] == hashlib.sha256(content).hexdigest()


def test_every_clip_can_be_rebuilt(goldens):
    for name, recipe in goldens.info["clips"].items():
        assert len(goldens.audio(name)) == recipe["samples"]


def test_goldens_cover_what_the_tests_rely_on(goldens):
    """Several compressions of a speaker cache, and a hundred greedy answers."""
    info = goldens.info
    assert info["clips"]["long"]["compressions"] >= 3
    activity = goldens.speaker_activity("long")
    assert 0 < activity.mean() < 1
    assert len(info["greedy"]["cases"]) >= 100
    assert info["greedy"]["min_margin"] >= 2e-3
    answers = {
        tuple(goldens.greedy_ids(number))
        for number in range(len(info["greedy"]["cases"]))
    }
    assert len(answers) > 90
