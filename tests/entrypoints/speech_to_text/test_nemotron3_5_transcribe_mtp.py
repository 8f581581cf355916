# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A real `vllm serve` with no flag but the speculative one."""

import io
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import soundfile

from tests.engine import CHECKPOINTS, running_server
from tests.goldens import SAMPLE_RATE, heldout, heldout_index

pytestmark = pytest.mark.server

MODEL = str(CHECKPOINTS["demo"])
DRAFTS = 3
CLIPS = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log.txt"
    speculative = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    flags = ("--speculative-config", json.dumps(speculative))
    with running_server(CHECKPOINTS["demo"], *flags, log=log) as running:
        yield running


@pytest.fixture(scope="module")
def texts(server):
    """Transcripts of held-out clips, several requests at a time."""

    def transcribe(number: int) -> str:
        data = io.BytesIO()
        soundfile.write(data, heldout(number), SAMPLE_RATE, format="WAV")
        return (
            server.client()
            .audio.transcriptions.create(
                model=MODEL, file=("clip.wav", data.getvalue()), temperature=0
            )
            .text
        )

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(transcribe, range(CLIPS)))


def counters(server) -> dict[str, float]:
    """Counters of speculative decoding, those by position as `name/position`."""
    metrics = requests.get(f"{server.url}/metrics", timeout=60).text
    found = {}
    for line in metrics.splitlines():
        match = re.match(r"vllm:spec_decode_(\w+?)(?:_total)?\{(.*)\} (\S+)$", line)
        if match and not match[1].endswith("_created"):
            position = re.search(r'position="(\d+)"', match[2])
            name = f"{match[1]}/{position[1]}" if position else match[1]
            found[name] = float(match[3])
    return found


def test_transcripts_are_right(texts):
    """As many as without drafts: `tests/v1` compares them to the letter."""
    right = sum(text == heldout_index()[i]["text"] for i, text in enumerate(texts))
    assert right >= 0.75 * CLIPS, texts


@pytest.mark.usefixtures("texts")
def test_metrics_show_the_drafts(server):
    found = counters(server)
    steps, drafted = found["num_drafts"], found["num_draft_tokens"]
    accepted = found["num_accepted_tokens"]
    assert steps > 0
    assert drafted <= DRAFTS * steps
    assert 2 * steps <= accepted <= drafted
    positions = [
        found[f"num_accepted_tokens_per_pos/{position}"] for position in range(DRAFTS)
    ]
    assert sum(positions) == accepted
    # A draft counts only if all before it were right.
    assert positions == sorted(positions, reverse=True)


@pytest.mark.usefixtures("texts")
def test_the_log_is_free_of_errors(server):
    log = server.log.read_text(errors="replace")
    for word in ("Traceback", "RecursionError", "Exception ignored"):
        assert word not in log
