# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The whole model in a real engine, against the reference's logits and tokens."""

import base64

import numpy as np
import pytest
import soundfile

from tests.engine import CHECKPOINTS, offline_engine
from tests.goldens import Goldens
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.engine

MAX_TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, skip_special_tokens=False)


@pytest.fixture(scope="module", params=sorted(CHECKPOINTS))
def checkpoint(request):
    return request.param


@pytest.fixture(scope="module")
def llm(checkpoint):
    with offline_engine(
        CHECKPOINTS[checkpoint], max_logprobs=-1, max_num_seqs=32
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def goldens(checkpoint):
    return Goldens(f"{checkpoint}.safetensors")


def engine_prompt(goldens, text, clips):
    prompt = {"prompt_token_ids": goldens.info["texts"][text]["ids"]}
    if clips:
        prompt["multi_modal_data"] = {
            "audio": [(goldens.audio(clip), 16000) for clip in clips]
        }
    return prompt


def greedy_cases(goldens):
    return [
        (engine_prompt(goldens, case["text"], case["clips"]), goldens.greedy_ids(i))
        for i, case in enumerate(goldens.info["greedy"]["cases"])
    ]


def generated(output):
    return list(output.outputs[0].token_ids)


def test_greedy_tokens_equal_reference_one_by_one(llm, goldens):
    cases = greedy_cases(goldens)
    assert len(cases) >= 100
    for number, (prompt, expected) in enumerate(cases):
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert generated(output) == expected, number


def test_greedy_tokens_equal_reference_batched(llm, goldens):
    """All at once: 32 in flight, the others waiting."""
    cases = greedy_cases(goldens)
    llm.reset_prefix_cache()
    outputs = llm.generate([prompt for prompt, _ in cases], GREEDY, use_tqdm=False)
    assert [generated(output) for output in outputs] == [ids for _, ids in cases]


def test_prompt_logits_equal_reference(llm, goldens):
    """Text only, one clip and several clips; whole rows of the vocabulary."""
    params = SamplingParams(
        temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1
    )
    for case, info in goldens.info["prompts"].items():
        prompt = engine_prompt(goldens, info["text"], info["clips"])
        llm.reset_prefix_cache()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert len(output.prompt_token_ids) == info["tokens"]
        # The distribution after position i stands at position i + 1.
        rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        expected = goldens.tensors[f"prompt.{case}.logits"].astype(np.float64)
        expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
        for row, wanted in zip(goldens.tensors[f"prompt.{case}.rows"], expected):
            actual = [rows[row][token].logprob for token in range(len(wanted))]
            np.testing.assert_allclose(actual, wanted, atol=2e-3, err_msg=case)


def test_prompts_of_every_kind_are_answered_as_the_reference_does(llm, goldens):
    cases = {k: v for k, v in goldens.info["prompts"].items() if v["decided"]}
    assert cases
    outputs = llm.generate(
        [engine_prompt(goldens, c["text"], c["clips"]) for c in cases.values()],
        GREEDY,
        use_tqdm=False,
    )
    for (name, case), output in zip(cases.items(), outputs):
        assert generated(output) == case["greedy"], name


def test_placeholder_and_padding_are_never_generated(llm, goldens):
    """Even at a temperature that makes every trained token likely."""
    hf_config = llm.llm_engine.model_config.hf_config
    assert hf_config.text_config.vocab_size > hf_config.output_vocab_size
    params = SamplingParams(
        temperature=2.0, max_tokens=200, seed=1, ignore_eos=True, logprobs=-1
    )
    prompt = engine_prompt(goldens, "text_only", [])
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert max(generated(output)) < hf_config.output_vocab_size
    first = output.outputs[0].logprobs[0]
    assert all(
        np.isneginf(entry.logprob)
        for token, entry in first.items()
        if token >= hf_config.output_vocab_size
    )


def test_same_clip_again_hits_the_prefix_cache_and_says_the_same(llm, goldens):
    prompt = engine_prompt(goldens, "default", ["chunks_3_4"])
    llm.reset_prefix_cache()
    first, again = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert generated(first) == generated(again)


def test_chat_takes_arrays_files_and_data_urls(llm, goldens, tmp_path):
    """One clip three ways through the chat template gives one answer."""
    samples = np.round(goldens.audio("eight_frames") * 32768).astype(np.int16)
    path = tmp_path / "clip.wav"
    soundfile.write(path, samples, 16000)
    data = base64.b64encode(path.read_bytes()).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    ]
    instruction = {"type": "text", "text": "Transcribe the audio."}
    answers = [
        llm.chat(
            [{"role": "user", "content": [instruction, part]}],
            GREEDY,
            chat_template_kwargs={"enable_thinking": False},
            use_tqdm=False,
        )[0]
        for part in parts
    ]
    tokenizer = llm.get_tokenizer()
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Transcribe the audio. <|audio|>"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    (array,) = llm.generate(
        [
            {
                "prompt": rendered,
                "multi_modal_data": {
                    "audio": (samples.astype(np.float32) / 32768, 16000)
                },
            }
        ],
        GREEDY,
        use_tqdm=False,
    )
    for answer in answers:
        assert answer.prompt_token_ids == array.prompt_token_ids
        assert generated(answer) == generated(array)


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        (np.zeros(0, np.float32), "no samples"),
        (np.full(100, np.nan, np.float32), "NaN"),
        (np.zeros((3, 3, 3), np.float32), "shape"),
    ],
)
def test_bad_audio_leaves_the_engine_usable(llm, goldens, audio, message):
    bad = engine_prompt(goldens, "default", [])
    bad["multi_modal_data"] = {"audio": [(audio, 16000)]}
    with pytest.raises(VLLMValidationError, match=message):
        llm.generate([bad], GREEDY, use_tqdm=False)
    prompt, expected = greedy_cases(goldens)[0]
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert generated(output) == expected


def test_bfloat16_runs_with_the_default_flags(checkpoint, goldens):
    """The dtype of the checkpoint; tokens may differ where logits are close."""
    with offline_engine(CHECKPOINTS[checkpoint], dtype="auto") as engine:
        cases = greedy_cases(goldens)[:24]
        outputs = engine.generate([p for p, _ in cases], GREEDY, use_tqdm=False)
        right = total = 0
        for output, (_, expected) in zip(outputs, cases):
            right += generated(output)[:1] == expected[:1]
            total += 1
        assert right / total >= 0.75
