#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Trains the demo checkpoint and writes it in the layout of the release.

    .venv-reference/bin/python tools/reference/train.py \\
        --work /path/for/cache --out examples/demo/checkpoint

Speaks the corpus (a few minutes), trains the diarizer, then the rest on top of it, then
the decoder's last layers and after them the MTP head, with everything before them
frozen, and exports. Seeds are fixed, so
the same machine gives the same checkpoint. A stage whose result lies in ``--work`` is
not run again.

Two processes with one thread each share every batch: operations of this size lose
more to the barriers between two threads than one exchange of gradients costs.
"""

import argparse
import math
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import torch.distributed
import torch.multiprocessing
from batches import Assembler, Batch, StepBatches
from corpus import WORDS, CachedSource, build_cache
from demo_config import MTP_DEPTHS, PATTERN, demo_config
from demo_tokenizer import AUDIO_TOKEN, build_pieces, build_tokenizer
from layout import ctc_decoder_config, export_checkpoint, feature_extractor, nemo_config
from mtp import MtpHead, mtp_losses
from scouts import AttentionGuide, PlaceScout
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from training_kernels import FrontEnd, check_front_end, use_fast_scan
from transformers import AutoTokenizer, Nemotron3_5TranscribeForConditionalGeneration
from transformers.models.nemotron3_5_transcribe import (
    modeling_nemotron3_5_transcribe as reference,
)

SEED = 20261201
CHUNK = 500  # encoder frames; longer clips run in chunks with a speaker cache
BASE_LAYERS = 9  # of the decoder; the others are trained on top of the frozen base
MTP_ROUNDS = 3  # how often the MTP head sees a batch


def initialise(model: nn.Module) -> None:
    """Scales the initial weights for a small model.

    The reference's fixed 0.02 suits thousands of channels; with 192 it leaves every
    layer near zero for hundreds of steps.
    """
    layers = {"asr_encoder": 4, "diarization_model": 3, "language_model": BASE_LAYERS}
    for name, module in model.named_modules():
        depth = next((d for part, d in layers.items() if part in name), 2)
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            if name.endswith(("o_proj", "out_proj", "down_proj", "fc2")):
                std /= math.sqrt(2 * depth)
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
        elif type(module).__name__ == "NemotronHExperts":
            nn.init.normal_(module.up_proj, std=module.hidden_dim**-0.5)
            std = module.intermediate_dim**-0.5 / math.sqrt(2 * depth)
            nn.init.normal_(module.down_proj, std=std / 2.5)
        elif type(module).__name__ == "NemotronHTopkRouter":
            nn.init.normal_(module.weight, std=module.hidden_dim**-0.5)
        elif type(module).__name__ == "NemotronHMamba2Mixer":
            step = torch.exp(torch.empty_like(module.dt_bias).uniform_(-4.6, -0.7))
            with torch.no_grad():
                module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
        elif isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and (
            "word_timestamp" in name
        ):
            nn.init.normal_(module.weight, std=module.in_channels**-0.5)
    if hasattr(model, "lm_head"):
        nn.init.normal_(model.lm_head.weight, std=0.05)


class RouterBalance:
    """Keeps experts in use by moving the router's selection bias."""

    def __init__(self, module: nn.Module, rate: float = 0.001):
        self.gates = [
            m for m in module.modules() if type(m).__name__ == "NemotronHTopkRouter"
        ]
        self.rate = rate
        self.counts = [torch.zeros(gate.num_experts) for gate in self.gates]
        for number, gate in enumerate(self.gates):
            gate.register_forward_hook(partial(self._count, number))

    def _count(self, number: int, gate: nn.Module, _: Any, output: Any) -> None:
        used = torch.bincount(output[2].flatten(), minlength=gate.num_experts)
        self.counts[number] += used

    def step(self) -> None:
        """Moves the biases; counts must have been exchanged before."""
        for gate, used in zip(self.gates, self.counts, strict=True):
            gate.e_score_correction_bias += self.rate * (used.mean() - used).sign()
        self.clear()

    def clear(self) -> None:
        """Counts anew."""
        for used in self.counts:
            used.zero_()


