#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store held-out clips of the demo's corpus whose word or turn times are known.

    python tools/reference/timed.py --out tests/data/heldout

`timed.ogg` has the clips one after the other and `timed.json` what is said in them and
when: single words of one speaker, each spoken for itself, and turns of two or three
speakers. Lossy, since nothing is compared to the sample.
"""

import argparse
import json
from pathlib import Path

import corpus
import numpy as np
import soundfile

# Kind of clip: words to store.
_WANTED = {"words": 220, "speakers": 120}
_LONGEST_SECONDS = 9.0


def timed_clips(kind: str, words: int) -> list[tuple[np.ndarray, dict]]:
    """The first clips of a kind that are short enough, until there are `words`."""
    clips, number = [], 0
    while words > 0:
        clip = corpus.heldout_clip(number, kind)
        number += 1
        if len(clip.audio) > _LONGEST_SECONDS * corpus.SAMPLE_RATE:
            continue
        prompt = "speakers" if kind == "speakers" else "default"
        entry = corpus.describe(clip, "", prompt)
        words -= len(clip.words)
        clips.append(
            (
                clip.audio,
                {
                    "kind": kind,
                    "number": number - 1,
                    "samples": len(clip.audio),
                    "text": entry["text"],
                    "words": entry.get("words") if kind == "words" else None,
                    "activity": entry["activity"],
                },
            )
        )
        print(f"{kind}: {words} words to go", flush=True)
    return clips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    clips = [
        clip for kind, words in _WANTED.items() for clip in timed_clips(kind, words)
    ]
    lines = ",\n".join(json.dumps(entry) for _, entry in clips)
    (out / "timed.json").write_text(f"[\n{lines}\n]\n", "utf-8")
    # In blocks: the encoder of some library versions overflows its stack on one long
    # write.
    path = out / "timed.ogg"
    with soundfile.SoundFile(
        path, "w", corpus.SAMPLE_RATE, 1, subtype="VORBIS", format="OGG"
    ) as file:
        for audio, _ in clips:
            for start in range(0, len(audio), 4096):
                file.write(audio[start : start + 4096])
    seconds = sum(entry["samples"] for _, entry in clips) / corpus.SAMPLE_RATE
    print(f"{len(clips)} clips, {seconds:.0f} s, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
