# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The serving with an engine and an aligner that say what a test wants."""

import asyncio
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi import UploadFile

from tests.engine import CHECKPOINTS
from vllm.config import ModelConfig
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.nemotron3_5_transcribe import (
    Nemotron3_5TranscribeForConditionalGeneration as Model,
)
from vllm.model_executor.models.nemotron3_5_transcribe_alignment import (
    Alignment,
    AlignmentError,
    DiarizationSegment,
    Word,
)
from vllm.plugins import load_general_plugins
from vllm_nemotron3_5_transcribe.speech_api import serving
from vllm_nemotron3_5_transcribe.speech_api.protocol import (
    TranscriptionForm,
    TranslationForm,
)

RATE = 16000


@pytest.fixture(scope="module")
def model_config():
    load_general_plugins()
    return ModelConfig(str(CHECKPOINTS["demo"]), dtype="float32")


class Engine:
    """Stands in for what vLLM's serving code does with an engine.

    Args:
        outputs: for each piece of the recording, the texts that are generated one
            after the other.
        finish_reason: of the last of each piece.
    """

    def __init__(self, *outputs, finish_reason="stop", seconds=2.0):
        self.outputs, self.finish_reason = outputs, finish_reason
        self.seconds = seconds
        self.closed = 0
        self.prompts = []

    async def generate(self, texts, streams):
        try:
            if not streams:
                texts = ["".join(texts)]
            for number, text in enumerate(texts):
                last = number == len(texts) - 1
                completion = SimpleNamespace(
                    text=text,
                    token_ids=list(range(100, 100 + len(text))),
                    logprobs=[
                        {100 + i: SimpleNamespace(decoded_token=letter, logprob=-0.5)}
                        for i, letter in enumerate(text)
                    ],
                    finish_reason=self.finish_reason if last else None,
                )
                yield SimpleNamespace(
                    outputs=[completion], prompt_token_ids=list(range(40))
                )
        finally:
            self.closed += 1

    async def create(self, made, audio_data, request, raw_request, **arguments):
        for _ in self.outputs:
            params = request.build_stt_params(
                audio=np.zeros(int(self.seconds * RATE), np.float32),
                stt_config=made.asr_config,
                model_config=made.model_config,
                task_type=made.task_type,
            )
            self.prompts.append(made.model_cls.get_generation_prompt(params)["prompt"])
        streams = request._options.stream
        return arguments["stream_generator_method"](
            request,
            [self.generate(list(texts), streams) for texts in self.outputs],
            "id",
            RequestResponseMetadata(request_id="id"),
            self.seconds * len(self.outputs),
            " ",
        )


def time_words(transcript):
    """Half a second for each word, under its tag."""
    alignment = Alignment(duration=2.0)
    speaker = "0"
    for number, unit in enumerate(transcript.split()):
        if unit.startswith("<spk:"):
            speaker = unit[5:-1]
            alignment.tag_map[speaker] = int(speaker)
            continue
        start = 0.25 * number
        alignment.words.append(Word(unit, start, start + 0.25, speaker, 0.9))
    alignment.diarization = [DiarizationSegment(0, 0.0, 2.0)]
    return alignment


@pytest.fixture
def answer(model_config, monkeypatch):
    """Run a request; returns its body as data, or the events of its stream."""

    def run(engine, align=time_words, route="transcribe", can_align=True, **fields):
        made_class = (
            serving.TranscribeServing
            if route == "transcribe"
            else serving.TranslateServing
        )
        form = TranscriptionForm if route == "transcribe" else TranslationForm
        made = object.__new__(made_class)
        made.__dict__.update(
            model_cls=Model,
            model_config=model_config,
            engine_client=None,
            task_type=route,
            asr_config=Model.get_speech_to_text_config(model_config, route),
            _control_tokens={"<|im_end|>", "<spk:0>", "<spk:1>"},
            _special_ids={11, 12, 13},
            _prompt_thinks=False,
            _can_align=None,
        )

        async def create(self, audio_data, request, raw_request, **arguments):
            return await engine.create(
                self, audio_data, request, raw_request, **arguments
            )

        async def align_async(client, audio, transcript, **arguments):
            assert len(audio) == engine.seconds * RATE
            return align(transcript)

        async def can_align_async(client):
            return can_align

        monkeypatch.setattr(SpeechToTextBaseServing, "_create_speech_to_text", create)
        monkeypatch.setattr(serving, "align_async", align_async)
        monkeypatch.setattr(serving, "can_align_async", can_align_async)

        async def ask():
            request = form(file=UploadFile(io.BytesIO(b"")), **fields)
            method = (
                made.create_transcription
                if route == "transcribe"
                else made.create_translation
            )
            result = await method(b"", request)
            if not fields.get("stream"):
                return result.model_dump(exclude_none=True)
            events = [event async for event in result]
            assert events.pop() == "data: [DONE]\n\n"
            return [json.loads(event.removeprefix("data: ")) for event in events]

        return asyncio.run(ask())

    return run


