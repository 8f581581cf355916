# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Serve the demo checkpoint, transcribe its sample clips over HTTP, stop the server.

Prints each transcript beside its reference and the word error rate of all.
"""

import argparse
import base64
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

import jiwer
import openai

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE / "checkpoint"
SAMPLES = HERE / "samples"

# The instruction that asks for a `<spk:N>` tag before every speaker turn.
SPEAKER_INSTRUCTION = (
    "Transcribe this audio. Include all spoken words and verbal fillers. Write "
    "numbers as spoken. Use no punctuation and no capitalization. Start every speaker "
    "turn with a speaker tag such as <spk:0>, <spk:1>, <spk:2>, etc.; assign one "
    "stable tag per speaker and keep speaker identities consistent. Output only the "
    "speaker-tagged transcript."
)


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


def transcribe(client: openai.OpenAI, path: Path) -> str:
    """Words alone, by the transcription route."""
    with path.open("rb") as file:
        return client.audio.transcriptions.create(
            model=str(CHECKPOINT), file=file, language="en", temperature=0
        ).text


def transcribe_speakers(client: openai.OpenAI, path: Path) -> str:
    """Words and speaker tags, by the chat route: tags are special tokens."""
    data = base64.b64encode(path.read_bytes()).decode()
    audio = {"data": data, "format": path.suffix.removeprefix(".")}
    answer = client.chat.completions.create(
        model=str(CHECKPOINT),
        temperature=0,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": SPEAKER_INSTRUCTION},
                    {"type": "input_audio", "input_audio": audio},
                ],
            }
        ],
        extra_body={
            "chat_template_kwargs": {"enable_thinking": False},
            "skip_special_tokens": False,
        },
    )
    text = answer.choices[0].message.content or ""
    return text.removesuffix("<|im_end|>").strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=None, help="default: a free one")
    parser.add_argument("--log", type=Path, default=Path("demo-output/server.log"))
    parser.add_argument("--minutes", type=float, default=15, help="to wait at most")
    options = parser.parse_args()

    samples = json.loads((SAMPLES / "transcripts.json").read_text("utf-8"))
    references, heard = [], []
    port = options.port or free_port()
    with serve(port, options.log, options.minutes) as url:
        client = openai.OpenAI(base_url=url, api_key="none", timeout=600)
        for sample in samples:
            path = SAMPLES / sample["file"]
            with_speakers = sample["prompt"] == "speakers"
            text = (transcribe_speakers if with_speakers else transcribe)(client, path)
            rate = jiwer.wer(sample["text"], text) if text else 1.0
            print(f"\n{sample['file']} ({sample['note']})")
            print(f"  said   {sample['text']}")
            print(f"  heard  {text}")
            print(f"  errors {100 * rate:.0f} %", flush=True)
            references.append(sample["text"])
            heard.append(text)
    rate = jiwer.wer(references, heard)
    print(f"\nWord error rate of {len(samples)} clips: {100 * rate:.1f} %")


if __name__ == "__main__":
    # A terminated demo takes its server along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