class Exchange:
    """Averages tensors over the processes, in place.

    Args:
        late: Hands out the average of the call before: a process whose batch takes
            longer holds nobody up, as long as it catches up a step later.
    """

    def __init__(self, late: bool):
        self.late = late
        self.flat: torch.Tensor | None = None
        self.work: Any = None

    def __call__(self, tensors: list[torch.Tensor]) -> bool:
        """Returns False if there is no average yet."""
        ready, flat = self.finish(), self.flat
        self.flat = torch.cat([t.flatten() for t in tensors])
        self.work = torch.distributed.all_reduce(self.flat, async_op=True)
        if not self.late:
            ready, flat = self.finish(), self.flat
        if ready:
            flat /= torch.distributed.get_world_size()
            pieces = flat.split([t.numel() for t in tensors])
            torch._foreach_copy_(
                tensors, [p.view_as(t) for p, t in zip(pieces, tensors, strict=True)]
            )
        return ready

    def finish(self) -> bool:
        """Waits for the last call's sum; False if there was no call."""
        if self.work is None:
            return False
        self.work.wait()
        return True


def join(rank: int, world: int, work: Path) -> None:
    """Joins this process to the others."""
    torch.set_num_threads(1)
    use_fast_scan()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=world
    )
    torch.manual_seed(SEED + rank)


def launch(stage: Any, world: int, work: Path, *arguments: Any) -> None:
    """Runs ``stage(rank, world, work, *arguments)`` in ``world`` processes."""
    (work / "rendezvous").unlink(missing_ok=True)
    torch.multiprocessing.spawn(stage, (world, work, *arguments), world)


class Average:
    """Exponential moving average of the parameters."""

    def __init__(self, parameters: list[nn.Parameter], decay: float):
        self.parameters = parameters
        self.decay = decay
        self.values = [p.detach().clone() for p in parameters]
        self.seen = 0

    def step(self) -> None:
        self.seen += 1
        decay = min(self.decay, self.seen / (self.seen + 20))
        current = [p.detach() for p in self.parameters]
        torch._foreach_lerp_(self.values, current, 1 - decay)

    def store(self) -> None:
        """Puts the averages into the model."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            parameter.data.copy_(value)


def audio_states(
    model: Any, batch: Batch, mask_bands: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the audio tower as the reference does, with hooks for training.

    Args:
        model: The reference model; the diarizer is taken as it is.
        batch: The clips.
        mask_bands: Hides random bands and moments from the ASR encoder.

    Returns:
        ``(valid audio tokens, hidden)`` embeddings in order, and ASR states.
    """
    tower = model.model.audio_tower
    frames = batch.features.shape[1] // 8
    normal = reference.normalize_per_feature(batch.features, batch.mask)
    if mask_bands:
        normal = hide_bands(normal)
    if frames <= CHUNK:
        states = tower.asr_encoder(normal, batch.mask).last_hidden_state
    else:
        parts = []
        for context, chunk in tower._get_chunks(frames):
            span = slice(context.start * 8, context.stop * 8)
            output = tower.asr_encoder(normal[:, span], batch.mask[:, span])
            parts.append(output.last_hidden_state[:, chunk])
        states = torch.cat(parts, 1)
    with torch.no_grad():
        diarizer = tower.diarization_model
        if frames <= CHUNK:
            hidden = diarizer.model(
                input_features=batch.features, attention_mask=batch.mask
            ).last_hidden_state
            speakers = diarizer.classifier(hidden)
        else:
            speakers = diarizer(batch.features, attention_mask=batch.mask).logits
        probabilities = speakers.sigmoid().unflatten(1, (frames, -1)).mean(2)
        active = (probabilities > tower.config.speaker_activity_threshold).float()
    fused = tower.asr_norm(states) + tower.speaker_embedding(tower.speaker_norm(active))
    embeds = model.model.multi_modal_projector(fused)
    return embeds[batch.mask[:, ::8]], states


