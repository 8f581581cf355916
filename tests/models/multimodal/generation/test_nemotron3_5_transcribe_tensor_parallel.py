# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two tensor parallel workers on the CPU: same tokens, with drafts, and same words."""

import numpy as np
import pytest

from tests.drafts import DraftCounts, greedy, mtp, prompt, token_ids
from tests.engine import CHECKPOINTS, offline_engine
from tests.goldens import heldout, heldout_index, heldout_utterances
from vllm_nemotron3_5_transcribe.offline import transcribe

pytestmark = pytest.mark.engine

CLIPS = 16


def speaker_clip() -> np.ndarray:
    number = next(n for n, e in enumerate(heldout_index()) if e["prompt"] == "speakers")
    return heldout(number).astype(np.float32) / 32768


@pytest.fixture(scope="module")
def results():
    """Tokens, accepted drafts and a transcript with speakers, by (workers, drafts)."""
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise vLLM gives each worker the cores of a NUMA node of its own.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        return measure()


def measure():
    clips, speakers = heldout_utterances(CLIPS), speaker_clip()
    found = {}
    for workers, drafts in ((1, 0), (2, 0), (2, 3)):
        with offline_engine(
            CHECKPOINTS["demo"],
            enforce_eager=True,
            tensor_parallel_size=workers,
            disable_log_stats=False,
            **mtp(drafts),
        ) as llm:
            counts = DraftCounts(llm)
            ids = token_ids(greedy(llm, [prompt(clip) for clip in clips]))
            accepted = counts.accepted_per_step()
            found[workers, drafts] = (
                ids,
                accepted,
                transcribe(llm, speakers, diarize=True),
            )
    return found


@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_are_the_same(results, drafts):
    assert results[2, drafts][0] == results[1, 0][0]


def test_drafts_are_accepted(results):
    assert results[2, 3][1] >= 2


@pytest.mark.parametrize("drafts", [0, 3])
def test_words_and_speakers_are_the_same(results, drafts):
    expected, found = results[1, 0][2], results[2, drafts][2]
    assert found.text == expected.text and found.tag_map == expected.tag_map
    assert [(w.text, w.speaker) for w in found.words] == [
        (w.text, w.speaker) for w in expected.words
    ]
    times = [[(w.start, w.end) for w in r.words] for r in (found, expected)]
    # Sums in another order may move a word's border to the next frame of 40 ms.
    np.testing.assert_allclose(*times, atol=0.041)
