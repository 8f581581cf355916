# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two tensor parallel workers on the CPU say what one says, with drafts."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.drafts import DraftCounts, greedy, mtp, prompt, token_ids
from tests.engine import CHECKPOINTS, offline_engine
from tests.goldens import heldout_speakers, heldout_utterances
from vllm_nemotron3_5_transcribe.offline import Transcription, transcribe

pytestmark = pytest.mark.engine

CLIPS = 16


class Said(NamedTuple):
    """Ids and accepted drafts of a few clips, and all that is known of another."""

    ids: list[list[int]]
    accepted: float
    result: Transcription


def say(**options: Any) -> Said:
    with offline_engine(
        CHECKPOINTS["demo"], enforce_eager=True, disable_log_stats=False, **options
    ) as llm:
        counts = DraftCounts(llm)
        prompts = [prompt(clip) for clip in heldout_utterances(CLIPS)]
        ids = token_ids(greedy(llm, prompts))
        accepted = counts.accepted_per_step()
        return Said(ids, accepted, transcribe(llm, heldout_speakers(), diarize=True))


@pytest.fixture(scope="module")
def environment():
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise vLLM gives each worker the cores of a NUMA node of its own.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def expected(environment):
    return say()


@pytest.fixture(scope="module")
def two_workers(environment):
    return say(tensor_parallel_size=2, **mtp(3))


def test_tokens_are_the_same(two_workers, expected):
    assert two_workers.ids == expected.ids
    assert two_workers.accepted >= 2


def test_words_and_speakers_are_the_same(two_workers, expected):
    found, wanted = two_workers.result, expected.result
    assert found.text == wanted.text and found.tag_map == wanted.tag_map
    assert [(word.text, word.speaker) for word in found.words] == [
        (word.text, word.speaker) for word in wanted.words
    ]
    times = [[(w.start, w.end) for w in result.words] for result in (found, wanted)]
    # Sums in another order may move a word's border to the next frame of 40 ms.
    np.testing.assert_allclose(*times, atol=0.041)
