# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Drafts never change the output: the demo checkpoint with and without its MTP head."""

import contextlib

import pytest

from tests import goldens
from tests.engine import CHECKPOINTS, offline_engine

CLIPS = 40
BLOCK = 128
SMALL_BUDGET = {"max_num_batched_tokens": 24, "max_num_seqs": 4}


def mtp(drafts):
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}}


@pytest.fixture(scope="module")
def clips():
    entries = enumerate(goldens.heldout_index())
    numbers = [i for i, entry in entries if entry["prompt"] == "default"][:CLIPS]
    assert len(numbers) == CLIPS
    return [goldens.heldout(number) for number in numbers]


@contextlib.contextmanager
def engine(**options):
    with offline_engine(
        CHECKPOINTS["demo"], enforce_eager=True, disable_log_stats=False, **options
    ) as llm:
        yield llm


def build(llm, clip, *, filler=0, answer=""):
    """A prompt with a clip; `filler` more tokens before it, `answer` begun after it."""
    from vllm.model_executor.models.nemotron3_5_transcribe import DEFAULT_INSTRUCTION

    return {
        "prompt": (
            f"<|im_start|>system\n{'x' * filler}<|im_end|>\n<|im_start|>user\n"
            f"{DEFAULT_INSTRUCTION} <|audio|><|im_end|>\n"
            f"<|im_start|>assistant\n<think></think>{answer}"
        ),
        "multi_modal_data": {"audio": (clip, goldens.SAMPLE_RATE)},
    }


def generate(llm, prompts):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=60, skip_special_tokens=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], outputs


def accepted_per_step(llm):
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    steps = metrics["vllm:spec_decode_num_drafts"].value
    return metrics["vllm:spec_decode_num_accepted_tokens"].value / steps


@pytest.fixture(scope="module")
def expected(clips):
    """Token ids without drafts, and the texts."""
    with engine(enable_prefix_caching=False) as llm:
        tokens, outputs = generate(llm, [build(llm, clip) for clip in clips])
    return tokens, [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"enable_prefix_caching": False}, id="no-prefix-caching"),
        pytest.param(SMALL_BUDGET, id="budget-below-a-clip"),
    ],
)
@pytest.mark.parametrize("drafts", [1, 3])
def test_tokens_equal_those_without_drafts(drafts, options, clips, expected):
    tokens, _ = expected
    with engine(**mtp(drafts), **options) as llm:
        prompts = [build(llm, clip) for clip in clips]
        assert generate(llm, prompts)[0] == tokens
        single = [generate(llm, [prompt])[0][0] for prompt in prompts[:10]]
        assert single == tokens[:10]


@pytest.mark.parametrize(("drafts", "at_least"), [(2, 1.5), (3, 2), (4, 2), (6, 2)])
def test_drafts_are_accepted_past_the_trained_depth(drafts, at_least, clips, expected):
    """One repeated block: exact for any number of drafts, and mostly right."""
    with engine(**mtp(drafts)) as llm:
        tokens, _ = generate(llm, [build(llm, clip) for clip in clips])
        assert tokens == expected[0]
        assert accepted_per_step(llm) >= at_least


def long_prompts(llm, clips, texts):
    """Prompts that end just before a block's border, so that drafts cross it, then
    the same with their answers and more, so that states saved there are restored."""
    tokenizer = llm.get_tokenizer()
    first, second = [], []
    for number, (clip, text) in enumerate(zip(clips, texts)):
        bare = len(tokenizer(build(llm, clip)["prompt"])["input_ids"])
        audio = -(-(len(clip) // 160) // 8)
        filler = 3 * BLOCK - 2 - number % 9 - bare - audio
        first.append(build(llm, clip, filler=filler))
        answer = text + " one two three" * 11
        second.append(build(llm, clip, filler=filler, answer=answer))
    return first, second


def test_states_at_block_borders_are_exact(clips):
    """Prefix caching with drafts: hits on states that accepted drafts carried over."""
    clips = clips[:20]
    runs = []
    for options in ({"enable_prefix_caching": False}, {}, mtp(3), mtp(6)):
        with engine(**options) as llm:
            if not runs:
                bare, outputs = generate(llm, [build(llm, clip) for clip in clips])
                texts = [output.outputs[0].text for output in outputs]
            first, second = long_prompts(llm, clips, texts)
            rounds = [generate(llm, prompts) for prompts in (first, first, second)]
            cached = [sum(o.num_cached_tokens for o in outs) for _, outs in rounds]
            lengths = [len(o.prompt_token_ids) for o in rounds[0][1]]
        assert all(3 * BLOCK - 16 < length < 3 * BLOCK for length in lengths)
        if "enable_prefix_caching" in options:
            assert cached == [0, 0, 0]
        else:
            # The border that the first round's drafts crossed is hit in the third.
            assert cached[1] > 0
            assert cached[2] > len(clips) * BLOCK
        runs.append([tokens for tokens, _ in rounds])
    assert runs[1:] == [runs[0]] * 3


def test_bfloat16_says_nearly_the_same(clips):
    """Rounding may differ with the batch; the words hardly do."""
    texts = []
    for options in ({}, mtp(3)):
        with engine(dtype="bfloat16", **options) as llm:
            _, outputs = generate(llm, [build(llm, clip) for clip in clips])
            texts.append([output.outputs[0].text for output in outputs])
    different = sum(a != b for a, b in zip(*texts))
    assert different <= len(clips) // 20


def test_checkpoint_without_a_head_is_refused(tmp_path):
    import json
    import shutil

    folder = tmp_path / "headless"
    shutil.copytree(CHECKPOINTS["demo"], folder)
    config = json.loads((folder / "config.json").read_text())
    config["mtp"] = {"enabled": False}
    config.pop("compute_mtp", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no draft head"), engine_of(folder):
        pass


@contextlib.contextmanager
def engine_of(folder):
    with offline_engine(folder, enforce_eager=True, **mtp(2)) as llm:
        yield llm
