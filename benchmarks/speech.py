# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What word times cost, what requests leave behind, and how an hour goes.

    .venv/bin/python -m benchmarks.speech words memory hour

Starts `vllm serve` on the demo checkpoint, or uses the one at `--url` with the process
id `--pid`. Where time is measured, every request brings samples of its own, a little
quieter than the ones before, so that no cache answers it. Where memory is, they are the
same few clips again and again: vLLM keeps up to 4 GiB of clips that it has not met.
"""

import argparse
import contextlib
import io
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jiwer
import numpy as np
import psutil
import requests
import soundfile

from tests.engine import CHECKPOINTS, ROOT, running_server

SAMPLES = ROOT / "examples" / "demo" / "samples"
RATE = 16000
_loudness = itertools.count(1)


class Target(NamedTuple):
    """A server.

    Attributes:
        url: without a path.
        pid: of its first process.
    """

    url: str
    pid: int

    def processes(self) -> list[psutil.Process]:
        first = psutil.Process(self.pid)
        return [first, *first.children(recursive=True)]

    def memory(self) -> int:
        """Bytes that its processes hold, each one's own."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().uss
        return total

    def ask(
        self,
        samples: np.ndarray,
        *,
        is_new: bool = True,
        timeout: float = 3600,
        **fields: Any,
    ) -> requests.Response:
        return requests.post(
            f"{self.url}/v1/audio/transcriptions",
            files={"file": ("clip.wav", wav(samples, is_new))},
            data=fields,
            timeout=timeout,
            stream="stream" in fields,
        )


