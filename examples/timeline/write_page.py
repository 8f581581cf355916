# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write the time line page with clips in it, so that it opens from a folder.

    python examples/timeline/write_page.py OUT RECORDING RESPONSE.json [...]

A page that is opened as a file may not read other files: recordings and responses go
into a script beside it.
"""

import argparse
import base64
import json
import mimetypes
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_FILES = ("index.html", "timeline.css", "timeline.js")


def write_page(folder: Path, clips: Iterable[tuple[Path, Mapping[str, Any]]]) -> Path:
    """Write the page.

    Args:
        folder: to write to; made if it is not there.
        clips: a recording, and the response for it, `verbose_json` or `diarized_json`.

    Returns:
        The page to open.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copyfile(HERE / name, folder / name)
    entries = []
    for recording, response in clips:
        kind = mimetypes.guess_type(recording.name)[0] or "application/octet-stream"
        data = base64.b64encode(recording.read_bytes()).decode()
        entries.append(
            {
                "name": recording.name,
                "audio": f"data:{kind};base64,{data}",
                "response": response,
            }
        )
    script = f"window.TIMELINE_CLIPS = {json.dumps(entries)};\n"
    (folder / "clips.js").write_text(script, "utf-8")
    return folder / "index.html"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="+", help="recording, response, …")
    options = parser.parse_args()
    if len(options.files) % 2:
        parser.error("each recording needs a response")
    pairs = zip(options.files[::2], options.files[1::2])
    print(
        write_page(
            options.folder,
            [(recording, json.loads(file.read_text())) for recording, file in pairs],
        )
    )


if __name__ == "__main__":
    main()