TIMED = {"response_format": "verbose_json"}
WORDS = {**TIMED, "timestamp_granularities[]": ["word", "segment"]}
DIARIZED = {"response_format": "diarized_json"}


@pytest.mark.parametrize(
    "texts",
    [
        ["<think>they ", "say</think>", "hello", " there<|im_end|>"],
        ["<th", "ink>they say</th", "ink>hello there"],
        ["hello <think>is it?</think>", "there"],
        ["hello there<think>or not"],
    ],
)
@pytest.mark.parametrize(
    "fields", [{}, WORDS, DIARIZED], ids=["json", "times", "turns"]
)
def test_thoughts_do_not_leak(answer, texts, fields):
    whole = answer(Engine(texts), **fields)
    assert whole["text"] == "hello there"
    *deltas, done = answer(Engine(texts), stream=True, **fields)
    said = [event["delta"] for event in deltas if "delta" in event]
    assert "".join(said) == done["text"] == "hello there"
    assert "they" not in json.dumps([whole, deltas, done])


def test_pieces_are_put_together(answer):
    engine = Engine(["one two"], ["three ", "four"])
    whole = answer(engine, **WORDS)
    assert whole["text"] == "one two three four"
    assert [(word["word"], word["start"]) for word in whole["words"]] == [
        *(("one", 0.0), ("two", 0.25)),
        *(("three", 2.0), ("four", 2.25)),
    ]
    assert [segment["start"] for segment in whole["segments"]] == [0.0, 2.0]
    assert whole["duration"] == 4.0 and engine.closed == 2
    assert whole["usage"]["output_tokens"] == len("one twothree four")
    # A token for each letter and space here.
    assert [len(segment["tokens"]) for segment in whole["segments"]] == [7, 10]
    assert whole["segments"][0]["avg_logprob"] == -0.5

    *deltas, done = answer(Engine(["one two"], ["three ", "four"]), stream=True)
    assert "".join(event["delta"] for event in deltas) == done["text"] == whole["text"]


def test_pieces_of_chinese_are_not_spaced(answer):
    engine = Engine(["你好"], ["世界"])
    assert answer(engine, language="zh")["text"] == "你好世界"


def test_what_is_cut_short_says_so(answer):
    engine = Engine(["one two"], finish_reason="length")
    assert answer(engine)["finish_reason"] == "length"
    engine = Engine(["one two"], finish_reason="repetition")
    assert answer(engine, stream=True)[-1]["finish_reason"] == "repetition"


def test_speakers(answer):
    texts = ["<spk:0> one ", "two <spk:1>", " three<spk:0>four<|im_end|>"]
    engine = Engine(texts)
    whole = answer(engine, **DIARIZED)
    assert "<spk:0>" in engine.prompts[0]
    assert whole["text"] == "one two three four"
    assert [(s["speaker"], s["text"]) for s in whole["segments"]] == [
        *(("A", "one two"), ("B", "three")),
        ("A", "four"),
    ]
    assert whole["speaker_map"] == {"A": 0, "B": 1}
    events = answer(Engine(texts), stream=True, **DIARIZED)
    assert [event for event in events if event["type"].endswith("segment")] == (
        whole["segments"]
    )
    labelled = answer(Engine(texts), diarize=True)["text"]
    assert labelled == "Speaker A: one two\nSpeaker B: three\nSpeaker A: four"
    *deltas, done = answer(Engine(texts), diarize=True, stream=True)
    assert "".join(event["delta"] for event in deltas) == done["text"] == labelled
    # Nobody asked for them.
    assert answer(Engine(texts))["text"] == "one two three four"


