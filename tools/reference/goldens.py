#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write the golden file of a checkpoint with the reference implementation.

    python tools/reference/goldens.py --checkpoint tests/data/odd_checkpoint \
        --out tests/data/goldens/odd.safetensors
    python tools/reference/goldens.py --checkpoint examples/demo/checkpoint \
        --speech --out tests/data/goldens/demo.safetensors

Everything is float32 and one clip at a time. Long quantities keep only some rows;
the speaker activity is kept whole. Cases that rounding could decide differently
(a speaker probability at the threshold, two tokens with nearly the same logit) are
left out, so a test can ask for equality. `README.md` lists the contents.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layout
import numpy as np
import torch
import transformers
from demo_tokenizer import DEFAULT_PROMPT, SPEAKER_PROMPT
from transformers.models.nemotron3_diarization.modeling_nemotron3_diarization import (
    Nemotron3DiarizationSpeakerCache,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.goldens import (  # noqa: E402
    SAMPLES,
    build_clip,
    checksum,
    heldout_index,
    read_pcm,
)

# A greedy step is clear when its two best logits differ by more than this many times
# the difference that rounding makes in the reference itself, and by MIN_MARGIN.
ROUNDING_FACTOR = 20
MIN_MARGIN = 2e-3
# Distance of a speaker probability from the activity threshold.
MIN_ACTIVITY_MARGIN = 1e-4


@dataclass
class TowerOutput:
    """What the reference's audio model gives for one clip, valid frames only.

    Attributes:
        logmel: (log-mel frames, mels).
        asr_states: (encoder frames, hidden), before ``asr_norm``.
        speaker_probs_10ms: (log-mel frames, speakers).
        speaker_probs: (encoder frames, speakers).
        embeddings: (encoder frames, decoder hidden), after ``proj``.
    """

    logmel: torch.Tensor
    asr_states: torch.Tensor
    speaker_probs_10ms: torch.Tensor
    speaker_probs: torch.Tensor
    embeddings: torch.Tensor


class Reference:
    """The reference model of a checkpoint, run on one clip at a time."""

    def __init__(self, checkpoint: Path) -> None:
        self.model, self.extractor, self.tokenizer = layout.load_reference(checkpoint)
        config = self.model.config
        self.audio_token = config.audio_token_id
        self.factor = config.audio_config.subsampling_factor
        self.threshold = config.audio_config.speaker_activity_threshold
        self.diarizer = config.audio_config.diarization_config
        eos = json.loads((checkpoint / "generation_config.json").read_text("utf-8"))
        self.eos = set(eos["eos_token_id"])
        self.compressions = 0  # of speaker caches, so far
        self._count_compressions()
        self._exact = copy.deepcopy(
            self.model.model.audio_tower.diarization_model
        ).double()

    def _count_compressions(self) -> None:
        compress = Nemotron3DiarizationSpeakerCache._compress

        def counted(*args: Any) -> Any:
            self.compressions += 1
            return compress(*args)

        Nemotron3DiarizationSpeakerCache._compress = counted

    def samples(self, frames: float) -> int:
        """Samples of a clip of so many encoder frames."""
        return round(frames * self.factor) * self.extractor.hop_length

    def features(self, audio: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return layout.clip_features(self.extractor, audio, self.factor)

    def tower(self, audio: np.ndarray) -> TowerOutput:
        features, mask = self.features(audio)
        output = self.model.get_audio_features(features, mask)
        frames = int(mask.sum())
        tokens = len(output.pooler_output)
        probs = output.speaker_logits[0].sigmoid()
        return TowerOutput(
            logmel=features[0, :frames],
            asr_states=output.asr_last_hidden_state[0, :tokens],
            speaker_probs_10ms=probs[:frames],
            speaker_probs=probs.unflatten(0, (-1, self.factor)).mean(1)[:tokens],
            embeddings=output.pooler_output,
        )

    def is_decided(self, audio: np.ndarray, tower: TowerOutput) -> bool:
        """Whether no rounding changes who is active, through all compressions."""
        margin = (tower.speaker_probs - self.threshold).abs().min()
        if margin < MIN_ACTIVITY_MARGIN:
            return False
        features, mask = self.features(audio)
        generator = torch.Generator().manual_seed(0)
        for rate in (0.0, 1e-6, 1e-6):
            noise = torch.randn(features.shape, generator=generator, dtype=torch.double)
            noisy = features.double() * (1 + rate * noise)
            logits = self._exact(noisy, attention_mask=mask).logits[0]
            probs = logits.sigmoid().unflatten(0, (-1, self.factor)).mean(1)
            probs = probs[: len(tower.speaker_probs)]
            if (probs - tower.speaker_probs).abs().max() > MIN_ACTIVITY_MARGIN / 2:
                return False
        return True

    def ctc_logits(self, audio: np.ndarray) -> torch.Tensor:
        features, mask = self.features(audio)
        states = self.model.get_audio_features(features, mask).asr_last_hidden_state
        logits = self.model.get_word_timestamp_logits(states, mask)[0]
        factor = self.model.config.word_timestamp_config.upsampling_factor
        return logits[: -(-int(mask.sum()) // self.factor) * factor]

    def prompt_ids(self, messages: list[dict[str, Any]], thinking: bool) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def embed_prompt(
        self, ids: Sequence[int], clips: Sequence[np.ndarray]
    ) -> torch.Tensor:
        """Embed a prompt: (1, tokens, hidden), a clip at each placeholder in order.

        Raises:
            ValueError: There are not as many placeholders as clips.
        """
        table = self.model.get_input_embeddings()
        remaining = iter(clips)
        parts, run = [], []
        for token in ids:
            if token != self.audio_token:
                run.append(token)
                continue
            parts += [table(torch.tensor(run, dtype=torch.long))] if run else []
            run = []
            clip = next(remaining, None)
            if clip is None:
                raise ValueError("more placeholders than clips")
            parts.append(self.tower(clip).embeddings)
        if next(remaining, None) is not None:
            raise ValueError("more clips than placeholders")
        parts += [table(torch.tensor(run, dtype=torch.long))] if run else []
        return torch.cat(parts)[None]

    def logits(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Logits of every position of an embedded prompt, (tokens, vocabulary)."""
        return self.model(inputs_embeds=embeddings, use_cache=False).logits[0]

    def greedy(self, embeddings: torch.Tensor, limit: int) -> "Greedy":
        """Decode greedily with the cache, then again without it for the rounding."""
        output = self.model(inputs_embeds=embeddings, use_cache=True, logits_to_keep=1)
        steps = [output.logits[0, -1]]
        ids = [int(steps[-1].argmax())]
        while len(ids) < limit and ids[-1] not in self.eos:
            output = self.model(
                input_ids=torch.tensor([ids[-1:]]), cache=output.cache, use_cache=True
            )
            steps.append(output.logits[0, -1])
            ids.append(int(steps[-1].argmax()))
        table = self.model.get_input_embeddings()
        answer = table(torch.tensor([ids[:-1]], dtype=torch.long))
        whole = self.logits(torch.cat([embeddings, answer], dim=1))[-len(ids) :]
        best = torch.stack(steps).topk(2).values
        return Greedy(
            ids=ids,
            margins=best[:, 0] - best[:, 1],
            rounding=float((whole - torch.stack(steps)).abs().max()),
        )


@dataclass
class Greedy:
    """A greedy answer.

    Attributes:
        ids: The tokens, the turn end included.
        margins: (tokens,) distance of the two best logits at each.
        rounding: Largest difference between logits computed with and without cache.
    """

    ids: list[int]
    margins: torch.Tensor
    rounding: float

    @property
    def is_decided(self) -> bool:
        limit = max(ROUNDING_FACTOR * self.rounding, MIN_MARGIN)
        return bool(self.margins.min() > limit)


def _spread(count: int, wanted: int) -> list[int]:
    """Numbers below ``count``, evenly spread, with the first and the last."""
    return [i * (count - 1) // (wanted - 1) for i in range(wanted)]


class Recorder:
    """Collects tensors and their description for one golden file."""

    def __init__(self, reference: Reference, rows: int) -> None:
        self.reference = reference
        self.rows = rows
        self.tensors: dict[str, torch.Tensor] = {}
        self.info: dict[str, Any] = {"clips": {}, "texts": {}, "prompts": {}}

    def add_clip(self, name: str, recipe: dict[str, Any]) -> np.ndarray:
        """Describe a clip and return its audio."""
        audio = build_clip(recipe)
        samples = np.round(audio * 32768).astype(np.int16)
        self.info["clips"][name] = recipe | {"sha256": checksum(samples)}
        return audio

    def add_tower(self, name: str, audio: np.ndarray, tower: TowerOutput) -> None:
        chunk = self.reference.diarizer.chunk_length
        for what, values in vars(tower).items():
            scale = self.reference.factor if len(values) == len(tower.logmel) else 1
            self._add_rows(f"{name}.{what}", values, chunk * scale)
        active = tower.speaker_probs > self.reference.threshold
        self.tensors[f"{name}.activity"] = torch.from_numpy(
            np.packbits(active.numpy().reshape(-1))
        )
        self.tensors[f"{name}.activity.shape"] = torch.tensor(
            active.shape, dtype=torch.int32
        )

    def add_ctc(self, name: str, audio: np.ndarray) -> None:
        factor = self.reference.model.config.word_timestamp_config.upsampling_factor
        chunk = self.reference.diarizer.chunk_length * factor
        self._add_rows(f"{name}.ctc_logits", self.reference.ctc_logits(audio), chunk)

    def _add_rows(self, name: str, values: torch.Tensor, chunk: int) -> None:
        """Keep a short quantity whole, of a long one evenly spread rows and seams."""
        count = len(values)
        rows = list(range(count))
        if count > self.rows:
            seams = [s + d for s in range(chunk, count, chunk) for d in (-1, 0)]
            rows = sorted({*_spread(count, self.rows), *seams})
            self.tensors[name + ".rows"] = torch.tensor(rows, dtype=torch.int32)
        self.tensors[name] = values[rows].float().contiguous()

    def add_text(
        self, name: str, messages: list[dict[str, Any]], thinking: bool = False
    ) -> None:
        """Describe a prompt: its messages and its tokens, placeholders unexpanded."""
        self.info["texts"][name] = {
            "messages": messages,
            "thinking": thinking,
            "ids": self.reference.prompt_ids(messages, thinking),
        }

    def add_prompt(
        self, name: str, text: str, clips: dict[str, np.ndarray], greedy: int
    ) -> None:
        """Keep prompt logits: the last rows and some others."""
        ids = self.info["texts"][text]["ids"]
        embeddings = self.reference.embed_prompt(ids, list(clips.values()))
        logits = self.reference.logits(embeddings)
        rows = sorted({*_spread(len(logits), 8), *range(len(logits))[-3:]})
        self.tensors[f"prompt.{name}.logits"] = logits[rows].contiguous()
        self.tensors[f"prompt.{name}.rows"] = torch.tensor(rows, dtype=torch.int32)
        answer = self.reference.greedy(embeddings, greedy)
        self.info["prompts"][name] = {
            "text": text,
            "clips": list(clips),
            "tokens": len(logits),
            "greedy": answer.ids,
            "decided": answer.is_decided,
        }


def tower_lengths(reference: Reference) -> dict[str, int]:
    """Clip lengths in samples, by name: around hops, groups and chunks."""
    chunk, hop = reference.diarizer.chunk_length, reference.extractor.hop_length
    group = reference.factor * hop
    return {
        "one_sample": 1,
        "under_one_hop": hop - 1,
        "one_hop": hop,
        "two_hops": 2 * hop + hop // 2,
        "one_frame": reference.samples(1),
        "one_frame_and_a_hop": group + hop,
        "eight_frames": reference.samples(8),
        "chunk_less_one": reference.samples(chunk - 1),
        "chunk_less_a_hop": reference.samples(chunk) - hop,
        "chunk": reference.samples(chunk),
        "chunk_and_a_hop": reference.samples(chunk) + hop,
        "chunk_and_one": reference.samples(chunk + 1),
        "chunks_3_4": reference.samples(3.4 * chunk) - hop // 2,
    }


def messages(text: str, clips: int) -> list[dict[str, Any]]:
    """One user turn: the text, then the clips."""
    audio = {"type": "audio"}
    return [
        {"role": "user", "content": [{"type": "text", "text": text}, *[audio] * clips]}
    ]


def add_texts(recorder: Recorder) -> None:
    """Describe the prompts that the cases use."""
    recorder.add_text("default", messages(DEFAULT_PROMPT, 1))
    recorder.add_text("speakers", messages(SPEAKER_PROMPT, 1))
    recorder.add_text("thinking", messages("Transcribe the audio.", 1), thinking=True)
    recorder.add_text("two_clips", messages(DEFAULT_PROMPT, 2))
    recorder.add_text("three_clips", messages("Transcribe the audio.", 3))
    recorder.add_text("text_only", messages("Say hello.", 0))
    recorder.add_text(
        "conversation",
        [
            {"role": "system", "content": "Be brief."},
            *messages("Transcribe the audio.", 1),
            {"role": "assistant", "content": "seven"},
            *messages("And this?", 1),
        ],
    )


def long_speech(samples: int, first: int, gap: int) -> dict[str, Any]:
    """Recipe of held-out clips one after the other, for a long clip."""
    index = heldout_index()
    order = [(first + 7 * step) % len(index) for step in range(len(index))]
    return {"kind": "heldout", "clips": order, "gap": gap, "samples": samples}


def record_towers(recorder: Recorder, speech: bool, long_chunks: int) -> dict:
    """Record the audio model around every length; return the clips by name."""
    reference = recorder.reference
    chunk = reference.diarizer.chunk_length
    lengths = tower_lengths(reference) | {
        "long": reference.samples(long_chunks * chunk)
    }
    clips = {}
    for number, (name, samples) in enumerate(lengths.items()):
        for attempt in range(40):
            if speech and samples > reference.samples(1):
                recipe = long_speech(
                    samples, 31 * number + attempt, 4000 + 100 * attempt
                )
            else:
                seed = 1000 + 50 * number + attempt
                recipe = {"kind": "synthetic", "seed": seed, "samples": samples}
            audio = build_clip(recipe)
            before = reference.compressions
            tower = reference.tower(audio)
            recipe["compressions"] = reference.compressions - before
            if reference.is_decided(audio, tower):
                break
        else:
            raise RuntimeError(f"no clip for {name} whose speakers are decided")
        clips[name] = recorder.add_clip(name, recipe)
        recorder.add_tower(name, audio, tower)
        report(
            f"{name}: {samples} samples, {recipe['compressions']} compressions, "
            f"attempt {attempt + 1}"
        )
    for name in ("one_sample", "eight_frames", "chunk_and_one", "chunks_3_4"):
        recorder.add_ctc(name, clips[name])
    return clips


def record_prompts(recorder: Recorder, clips: dict, limit: int) -> None:
    """Record prompt logits with no, one and several clips."""
    cases = {
        "default": ("default", ["eight_frames"]),
        "speakers": ("speakers", ["chunks_3_4"]),
        "thinking": ("thinking", ["chunk"]),
        "one_token_clip": ("default", ["one_sample"]),
        "two_clips": ("two_clips", ["eight_frames", "chunk_and_one"]),
        "three_clips": ("three_clips", ["chunk_less_one", "one_sample", "chunk"]),
        "conversation": ("conversation", ["eight_frames", "chunk_less_one"]),
        "text_only": ("text_only", []),
    }
    for name, (text, names) in cases.items():
        recorder.add_prompt(name, text, {n: clips[n] for n in names}, limit)
    report(f"{len(cases)} prompts")


def sample_recipes() -> Iterator[tuple[str, list]]:
    """Yield (text name, recipes) of the demo samples that need no resampling."""
    for entry in json.loads((SAMPLES / "transcripts.json").read_text("utf-8")):
        try:
            samples = len(read_pcm(SAMPLES / entry["file"]))
        except ValueError:
            continue
        text = "speakers" if entry["prompt"] == "speakers" else "default"
        yield text, [{"kind": "sample", "file": entry["file"], "samples": samples}]


def greedy_recipes(reference: Reference, speech: bool) -> Iterator[tuple[str, list]]:
    """Yield (text name, recipes) of greedy cases without end, or while speech lasts."""
    if speech:
        yield from sample_recipes()
        for number, entry in enumerate(heldout_index()):
            recipe = {
                "kind": "heldout",
                "clips": [number],
                "gap": 0,
                "samples": entry["samples"],
            }
            yield entry["prompt"], [recipe]
        return
    texts = ("default", "default", "speakers", "thinking", "two_clips", "default")
    seed = 5000
    while True:
        text = texts[seed % len(texts)]
        recipes = []
        for _ in range(2 if text == "two_clips" else 1):
            # Up to 3.6 s, mostly under 2 s; every remainder of a hop occurs.
            span = 400 + seed * 7919 % 28_000 + (seed % 5 == 0) * 29_000
            recipes.append({"kind": "synthetic", "seed": seed, "samples": span})
            seed += 1
        yield text, recipes


def record_greedy(recorder: Recorder, speech: bool, wanted: int, limit: int) -> None:
    """Record greedy answers of clips that rounding does not decide."""
    reference = recorder.reference
    cases, answers, tried = [], [], 0
    for text, recipes in greedy_recipes(reference, speech):
        tried += 1
        audios = [build_clip(recipe) for recipe in recipes]
        if not all(reference.is_decided(a, reference.tower(a)) for a in audios):
            continue
        ids = recorder.info["texts"][text]["ids"]
        answer = reference.greedy(reference.embed_prompt(ids, audios), limit)
        if not answer.is_decided:
            continue
        names = []
        for recipe in recipes:
            names.append(f"greedy_{len(answers)}_{len(names)}")
            recorder.add_clip(names[-1], recipe)
        cases.append({"text": text, "clips": names})
        answers.append(answer)
        if len(answers) == wanted:
            break
    ids = torch.full((len(answers), limit), -1, dtype=torch.int32)
    margins = torch.zeros(len(answers), limit)
    for row, answer in enumerate(answers):
        ids[row, : len(answer.ids)] = torch.tensor(answer.ids, dtype=torch.int32)
        margins[row, : len(answer.ids)] = answer.margins
    recorder.tensors |= {"greedy.ids": ids, "greedy.margins": margins}
    recorder.info["greedy"] = {
        "cases": cases,
        "limit": limit,
        "tried": tried,
        "rounding": max(answer.rounding for answer in answers),
        "min_margin": min(float(answer.margins.min()) for answer in answers),
    }
    report(f"{len(answers)} of {tried} greedy cases kept")


_START = time.monotonic()


def report(line: str) -> None:
    print(f"[{time.monotonic() - _START:5.0f} s] {line}", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--speech",
        action="store_true",
        help="use the held-out speech of tests/data/heldout, not synthetic signals",
    )
    parser.add_argument("--greedy", type=int, default=112, help="greedy cases to keep")
    parser.add_argument("--limit", type=int, default=48, help="tokens of an answer")
    parser.add_argument(
        "--rows", type=int, default=40, help="rows to keep of a long quantity"
    )
    parser.add_argument("--long-chunks", type=int, default=24, help="length of `long`")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the models are small, and the order of sums is fixed
    reference = Reference(options.checkpoint)
    recorder = Recorder(reference, options.rows)
    add_texts(recorder)
    clips = record_towers(recorder, options.speech, options.long_chunks)
    record_prompts(recorder, clips, options.limit)
    record_greedy(recorder, options.speech, options.greedy, options.limit)
    recorder.info["checkpoint"] = {
        "sha256": layout.file_sha256(options.checkpoint / "model.safetensors"),
    }
    recorder.info["versions"] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    layout.write_safetensors(
        options.out,
        recorder.tensors,
        {"goldens": json.dumps(recorder.info, separators=(",", ":"))},
    )
    report(f"{options.out}: {options.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
