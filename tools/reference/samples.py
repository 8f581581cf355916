#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes the demo's sample clips: held-out speech in the formats people upload.

python tools/reference/samples.py --out examples/demo/samples
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import soundfile
import soxr
from corpus import DIGITS, SAMPLE_RATE, Clip, heldout_clip, human_prompts

# name, kind, number of the held-out clip, sample rate, channels, note
SAMPLES = (
    ("digits.wav", "utterances", 1000, 16000, 1, "16 kHz mono"),
    ("words.wav", "utterances", 1001, 16000, 1, "16 kHz mono"),
    ("short.wav", "utterances", 1002, 16000, 1, "16 kHz mono"),
    ("spaced.wav", "words", 1003, 16000, 1, "16 kHz mono, words spoken one by one"),
    ("connected.wav", "utterances", 1004, 16000, 1, "16 kHz mono"),
    ("telephone.wav", "utterances", 1005, 8000, 1, "8 kHz mono"),
    ("studio.wav", "utterances", 1006, 44100, 2, "44.1 kHz stereo"),
    ("lossless.flac", "utterances", 1007, 16000, 1, "FLAC, 16 kHz"),
    ("compressed.mp3", "utterances", 1008, 24000, 1, "MP3, 24 kHz"),
    ("two-speakers.wav", "speakers", 1009, 16000, 1, "16 kHz mono, two speakers"),
    ("long.flac", "long", 1010, 16000, 1, "FLAC, over 45 s: more than one chunk"),
)
HUMAN = {
    "thank you": "human-thank-you.wav",
    "please try again": "human-please-try-again.wav",
}
LICENCE = """\
All clips but the two below were spoken by espeak-ng and flite and mixed by
tools/reference/samples.py; they are Apache-2.0 like the rest of this repository.

human-thank-you.wav, human-please-try-again.wav: from Debian's package
asterisk-core-sounds-en-wav, copyright 2003-2010 Allison Smith
(http://www.theivrvoice.com), financed by Digium, Inc., licensed under the Creative
Commons Attribution-ShareAlike 3.0 licence (CC-BY-SA-3.0,
https://creativecommons.org/licenses/by-sa/3.0/); unchanged.
"""


def write(clip: Clip, path: Path, rate: int, channels: int) -> None:
    """Writes a clip in another rate, channel count and format (by the suffix)."""
    audio = clip.audio
    if rate != SAMPLE_RATE:
        audio = soxr.resample(audio, SAMPLE_RATE, rate)
    audio = np.clip(audio, -1, 1)
    if channels == 2:  # not the same on both sides, so that the mean matters
        audio = np.stack([audio, 0.6 * audio], 1)
    subtype = {".mp3": "MPEG_LAYER_III"}.get(path.suffix, "PCM_16")
    soundfile.write(path, audio, rate, subtype=subtype)


def find(kind: str, number: int, name: str) -> Clip:
    """The first held-out clip from ``number`` on that suits the sample's name."""
    while True:
        clip = heldout_clip(number, kind)
        two = len({speaker for speaker, _ in clip.turns}) == 2
        if (
            (name == "two-speakers.wav" and not two)
            or (name == "long.flac" and len(clip.audio) < 46 * SAMPLE_RATE)
            or (name == "digits.wav" and not set(clip.words) <= set(DIGITS))
            or (kind == "utterances" and name != "short.wav" and len(clip.words) < 4)
        ):
            number += 20
            continue
        return clip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("examples/demo/samples"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, kind, number, rate, channels, note in SAMPLES:
        clip = find(kind, number, name)
        write(clip, out / name, rate, channels)
        tagged = kind == "speakers"
        entries.append(
            {
                "file": name,
                "text": clip.tagged_text if tagged else clip.text,
                "prompt": "speakers" if tagged else "transcribe",
                "note": f"synthetic, {note}",
            }
        )
    for path, text in human_prompts():
        if (name := HUMAN.pop(text, None)) is not None:
            shutil.copyfile(path, out / name)
            note = "human, 8 kHz mono, CC-BY-SA-3.0 (see LICENSE.txt)"
            entries.append(
                {"file": name, "text": text, "prompt": "transcribe", "note": note}
            )
    (out / "transcripts.json").write_text(json.dumps(entries, indent=2) + "\n")
    (out / "LICENSE.txt").write_text(LICENCE)
    size = sum(p.stat().st_size for p in out.iterdir())
    print(f"{len(entries)} clips, {size:,} bytes in {out}")


if __name__ == "__main__":
    main()
