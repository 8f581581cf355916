# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A server whose word timing head is not loaded, with limits set by the user.

No `VLLM_PLUGINS`: the routes need none.
"""

import io

import numpy as np
import openai
import pytest
import soundfile

from tests.engine import CHECKPOINTS, ROOT, running_server

pytestmark = pytest.mark.server

MODEL = str(CHECKPOINTS["demo"])
SAMPLES = ROOT / "examples" / "demo" / "samples"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with running_server(
        CHECKPOINTS["demo"],
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
        *("--hf-overrides", '{"ctc_timestamps": {"enabled": false}}'),
        log=log,
        env={
            "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "1",
            "VLLM_MAX_AUDIO_DECODE_DURATION_S": "200",
        },
    ) as running:
        yield running.client()


def transcribe(client, file=None, **fields):
    return client.audio.transcriptions.create(
        model=MODEL, file=file or SAMPLES / "two-speakers.wav", **fields
    )


def silence(seconds):
    buffer = io.BytesIO()
    samples = np.zeros(int(16000 * seconds), np.int16)
    soundfile.write(buffer, samples, 16000, format="FLAC")
    return "silence.flac", buffer.getvalue()


def test_texts_need_no_head(client):
    text = transcribe(client).text
    assert text
    assert transcribe(client, response_format="text") == text
    labelled = transcribe(client, extra_body={"diarize": True}).text
    assert labelled.startswith("Speaker A: ")
    *_, done = transcribe(client, stream=True)
    assert done.text == text


@pytest.mark.parametrize(
    ("format_", "stream"),
    [
        *(("srt", False), ("vtt", False)),
        *(("verbose_json", False), ("verbose_json", True)),
        *(("diarized_json", False), ("diarized_json", True)),
    ],
)
def test_times_need_the_head(client, format_, stream):
    with pytest.raises(openai.BadRequestError, match="word timing head") as error:
        transcribe(client, response_format=format_, stream=stream)
    assert error.value.param == "response_format"


def test_translations_are_laid_over_the_recording(client):
    answer = client.audio.translations.create(
        model=MODEL, file=SAMPLES / "words.wav", response_format="verbose_json"
    )
    assert answer.segments[0].start == 0
    assert answer.segments[-1].end == pytest.approx(answer.duration, abs=1e-3)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (("big.wav", b"RIFF" * (300 << 10)), "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"),
        (silence(201), "VLLM_MAX_AUDIO_DECODE_DURATION_S"),
    ],
    ids=["size", "duration"],
)
def test_limits_of_the_user_hold_and_are_named(client, file, message):
    with pytest.raises(openai.BadRequestError, match=message):
        transcribe(client, file)


def test_speakers_beyond_the_context_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="at most 5. s.*--max-model-len"):
        transcribe(client, silence(100), extra_body={"diarize": True})


def test_words_beyond_the_context_are_cut_in_pieces(client):
    answer = transcribe(client, silence(100))
    assert answer.usage.seconds == 100
    assert answer.usage.input_token_details["audio_tokens"] >= 1250
