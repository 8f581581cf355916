# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`transcribe`: from audio to the result, with the decoder's answer given."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from tests.engine import CHECKPOINTS
from tests.goldens import HELDOUT
from tests.models.multimodal.aligning import AligningEngine, aligning_model
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.nemotron3_5_transcribe import SPEAKER_INSTRUCTION
from vllm_nemotron3_5_transcribe.alignment import AlignmentError
from vllm_nemotron3_5_transcribe.offline import Transcription, transcribe


class AnsweringLLM(AligningEngine):
    """Times words, and answers every prompt with the same text.

    Attributes:
        answer: what is generated.
        asked: (prompt, sampling parameters) of every request.
    """

    def __init__(self, model) -> None:
        super().__init__(model)
        self.answer = ""
        self.asked = []

    def generate(self, prompts, params, use_tqdm):
        self.asked.append((prompts[0], params))
        tokens = self.answer.split()
        completion = SimpleNamespace(
            text=self.answer, token_ids=tokens, finish_reason="stop"
        )
        return [SimpleNamespace(outputs=[completion], prompt_token_ids=[0] * 500)]


@pytest.fixture(scope="module")
def model():
    with aligning_model(CHECKPOINTS["demo"]) as loaded:
        yield loaded


@pytest.fixture
def llm(model):
    return AnsweringLLM(model)


def timed_clip(kind):
    """Description and samples of the first held-out clip of a kind."""
    start = 0
    for entry in json.loads((HELDOUT / "timed.json").read_text("utf-8")):
        if entry["kind"] == kind:
            break
        start += entry["samples"]
    audio, _ = soundfile.read(
        HELDOUT / "timed.ogg", entry["samples"], start, dtype="float32"
    )
    return entry, audio


def test_one_speaker(llm):
    entry, audio = timed_clip("words")
    llm.answer = f"<think></think>{entry['text']}<|im_end|>"
    result = transcribe(llm, audio)
    assert result.text == entry["text"]
    assert [word.text for word in result.words] == entry["text"].split()
    errors = [w.start - said["start"] for w, said in zip(result.words, entry["words"])]
    assert np.abs(errors).mean() < 0.1
    assert " ".join(segment["text"] for segment in result.segments) == result.text
    assert {segment["speaker"] for segment in result.segments} == {None}
    assert result.diarization and not result.failed_tags
    assert result.duration == pytest.approx(len(audio) / 16000, abs=1e-3)
    assert result.usage["input_tokens"] == 500
    assert Transcription.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_speakers(llm):
    entry, audio = timed_clip("speakers")
    llm.answer = entry["text"]
    result = transcribe(llm, audio, diarize=True)
    assert SPEAKER_INSTRUCTION in llm.asked[0][0]["prompt"]
    assert "<spk:" not in result.text
    assert len(set(result.tag_map.values())) == len(result.tag_map) >= 2
    assert {segment["speaker"] for segment in result.segments} >= {"0", "1"}
    assert {word.speaker for word in result.words} == set(result.tag_map)


def test_text_before_the_first_tag_is_the_first_speakers(llm):
    _, audio = timed_clip("speakers")
    llm.answer = "hello <spk:1> goodbye"
    result = transcribe(llm, audio, diarize=True)
    assert [segment["speaker"] for segment in result.segments] == ["0", "1"]


def test_files_bytes_channels_and_rates(llm, tmp_path):
    entry, audio = timed_clip("words")
    llm.answer = entry["text"]
    path = tmp_path / "clip.flac"
    soundfile.write(path, audio, 16000, subtype="PCM_24")
    samples, _ = soundfile.read(path, dtype="float32")
    expected = transcribe(llm, samples)
    assert transcribe(llm, path) == transcribe(llm, str(path)) == expected
    assert transcribe(llm, path.read_bytes()) == expected
    assert transcribe(llm, np.stack([samples] * 2), sample_rate=16000) == expected
    slower = transcribe(llm, audio[::2], sample_rate=8000)
    assert slower.duration == pytest.approx(expected.duration, abs=0.01)


def test_fields_reach_the_prompt_and_the_sampler(llm):
    _, audio = timed_clip("words")
    llm.answer = "hello"
    transcribe(llm, audio, language="en-US", hotwords="Kubernetes; vLLM", times=False)
    prompt, params = llm.asked[0]
    assert "English" in prompt["prompt"] and "Kubernetes, vLLM" in prompt["prompt"]
    assert params.temperature == 0 and not params.skip_special_tokens
    assert params.max_tokens < 40 * len(audio) / 16000 + 100
    own = SamplingParams(temperature=0.5, max_tokens=7)
    transcribe(llm, audio, sampling_params=own, times=False)
    assert llm.asked[1][1].max_tokens == 7 and not llm.asked[1][1].skip_special_tokens
    assert own.skip_special_tokens


def test_translation_has_segments_but_no_words(llm):
    _, audio = timed_clip("words")
    llm.answer = "Hallo. Gut."
    result = transcribe(llm, audio, language="en", to_language="de")
    assert "into German" in llm.asked[0][0]["prompt"]
    assert result.language == "de" and not result.words
    assert result.diarization and not result.tag_map and not result.failed_tags
    assert [segment["text"] for segment in result.segments] == ["Hallo.", "Gut."]


def test_a_translation_that_cannot_be_aligned_is_laid_over_the_recording(llm):
    _, audio = timed_clip("words")
    llm.answer = "……"
    result = transcribe(llm, audio, language="en", to_language="zh")
    assert "".join(segment["text"] for segment in result.segments) == "……"
    assert result.segments[-1]["end"] == pytest.approx(result.duration, abs=1e-3)


def test_without_times_or_words_nothing_is_aligned(llm):
    _, audio = timed_clip("words")
    llm.answer = "hello"
    assert not transcribe(llm, audio, times=False).words
    llm.answer = "<|im_end|>"
    assert transcribe(llm, audio).text == ""
    assert not llm.calls


def test_bad_input_is_refused(llm, tmp_path):
    _, audio = timed_clip("words")
    llm.answer = "hello"
    with pytest.raises(VLLMValidationError, match="no audio"):
        transcribe(llm, b"RIFF")
    with pytest.raises(FileNotFoundError):
        transcribe(llm, tmp_path / "nowhere.wav")
    with pytest.raises(VLLMValidationError, match="no samples"):
        transcribe(llm, np.zeros(0, np.float32))
    with pytest.raises(VLLMValidationError, match="rate"):
        transcribe(llm, audio, sample_rate=1)
    with pytest.raises(VLLMValidationError):
        transcribe(llm, audio, language="klingon")
    with pytest.raises(VLLMValidationError, match="transcripts only"):
        transcribe(llm, audio, to_language="de", diarize=True)
    with pytest.raises(VLLMValidationError, match="to and from English"):
        transcribe(llm, audio, language="de", to_language="fr")
    with pytest.raises(VLLMValidationError, match="no translation into 'auto'"):
        transcribe(llm, audio, to_language="auto")
    assert not llm.asked
    llm.answer = "……"
    with pytest.raises(AlignmentError, match="no words"):
        transcribe(llm, audio, language="zh")
