#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measures the demo checkpoint through the reference implementation.

    .venv-reference/bin/python tools/reference/evaluate.py examples/demo/checkpoint

Decoding is greedy in float32 on the stored (bfloat16) weights, one clip at a time.
Prints one line per figure of the card.
"""

import argparse
import difflib
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import sentencepiece
import torch
from batches import Assembler
from corpus import (
    Clip,
    heldout_clip,
    human_prompts,
    load_audio,
)
from demo_tokenizer import DEFAULT_PROMPT, SPEAKER_PROMPT, render_prompt
from layout import load_reference
from mtp import MtpHead, accepted_per_step, draft_tokens
from safetensors import safe_open

DEPTHS = 4


def load_mtp(checkpoint: Path, config: Any) -> MtpHead:
    """The checkpoint's MTP head in float32."""
    head = MtpHead(config)
    state = {}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            if name.startswith("llm.mtp.") and not name.endswith("._extra_state"):
                tensor = file.get_tensor(name).float()
                short = name.removeprefix("llm.mtp.")
                for old, new in (
                    ("gate_and_up_projs", "up_proj"),
                    ("down_projs", "down_proj"),
                ):
                    if short.endswith(old):
                        short = short.removesuffix(old) + new
                        tensor = tensor.transpose(1, 2).contiguous()
                state[short] = tensor
    head.load_state_dict(state)
    return head.eval()


