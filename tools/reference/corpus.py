#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Deterministic synthetic speech for the demo checkpoint.

Everything is spoken by espeak-ng and flite, so the corpus needs no download and
carries no third-party recording. Training reads a cache of single words and
connected phrases and mixes clips from it on the fly; the held-out set is spoken
afresh with voice and parameter combinations and word sequences that training
never sees.

    python tools/reference/corpus.py cache --out DIR            # for training
    python tools/reference/corpus.py heldout --count 200 --out DIR
    python tools/reference/corpus.py heldout --kind words --count 60 --out DIR
    python tools/reference/corpus.py human                      # asterisk prompts

Only numpy, scipy, soundfile and soxr are imported, so the held-out set can be
written in the serving environment too. The speech programs come from Debian:
``apt-get install espeak-ng flite``.
"""

import argparse
import functools
import gzip
import hashlib
import io
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from scipy import signal

SAMPLE_RATE = 16_000

DIGITS = re.findall(r"\w+", "zero one two three four five six seven eight nine")

# No homophones ("to", "for") and no pairs that differ in one weak sound ("minute",
# "minutes"): random sequences give the decoder nothing to tell them apart by.
_EVERYDAY = """
hello goodbye please thank you sorry yes no call phone number messages today tomorrow
yesterday time and from with again later enter press star pound key try person first
next family friends work urgent password extension transfer minutes seconds hours
location valid line help exit menu return saved deleted received options record agent
busy conference joined name connect monday tuesday wednesday thursday friday saturday
sunday home open close stop music water red green blue white black coffee
"""
EVERYDAY = re.findall(r"\S+", _EVERYDAY)

WORDS = DIGITS + EVERYDAY

# Speakers are (accent, variant) pairs; a pair belongs to training or to the
# held-out set, never to both.
_ACCENTS = (
    "en-us",
    "en-gb",
    "en-gb-scotland",
    "en-gb-x-rp",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-029",
)
_VARIANTS = (
    *("m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "f1", "f2", "f3", "f4"),
    *("f5", "Alex", "Alicia", "Andy", "Annie", "Lee", "Mike", "Michael", "adam"),
    *("anika", "belinda", "benjamin", "david", "ed", "grandma", "grandpa", "john"),
    *("linda", "paul", "rob", "steph", "travis", "victor", "shelby", "klatt2"),
)
_FLITE = ("slt", "rms", "awb", "kal16", "kal")

_KINDS = ("utterances", "words", "speakers", "long")


@dataclass(frozen=True)
class Voice:
    """One synthetic voice with its settings.

    Attributes:
        engine: ``"espeak"`` or ``"flite"``.
        name: espeak-ng's ``accent+variant`` or flite's voice.
        rate: Words a minute (espeak) or duration stretch (flite).
        pitch: 0-99 (espeak) or mean F0 in Hz (flite; 0 keeps the voice's own).
    """

    engine: str
    name: str
    rate: float
    pitch: float

    @property
    def speaker(self) -> str:
        """The voice without its settings: who is speaking."""
        return f"{self.engine}:{self.name}"


def training_voices() -> list[Voice]:
    """The voices of the training cache: 74 speakers, 1-6 settings each."""
    rng = np.random.default_rng(11)
    voices = []
    for a, accent in enumerate(_ACCENTS):
        for v, variant in enumerate(_VARIANTS):
            if (a + 2 * v) % 7 in (0, 3):  # every accent and every variant occurs
                voices += [
                    Voice(
                        "espeak",
                        f"{accent}+{variant}",
                        int(rng.integers(115, 205)),
                        int(rng.integers(20, 80)),
                    )
                ]
    for name in _FLITE:
        base = {"slt": 175, "rms": 95, "awb": 125, "kal16": 105, "kal": 105}[name]
        for stretch in (0.8, 0.92, 1.02, 1.15, 1.3, 1.45):
            voices.append(
                Voice("flite", name, stretch, int(base * rng.uniform(0.85, 1.2)))
            )
    return voices


def heldout_voices() -> list[Voice]:
    """Voice and parameter combinations that the training cache does not hold."""
    rng = np.random.default_rng(12)
    voices = []
    for a, accent in enumerate(_ACCENTS):
        for v, variant in enumerate(_VARIANTS):
            if (a + 2 * v) % 7 == 5 and v % 2 == 0:
                voices.append(
                    Voice(
                        "espeak",
                        f"{accent}+{variant}",
                        int(rng.integers(120, 195)),
                        int(rng.integers(25, 75)),
                    )
                )
    for name in ("slt", "rms", "awb", "kal16"):
        base = {"slt": 175, "rms": 95, "awb": 125, "kal16": 105}[name]
        for stretch in (0.87, 1.08, 1.22):
            voices.append(
                Voice("flite", name, stretch, int(base * rng.uniform(0.9, 1.12)))
            )
    return voices


def synthesise(voice: Voice, text: str) -> np.ndarray:
    """Speaks ``text`` and trims the silence around it.

    Returns:
        Mono float32 samples at 16 kHz, peak below 1.

    Raises:
        RuntimeError: If the speech program is missing or says nothing.
    """
    try:
        if voice.engine == "espeak":
            command = ["espeak-ng", "-v", voice.name, "-s", str(int(voice.rate))]
            command += ["-p", str(int(voice.pitch)), "--stdout", text]
            raw = subprocess.run(command, check=True, capture_output=True).stdout
            # a piped WAV carries no length, which soundfile would reject
            samples = np.frombuffer(raw[44:], dtype="<i2").astype(np.float32) / 32768
            rate = int.from_bytes(raw[24:28], "little")
        else:
            with tempfile.NamedTemporaryFile(suffix=".wav") as out:
                command = ["flite", "-voice", voice.name]
                command += ["--setf", f"duration_stretch={voice.rate}"]
                if voice.pitch:
                    command += ["--setf", f"int_f0_target_mean={voice.pitch}"]
                command += ["-t", text, "-o", out.name]
                subprocess.run(command, check=True, capture_output=True)
                samples, rate = soundfile.read(out.name, dtype="float32")
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{command[0]} could not speak {text!r}: {error}") from error
    if rate != SAMPLE_RATE:
        samples = soxr.resample(samples, rate, SAMPLE_RATE)
    samples = trim(np.asarray(samples, dtype=np.float32))
    if len(samples) < SAMPLE_RATE // 50:
        raise RuntimeError(f"{voice} said nothing for {text!r}")
    return samples / max(float(np.abs(samples).max()), 1e-4) * 0.9


def trim(samples: np.ndarray, floor: float = 0.012) -> np.ndarray:
    """Cuts leading and trailing 5 ms blocks quieter than ``floor`` of the peak."""
    block = SAMPLE_RATE // 200
    usable = len(samples) // block * block
    if not usable:
        return samples
    level = np.abs(samples[:usable]).reshape(-1, block).max(1)
    loud = np.flatnonzero(level > floor * max(float(level.max()), 1e-6))
    return samples[loud[0] * block : (loud[-1] + 1) * block] if len(loud) else samples


def median_pitch(samples: np.ndarray) -> float:
    """Median fundamental frequency in Hz of the voiced parts of a recording."""
    size, hop = 800, 400
    low, high = SAMPLE_RATE // 350, SAMPLE_RATE // 65
    found = []
    for start in range(0, len(samples) - size - high, hop):
        frame = samples[start : start + size]
        if np.abs(frame).max() < 0.1:
            continue
        energy = float(frame @ frame)
        window = np.lib.stride_tricks.sliding_window_view(
            samples[start + low : start + high + size], size
        )
        norms = np.sqrt(energy * (window**2).sum(1)) + 1e-6
        score = window @ frame / norms
        if score.max() > 0.6:
            best = int(np.flatnonzero(score > 0.9 * score.max())[0])
            found.append(SAMPLE_RATE / (low + best))
    return float(np.median(found)) if found else 0.0


def is_heldout_sequence(words: list[str]) -> bool:
    """Whether a word sequence of two or more words is kept out of training."""
    if len(words) < 2:
        return True
    digest = hashlib.sha1(" ".join(words).encode()).digest()
    return digest[0] % 8 == 0


def random_words(rng: np.random.Generator, count: int, heldout: bool) -> list[str]:
    """Draws ``count`` words; digits come in runs as often as words do."""
    while True:
        style = rng.random()
        if style < 0.25:
            words = [str(w) for w in rng.choice(DIGITS, count)]
        elif style < 0.5:
            words = [str(w) for w in rng.choice(WORDS, count)]
        else:
            words = [str(w) for w in rng.choice(EVERYDAY, count)]
        if count < 2 or is_heldout_sequence(words) == heldout:
            return words


# --------------------------------------------------------------------------- cache


def _speak(task: tuple[Voice, str]) -> np.ndarray:
    return (synthesise(*task) * 32767).astype(np.int16)


def build_cache(directory: Path, phrases_per_voice: int = 85, jobs: int = 2) -> None:
    """Speaks every word and random phrases with every training voice.

    Writes ``audio.npy`` (int16, all items one after the other) and ``index.json``
    (voices, and per item: voice, text, offset, length). Does nothing when the
    folder already holds a finished cache of the same words and size.
    """
    directory.mkdir(parents=True, exist_ok=True)
    index_path = directory / "index.json"
    voices = training_voices()
    if index_path.exists():
        stored = json.loads(index_path.read_text())
        if stored["made_of"] == [phrases_per_voice, *WORDS]:
            return
    rng = np.random.default_rng(13)
    tasks = []
    for number, voice in enumerate(voices):
        tasks += [(number, voice, word) for word in WORDS]
        for _ in range(phrases_per_voice):
            count = int(rng.integers(2, 9))
            tasks.append((number, voice, " ".join(random_words(rng, count, False))))
    items, chunks, offset = [], [], 0
    with ProcessPoolExecutor(jobs) as pool:
        spoken = pool.map(_speak, [(v, t) for _, v, t in tasks], chunksize=32)
        for done, ((number, _, text), samples) in enumerate(
            zip(tasks, spoken, strict=True), 1
        ):
            items.append([number, text, offset, len(samples)])
            chunks.append(samples)
            offset += len(samples)
            if done % 2000 == 0 or done == len(tasks):
                print(f"[corpus] {done}/{len(tasks)} items spoken", flush=True)
    np.save(directory / "audio.npy", np.concatenate(chunks))
    index_path.write_text(
        json.dumps(
            {
                "made_of": [phrases_per_voice, *WORDS],
                "voices": [vars(v) for v in voices],
                "items": items,
            }
        )
    )


class CachedSource:
    """Words and phrases of the training voices, read from the cache."""

    heldout = False

    def __init__(self, directory: Path):
        index = json.loads((directory / "index.json").read_text())
        self.audio = np.load(directory / "audio.npy", mmap_mode="r")
        self.voices = [Voice(**v) for v in index["voices"]]
        self.words: list[dict[str, tuple[int, int]]] = [{} for _ in self.voices]
        self.phrases: list[list[tuple[str, int, int]]] = [[] for _ in self.voices]
        for number, text, offset, length in index["items"]:
            if " " in text:
                self.phrases[number].append((text, offset, length))
            else:
                self.words[number][text] = (offset, length)

    @functools.cached_property
    def pitches(self) -> list[float]:
        """Median pitch of every voice, in Hz."""
        words = ("monday", "hello", "number", "message", "yellow", "home", "now")
        return [
            median_pitch(np.concatenate([self._read(*v[w]) for w in words if w in v]))
            for v in self.words
        ]

    def _read(self, offset: int, length: int) -> np.ndarray:
        return self.audio[offset : offset + length].astype(np.float32) / 32768

    def word(self, voice: int, word: str) -> np.ndarray:
        return self._read(*self.words[voice][word])

    def phrase(
        self, rng: np.random.Generator, voice: int, count: int
    ) -> tuple[np.ndarray, list[str]]:
        pool = [p for p in self.phrases[voice] if p[0].count(" ") + 1 == count]
        if not pool:
            pool = self.phrases[voice]
        text, offset, length = pool[int(rng.integers(len(pool)))]
        return self._read(offset, length), text.split()


class LiveSource:
    """Words and phrases of the held-out voices, spoken when asked for."""

    heldout = True

    def __init__(self) -> None:
        self.voices = heldout_voices()

    @functools.cached_property
    def pitches(self) -> list[float]:
        """Median pitch of every voice, in Hz."""
        text = "monday hello number message home now"
        return [median_pitch(synthesise(v, text)) for v in self.voices]

    def word(self, voice: int, word: str) -> np.ndarray:
        return synthesise(self.voices[voice], word)

    def phrase(
        self, rng: np.random.Generator, voice: int, count: int
    ) -> tuple[np.ndarray, list[str]]:
        words = random_words(rng, count, True)
        return synthesise(self.voices[voice], " ".join(words)), words


# -------------------------------------------------------------------------- mixing


@dataclass
class Clip:
    """One mixed clip.

    Attributes:
        audio: Mono float32 samples at 16 kHz.
        turns: ``(speaker, words)``; speakers are numbered by arrival from 0.
        spans: ``(words, start, end)`` in seconds: one word each where words were
            spoken separately, a whole phrase where it was spoken in one breath.
        activity: ``(speaker, start, end)`` in seconds of every stretch of speech.
        voices: The source's voice of every speaker.
    """

    audio: np.ndarray
    turns: list[tuple[int, list[str]]]
    spans: list[tuple[list[str], float, float]] = field(default_factory=list)
    activity: list[tuple[int, float, float]] = field(default_factory=list)
    voices: list[int] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return [word for _, words in self.turns for word in words]

    @property
    def text(self) -> str:
        """The plain transcript."""
        return " ".join(self.words)

    @property
    def tagged_text(self) -> str:
        """The transcript with a ``<spk:N>`` tag before every turn."""
        return " ".join(f"<spk:{n}> {' '.join(words)}" for n, words in self.turns)


def _stretch(samples: np.ndarray, factor: float) -> np.ndarray:
    """Plays samples ``factor`` times as fast (tempo and pitch together)."""
    if abs(factor - 1) < 1e-3:
        return samples
    positions = np.arange(0, len(samples) - 1, factor)
    return np.interp(positions, np.arange(len(samples)), samples).astype(np.float32)


def _say(
    source: Any,
    rng: np.random.Generator,
    voice: int,
    count: int,
    connected: bool,
    factor: float,
) -> list[tuple[list[str], np.ndarray, float]]:
    """Pieces of speech for ``count`` words: ``(words, samples, gap after)``."""
    if connected and count > 1:
        samples, words = source.phrase(rng, voice, count)
        return [(words, _stretch(samples, factor), 0.0)]
    low, high = ((0.0, 0.05), (0.04, 0.2), (0.2, 0.7))[
        int(rng.choice(3, p=(0.35, 0.45, 0.2)))
    ]
    pieces = []
    for word in random_words(rng, count, source.heldout):
        samples = _stretch(source.word(voice, word), factor)
        samples = samples * float(rng.uniform(0.75, 1.0))
        pieces.append(([word], samples, float(rng.uniform(low, high))))
    return pieces


def _augment(rng: np.random.Generator, audio: np.ndarray) -> np.ndarray:
    """Room, channel, bandwidth, noise and level, each only now and then."""
    if rng.random() < 0.2:  # a small room
        length = int(SAMPLE_RATE * rng.uniform(0.04, 0.2))
        tail = rng.standard_normal(length) * np.exp(-6 * np.arange(length) / length)
        response = np.concatenate([[1.0], tail * rng.uniform(0.01, 0.06)])
        audio = signal.fftconvolve(audio, response)[: len(audio)].astype(np.float32)
    if rng.random() < 0.4:  # spectral tilt of a microphone
        tilt = float(rng.uniform(-0.5, 0.5))
        audio = signal.lfilter([1.0, tilt], [1.0], audio).astype(np.float32)
    if rng.random() < 0.35:  # telephone
        narrow = soxr.resample(audio, SAMPLE_RATE, 8000, quality="MQ")
        if rng.random() < 0.5:
            b, a = signal.butter(2, 250 / 4000, "high")
            narrow = signal.lfilter(b, a, narrow).astype(np.float32)
        wide = soxr.resample(narrow, 8000, SAMPLE_RATE, quality="MQ")
        audio = np.resize(wide, len(audio)) if len(wide) != len(audio) else wide
    peak = max(float(np.abs(audio).max()), 1e-4)
    audio = audio / peak
    if rng.random() < 0.7:
        noise = rng.standard_normal(len(audio)).astype(np.float32)
        if rng.random() < 0.6:
            noise = signal.lfilter([1.0], [1.0, -float(rng.uniform(0.5, 0.97))], noise)
        noise /= max(float(np.std(noise)), 1e-6)
        audio = audio + noise * 10 ** (-float(rng.uniform(28, 65)) / 20)
    level = 10 ** (-float(rng.uniform(0, 22)) / 20)
    audio = audio / max(float(np.abs(audio).max()), 1e-4) * level
    return np.round(audio * 32767).astype(np.float32) / 32768


def mix(
    source: Any,
    rng: np.random.Generator,
    kind: str = "utterances",
    words: tuple[int, int] = (1, 8),
    seconds: tuple[float, float] = (20.0, 58.0),
    clean: bool = False,
    contrast: bool = False,
    turns: int | None = None,
) -> Clip:
    """Mixes one clip.

    Args:
        source: `CachedSource` (training) or `LiveSource` (held out).
        rng: Decides everything; the same state gives the same clip.
        kind: ``utterances`` (one speaker, ``words`` words), ``words`` (the same,
            every word spoken separately), ``speakers`` (two, sometimes three
            speakers taking turns) or ``long`` (``seconds`` of utterances with
            pauses, one or two speakers).
        words: Fewest and most words of an utterance.
        seconds: Shortest and longest duration aimed at by ``long``.
        clean: Leaves out noise and channel effects.
        contrast: The first two speakers' pitches are at least 40 % apart.
        turns: How many turns ``speakers`` take; without it 2 to 5.
    """
    voices, names = [], set()
    for number in rng.permutation(len(source.voices)):
        if contrast and len(voices) == 1:
            pair = sorted((source.pitches[voices[0]], source.pitches[number]))
            if pair[1] < 1.4 * pair[0] or not pair[0]:
                continue
        if source.voices[number].speaker not in names:
            names.add(source.voices[number].speaker)
            voices.append(int(number))
        if len(voices) == 3:
            break
    if contrast and len(voices) < 3:
        return mix(source, rng, kind, words, seconds, clean, contrast, turns)
    factors = [float(f) for f in rng.uniform(0.93, 1.08, 3)]
    gains = [10 ** (-float(g) / 20) for g in rng.uniform(0, 6, 3)]
    plan: list[tuple[int, int, float]] = []  # speaker, words, pause before
    if kind == "speakers":
        speakers = 3 if rng.random() < 0.2 else 2
        drawn = int(rng.integers(speakers, 6))
        turns = drawn if turns is None else turns
        last = -1
        for turn in range(turns):
            options = [s for s in range(speakers) if s != last]
            # everybody speaks once, in order of arrival, before turns are random
            last = turn if turn < speakers else int(rng.choice(options))
            plan.append((last, int(rng.integers(1, 5)), float(rng.uniform(0.1, 0.8))))
    elif kind == "long":
        speakers = 2 if rng.random() < 0.35 else 1
        budget, last = float(rng.uniform(*seconds)), -1
        while budget > 0:
            count, pause = int(rng.integers(2, 9)), float(rng.uniform(0.2, 2.2))
            last = (last + 1) % speakers if speakers > 1 else 0
            plan.append((last, count, pause))
            budget -= pause + 0.47 * count
    else:
        plan.append((0, int(rng.integers(words[0], words[1] + 1)), 0.0))

    parts = [np.zeros(int(SAMPLE_RATE * rng.uniform(0.05, 0.6)), np.float32)]
    position = len(parts[0])
    turns_out: list[tuple[int, list[str]]] = []
    spans, activity = [], []

    def pause_for(duration: float) -> None:
        nonlocal position
        parts.append(np.zeros(int(SAMPLE_RATE * duration), np.float32))
        position += len(parts[-1])

    for speaker, count, pause in plan:
        if turns_out:
            pause_for(pause)
        connected = kind != "words" and rng.random() < 0.55
        said: list[str] = []
        pieces = _say(source, rng, voices[speaker], count, connected, factors[speaker])
        for number, (piece_words, samples, gap) in enumerate(pieces):
            start = position / SAMPLE_RATE
            parts.append(samples * gains[speaker])
            position += len(samples)
            spans.append((piece_words, start, position / SAMPLE_RATE))
            # a listener does not hear a pause between words said in one breath
            if activity and number and start - activity[-1][2] < 0.16:
                activity[-1] = (speaker, activity[-1][1], position / SAMPLE_RATE)
            else:
                activity.append((speaker, start, position / SAMPLE_RATE))
            said += piece_words
            if number + 1 < len(pieces):
                pause_for(gap)
        if turns_out and turns_out[-1][0] == speaker:
            turns_out[-1][1].extend(said)
        else:
            turns_out.append((speaker, said))
    pause_for(float(rng.uniform(0.05, 0.6)))
    audio = np.concatenate(parts)
    if clean:
        audio = np.round(audio / np.abs(audio).max() * 0.7 * 32767) / 32768
        audio = audio.astype(np.float32)
    else:
        audio = _augment(rng, audio)
    return Clip(audio, turns_out, spans, activity, voices)


@functools.cache
def _live_source() -> LiveSource:
    return LiveSource()


def heldout_clip(number: int, kind: str = "utterances", clean: bool = False) -> Clip:
    """The held-out clip ``number`` of a kind; the same on every machine."""
    rng = np.random.default_rng([20261128, _KINDS.index(kind), number])
    source = _live_source()
    return mix(source, rng, kind, seconds=(46.0, 58.0), clean=clean, contrast=True)


def describe(clip: Clip, name: str, prompt: str) -> dict[str, Any]:
    """The entry of a clip in ``transcripts.json`` (times in seconds)."""
    entry: dict[str, Any] = {
        "file": name,
        "text": clip.tagged_text if prompt == "speakers" else clip.text,
        "prompt": prompt,
        "duration": round(len(clip.audio) / SAMPLE_RATE, 3),
        "activity": [[s, round(a, 3), round(b, 3)] for s, a, b in clip.activity],
    }
    if all(len(words) == 1 for words, _, _ in clip.spans):
        entry["words"] = [
            {"word": words[0], "start": round(a, 3), "end": round(b, 3)}
            for words, a, b in clip.spans
        ]
    return entry


def _write_heldout(task: tuple[int, str, str]) -> dict[str, Any]:
    number, kind, out = task
    clip = heldout_clip(number, kind)
    name = f"{kind}-{number:04d}.wav"
    soundfile.write(Path(out) / name, clip.audio, SAMPLE_RATE, subtype="PCM_16")
    return describe(clip, name, "speakers" if kind == "speakers" else "transcribe")


def write_heldout(
    out: Path, count: int, kind: str = "utterances", jobs: int = 2
) -> list[dict[str, Any]]:
    """Writes ``count`` held-out WAV files and ``transcripts.json`` to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs) as pool:
        tasks = [(n, kind, str(out)) for n in range(count)]
        entries = list(pool.map(_write_heldout, tasks, chunksize=4))
    (out / "transcripts.json").write_text(json.dumps(entries, indent=1) + "\n")
    return entries


