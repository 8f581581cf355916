# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's batch runner with the audio routes, as a user calls it."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pysubs2
import pytest

from tests.engine import CHECKPOINTS, KV_CACHE_BYTES, ROOT

pytestmark = pytest.mark.server

SAMPLES = ROOT / "examples" / "demo" / "samples"


def data_url(name: str) -> str:
    data = base64.b64encode((SAMPLES / name).read_bytes()).decode()
    return f"data:audio/wav;base64,{data}"


REQUESTS = {
    "json": ("transcriptions", {}),
    "text": ("transcriptions", {"response_format": "text"}),
    "srt": ("transcriptions", {"response_format": "srt"}),
    "verbose": (
        "transcriptions",
        {
            "response_format": "verbose_json",
            "timestamp_granularities": ["word", "segment"],
            "language": "en",
        },
    ),
    "diarized": ("transcriptions", {"response_format": "diarized_json"}),
    "labelled": ("transcriptions", {"diarize": True}),
    "translation": ("translations", {}),
    "translated-vtt": ("translations", {"response_format": "vtt"}),
    "bad-n": ("transcriptions", {"n": 2}),
    "bad-language": ("transcriptions", {"to_language": "xx"}),
    "bad-audio": ("transcriptions", {"file_url": "data:audio/wav;base64,AAAA"}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Body, or error, of each request."""
    folder = tmp_path_factory.mktemp("batch")
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    with source.open("w") as file:
        for custom_id, (route, fields) in REQUESTS.items():
            speakers = custom_id in ("diarized", "labelled")
            name = "two-speakers.wav" if speakers else "words.wav"
            line = {
                "custom_id": custom_id,
                "method": "POST",
                "url": f"/v1/audio/{route}",
                "body": {"file_url": data_url(name), **fields},
            }
            print(json.dumps(line), file=file)
    done = subprocess.run(
        [
            *(Path(sys.executable).with_name("vllm"), "run-batch"),
            *("-i", source, "-o", target, "--model", CHECKPOINTS["demo"]),
            *("--dtype", "float32", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
        ],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert target.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
    return {
        line["custom_id"]: line["error"] or line["response"]["body"] for line in lines
    }


def test_every_request_is_answered(answers):
    assert answers.keys() == REQUESTS.keys()


def test_texts_are_bodies(answers):
    text = answers["json"]["text"]
    assert text and answers["text"]["text"] == text
    assert answers["json"]["usage"]["seconds"] == 5
    assert answers["json"]["usage"]["output_tokens"] > 4
    events = pysubs2.SSAFile.from_string(answers["srt"]["text"], "srt")
    assert " ".join(event.plaintext for event in events).split() == text.split()


def test_times_are_there(answers):
    answer = answers["verbose"]
    assert [word["word"] for word in answer["words"]] == answer["text"].split()
    assert answer["segments"] and answer["language"] == "en"
    assert all(0 <= word["confidence"] <= 1 for word in answer["words"])


def test_speakers_are_there(answers):
    answer = answers["diarized"]
    assert {segment["speaker"] for segment in answer["segments"]} == {"A", "B"}
    assert answer["diarization"]
    assert answers["labelled"]["text"].startswith("Speaker A: ")


def test_translations_are_there(answers):
    assert answers["translation"]["text"]
    assert answers["translated-vtt"]["text"].startswith("WEBVTT\n")


@pytest.mark.parametrize(
    ("custom_id", "message"),
    [("bad-n", "'n'"), ("bad-language", "to_language"), ("bad-audio", "nvalid")],
)
def test_bad_requests_fail_alone(answers, custom_id, message):
    error = answers[custom_id]["error"]
    assert error["code"] == 400 and message in error["message"]