def hide_bands(features: torch.Tensor) -> torch.Tensor:
    """Zeroes up to two bands and two moments of each normalised log-mel."""
    features = features.clone()
    for row in features:
        for _ in range(2):
            width = int(torch.randint(0, 16, ()))
            start = int(torch.randint(0, row.shape[1] - width, ()))
            row[:, start : start + width] = 0
            width = int(torch.randint(0, 8, ()))
            start = int(torch.randint(0, max(row.shape[0] - width, 1), ()))
            row[start : start + width] = 0
    return features


def embed_tokens(model: Any, input_ids: torch.Tensor, audio: torch.Tensor) -> Any:
    """Token embeddings with the audio embeddings at the placeholders."""
    embeds = model.model._embed_input_ids(input_ids)
    if not len(audio):
        return embeds
    places = (input_ids == model.config.audio_token_id)[..., None].expand_as(embeds)
    return embeds.masked_scatter(places, audio.to(embeds.dtype))


class Teacher(nn.Module):
    """The training losses of a batch; its own parameters are thrown away afterwards.

    `frames` names the word of every ASR frame where it is known: without it the
    encoder takes three times as long to learn words.
    """

    WEIGHTS = {
        "text": 1.0,
        "ctc": 0.5,
        "edges": 0.2,
        "frames": 0.5,
        "place": 0.5,
        "guide": 0.4,
    }

    def __init__(self, model: Any):
        super().__init__()
        self.frames = nn.Linear(model.config.audio_config.hidden_size, len(WORDS) + 1)
        self.place = PlaceScout(model.model.language_model)
        self.guide = AttentionGuide(model.model.language_model)

    def forward(
        self, model: Any, batch: Batch, mask_bands: bool
    ) -> tuple[dict[str, torch.Tensor], float]:
        """The losses by name and the share of right next tokens."""
        out: dict[str, torch.Tensor] = {}
        audio = torch.zeros(0)
        if len(batch.features):
            audio, states = audio_states(model, batch, mask_bands)
            logits = model.get_word_timestamp_logits(states, batch.mask)
            scores = logits.log_softmax(-1)
            targets = torch.tensor([p for ids in batch.pieces for p in ids])
            out["ctc"] = F.ctc_loss(
                scores.transpose(0, 1),
                targets,
                2 * batch.mask[:, ::8].sum(1),
                torch.tensor([len(ids) for ids in batch.pieces]),
                blank=logits.shape[-1] - 1,
                reduction="sum",
                zero_infinity=True,
            ) / len(targets)
            named = self.frames(states).transpose(1, 2)
            out["frames"] = F.cross_entropy(named, batch.word_targets)
            out["edges"] = F.nll_loss(scores.transpose(1, 2), batch.frame_targets)
        embeds = embed_tokens(model, batch.input_ids, audio)
        hidden = model.model.language_model(
            inputs_embeds=embeds, use_cache=False
        ).last_hidden_state
        out["place"], out["guide"] = self.place(batch), self.guide(batch)
        out["text"], right = text_loss(model, hidden, batch.labels)
        return out, right


def text_loss(
    model: Any, hidden: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Cross-entropy of the transcripts and the share of right next tokens."""
    wanted = labels[:, 1:]
    chosen = wanted != -100
    logits = model.lm_head(hidden[:, :-1][chosen])
    loss = F.cross_entropy(logits, wanted[chosen])
    return loss, (logits.argmax(-1) == wanted[chosen]).float().mean().item()


def rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    fraction = (step - warmup) / max(steps - warmup, 1)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * fraction)))


def parameter_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Weight decay on matrices only."""
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.02},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


