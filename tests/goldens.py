# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read golden files and rebuild the audio they were made from.

`tools/reference/goldens.py` writes the files and `tools/reference/README.md` says
what they hold. This module is the part that both environments share: it needs
numpy, safetensors and soundfile alone.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "data" / "goldens"
HELDOUT = ROOT / "tests" / "data" / "heldout"
SAMPLES = ROOT / "examples" / "demo" / "samples"
SAMPLE_RATE = 16_000


def _hash(seed: int, start: int, count: int) -> np.ndarray:
    """(count,) uint64: splitmix64 of the positions from `start`, keyed by `seed`."""
    with np.errstate(over="ignore"):
        x = np.arange(start, start + count, dtype=np.uint64)
        key = (seed * 0x632BE59BD9B4E019 + 1) % 2**64
        x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return x ^ (x >> np.uint64(31))


def noise_floor(seed: int, num_samples: int) -> np.ndarray:
    """Make (num_samples,) int64 white noise at -41 dB, as int16 samples count.

    Without one the quiet bands of a loud frame would be what a float32 transform
    leaves of them: on each machine something else.
    """
    return (_hash(seed, 0, num_samples) >> np.uint64(54)).astype(np.int64) - 512


def synthetic(seed: int, num_samples: int) -> np.ndarray:
    """Make a speech-like test signal that is the same on every machine.

    Integer arithmetic only: bursts of five buzzing "speakers" (triangle waves at a
    gliding pitch and two higher partials), hisses, overlaps and pauses, over a
    noise floor.

    Args:
        seed: Which signal, below 2**32. A longer signal of the same seed starts with
            the shorter one.
        num_samples: Samples at 16 kHz.

    Returns:
        (num_samples,) int16.
    """
    out = noise_floor(seed, num_samples)
    start, segment = 0, 0
    while start < num_samples:
        key = seed * 4096 + segment
        draw = (_hash(key, 1 << 40, 12) >> np.uint64(40)).astype(np.int64)
        length = 1200 + int(draw[0] % 5600)  # 75 to 425 ms
        here = np.arange(min(length, num_samples - start), dtype=np.int64)
        total = np.zeros(len(here), dtype=np.int64)
        kind = int(draw[1] % 8)
        # Two of eight segments are pauses, one is an overlap of two speakers.
        for voice in {0: (), 1: (), 2: (2, 3)}.get(kind, (2,)):
            speaker = int(draw[voice] % 5)
            pitch = 90 + 45 * speaker + int(draw[4] % 20)
            glide = int(draw[5] % 41) - 20
            level = 300 + int(draw[6] % 1500)
            for partial, weight in (
                (1, 4),
                (3 + speaker, 3),
                (9 + 4 * speaker + int(draw[7] % 3), 2),
            ):
                # Phase in 2**32nds of a period; the pitch glides linearly.
                step = pitch * partial * 268435
                bend = glide * partial * 268435 * here * here // (2 * SAMPLE_RATE)
                phase = (step * here + bend) & 0xFFFFFFFF
                triangle = np.abs(phase - (1 << 31)) - (1 << 30)
                total += (triangle >> 15) * weight * level >> 15
        if kind == 3:
            hiss = (_hash(key, 1 << 41, len(here)) >> np.uint64(49)).astype(np.int64)
            total += (hiss - 16384) * int(100 + draw[8] % 900) >> 11
        # Fades of 20 ms keep the spectrum free of clicks.
        fade = np.minimum(np.minimum(here, length - here), 320)
        out[start : start + len(here)] += total * fade // 320
        start += length
        segment += 1
    return np.clip(out, -32768, 32767).astype(np.int16)


@functools.cache
def heldout_index() -> list[dict[str, Any]]:
    """Return the held-out clips: `file`, `start`, `samples`, `text`, `prompt`..."""
    return json.loads((HELDOUT / "index.json").read_text("utf-8"))


@functools.cache
def read_pcm(path: Path) -> np.ndarray:
    """Return the int16 samples of a lossless mono file at 16 kHz.

    Raises:
        ValueError: The file has another rate or several channels.
    """
    import soundfile

    samples, rate = soundfile.read(path, dtype="int16")
    if rate != SAMPLE_RATE or samples.ndim != 1:
        raise ValueError(f"{path}: not mono at 16 kHz")
    return samples