# ------------------------------------------------------------- human recordings

ASTERISK_SOUNDS = Path("/usr/share/asterisk/sounds/en")
ASTERISK_TEXT = Path("/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")


def human_prompts() -> Iterator[tuple[Path, str]]:
    """Debian's English asterisk prompts that hold only words of the vocabulary.

    Yields:
        The path of an 8 kHz WAV file and its normalised transcript. Digits in the
        transcript are read as words; prompts whose text is not verbatim (notes in
        brackets) are left out.
    """
    if not ASTERISK_TEXT.exists():
        return
    lines = gzip.decompress(ASTERISK_TEXT.read_bytes()).decode("utf-8", "replace")
    seen = set()
    for line in lines.splitlines():
        name, _, text = line.partition(": ")
        path = ASTERISK_SOUNDS / f"{name.strip()}.wav"
        if name.startswith(";") or not text or re.search(r"[\[\]()<>@=]", text):
            continue
        text = re.sub(r"\d", lambda m: f" {DIGITS[int(m[0])]} ", text.lower())
        words = re.sub(r"[^a-z' ]", " ", text.replace("re-", "re")).split()
        known = words and all(w in WORDS for w in words)
        if known and path not in seen and path.exists():
            seen.add(path)
            yield path, " ".join(words)


def load_audio(path: Path | io.BytesIO) -> np.ndarray:
    """Reads any file soundfile knows as mono float32 at 16 kHz."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    samples = samples.mean(1)
    if rate != SAMPLE_RATE:
        samples = soxr.resample(samples, rate, SAMPLE_RATE)
    return np.ascontiguousarray(samples, dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    cache = commands.add_parser("cache", help="speak the training cache")
    cache.add_argument("--out", type=Path, required=True)
    cache.add_argument("--jobs", type=int, default=2)
    heldout = commands.add_parser("heldout", help="write held-out clips")
    heldout.add_argument("--out", type=Path, required=True)
    heldout.add_argument("--count", type=int, default=200)
    heldout.add_argument("--kind", choices=_KINDS, default="utterances")
    heldout.add_argument("--jobs", type=int, default=2)
    commands.add_parser("human", help="list the human prompts in the vocabulary")
    arguments = parser.parse_args()
    if arguments.command == "cache":
        build_cache(arguments.out, jobs=arguments.jobs)
    elif arguments.command == "heldout":
        entries = write_heldout(
            arguments.out, arguments.count, arguments.kind, arguments.jobs
        )
        words = sum(len(e["text"].split()) for e in entries)
        print(f"{len(entries)} clips, {words} words in {arguments.out}")
    else:
        for path, text in human_prompts():
            print(f"{path}\t{text}")


if __name__ == "__main__":
    main()