@pytest.mark.parametrize("texts", [["one two"], ["one <spk:0> two"]])
def test_text_without_a_tag_is_the_first_speakers(answer, texts):
    whole = answer(Engine(texts), **DIARIZED)
    assert {segment["speaker"] for segment in whole["segments"]} == {"A"}
    assert whole["speaker_map"] == {"A": 0}
    events = answer(Engine(texts), stream=True, **DIARIZED)
    assert {event["speaker"] for event in events[:-1]} == {"A"}


def test_a_speaker_that_cannot_be_aligned_fails_alone(answer):
    def align(transcript):
        alignment = time_words(transcript)
        alignment.words = [word for word in alignment.words if word.speaker == "0"]
        del alignment.tag_map["1"]
        alignment.failed_tags = {"1": "too much text"}
        return alignment

    texts = ["<spk:0> one <spk:1> two <spk:0> three"]
    whole = answer(Engine(texts), align, **DIARIZED)
    assert [(s["text"], s.get("aligned", True)) for s in whole["segments"]] == [
        *(("one", True), ("two", False)),
        ("three", True),
    ]
    one, two, three = whole["segments"]
    assert (two["start"], two["end"]) == (one["end"], three["start"])
    assert whole["failed_speakers"] == {"B": "too much text"}
    assert whole["speaker_map"] == {"A": 0, "B": None}


def unalignable(transcript):
    raise AlignmentError("There is no time for it.")


def nothing_aligned(transcript):
    return Alignment(failed_tags={"0": "There is no time for it."}, duration=2.0)


@pytest.mark.parametrize("align", [unalignable, nothing_aligned])
@pytest.mark.parametrize("fields", [WORDS, DIARIZED, {"response_format": "srt"}])
def test_transcripts_that_cannot_be_timed_are_errors(answer, align, fields):
    engine = Engine(["one two"])
    with pytest.raises(VLLMValidationError, match="no time for it") as error:
        answer(engine, align, **fields)
    assert error.value.parameter == "response_format" and engine.closed == 1


@pytest.mark.parametrize("align", [unalignable, nothing_aligned])
def test_streams_end_with_an_error_when_they_cannot_be_timed(answer, align):
    engine = Engine(["one two"])
    *deltas, last = answer(engine, align, stream=True, **TIMED)
    assert [event["delta"] for event in deltas] == ["one two"]
    assert last["error"]["code"] == 400 and "no time" in last["error"]["message"]
    assert engine.closed == 1


def test_texts_need_no_times(answer):
    assert answer(Engine(["one"]), unalignable)["text"] == "one"
    with pytest.raises(VLLMValidationError, match="word timing head"):
        answer(Engine(["one"]), can_align=False, **TIMED)


@pytest.mark.parametrize("fields", [TIMED, WORDS, DIARIZED, {"response_format": "vtt"}])
def test_an_empty_transcript_is_an_answer(answer, fields):
    whole = answer(Engine(["<|im_end|>"]), unalignable, **fields)
    assert whole["text"].strip() in ("", "WEBVTT")
    assert not whole.get("segments") and not whole.get("words")


@pytest.mark.parametrize("align", [time_words, unalignable])
def test_translations_are_laid_over_the_speech(answer, align):
    whole = answer(Engine(["One. Two."]), align, route="translate", **TIMED)
    assert [(s["text"], s["start"], s["end"]) for s in whole["segments"]] == [
        ("One.", 0.0, 1.0),
        ("Two.", 1.0, 2.0),
    ]
    assert whole["language"] == "en"


def test_speakers_are_not_followed_from_piece_to_piece(answer):
    with pytest.raises(VLLMValidationError, match="transcribed whole"):
        answer(Engine(["one"], ["two"]), **DIARIZED)


def test_an_engine_that_fails_is_an_event_of_a_stream(answer):
    events = answer(Engine(["one"], finish_reason="error"), stream=True)
    assert events[-1]["error"]["code"] == 500