def wav(samples: np.ndarray, is_new: bool) -> bytes:
    """Encode, at a loudness that nothing before had if it is to be new."""
    buffer = io.BytesIO()
    gain = 1 - 1e-4 * next(_loudness) if is_new else 1
    soundfile.write(buffer, gain * samples, RATE, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def read(name: str) -> np.ndarray:
    samples, rate = soundfile.read(SAMPLES / name, dtype="float32")
    assert rate == RATE and samples.ndim == 1
    return samples


def measure_words(target: Target, repeats: int) -> None:
    """Time 60 s with and without word times, by turns."""
    speech = np.concatenate(
        [read("long.flac"), read("connected.wav"), read("words.wav")]
    )
    minute = np.resize(speech, 60 * RATE)
    forms = {
        "json": {"response_format": "json"},
        "words": {
            "response_format": "verbose_json",
            "timestamp_granularities[]": "word",
        },
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for name, form in forms.items():
        target.ask(minute, **form).raise_for_status()
    for _ in range(repeats):
        for name, form in forms.items():
            start = time.perf_counter()
            target.ask(minute, **form).raise_for_status()
            seconds[name].append(time.perf_counter() - start)
    without, with_words = (statistics.median(seconds[name]) for name in forms)
    share = 1 - without / with_words
    print(
        f"60 s of speech, median of {repeats}: {without:.2f} s without words, "
        f"{with_words:.2f} s with; words are {100 * share:.0f} % of the request",
        flush=True,
    )


def mixed_request(target: Target, number: int) -> None:
    """One of many kinds; each third is given up on the way."""
    chance = random.Random(number)
    name = chance.choice(("words.wav", "two-speakers.wav", "digits.wav", "spaced.wav"))
    form: dict[str, Any] = {
        "response_format": chance.choice(
            ("json", "text", "srt", "vtt", "verbose_json", "diarized_json")
        )
    }
    gives_up = number % 3 == 0
    if form["response_format"] not in ("srt", "vtt") and chance.random() < 0.5:
        form["stream"] = "true"
    with contextlib.suppress(*((requests.RequestException,) if gives_up else ())):
        response = target.ask(
            read(name),
            **form,
            is_new=False,
            timeout=chance.uniform(0.05, 0.5) if gives_up else 300,
        )
        if gives_up:
            next(response.iter_content(32), None)
        else:
            response.raise_for_status()
            _ = response.content
        response.close()


def measure_memory(target: Target, count: int) -> None:
    """Compare the memory before and after many requests."""

    def run(numbers: range) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: mixed_request(target, number), numbers))

    # What is allocated once, is.
    run(range(count // 2))
    time.sleep(5)
    before = target.memory()
    run(range(count // 2, count // 2 + count))
    time.sleep(5)
    after = target.memory()
    print(
        f"{count} mixed requests, a third given up: {before / 2**20:.0f} MiB before, "
        f"{after / 2**20:.0f} MiB after ({100 * (after / before - 1):+.2f} %)",
        flush=True,
    )


def measure_hour(target: Target, seconds: int) -> None:
    """Transcribe and time an hour, in which the same few words come again and again.

    The demo checkpoint has no positions and cannot keep its place in an hour; left
    alone it writes on for tens of thousands of tokens. The answer gets the tokens that
    the hour's words have, a letter each, so that the time is that of a right one. Where
    the server cuts the hour into pieces (`--limit-mm-per-prompt`) of a few words, it
    has the words right, too.

    Args:
        target: The server.
        seconds: From one time that the words are said to the next one.
    """
    words = read("words.wav")
    entries = json.loads((SAMPLES / "transcripts.json").read_text())
    text = next(entry["text"] for entry in entries if entry["file"] == "words.wav")
    count = 3600 // seconds
    period = np.zeros(seconds * RATE, np.float32)
    period[: len(words)] = words
    hour = np.tile(period, count)
    with Peak(target) as peak:
        start = time.perf_counter()
        response = target.ask(
            hour,
            **{
                "response_format": "verbose_json",
                "timestamp_granularities[]": "word",
                "max_completion_tokens": count * (len(text) + 1),
            },
        )
        spent = time.perf_counter() - start
    response.raise_for_status()
    answer = response.json()
    wrong = 100 * jiwer.wer(" ".join([text] * count), answer["text"])
    print(
        f"an hour in {spent:.0f} s ({3600 / spent:.0f} times as fast as speech): "
        f"{answer['usage']['output_tokens']} tokens, {len(answer['words'])} words, the "
        f"last at {answer['words'][-1]['end']:.0f} s, {wrong:.1f} % word errors, "
        f"finished by "
        f"{answer['finish_reason']!r}; {peak.before / 2**20:.0f} MiB before, at most "
        f"{peak.highest / 2**20:.0f} MiB meanwhile",
        flush=True,
    )


class Peak:
    """Most memory that a server holds while the block runs.

    Attributes:
        before, highest: bytes.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._running = False
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> "Peak":
        self.before = self.highest = self._target.memory()
        self._running = True
        self._pool.submit(self._watch)
        return self

    def _watch(self) -> None:
        while self._running:
            self.highest = max(self.highest, self._target.memory())
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        self._running = False
        self._pool.shutdown()


@contextlib.contextmanager
def started(options: argparse.Namespace) -> Iterator[Target]:
    if options.url:
        yield Target(options.url, options.pid)
        return
    log = Path(tempfile.mkdtemp()) / "server.log"
    print(f"Starting vllm serve, log in {log}", flush=True)
    with running_server(CHECKPOINTS["demo"], *options.flags, log=log) as server:
        yield Target(server.url, server.process.pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="+", choices=("words", "memory", "hour"))
    parser.add_argument("--repeats", type=int, default=5, help="of the words")
    parser.add_argument("--requests", type=int, default=300, help="of the memory")
    parser.add_argument(
        "--period", type=int, default=20, help="seconds of the hour for six words"
    )
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--pid", type=int, help="of its first process")
    parser.add_argument("--flags", nargs="*", default=[], help="of vllm serve")
    options = parser.parse_args()
    with started(options) as target:
        if "words" in options.what:
            measure_words(target, options.repeats)
        if "memory" in options.what:
            measure_memory(target, options.requests)
        if "hour" in options.what:
            measure_hour(target, options.period)


if __name__ == "__main__":
    main()
