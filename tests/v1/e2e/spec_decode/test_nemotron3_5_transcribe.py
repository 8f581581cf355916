# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Drafts never change the output: the demo checkpoint with and without its MTP head.

`tools/mtp_exactness.py` asks the same of 200 clips and more combinations.
"""

import contextlib

import pytest

from tests import goldens
from tests.drafts import (
    DraftCounts,
    greedy,
    mtp,
    prompt,
    prompt_of_length,
    token_ids,
)
from tests.engine import CHECKPOINTS, offline_engine

pytestmark = pytest.mark.engine

CLIPS = 40
BLOCK = 128
SMALL_BUDGET = {"max_num_batched_tokens": 24, "max_num_seqs": 4}
# Room for some of the requests: others are preempted, and start over.
SMALL_CACHE = {"num_gpu_blocks_override": 30, "max_model_len": 512}
NO_PREFIX_CACHING = {"enable_prefix_caching": False}


@pytest.fixture(scope="module")
def clips():
    return goldens.heldout_utterances(CLIPS)


@contextlib.contextmanager
def engine(**options):
    with offline_engine(
        CHECKPOINTS["demo"], enforce_eager=True, disable_log_stats=False, **options
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(clips):
    """Token ids without drafts."""
    with engine(**NO_PREFIX_CACHING) as llm:
        return token_ids(greedy(llm, [prompt(clip) for clip in clips]))


@pytest.mark.parametrize(
    ("drafts", "options", "accepted"),
    [
        pytest.param(1, {}, 0.8, id="N=1"),
        pytest.param(2, {}, 1.5, id="N=2"),
        pytest.param(3, {}, 2, id="N=3"),
        pytest.param(3, NO_PREFIX_CACHING, 2, id="N=3, no prefix caching"),
        pytest.param(3, SMALL_BUDGET, 2, id="N=3, budget below a clip"),
        pytest.param(4, SMALL_BUDGET, 2, id="N=4, budget below a clip"),
    ],
)
def test_tokens_equal_those_without_drafts(drafts, options, accepted, clips, expected):
    with engine(**mtp(drafts), **options) as llm:
        counts = DraftCounts(llm)
        prompts = [prompt(clip) for clip in clips]
        assert token_ids(greedy(llm, prompts)) == expected
        single = [greedy(llm, [one])[0] for one in prompts[:10]]
        assert token_ids(single) == expected[:10]
        assert counts.accepted_per_step() >= accepted


def test_audio_makes_the_drafts_right(clips, expected, record_property):
    """Without the audio embeddings fewer are accepted; the output is the same.

    The target's hidden states tell the drafter of the audio, too, so it takes more
    drafts than the head was trained for to see the difference.
    """
    extension = "tests.drafts.WithheldAudio"
    with engine(**mtp(6), worker_extension_cls=extension) as llm:
        accepted = []
        for withheld in (False, True):
            if withheld:
                llm.collective_rpc("withhold_audio")
            counts = DraftCounts(llm)
            outputs = greedy(llm, [prompt(clip) for clip in clips])
            assert token_ids(outputs) == expected
            accepted.append(counts.accepted_per_step())
    figures = "{:.2f} with the audio embeddings, {:.2f} without".format(*accepted)
    record_property("accepted drafts a step, N=6", figures)
    assert accepted[0] >= 2
    assert accepted[1] < accepted[0] - 0.25


def long_prompts(llm, clips, texts):
    """Prompts that end just before a block's border, so that drafts cross it, then
    the same with their answers and more, so that states saved there are restored."""
    first, second = [], []
    for number, (clip, text) in enumerate(zip(clips, texts)):
        length = 3 * BLOCK - 1 - number % 9
        first.append(prompt_of_length(llm, clip, length))
        answer = text + " one two three" * 11
        second.append(prompt_of_length(llm, clip, length, answer))
    return first, second


def test_states_at_block_borders_are_exact(clips):
    """Prefix caching with drafts: hits on states that accepted drafts carried over."""
    clips = clips[:20]
    runs = []
    for options in (NO_PREFIX_CACHING, {}, mtp(3), mtp(6)):
        with engine(**options) as llm:
            if not runs:
                outputs = greedy(llm, [prompt(clip) for clip in clips])
                texts = [output.outputs[0].text for output in outputs]
            first, second = long_prompts(llm, clips, texts)
            rounds = [greedy(llm, prompts) for prompts in (first, first, second)]
            cached = [sum(o.num_cached_tokens for o in outs) for outs in rounds]
            lengths = [len(o.prompt_token_ids) for o in rounds[0]]
        assert all(3 * BLOCK - 16 < length < 3 * BLOCK for length in lengths)
        if options is NO_PREFIX_CACHING:
            assert cached == [0, 0, 0]
        else:
            # The border that the first round's drafts crossed is hit in the third.
            assert cached[1] > 0
            assert cached[2] > len(clips) * BLOCK
        runs.append([token_ids(outputs) for outputs in rounds])
    assert runs[1:] == [runs[0]] * 3
    with engine(**mtp(3), **SMALL_CACHE) as llm:
        outputs = greedy(llm, long_prompts(llm, clips, texts)[0])
        counters = {metric.name: metric for metric in llm.get_metrics()}
    assert counters["vllm:num_preemptions"].value > 0
    assert token_ids(outputs) == runs[0][0]


def test_bfloat16_says_nearly_the_same(clips):
    """Rounding may differ with the batch; the words hardly do."""
    texts = []
    for options in ({}, mtp(3)):
        with engine(dtype="bfloat16", **options) as llm:
            outputs = greedy(llm, [prompt(clip) for clip in clips])
            texts.append([output.outputs[0].text for output in outputs])
    different = sum(a != b for a, b in zip(*texts))
    assert different <= len(clips) // 20
