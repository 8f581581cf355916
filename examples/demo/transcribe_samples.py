# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Serve the demo checkpoint, transcribe its sample clips over HTTP, stop the server.

Prints each transcript beside its reference and the word error rate of all, and writes
a page that shows the clips as time lines of speakers and words.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jiwer
import openai

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE / "checkpoint"
SAMPLES = HERE / "samples"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def serve(port: int, log: Path, minutes: float) -> Iterator[str]:
    """Run `vllm serve` while the block runs; yields the API's base URL.

    Raises:
        RuntimeError: the server ended, or did not answer in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    vllm = Path(sys.executable).with_name("vllm")
    print(f"Starting vllm serve on port {port}, log in {log}", flush=True)
    with log.open("w") as output:
        server = subprocess.Popen(
            [vllm, "serve", CHECKPOINT, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        start = time.monotonic()
        while True:
            if server.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise RuntimeError(f"vllm serve ended:\n{tail}")
            waited = time.monotonic() - start
            if waited > 60 * minutes:
                raise RuntimeError(f"vllm serve did not answer in {minutes} minutes")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            print(f"\r  loading and compiling, {waited:.0f} s", end="", flush=True)
            time.sleep(1)
        print(f"\r  ready after {waited:.0f} s          ", flush=True)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        print("Server stopped.", flush=True)


def transcribe(client: openai.OpenAI, path: Path, *, speakers: bool) -> dict[str, Any]:
    """Transcribe a recording, and show how far it is.

    Args:
        speakers: tell them apart.

    Returns:
        The response, as `verbose_json` has it.
    """
    start = time.monotonic()
    words = 0

    def progress(what: str) -> None:
        if sys.stdout.isatty():
            seconds = time.monotonic() - start
            print(f"\r  {what}, {words} words, {seconds:.0f} s ", end="", flush=True)

    progress("listening")
    with path.open("rb") as file:
        events = client.audio.transcriptions.create(
            model=str(CHECKPOINT),
            file=file,
            language="en",
            temperature=0,
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
            extra_body={"diarize": speakers},
            stream=True,
        )
        for event in events:
            if event.type == "transcript.text.delta":
                words += event.delta.count(" ")
                progress("writing")
            else:
                # The last one has all of the text, and the times.
                done = event
    if sys.stdout.isatty():
        print("\r" + " " * 60, end="\r")
    return done.to_dict()


def tagged_text(response: dict[str, Any]) -> str:
    """Text with a `<spk:N>` tag before every turn, if there are speakers."""
    parts, before = [], None
    for segment in response["segments"]:
        speaker = segment.get("speaker")
        if speaker is not None and speaker != before:
            parts.append(f"<spk:{ord(speaker) - ord('A')}>")
        parts.append(segment["text"])
        before = speaker
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=None, help="default: a free one")
    parser.add_argument("--log", type=Path, default=Path("demo-output/server.log"))
    parser.add_argument(
        "--page", type=Path, default=Path("demo-output/timeline"), help="its folder"
    )
    parser.add_argument("--minutes", type=float, default=15, help="to wait at most")
    options = parser.parse_args()

    samples = json.loads((SAMPLES / "transcripts.json").read_text("utf-8"))
    references, heard, clips = [], [], []
    port = options.port or free_port()
    with serve(port, options.log, options.minutes) as url:
        client = openai.OpenAI(base_url=url, api_key="none", timeout=600)
        for sample in samples:
            path = SAMPLES / sample["file"]
            speakers = sample["prompt"] == "speakers"
            response = transcribe(client, path, speakers=speakers)
            clips.append((path, response))
            text = tagged_text(response)
            rate = jiwer.wer(sample["text"], text) if text else 1.0
            print(f"\n{sample['file']} ({sample['note']})")
            print(f"  said   {sample['text']}")
            print(f"  heard  {text}")
            print(f"  errors {100 * rate:.0f} %", flush=True)
            references.append(sample["text"])
            heard.append(text)
    rate = jiwer.wer(references, heard)
    print(f"\nWord error rate of {len(samples)} clips: {100 * rate:.1f} %")

    sys.path.append(str(HERE.parent / "timeline"))
    from write_page import write_page

    page = write_page(options.page, clips).resolve()
    print(f"Time lines of the clips, to open in a browser: {page}")


if __name__ == "__main__":
    # A terminated demo takes its server along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
