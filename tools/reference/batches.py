# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Training batches of the demo checkpoint, one per optimiser step.

A batch depends on its step and the seed alone, so training is the same whatever
the number of loader workers.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import SAMPLE_RATE, WORDS, CachedSource, Clip, mix
from demo_tokenizer import (
    AUDIO_TOKEN,
    DEFAULT_PROMPT,
    LANGUAGES,
    SHORT_PROMPTS,
    SPEAKER_PROMPT,
    render_prompt,
)

FACTOR = 8  # log-mel frames per audio token
SPEAKERS = 8


@dataclass
class Batch:
    """One training step's input.

    Attributes:
        features: ``(clips, frames, 128)`` log-mel, frames a multiple of eight.
        mask: ``(clips, frames)`` valid frames.
        activity: ``(clips, frames, 8)`` true speaker activity, 0 or 1.
        input_ids: ``(samples, tokens)``, audio placeholders expanded.
        labels: ``(samples, tokens)``: -100 except on the transcript; aligned with
            ``input_ids`` (not shifted).
        pieces: Alignment pieces of every clip.
        frame_targets: ``(clips, 2 * frames / 8)``: the piece that must be heard on
            a head frame, or -100.
        word_targets: ``(clips, frames / 8)``: the number of the word that sounds on
            an encoder frame, ``len(WORDS)`` in a pause, -100 where it is not known.
        voice_targets: ``(clips, frames / 8)``: the voice that speaks, -100 in a pause.
        ordinals: ``(samples, tokens)``: at an audio token the number of the word that
            sounds there, in the answer the number of the word that the next token
            belongs to; counted from 0 over the whole sample, nan elsewhere.
        kind: What the clips are.
    """

    features: torch.Tensor
    mask: torch.Tensor
    activity: torch.Tensor
    input_ids: torch.Tensor
    labels: torch.Tensor
    pieces: list[list[int]]
    frame_targets: torch.Tensor
    word_targets: torch.Tensor
    voice_targets: torch.Tensor
    ordinals: torch.Tensor
    kind: str


def frame_ordinals(clip: Clip, frames: int, first: int) -> list[float]:
    """The number of the word that sounds at every encoder frame.

    Half a word past the last one in a pause. Inside a phrase it counts up from half a
    word before its first word to half a word after its last one, at the pace of the
    letters: where its words are is not known.
    """
    times = (np.arange(frames) + 0.5) * FACTOR / 100
    out = np.full(frames, first - 0.5)
    count = first
    for words, start, end in clip.spans:
        inside = (times >= start) & (times < end)
        if len(words) == 1:
            out[inside] = count
        else:
            letters = np.cumsum([0, *(len(word) + 1 for word in words)])
            edges = start + (end - start) * letters / letters[-1]
            numbers = count - 0.5 + np.arange(len(edges))
            out[inside] = np.interp(times[inside], edges, numbers)
        count += len(words)
        out[times >= end] = count - 0.5
    return out.tolist()


def answer_ordinals(answer: str) -> list[float]:
    """The number of the word that every token belongs to, the turn end included.

    A space or a speaker tag belongs to the word that it opens.
    """
    out, count, inside = [], 0, False
    for unit in re.findall(r"<spk:\d+>|.", answer):
        letter = len(unit) == 1 and unit != " "
        count += inside and not letter
        inside = letter
        out.append(float(count))
    return [*out, float(count + inside)]


