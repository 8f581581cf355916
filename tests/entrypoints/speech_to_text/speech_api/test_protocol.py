# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What fields mean together, and how much audio and text there may be."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi import UploadFile

from vllm.entrypoints.launchers.run_batch import BatchTranscriptionRequest
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.nemotron3_5_transcribe import (
    Nemotron3_5TranscribeForConditionalGeneration as Model,
)
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm_nemotron3_5_transcribe.speech_api import limits
from vllm_nemotron3_5_transcribe.speech_api.protocol import (
    SpeechOptions,
    TranscriptionForm,
    TranslationForm,
)
from vllm_nemotron3_5_transcribe.speech_api.serving import _EngineRequest

FILE = UploadFile(io.BytesIO(b"RIFF"), filename="a.wav")


def transcription(**fields):
    return TranscriptionForm(file=FILE, **fields)


def translation(**fields):
    return TranslationForm(file=FILE, **fields)


def options_of(request):
    route = "translate" if isinstance(request, TranslationForm) else "transcribe"
    return SpeechOptions.of(request, route, Model)


def test_defaults():
    assert options_of(transcription()) == SpeechOptions(
        task="transcribe",
        response_format="json",
        words=False,
        segments=True,
        diarize=False,
        language=None,
        to_language=None,
        stream=False,
        stream_usage=False,
    )


def test_translations_are_into_english_by_default():
    options = options_of(translation(language="de"))
    assert (options.task, options.language, options.to_language) == (
        *("translate", "de"),
        "en",
    )


@pytest.mark.parametrize("make", [transcription, translation])
def test_to_language_translates_on_both_routes(make):
    options = options_of(make(to_language="de"))
    assert (options.task, options.to_language) == ("translate", "de")


@pytest.mark.parametrize("make", [transcription, translation])
def test_the_same_language_is_a_transcript(make):
    options = options_of(make(language="en", to_language="en-US"))
    assert (options.task, options.output_language) == ("transcribe", "en")


@pytest.mark.parametrize("language", [None, "", "auto"])
def test_unknown_language(language):
    assert options_of(transcription(language=language)).language is None


def test_diarized_json_asks_for_speakers():
    assert options_of(transcription(response_format="diarized_json")).diarize
    assert options_of(transcription(response_format="srt", diarize=True)).diarize


def test_granularities_choose():
    for asked, words, segments in (
        ([], False, True),
        (["word"], True, False),
        (["segment"], False, True),
        (["word", "segment"], True, True),
    ):
        request = transcription(
            **{"timestamp_granularities[]": asked, "response_format": "verbose_json"}
        )
        options = options_of(request)
        assert (options.words, options.segments) == (words, segments)


@pytest.mark.parametrize(
    "name", ["timestamp_granularities", "timestamp_granularities[]"]
)
def test_fields_survive_vllms_batch_runner(name):
    """It dumps a request and reads it again as vLLM's own class."""
    line = BatchTranscriptionRequest.model_validate(
        {
            "file_url": "data:,",
            "response_format": "verbose_json",
            "diarize": "true",
            name: ["word"],
        }
    )
    fields = line.model_dump(exclude={"file_url"})
    request = TranscriptionRequest.model_validate({**fields, "file": FILE})
    options = SpeechOptions.of(request, "transcribe", Model)
    assert (options.words, options.segments, options.diarize) == (True, False, True)


@pytest.mark.parametrize(
    ("make", "fields", "parameter"),
    [
        (transcription, {"language": "xx"}, "language"),
        (transcription, {"to_language": "xx"}, "to_language"),
        (translation, {"to_language": "auto"}, "to_language"),
        (translation, {"to_language": "fr", "language": "de"}, "to_language"),
        (transcription, {"n": 2}, "n"),
        (transcription, {"n": 0}, "n"),
        (translation, {"n": 2}, "n"),
        (transcription, {"stream": True, "response_format": "srt"}, "stream"),
        (transcription, {"stream": True, "response_format": "vtt"}, "stream"),
        (translation, {"stream": True, "response_format": "srt"}, "stream"),
        (transcription, {"stream": True, "use_beam_search": True}, "stream"),
        (transcription, {"diarize": True, "use_beam_search": True}, "use_beam_search"),
        (transcription, {"diarize": True, "to_language": "de"}, "diarize"),
        (translation, {"diarize": "true"}, "diarize"),
        (translation, {"diarize": "perhaps"}, "diarize"),
        (
            transcription,
            {"timestamp_granularities[]": ["word"]},
            "timestamp_granularities[]",
        ),
        (
            translation,
            {"timestamp_granularities[]": ["word"], "response_format": "verbose_json"},
            "timestamp_granularities[]",
        ),
        (
            translation,
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
            "timestamp_granularities[]",
        ),
    ],
)
def test_contradictions_name_the_field(make, fields, parameter):
    with pytest.raises(VLLMValidationError) as error:
        options_of(make(**fields))
    assert error.value.parameter == parameter