def heldout(number: int) -> np.ndarray:
    """Return one held-out clip, int16 at 16 kHz."""
    entry = heldout_index()[number]
    start = entry["start"]
    return read_pcm(HELDOUT / entry["file"])[start : start + entry["samples"]]


def heldout_utterances(count: int) -> list[np.ndarray]:
    """Return the first one-speaker clips, int16 at 16 kHz.

    Raises:
        ValueError: There are not so many.
    """
    index = enumerate(heldout_index())
    numbers = [n for n, entry in index if entry["prompt"] == "default"][:count]
    if len(numbers) < count:
        raise ValueError(f"{count} clips wanted, {len(numbers)} there")
    return [heldout(number) for number in numbers]


def heldout_speakers() -> np.ndarray:
    """Return the first clip of several speakers, float32 at 16 kHz."""
    index = enumerate(heldout_index())
    number = next(n for n, entry in index if entry["prompt"] == "speakers")
    return heldout(number).astype(np.float32) / 32768


def build_clip(recipe: dict[str, Any]) -> np.ndarray:
    """Rebuild a clip from the recipe in a golden file.

    Args:
        recipe: `{"kind": "synthetic", "seed", "samples"}`; or `{"kind": "heldout",
            "clips": [numbers], "gap": samples, "samples"}`, the clips one after the
            other, a pause of `gap` samples after each, over and over, cut to
            `samples`, over a noise floor; or `{"kind": "sample", "file",
            "samples"}`, a demo sample. All have the `sha256` of the int16 samples.

    Returns:
        (samples,) float32 in [-1, 1).

    Raises:
        ValueError: The samples are not the ones the golden file was made from.
    """
    if recipe["kind"] == "synthetic":
        samples = synthetic(recipe["seed"], recipe["samples"])
    elif recipe["kind"] == "sample":
        samples = read_pcm(SAMPLES / recipe["file"])
    else:
        parts: list[np.ndarray] = []
        for number in recipe["clips"]:
            parts += [heldout(number), np.zeros(recipe["gap"], dtype=np.int16)]
        samples = np.resize(np.concatenate(parts), recipe["samples"])
        samples = samples + noise_floor(len(parts), len(samples))
        samples = np.clip(samples, -32768, 32767).astype(np.int16)
    if checksum(samples) != recipe.get("sha256", checksum(samples)):
        raise ValueError(f"other samples than the golden file's: {recipe}")
    return samples.astype(np.float32) / 32768


def checksum(samples: np.ndarray) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of int16 samples."""
    return hashlib.sha256(samples.astype("<i2").tobytes()).hexdigest()[:16]


class Goldens:
    """One golden file.

    Attributes:
        tensors: The arrays by name.
        info: The JSON description: `clips` (recipes by name), `prompts` (cases by
            name), `texts` (prompt texts and ids by name), `greedy` and `versions`.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        if not path.is_absolute():
            path = GOLDENS / path
        self.tensors = load_file(path)
        with safe_open(path, "np") as file:
            self.info = json.loads(file.metadata()["goldens"])

    def audio(self, name: str) -> np.ndarray:
        """Return the float32 samples of a clip."""
        return build_clip(self.info["clips"][name])

    def rows(self, clip: str, what: str) -> tuple[Sequence[int], np.ndarray]:
        """Return the kept row numbers and rows of a quantity of a clip.

        Args:
            clip: A name of `info["clips"]`.
            what: `logmel`, `asr_states`, `speaker_probs_10ms`, `speaker_probs`,
                `embeddings` or `ctc_logits`.
        """
        values = self.tensors[f"{clip}.{what}"]
        kept = self.tensors.get(f"{clip}.{what}.rows", np.arange(len(values)))
        return kept, values

    def speaker_activity(self, clip: str) -> np.ndarray:
        """Return every encoder frame's active speakers, (frames, speakers) bool."""
        frames, speakers = self.tensors[f"{clip}.activity.shape"]
        bits = np.unpackbits(self.tensors[f"{clip}.activity"])
        return bits[: frames * speakers].reshape(frames, speakers).astype(bool)

    def greedy_ids(self, number: int) -> list[int]:
        """Return the reference's greedy tokens for one greedy case."""
        row = self.tensors["greedy.ids"][number]
        return row[row >= 0].tolist()

    def greedy_margins(self, number: int) -> np.ndarray:
        """Return, per greedy token, the logit distance to the runner-up."""
        return self.tensors["greedy.margins"][number][: len(self.greedy_ids(number))]
