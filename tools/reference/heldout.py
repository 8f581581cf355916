#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store short held-out clips of the demo's corpus for the golden files and tests.

    python tools/reference/heldout.py --out tests/data/heldout

The clips are spoken by espeak-ng and flite, whose output changes with their version,
so the samples themselves are stored: losslessly, a FLAC file for each kind, with an
index of where each clip starts, what it says and under which prompt.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import corpus
import numpy as np
import soundfile

# Kind of clip: (how many, longest in seconds, prompt).
_WANTED = {
    "utterances": (96, 2.2, "default"),
    "speakers": (16, 4.5, "speakers"),
}


def short_clips(
    kind: str, count: int, seconds: float
) -> Iterator[tuple[int, corpus.Clip]]:
    """Yield the first clips of a kind that are short enough, with their numbers."""
    number = 0
    while count:
        clip = corpus.heldout_clip(number, kind)
        if len(clip.audio) <= seconds * corpus.SAMPLE_RATE:
            yield number, clip
            count -= 1
        number += 1


def store_kind(kind: str, out: Path) -> list[dict]:
    """Write the clips of a kind to one file and return their index entries."""
    count, seconds, prompt = _WANTED[kind]
    entries, parts, start = [], [], 0
    for number, clip in short_clips(kind, count, seconds):
        samples = np.round(clip.audio * 32768).astype(np.int16)
        entries.append(
            {
                "file": f"{kind}.flac",
                "start": start,
                "samples": len(samples),
                "prompt": prompt,
                "text": clip.tagged_text if prompt == "speakers" else clip.text,
                "number": number,
            }
        )
        parts.append(samples)
        start += len(samples)
        print(f"{len(entries)} of {count} {kind}", flush=True)
    soundfile.write(
        out / f"{kind}.flac",
        np.concatenate(parts),
        corpus.SAMPLE_RATE,
        subtype="PCM_16",
        compression_level=1.0,  # the library's default is not FLAC's best
    )
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    index = [entry for kind in _WANTED for entry in store_kind(kind, out)]
    lines = ",\n".join(json.dumps(entry) for entry in index)
    (out / "index.json").write_text(f"[\n{lines}\n]\n", "utf-8")
    seconds = sum(entry["samples"] for entry in index) / corpus.SAMPLE_RATE
    size = sum(file.stat().st_size for file in out.glob("*.flac"))
    print(f"{len(index)} clips, {seconds:.0f} s, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
