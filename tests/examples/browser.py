# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A headless Chromium for tests of pages, driven over its debugging socket."""

import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Path of an installed Chromium, None if there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """A page that scripts can be run in.

    Attributes:
        errors: texts of uncaught errors of the page's scripts.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol.

        Raises:
            RuntimeError: Chromium refuses.
        """
        call_id = next(self._ids)
        self._socket.send(
            json.dumps({"id": call_id, "method": method, "params": params})
        )
        while True:
            message = json.loads(self._socket.recv(timeout=120))
            if message.get("method") == "Runtime.exceptionThrown":
                details = message["params"]["exceptionDetails"]
                self.errors.append(json.dumps(details))
            if message.get("id") == call_id:
                if "error" in message:
                    raise RuntimeError(message["error"])
                return message["result"]

    def evaluate(self, script: str) -> Any:
        """Value of a JavaScript expression, awaited if it is a promise.

        Raises:
            RuntimeError: it throws.
        """
        answer = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            # As if the user had clicked, which playback asks for.
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> Any:
        """Value of an expression as soon as it is true.

        Raises:
            TimeoutError: it does not become true.
        """
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{script}; errors: {self.errors}")
            time.sleep(0.1)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for(
            f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        )

    def screenshot(self, path: Path) -> None:
        import base64

        answer = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def headless_page(chromium: str, folder: Path) -> Iterator[Page]:
    """Run Chromium while the block runs.

    Args:
        chromium: its path.
        folder: for its profile and log.

    Raises:
        RuntimeError: it does not start.
    """
    log = folder / "chromium.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                *(chromium, "--headless", "--no-first-run", "--disable-gpu"),
                # Containers run as root, with little shared memory and no sound.
                *("--no-sandbox", "--disable-dev-shm-usage", "--mute-audio"),
                *("--window-size=1200,700", "--force-device-scale-factor=1"),
                *("--autoplay-policy=no-user-gesture-required",),
                f"--user-data-dir={folder / 'profile'}",
                *("--remote-debugging-port=0", "about:blank"),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        port_file = folder / "profile" / "DevToolsActivePort"
        deadline = time.monotonic() + 120
        while not (port_file.exists() and port_file.read_text().strip()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{chromium} did not start:\n{log.read_text()}")
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            targets = json.load(answer)
        url = next(t for t in targets if t["type"] == "page")["webSocketDebuggerUrl"]
        with connect(url, max_size=None) as socket:
            page = Page(socket)
            page.call("Runtime.enable")
            page.call("Page.enable")
            yield page
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
