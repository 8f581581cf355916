# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What helps the demo checkpoint learn its place, and is thrown away afterwards.

The decoder has no rotary positions. Left alone it finds the next word in the audio by
what was said before it, which fails where words repeat: digits above all. Both helpers
here know from the corpus which word sounds where (`Batch.ordinals`).
"""

import math

import torch
from batches import Batch
from torch import nn
from torch.nn import functional as F


def answer_tokens(batch: Batch) -> torch.Tensor:
    """``(samples, tokens)`` bool: tokens whose next token belongs to the answer."""
    return batch.labels.roll(-1, 1) != -100


class PlaceScout(nn.Module):
    """Reads from the decoder which word it is at, in the audio and in the answer.

    Taught to count words on both sides, the decoder can compare the counts.
    """

    PERIODS = (4, 8, 16, 32, 64, 160)
    LAYER = 3  # the second Mamba layer, before the second attention

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.read = nn.Linear(decoder.config.hidden_size, 2 * len(self.PERIODS))
        self.seen: torch.Tensor | None = None
        decoder.layers[self.LAYER].register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.seen = output

    def forward(self, batch: Batch) -> torch.Tensor:
        """The squared error on the states of the decoder's last run."""
        hidden, self.seen = self.seen, None
        known = ~batch.ordinals.isnan()
        turns = 2 * math.pi / torch.tensor(self.PERIODS)
        angle = batch.ordinals[known][:, None] * turns
        wanted = torch.cat([angle.sin(), angle.cos()], -1)
        normal = F.layer_norm(hidden[known], hidden.shape[-1:])
        error = (self.read(normal) - wanted).square().mean(-1)
        answer = answer_tokens(batch)[known]
        parts = [error[side].mean() for side in (answer, ~answer) if side.any()]
        return sum(parts) / len(parts)


class AttentionGuide:
    """Draws one head of each key-value group to the frames of the word to be written.

    Takes queries and keys of one attention layer. The loss is the negative logarithm
    of the attention that falls on frames within three quarters of a word: those of the
    word itself and of a pause beside it.
    """

    LAYER = 4  # the second attention

    def __init__(self, decoder: nn.Module):
        self.attention = decoder.layers[self.LAYER].mixer
        self.seen: dict[str, torch.Tensor] = {}
        for name in ("q_proj", "k_proj"):
            getattr(self.attention, name).register_forward_hook(
                lambda module, inputs, output, name=name: self.seen.update(
                    {name: output.unflatten(-1, (-1, self.attention.head_dim))}
                )
            )

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The loss on the decoder's last run; 0 without audio."""
        query, key = self.seen.pop("q_proj"), self.seen.pop("k_proj")
        query = query[:, :, :: self.attention.num_key_value_groups]
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * self.attention.scaling
        places = batch.ordinals
        answer = answer_tokens(batch)
        near = (places[:, :, None] - places[:, None, :]).abs() < 0.75
        near &= answer[:, :, None] & ~answer[:, None, :]
        rows = near.any(2)
        if not rows.any():
            return scores.new_zeros(())
        length = scores.shape[-1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        everywhere = scores.masked_fill(~causal, -torch.inf).logsumexp(-1)
        there = scores.masked_fill(~near[:, None], -1e4).logsumexp(-1)
        return (everywhere - there).transpose(0, 1)[:, rows].mean()
