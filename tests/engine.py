# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real engines and servers for the tests, on the CPU."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = {
    "demo": ROOT / "examples" / "demo" / "checkpoint",
    "odd": ROOT / "tests" / "data" / "odd_checkpoint",
}

# Enough for the tests' contexts. Without it vLLM takes nearly all of the memory, or
# refuses to start where something else has it.
KV_CACHE_BYTES = 512 << 20


@contextlib.contextmanager
def offline_engine(checkpoint: str | Path, **options: Any) -> Iterator[Any]:
    """Run `vllm.LLM` on a checkpoint; float32 unless told."""
    import vllm

    llm = vllm.LLM(
        str(checkpoint),
        **{
            "dtype": "float32",
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            **options,
        },
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """A `vllm serve` subprocess.

    Attributes:
        url: its base URL, without a path.
        log: file that its output goes to.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *flags: str,
        log: Path,
        env: dict[str, str] | None = None,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        vllm = Path(sys.executable).with_name("vllm")
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [vllm, "serve", checkpoint, "--port", str(port), *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def wait(self, seconds: float = 300) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: it ended, or did not answer in time; with its last lines.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"vllm serve did not start:\n{tail}")

    def client(self) -> Any:
        """Return a synchronous OpenAI client."""
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=300, max_retries=0
        )

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def running_server(
    checkpoint: str | Path, *flags: str, log: Path, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """Serve a checkpoint while the block runs."""
    server = Server(checkpoint, *flags, log=log, env=env)
    try:
        server.wait()
        yield server
    finally:
        server.stop()