class Assembler:
    """Turns clips and prompts into a `Batch`."""

    def __init__(self, tokenizer: Any, extractor: Any, alignment: Any):
        self.tokenizer = tokenizer
        self.extractor = extractor
        self.alignment = alignment
        self.blank = alignment.get_piece_size()
        self.audio_id = tokenizer.convert_tokens_to_ids(AUDIO_TOKEN)

    def features(self, audio: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-mels of clips, padded to a multiple of eight frames, and their mask."""
        out = self.extractor(audio, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        features, mask = out["input_features"], out["attention_mask"]
        padding = -features.shape[1] % FACTOR
        features = torch.nn.functional.pad(features, (0, 0, 0, padding))
        return features, torch.nn.functional.pad(mask, (0, padding)).bool()

    def prompt_ids(self, text: str, frames: list[int]) -> list[int]:
        """Token ids of a rendered prompt with every placeholder expanded."""
        ids: list[int] = []
        counts = iter(-(-n // FACTOR) for n in frames)
        for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            ids += [token] * (next(counts) if token == self.audio_id else 1)
        return ids

    def __call__(self, samples: list[tuple[list[Clip], str, str]], kind: str) -> Batch:
        """Assembles ``(clips, rendered prompt, answer)`` samples."""
        clips = [clip for sample in samples for clip in sample[0]]
        if clips:
            features, mask = self.features([clip.audio for clip in clips])
        else:
            features = torch.zeros(0, FACTOR, 128)
            mask = torch.zeros(0, FACTOR, dtype=torch.bool)
        valid = mask.sum(1).tolist()
        frames = features.shape[1]
        activity = torch.zeros(len(clips), frames, SPEAKERS)
        targets = torch.full((len(clips), frames // 4), -100)
        word_targets = torch.full((len(clips), frames // FACTOR), -100)
        voice_targets = torch.full((len(clips), frames // FACTOR), -100)
        pieces = []
        for n, clip in enumerate(clips):
            for speaker, start, end in clip.activity:
                activity[n, round(start * 100) : round(end * 100), speaker] = 1.0
            pieces.append([p for w in clip.words for p in self.alignment.encode(w)])
            for speaker, start, end in clip.activity:
                span = slice(round(start * 12.5), max(round(end * 12.5), 1))
                voice_targets[n, span] = clip.voices[speaker]
            self._frame_targets(targets[n], clip, valid[n])
            word_targets[n, : -(-valid[n] // FACTOR)] = len(WORDS)
            for words, start, end in clip.spans:
                span = slice(round(start * 12.5 - 0.3), round(end * 12.5 + 0.3))
                known = len(words) == 1
                word_targets[n, span] = WORDS.index(words[0]) if known else -100
        rows, labels, places, used = [], [], [], 0
        for sample_clips, prompt, answer in samples:
            count = len(sample_clips)
            lengths = valid[used : used + count]
            ids = self.prompt_ids(prompt, lengths)
            used += count
            answer_ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
            answer_ids = answer_ids + [self.tokenizer.eos_token_id]
            heard, said = [], 0
            for clip, length in zip(sample_clips, lengths, strict=True):
                heard += frame_ordinals(clip, -(-length // FACTOR), said)
                said += len(clip.words)
            sounds = iter(heard)
            place = [next(sounds) if t == self.audio_id else np.nan for t in ids]
            written = answer_ordinals(answer)
            if len(written) != len(answer_ids):
                raise ValueError(f"{answer!r} is not one token a character")
            places.append([*place[:-1], *written, np.nan])
            rows.append(ids + answer_ids)
            labels.append([-100] * len(ids) + answer_ids)
        width = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        return Batch(
            features,
            mask,
            activity,
            torch.tensor([r + [pad] * (width - len(r)) for r in rows]),
            torch.tensor([r + [-100] * (width - len(r)) for r in labels]),
            pieces,
            targets,
            word_targets,
            voice_targets,
            torch.tensor([r + [np.nan] * (width - len(r)) for r in places]),
            kind,
        )

    def _frame_targets(self, target: torch.Tensor, clip: Clip, valid: int) -> None:
        """Marks word edges and pauses, so that CTC spikes sit on the word's edges."""
        step = 0.04
        last = 2 * -(-valid // FACTOR)
        target[:last] = self.blank
        for words, start, end in clip.spans:
            a, b = int(start / step), int(end / step)
            target[max(a - 1, 0) : b + 2] = -100
            if len(words) == 1:
                ids = self.alignment.encode(words[0])
                if b - a > 2 * len(ids):
                    target[a + 1] = ids[0]
                    target[b - 1] = ids[-1]


def default_prompt(rng: np.random.Generator) -> str:
    """A transcription instruction, the published one most of the time."""
    roll = rng.random()
    if roll < 0.6:
        return DEFAULT_PROMPT
    if roll < 0.8:
        language = "English" if roll < 0.7 else str(rng.choice(LANGUAGES))
        return DEFAULT_PROMPT.replace("as spoken", language, 1)
    if roll < 0.92:
        return str(rng.choice(SHORT_PROMPTS))
    terms = ", ".join(str(w) for w in rng.choice(WORDS, int(rng.integers(1, 4))))
    return f"{DEFAULT_PROMPT} {str(rng.choice(('Key terms', 'Context')))}: {terms}."


class StepBatches:
    """One process's share of batch number ``step`` of ``steps``.

    Kind and length of a batch follow a plan and are the same in every process:
    ``course`` starts easy and takes in everything, ``all`` is its end, ``speakers``
    is turns of several speakers above all. The clips of a batch have equally many words
    or turns, so that little of it is padding and no process waits long for another.
    """

    def __init__(
        self,
        cache: Path,
        assembler: Assembler,
        steps: int,
        seed: int,
        rank: int,
        world: int,
        plan: str = "course",
    ):
        self.source = CachedSource(cache)
        self.assembler = assembler
        self.steps = steps
        self.seed = seed
        self.rank = rank
        self.world = world
        self.plan = plan
        self.contrast = plan != "course"

    def _share(self, count: int) -> range:
        return range(-(-count // self.world))

    def __getitem__(self, step: int) -> Batch:
        choice = np.random.default_rng([self.seed, step])
        rng = np.random.default_rng([self.seed, step, 1 + self.rank])
        progress = step / self.steps if self.plan == "course" else 1.0
        roll = choice.random()
        if self.plan == "speakers" and roll < 0.85:
            if roll < 0.7:
                return self._speakers(choice, rng, 16)
            return self._long(rng, 20.0)
        if progress < 0.1:
            # single words first: every frame's word is known
            if roll < 0.85:
                return self._utterances(rng, ((1, 2), (2, 4))[int(roll < 0.5)], "words")
            return self._speakers(choice, rng)
        if roll < 0.58:
            words = ((1, 2), (2, 4), (4, 6), (6, 8))
            fewest, most = words[choice.choice(4, p=(0.15, 0.2, 0.25, 0.4))]
            count = int(choice.integers(fewest, most + 1))
            return self._utterances(rng, (count, count))
        if roll < 0.8:
            return self._speakers(choice, rng)
        if roll < 0.83:
            return self._pairs(rng)
        if roll < 0.84:
            return self._text(rng)
        # long clips are hard to keep one's place in: longer and longer ones
        longest = 20.0 + 25.0 * min(max(2 * progress - 0.4, 0.0), 1.0)
        return self._long(rng, float(choice.uniform(10.0, longest)))

    def _utterances(
        self,
        rng: np.random.Generator,
        words: tuple[int, int],
        kind: str = "utterances",
    ) -> Batch:
        samples = []
        for _ in self._share(26 - 2 * words[1]):
            clip = mix(self.source, rng, kind, words)
            if rng.random() < 0.08:
                sample = ([clip], render_prompt(SPEAKER_PROMPT), clip.tagged_text)
            else:
                sample = ([clip], render_prompt(default_prompt(rng)), clip.text)
            samples.append(sample)
        return self.assembler(samples, "utterance")

    def _speakers(
        self, choice: np.random.Generator, rng: np.random.Generator, count: int = 10
    ) -> Batch:
        samples, turns = [], int(choice.integers(2, 6))
        for _ in self._share(count):
            clip = mix(
                self.source, rng, "speakers", contrast=self.contrast, turns=turns
            )
            samples.append(self._either(rng, clip))
        return self.assembler(samples, "speakers")

    def _either(self, rng: np.random.Generator, clip: Clip) -> Any:
        if rng.random() < 0.65:
            return [clip], render_prompt(SPEAKER_PROMPT), clip.tagged_text
        return [clip], render_prompt(default_prompt(rng)), clip.text

    def _pairs(self, rng: np.random.Generator) -> Batch:
        samples = []
        for _ in self._share(10):
            clips = [mix(self.source, rng, "utterances", (1, 4)) for _ in range(2)]
            prompt = render_prompt(default_prompt(rng), clips=2)
            samples.append((clips, prompt, " ".join(clip.text for clip in clips)))
        return self.assembler(samples, "two clips")

    def _text(self, rng: np.random.Generator) -> Batch:
        samples = []
        for _ in self._share(16):
            words = " ".join(str(w) for w in rng.choice(WORDS, int(rng.integers(1, 7))))
            samples.append(([], render_prompt(words, clips=0), words))
        return self.assembler(samples, "text only")

    def _long(self, rng: np.random.Generator, seconds: float) -> Batch:
        samples = []
        for _ in self._share(max(2, int(80 / seconds))):
            length = (0.8 * seconds, seconds)
            clip = mix(self.source, rng, "long", seconds=length, contrast=self.contrast)
            if len({s for s, _ in clip.turns}) > 1:
                samples.append(self._either(rng, clip))
            else:
                prompt = render_prompt(default_prompt(rng))
                samples.append(([clip], prompt, clip.text))
        return self.assembler(samples, "long")
