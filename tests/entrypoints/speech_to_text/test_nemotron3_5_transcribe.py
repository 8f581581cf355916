# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A real `vllm serve` with no flag but model and port, called by OpenAI's client."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import requests
import soundfile

from tests.engine import CHECKPOINTS, ROOT, running_server
from tests.goldens import heldout, heldout_index

pytestmark = pytest.mark.server

MODEL = str(CHECKPOINTS["demo"])
SAMPLES = ROOT / "examples" / "demo" / "samples"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with running_server(CHECKPOINTS["demo"], log=log) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def wav(
    samples: np.ndarray, rate: int = 16000, kind: str = "WAV", subtype: str = "PCM_16"
) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def transcribe(client, data: bytes, name: str = "clip.wav", **options) -> str:
    return client.audio.transcriptions.create(
        model=MODEL, file=(name, data), temperature=0, **options
    ).text


@pytest.fixture(scope="module")
def clip():
    return wav(heldout(0))


@pytest.fixture(scope="module")
def text(client, clip):
    return transcribe(client, clip)


def test_the_server_lists_the_model(client):
    assert [model.id for model in client.models.list()] == [MODEL]


def test_transcripts_of_held_out_clips_are_right(client):
    """Most clips are heard to the letter; the rate over 200 is the demo card's."""
    index = heldout_index()[:24]
    heard = [transcribe(client, wav(heldout(i))) for i in range(len(index))]
    right = sum(text == entry["text"] for text, entry in zip(heard, index))
    assert right >= 0.8 * len(index), list(zip(heard, index))


@pytest.mark.parametrize("concurrency", [8, 32])
def test_concurrent_requests_get_the_same_texts(client, concurrency):
    clips = [wav(heldout(i)) for i in range(32)]
    alone = [transcribe(client, data) for data in clips]
    with ThreadPoolExecutor(concurrency) as pool:
        together = list(pool.map(lambda data: transcribe(client, data), clips))
    assert together == alone


def test_every_sample_file_is_heard(client):
    """WAV, FLAC and MP3, 8 to 44.1 kHz, mono and stereo, over 45 s."""
    for sample in json.loads((SAMPLES / "transcripts.json").read_text("utf-8")):
        data = (SAMPLES / sample["file"]).read_bytes()
        assert transcribe(client, data, sample["file"])


def test_chat_hears_audio_parts(client, clip, text):
    data = base64.b64encode(clip).decode()
    for part in (
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    ):
        answer = client.chat.completions.create(
            model=MODEL,
            temperature=0,
            max_completion_tokens=200,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "text",
                            "text": "Audio transcription. Language: as spoken. "
                            "Wording: verbatim, including fillers and repetitions. "
                            "Formatting: punctuation and capitalization. "
                            "Output: transcript only.",
                        },
                        part,
                    ],
                }
            ],
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert answer.choices[0].message.content.strip() == text
        assert answer.usage.prompt_tokens > len(heldout(0)) // 1280


def test_chat_answers_text_alone_and_several_clips(client, clip):
    data = base64.b64encode(clip).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    instruction = {"type": "text", "text": "Transcribe the audio."}
    for content in ("Hello.", [instruction, part, part]):
        answer = client.chat.completions.create(
            model=MODEL,
            max_completion_tokens=8,
            messages=[{"role": "user", "content": content}],
        )
        assert answer.choices[0].finish_reason in ("stop", "length")


def test_language_hint_is_accepted(client, clip):
    for language in ("en", "auto", "en-GB"):
        assert transcribe(client, clip, language=language)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (b"", {}, ""),
        (b"this is not audio" * 100, {}, "nvalid"),
        (wav(np.zeros(0, np.float32)), {}, "no samples|No audio|Invalid"),
        (wav(np.full(4000, np.nan, np.float32), subtype="FLOAT"), {}, "NaN"),
        (None, {"language": "xx"}, "Unsupported language"),
        (None, {"response_format": "xml"}, "response_format"),
        (None, {"model": "another"}, "another"),
    ],
    ids=[
        "empty",
        "not-audio",
        "no-samples",
        "nan",
        "language",
        "format",
        "model",
    ],
)
def test_bad_transcription_requests_are_400_and_name_the_fault(
    client, clip, text, data, options, message
):
    import regex as re

    with pytest.raises(openai.APIStatusError) as error:
        client.audio.transcriptions.create(
            **{
                "model": MODEL,
                "file": ("clip.wav", clip if data is None else data),
                **options,
            }
        )
    assert 400 <= error.value.status_code < 500, error.value
    assert re.search(message, str(error.value))
    # And goes on serving.
    assert transcribe(client, clip) == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
            "image",
        ),
        (
            [
                {
                    "type": "input_audio",
                    "input_audio": {"data": "AAAA", "format": "wav"},
                }
            ],
            "",
        ),
        (
            [
                {
                    "type": "input_audio",
                    "input_audio": {
                        "data": base64.b64encode(
                            wav(np.zeros(100, np.float32), rate=1)
                        ).decode(),
                        "format": "wav",
                    },
                }
            ],
            "sample rate of 1 Hz",
        ),
    ],
    ids=["image", "broken-audio", "one-hertz"],
)
def test_bad_chat_requests_are_4xx(client, clip, text, content, message):
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],
            max_completion_tokens=4,
        )
    assert 400 <= error.value.status_code < 500, error.value
    assert message in str(error.value)
    assert transcribe(client, clip) == text


def test_audio_over_the_decoding_limit_is_refused(client, server, clip, text):
    """An hour passes; the message says which variable raises the limit."""
    silence = wav(np.zeros(16000 * 3661, np.int16), kind="FLAC")
    with pytest.raises(openai.BadRequestError, match="VLLM_MAX_AUDIO_DECODE_DURATION"):
        transcribe(client, silence, "long.flac")
    assert transcribe(client, clip) == text


def test_several_clips_need_several_placeholders(server, clip):
    """A prompt of one's own with a placeholder too many."""
    data = base64.b64encode(clip).decode()
    response = requests.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": MODEL,
            "max_completion_tokens": 4,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<|audio|> and"},
                        {
                            "type": "input_audio",
                            "input_audio": {"data": data, "format": "wav"},
                        },
                    ],
                }
            ],
        },
        timeout=300,
    )
    assert 400 <= response.status_code < 500, response.text
    assert "placeholder" in response.text


@pytest.mark.parametrize(
    "route,field",
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "<|audio|>"}]}),
        ("completions", {"prompt": "hear <|audio|> and <|audio|>"}),
    ],
)
def test_placeholder_without_clip_is_refused(client, server, clip, text, route, field):
    response = requests.post(
        f"{server.url}/v1/{route}",
        json={"model": MODEL, "max_tokens": 4, **field},
        timeout=300,
    )
    assert response.status_code == 400, response.text
    assert "<|audio|>" in response.json()["error"]["message"]
    assert transcribe(client, clip) == text