class Decoder:
    """The checkpoint in the reference, ready to decode and to draft."""

    def __init__(self, checkpoint: Path):
        self.model, extractor, self.tokenizer = load_reference(checkpoint)
        with safe_open(checkpoint / "model.safetensors", "pt") as file:
            proto = file.get_tensor("ctc_timestamp.tokenizer.model_proto")
        self.alignment = sentencepiece.SentencePieceProcessor(
            model_proto=bytes(proto.tolist())
        )
        self.assembler = Assembler(self.tokenizer, extractor, self.alignment)
        self.head: MtpHead | None = None

    @torch.no_grad()
    def __call__(
        self, audio: np.ndarray, prompt: str = DEFAULT_PROMPT, limit: int = 900
    ) -> dict[str, Any]:
        """Decodes one clip greedily."""
        features, mask = self.assembler.features([audio])
        frames = [int(mask.sum())]
        ids = self.assembler.prompt_ids(render_prompt(prompt), frames)
        inputs = torch.tensor([ids])
        out = self.model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            input_features=features,
            input_features_mask=mask,
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=[self.tokenizer.eos_token_id],
            pad_token_id=self.tokenizer.pad_token_id,
        )
        tokens = out[0].tolist()
        answer = [t for t in tokens[len(ids) :] if t != self.tokenizer.eos_token_id]
        return {
            "text": self.tokenizer.decode(answer, skip_special_tokens=False),
            "tokens": tokens,
            "first": len(ids),
            "features": features,
            "mask": mask,
        }

    @torch.no_grad()
    def acceptance(self, result: dict[str, Any]) -> list[tuple[int, int]]:
        """Accepted drafts and steps of a decoded clip for 1..DEPTHS drafts a step."""
        tokens, first = result["tokens"], result["first"]
        if len(tokens) - first < 2:
            return [(0, 0)] * DEPTHS
        ids = torch.tensor([tokens])
        audio = self.model.get_audio_features(result["features"], result["mask"])
        embeds = self.model.model._embed_input_ids(ids)
        places = (ids == self.model.config.audio_token_id)[..., None]
        embeds = embeds.masked_scatter(places.expand_as(embeds), audio.pooler_output)
        hidden = self.model.model.language_model(
            inputs_embeds=embeds, use_cache=False
        ).last_hidden_state
        starts = torch.arange(first - 1, len(tokens) - 2)[None]
        drafts = draft_tokens(
            self.head,
            self.model.lm_head,
            self.model.get_input_embeddings(),
            embeds,
            hidden,
            starts,
            DEPTHS,
        )
        return [
            accepted_per_step(drafts, tokens, first, count)
            for count in range(1, DEPTHS + 1)
        ]

    @torch.no_grad()
    def audio_outputs(self, audio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of the pieces (40 ms) and speaker activity (10 ms)."""
        features, mask = self.assembler.features([audio])
        output = self.model.get_audio_features(features, mask)
        logits = self.model.get_word_timestamp_logits(
            output.asr_last_hidden_state, mask
        )
        count = int(mask.sum())
        scores = logits[0, : 2 * -(-count // 8)].log_softmax(-1).numpy()
        return scores, output.speaker_logits[0, :count].sigmoid().numpy()


def align(scores: np.ndarray, ids: list[int]) -> list[int]:
    """Best CTC path: the first frame of every piece."""
    blank = scores.shape[1] - 1
    states = [blank]
    for piece in ids:
        states += [piece, blank]
    best = np.full(len(states), -np.inf)
    best[0], best[1] = scores[0, states[0]], scores[0, states[1]]
    back = np.zeros((len(scores), len(states)), np.int64)
    for frame in range(1, len(scores)):
        options = np.full((3, len(states)), -np.inf)
        options[0] = best
        options[1, 1:] = best[:-1]
        for n in range(3, len(states), 2):
            if states[n] != states[n - 2]:
                options[2, n] = best[n - 2]
        back[frame] = options.argmax(0)
        best = options.max(0) + scores[frame, states]
    state = len(states) - 1 if best[-1] > best[-2] else len(states) - 2
    onsets = [0] * len(ids)
    for frame in range(len(scores) - 1, -1, -1):
        if state % 2:
            onsets[state // 2] = frame
        state -= int(back[frame, state])
    return onsets


def start_errors(decoder: Decoder, clip: Clip) -> list[float]:
    """Absolute error in seconds of every word's aligned start."""
    scores, _ = decoder.audio_outputs(clip.audio)
    pieces = [decoder.alignment.encode(words[0]) for words, _, _ in clip.spans]
    onsets = align(scores, [p for word in pieces for p in word])
    errors, used = [], 0
    for (_, start, _), word in zip(clip.spans, pieces, strict=True):
        errors.append(abs(onsets[used] * 0.04 - start))
        used += len(word)
    return errors


def tag_words(text: str) -> list[tuple[str, str]]:
    """``(tag, word)`` of a tagged transcript."""
    tag, out = "", []
    for word in text.replace("<spk:", " <spk:").replace(">", "> ").split():
        if word.startswith("<spk:"):
            tag = word
        else:
            out.append((tag, word))
    return out


def same_tags(wanted: str, heard: str) -> tuple[int, int]:
    """Words that were heard, with the right tag, of how many heard at all.

    The two transcripts are aligned on their words alone.
    """
    first, second = tag_words(wanted), tag_words(heard)
    matcher = difflib.SequenceMatcher(
        None, [w for _, w in first], [w for _, w in second], autojunk=False
    )
    right = total = 0
    for a, b, size in matcher.get_matching_blocks():
        total += size
        right += sum(
            x[0] == y[0]
            for x, y in zip(first[a : a + size], second[b : b + size], strict=True)
        )
    return right, total


def _clips(kind: str, count: int) -> list[Clip]:
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(heldout_clip, range(count), [kind] * count, chunksize=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--speakers", type=int, default=60)
    parser.add_argument("--long", type=int, default=6)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--mtp", action="store_true", help="measure drafts too")
    parser.add_argument("--errors", action="store_true", help="print every mistake")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder = Decoder(arguments.checkpoint)
    if arguments.mtp:
        decoder.head = load_mtp(
            arguments.checkpoint, decoder.model.config.get_text_config()
        )
    figures: dict[str, Any] = {}

    def measure(name: str, pairs: list[tuple[str, str]]) -> None:
        wanted, heard = zip(*pairs, strict=True)
        if arguments.errors:
            for a, b in pairs:
                if a != b:
                    print(f"  {name}: {a!r} heard as {b!r}")
        figures[name] = {
            "clips": len(pairs),
            "words": sum(len(a.split()) for a in wanted),
            "word error rate %": round(100 * jiwer.wer(list(wanted), list(heard)), 2),
            "exact clips %": round(100 * np.mean([a == b for a, b in pairs]), 1),
        }
        print(name, json.dumps(figures[name]), flush=True)

    pairs, steps = [], np.zeros((DEPTHS, 2))
    for clip in _clips("utterances", arguments.count):
        result = decoder(clip.audio)
        pairs.append((clip.text, result["text"]))
        if decoder.head is not None:
            steps += np.array(decoder.acceptance(result))
    if pairs:
        measure("held-out utterances", pairs)
    if pairs and decoder.head is not None:
        for count in range(DEPTHS):
            mean = steps[count, 0] / steps[count, 1]
            print(f"accepted drafts per step, N={count + 1}: {mean:.2f}", flush=True)
    if arguments.speakers:
        pairs, plain, right, total = [], [], 0, 0
        for clip in _clips("speakers", arguments.speakers):
            text = decoder(clip.audio, SPEAKER_PROMPT)["text"]
            pairs.append((clip.tagged_text, text))
            plain.append((clip.text, decoder(clip.audio)["text"]))
            found, count = same_tags(clip.tagged_text, text)
            right, total = right + found, total + count
        measure("two and three speakers, tagged", pairs)
        print(f"right tag on {100 * right / total:.1f} % of {total} words heard")
        measure("two and three speakers, plain prompt", plain)
    if arguments.long:
        clips = _clips("long", arguments.long)
        measure("46 to 60 s clips", [(c.text, decoder(c.audio)["text"]) for c in clips])
    if arguments.words:
        clips = _clips("words", arguments.words)
        errors = [e for clip in clips for e in start_errors(decoder, clip)]
        mean, middle = 1000 * np.mean(errors), 1000 * np.median(errors)
        print(
            f"word starts over {len(errors)} words: mean absolute error "
            f"{mean:.0f} ms, median {middle:.0f} ms"
        )
    human = [(text, decoder(load_audio(p))["text"]) for p, text in human_prompts()]
    if human:
        measure("human prompts", human)


if __name__ == "__main__":
    main()