class Descent:
    """Optimiser steps that all processes take together, and the average over them.

    Args:
        module: Whose routers are kept in balance.
        parameters: What is trained.
        steps: How many steps there will be.
        peak: Highest learning rate.
        warmup: Steps until it is reached.
        decay: Of the average.
        fused: AdamW's fused kernel, faster and not the same to the last bit.
        late: Steps along gradients that are one step old (`Exchange`), which takes a
            tenth less time. The last ones are not used.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        steps: int,
        peak: float,
        *,
        warmup: int = 150,
        decay: float = 0.997,
        fused: bool = True,
        late: bool = False,
    ):
        self.parameters = parameters
        self.steps = steps
        self.peak = peak
        self.warmup = warmup
        self.done = 0
        self.exchange = Exchange(late)
        self.balance = RouterBalance(module)
        self.average = Average(parameters, decay)
        self.optimiser = torch.optim.AdamW(
            parameter_groups(parameters),
            lr=peak,
            betas=(0.9, 0.98),
            eps=1e-9,
            fused=fused,
        )

    def step(self, loss: torch.Tensor | None) -> None:
        """Takes a step down; without a loss along the other processes' gradients."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate(self.done, self.steps, self.peak, self.warmup)
        self.done += 1
        self.optimiser.zero_grad()
        if loss is not None:
            loss.backward()
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters]
        if not self.exchange(gradients + self.balance.counts):
            self.balance.clear()
            return
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.balance.step()
        self.average.step()

    def finish(self) -> None:
        """Puts the averages into the model."""
        self.exchange.finish()
        self.average.store()


def report(stage: str, step: int, steps: int, started: float, text: str) -> None:
    """One progress line: step, figures, time left."""
    spent = time.monotonic() - started
    left = spent / (step + 1) * (steps - step - 1)
    print(
        f"[{stage}] {step + 1}/{steps} {text} "
        f"{spent / 60:.1f} min, {left / 60:.1f} min left",
        flush=True,
    )


def train_base(rank: int, world: int, work: Path, steps: int) -> None:
    """Trains all but diarizer, last layers and MTP head; rank 0 writes ``base.pt``."""
    join(rank, world, work)
    tokenizer, assembler, _ = make_assembler(work, write=False)
    model = build_model(tokenizer, assembler, BASE_LAYERS)
    diarizer = model.model.audio_tower.diarization_model
    diarizer.load_state_dict(torch.load(work / "diarizer.pt"))
    diarizer.requires_grad_(False)
    teacher = Teacher(model)
    torch.manual_seed(SEED + rank)
    batches = StepBatches(work / "cache", assembler, steps, SEED, rank, world)
    parameters = [p for p in model.parameters() if p.requires_grad]
    parameters += teacher.parameters()
    descent = Descent(model, parameters, steps, 1.6e-3)
    model.train()
    started, sums, rights = time.monotonic(), {}, []
    for step in range(steps):
        batch = batches[step]
        parts, right = teacher(model, batch, mask_bands=step > 0.2 * steps)
        total = sum(teacher.WEIGHTS[name] * part for name, part in parts.items())
        descent.step(total)
        for key, value in parts.items():
            sums.setdefault(f"{batch.kind} {key}", []).append(value.item())
        rights.append(right)
        if rank == 0 and ((step + 1) % 50 == 0 or step + 1 == steps):
            text = f"tokens right {sum(rights) / len(rights):.3f} "
            text += " ".join(f"{k} {sum(v) / len(v):.3f}" for k, v in sums.items())
            report("base", step, steps, started, text)
            sums, rights = {}, []
    descent.finish()
    if rank == 0:
        torch.save(model.state_dict(), work / "base.pt")
    torch.distributed.destroy_process_group()