def test_a_file_that_is_text_is_refused():
    with pytest.raises(VLLMValidationError, match="uploaded file") as error:
        TranscriptionForm.model_validate({"file": "a.wav"})
    assert error.value.parameter == "file"


# --- Limits --------------------------------------------------------------------------


def engine_request(request, seconds=10.0, clips=1):
    stt_config = SimpleNamespace(sample_rate=16000, max_audio_clip_s=3600)
    made = _EngineRequest(request, options_of(request))
    for _ in range(clips):
        params = made.build_stt_params(
            audio=np.zeros(int(seconds * 16000), np.float32),
            stt_config=stt_config,
            model_config=None,
            task_type="transcribe",
        )
    return made, params


@pytest.mark.parametrize(
    ("fields", "seconds", "tokens"),
    [
        ({}, 10.0, 314),
        ({}, 3600.0, 65536),
        ({"prompt": "Tell a story."}, 1.0, 1024),
        ({"prompt": "  "}, 1.0, 89),
        ({"prompt": "Verbatim."}, 60.0, 1564),
        ({"max_completion_tokens": 7}, 10.0, 7),
        ({"max_completion_tokens": 5000}, 10.0, 5000),
    ],
)
def test_the_length_of_the_audio_bounds_the_transcript(fields, seconds, tokens):
    request, _ = engine_request(transcription(**fields), seconds)
    # What vLLM's code passes: the user's limit, or the context.
    asked = fields.get("max_completion_tokens", 65536)
    assert request.to_sampling_params(asked).max_tokens == tokens
    assert request.to_beam_search_params(asked).max_tokens == tokens


def test_a_loop_is_noticed_and_speech_is_not():
    params = engine_request(transcription())[0].to_sampling_params(100)
    assert check_sequence_repetition([5, *[1, 2, 3] * 64], params.repetition_detection)
    # Laughter, and the sentence of a waiting loop.
    for said in ([3, 4] * 40, list(range(20)) * 500):
        assert not check_sequence_repetition(said, params.repetition_detection)


def test_the_engine_keeps_tags_and_sends_what_is_needed():
    params = engine_request(transcription(stream=True))[0].to_sampling_params(100)
    assert not params.skip_special_tokens
    assert params.output_kind == RequestOutputKind.DELTA
    assert params.logprobs is None
    verbose = transcription(response_format="verbose_json")
    params = engine_request(verbose)[0].to_sampling_params(100)
    assert params.output_kind == RequestOutputKind.FINAL_ONLY
    assert params.logprobs == 0


def test_users_sampling_fields_reach_the_engine():
    params = engine_request(
        transcription(
            temperature=0.5, top_p=0.9, top_k=7, seed=3, vllm_xargs='{"key": "value"}'
        )
    )[0].to_sampling_params(100)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (
        *(0.5, 0.9, 7),
        3,
    )
    assert params.extra_args == {"key": "value"}


def test_speakers_are_never_followed_across_pieces():
    _, params = engine_request(transcription(diarize=True))
    assert params.diarize
    engine_request(transcription(), clips=3)
    with pytest.raises(VLLMValidationError, match="3600 s.*--max-model-len"):
        engine_request(transcription(diarize=True), clips=2)


def test_an_hour_fits_the_default_limits(monkeypatch):
    names = (
        "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB",
        "VLLM_MAX_AUDIO_DECODE_DURATION_S",
        "VLLM_MAX_AUDIO_DECODE_BYTES",
    )
    for name in names:
        # Set first, so that the test's changes are undone.
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    monkeypatch.setenv(names[0], "7")
    limits.admit_an_hour()

    import vllm.envs as envs

    assert envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB == 7
    assert envs.VLLM_MAX_AUDIO_DECODE_DURATION_S >= 3600
    # 48 kHz, stereo, float32.
    assert envs.VLLM_MAX_AUDIO_DECODE_BYTES >= 3600 * 48000 * 2 * 4


@pytest.mark.parametrize("known", [True, False])
def test_too_large_a_file_says_which_limit(monkeypatch, known):
    import anyio

    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "1")
    data = b"x" * (2 << 20)
    upload = UploadFile(io.BytesIO(data), size=len(data) if known else None)
    with pytest.raises(VLLMValidationError, match="1 MB.*VLLM_MAX_AUDIO_CLIP_FILE"):
        anyio.run(limits.read_upload, upload)