def make_assembler(work: Path, write: bool = True) -> tuple[Any, Any, bytes]:
    """The text tokenizer, the batch assembler and the alignment model's bytes."""
    if write:
        build_tokenizer(work / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    proto = build_pieces(WORDS)
    alignment = sentencepiece.SentencePieceProcessor(model_proto=proto)
    front_end = feature_extractor({}, FrontEnd)
    return tokenizer, Assembler(tokenizer, front_end, alignment), proto


def build_model(tokenizer: Any, assembler: Assembler, layers: int) -> Any:
    """The untrained model, with so many decoder layers."""
    torch.manual_seed(SEED)
    config = demo_config(
        tokenizer.convert_tokens_to_ids(AUDIO_TOKEN),
        assembler.alignment.get_piece_size(),
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        layers,
    )
    # a shorter scan chunk is the same sum in less padding
    config.text_config.chunk_size = 64
    config._attn_implementation = "sdpa"
    model = Nemotron3_5TranscribeForConditionalGeneration(config).float()
    initialise(model)
    return model


class WithoutMean(nn.Module):
    """Makes a projection of stacked log-mels blind to the average spectrum.

    Raw log-mels are far from zero: the optimiser's steps along their mean would drown
    everything else, and the layer has no bias that could take it out.
    """

    def __init__(self, mean: torch.Tensor):
        super().__init__()
        mean = mean.repeat(8)
        self.register_buffer("direction", mean / mean.norm())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight - (weight @ self.direction)[:, None] * self.direction


def train_diarizer(rank: int, world: int, work: Path, steps: int) -> None:
    """Trains the diarizer alone; rank 0 writes ``diarizer.pt``.

    A scout behind its second layer names the voice of every frame and its pitch, and
    is thrown away afterwards: voices are what speakers are told apart by.
    """
    join(rank, world, work)
    tokenizer, assembler, _ = make_assembler(work, write=False)
    model = build_model(tokenizer, assembler, BASE_LAYERS)
    model = model.model.audio_tower.diarization_model
    batches = StepBatches(
        work / "cache", assembler, steps, SEED + 2, rank, world, plan="speakers"
    )
    octaves = torch.tensor(batches.source.pitches).clamp(min=60).div(140).log2()
    scout = nn.Linear(model.config.audio_config.hidden_size, len(octaves) + 1)
    typical = StepBatches(work / "cache", assembler, 8, SEED + 3, 0, 1, plan="speakers")
    speech = [b.features[b.activity.sum(2) > 0] for b in (typical[0], typical[1])]
    projection = model.model.audio_tower.embedder.projection
    parametrize.register_parametrization(
        projection, "weight", WithoutMean(torch.cat(speech).mean(0))
    )
    torch.manual_seed(SEED + rank)
    seen: list[torch.Tensor] = []
    model.model.audio_tower.layers[1].register_forward_hook(
        lambda module, inputs, output: seen.append(output)
    )
    parameters = [*model.parameters(), *scout.parameters()]
    # late gradients do not hurt here; the base would learn words far later with them
    descent = Descent(model, parameters, steps, 1e-3, fused=False, late=True)
    model.train()
    started, sums = time.monotonic(), []
    for step in range(steps):
        batch = batches[step]
        loss, figures = None, [0.0] * 4
        if len(batch.features):
            seen.clear()
            hidden = model.model(
                input_features=batch.features, attention_mask=batch.mask
            ).last_hidden_state
            logits = model.classifier(hidden)
            valid = batch.mask.float()
            bce = F.binary_cross_entropy_with_logits(
                logits, batch.activity, reduction="none"
            ).sum(2)
            speaker = (bce * valid).sum() / valid.sum()
            guess, known = scout(seen[0]), batch.voice_targets >= 0
            voices = batch.voice_targets[known]
            voice = F.cross_entropy(guess[known][:, :-1], voices)
            pitch = F.mse_loss(guess[known][:, -1], octaves[voices])
            loss = speaker + 0.3 * voice + 2.0 * pitch
            talk = batch.activity.sum(2) > 0
            same = ((logits > 0) == batch.activity.bool()).all(2)
            right = same[talk].float().mean()
            figures = [t.item() for t in (speaker, voice, pitch, right)]
        descent.step(loss)
        sums.append(figures)
        if rank == 0 and ((step + 1) % 50 == 0 or step + 1 == steps):
            mean = torch.tensor(sums).mean(0).tolist()
            text = f"speaker {mean[0]:.3f} voice {mean[1]:.3f} pitch {mean[2]:.3f} "
            text += f"frames right {mean[3]:.3f}"
            report("diarizer", step, steps, started, text)
            sums = []
    descent.finish()
    parametrize.remove_parametrizations(projection, "weight")
    if rank == 0:
        torch.save(model.state_dict(), work / "diarizer.pt")
    torch.distributed.destroy_process_group()


def round_weights(module: nn.Module) -> None:
    """Rounds to what the file keeps: bfloat16, except the float32 set."""
    kept = ("A_log", "D", "dt_bias", "e_score_correction_bias")
    for name, value in module.state_dict().items():
        if value.is_floating_point() and not name.endswith(kept):
            value.copy_(value.bfloat16())


def load_model(work: Path) -> tuple[Any, Any, Assembler, bytes]:
    """The trained model with stored precision, tokenizer, assembler, alignment."""
    tokenizer, assembler, proto = make_assembler(work, write=False)
    model = build_model(tokenizer, assembler, len(PATTERN))
    model.load_state_dict(torch.load(work / "decoder.pt"))
    round_weights(model)
    return model.eval(), tokenizer, assembler, proto


def load_base(work: Path) -> tuple[Any, Assembler]:
    """The model with the trained base, whose last layers add nothing yet."""
    tokenizer, assembler, _ = make_assembler(work, write=False)
    model = build_model(tokenizer, assembler, len(PATTERN))
    state = model.state_dict()
    model.load_state_dict(state | torch.load(work / "base.pt"))
    for layer in model.model.language_model.layers[BASE_LAYERS:]:
        for name, parameter in layer.named_parameters():
            if re.search(r"(o_proj|out_proj|down_proj)(\.weight)?$", name):
                nn.init.zeros_(parameter)
    round_weights(model)
    return model.eval(), assembler


def train_top(rank: int, world: int, work: Path, steps: int) -> None:
    """Trains the decoder's last layers; rank 0 writes ``decoder.pt``.

    They start as the identity, which trains in a fraction of the time that a decoder
    of full depth takes from the start.
    """
    join(rank, world, work)
    model, assembler = load_base(work)
    model.requires_grad_(False)
    decoder = model.model.language_model
    top = nn.ModuleList([*decoder.layers[BASE_LAYERS:], decoder.norm_f, model.lm_head])
    top.requires_grad_(True)
    batches = StepBatches(
        work / "cache", assembler, steps, SEED + 4, rank, world, plan="all"
    )
    torch.manual_seed(SEED + rank)
    parameters = [p for p in top.parameters() if p.requires_grad]
    descent = Descent(top, parameters, steps, 1e-3, warmup=50, decay=0.99)
    started, sums = time.monotonic(), []
    for step in range(steps):
        batch = batches[step]
        embeds = embed_batch(model, batch, mask_bands=True)
        hidden = decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state
        loss, right = text_loss(model, hidden, batch.labels)
        descent.step(loss)
        sums.append([loss.item(), right])
        if rank == 0 and ((step + 1) % 50 == 0 or step + 1 == steps):
            mean = torch.tensor(sums).mean(0).tolist()
            text = f"text {mean[0]:.3f} tokens right {mean[1]:.3f}"
            report("top", step, steps, started, text)
            sums = []
    descent.finish()
    if rank == 0:
        torch.save(model.state_dict(), work / "decoder.pt")
    torch.distributed.destroy_process_group()


def embed_batch(model: Any, batch: Batch, mask_bands: bool) -> torch.Tensor:
    """The decoder's input ``(samples, tokens, width)``, audio included."""
    audio = torch.zeros(0)
    if len(batch.features):
        audio, _ = audio_states(model, batch, mask_bands)
    return embed_tokens(model, batch.input_ids, audio)


def frozen_states(
    model: Any, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, labels, input embeddings and the frozen decoder's states of a batch."""
    with torch.no_grad():
        embeds = embed_batch(model, batch, mask_bands=False)
        hidden = model.model.language_model(
            inputs_embeds=embeds, use_cache=False
        ).last_hidden_state
    return batch.input_ids, batch.labels, embeds, hidden


def train_mtp(rank: int, world: int, work: Path, steps: int) -> None:
    """Trains the MTP head on the frozen model; rank 0 writes ``mtp.pt``.

    What the frozen model makes of a batch costs more than a step of the head, so each
    batch is taken `MTP_ROUNDS` times. In half of the samples the decoder's states at
    the audio are blotted out, another half each time: a head that always sees them
    hardly looks at the audio embeddings.
    """
    join(rank, world, work)
    model, _, assembler, _ = load_model(work)
    model.requires_grad_(False)
    head = MtpHead(model.config.text_config)
    torch.manual_seed(SEED + 7)
    initialise(head)
    count = -(-steps // MTP_ROUNDS)
    # the easy start of the course is not needed
    batches = StepBatches(
        work / "cache", assembler, count, SEED + 1, rank, world, plan="all"
    )
    parameters = [p for p in head.parameters() if p.requires_grad]
    descent = Descent(head, parameters, steps, 2e-3, warmup=50, decay=0.995)
    chance = torch.Generator().manual_seed((SEED + 8) * world + rank)
    started, sums = time.monotonic(), []
    kept = []
    for step in range(steps):
        if step < count:
            kept.append(frozen_states(model, batches[step]))
        ids, labels, embeds, hidden = kept[step % count]
        blind = torch.rand(len(ids), 1, generator=chance) < 0.5
        blind = (blind & (ids == assembler.audio_id))[..., None]
        hidden = hidden.masked_fill(blind, 0.0)
        loss, shares = mtp_losses(
            head, model.lm_head, embeds, hidden, labels, MTP_DEPTHS
        )
        descent.step(loss)
        sums.append([loss.item(), *shares])
        if rank == 0 and ((step + 1) % 50 == 0 or step + 1 == steps):
            mean = torch.tensor(sums).mean(0).tolist()
            text = f"loss {mean[0]:.3f} drafts right "
            text += " ".join(f"{share:.3f}" for share in mean[1:])
            report("mtp", step, steps, started, text)
            sums = []
    descent.finish()
    if rank == 0:
        torch.save(head.state_dict(), work / "mtp.pt")
    torch.distributed.destroy_process_group()


def export(work: Path, out: Path, with_mtp: bool) -> None:
    """Writes the checkpoint folder."""
    model, tokenizer, assembler, proto = load_model(work)
    model.config.text_config.chunk_size = 128
    state = None
    if with_mtp:
        state = torch.load(work / "mtp.pt")
        state = {k.removeprefix("layers."): v for k, v in state.items()}
    alignment = assembler.alignment
    pieces = [alignment.id_to_piece(n) for n in range(alignment.get_piece_size())]
    export_checkpoint(
        model,
        out,
        nemo_config=nemo_config(
            model.config,
            mtp_depths=MTP_DEPTHS if with_mtp else 0,
            eos_token_id=[tokenizer.eos_token_id, 2],
            pad_token_id=tokenizer.pad_token_id,
        ),
        mtp_state=state,
        sentencepiece_proto=proto,
        ctc_decoder_config=ctc_decoder_config(model.config, pieces),
        tokenizer_dir=work / "tokenizer",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="cache folder")
    parser.add_argument("--out", type=Path, default=Path("examples/demo/checkpoint"))
    parser.add_argument("--diarizer-steps", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--top-steps", type=int, default=600)
    parser.add_argument("--mtp-steps", type=int, default=1800)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    work, world = arguments.work.absolute(), arguments.processes
    work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    build_cache(work / "cache", jobs=world)
    _, assembler, _ = make_assembler(work)
    source = CachedSource(work / "cache")
    spoken = [source.word(0, word) for word in WORDS[:8]]
    check_front_end(assembler.extractor, spoken)
    if not (work / "diarizer.pt").exists():
        launch(train_diarizer, world, work, arguments.diarizer_steps)
    if not (work / "base.pt").exists():
        launch(train_base, world, work, arguments.steps)
    if not (work / "decoder.pt").exists():
        launch(train_top, world, work, arguments.top_steps)
    if not (work / "mtp.pt").exists():
        launch(train_mtp, world, work, arguments.mtp_steps)
    export(work, arguments.out, with_mtp=True)
    size = sum(f.stat().st_size for f in arguments.out.rglob("*") if f.is_file())
    minutes = (time.monotonic() - started) / 60
    print(f"[done] {arguments.out}: {size:,} bytes, {minutes:.1f} min", flush=True)


if __name__ == "__main__":
    main()
