# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The multi-token-prediction head of the demo checkpoint.

One block, attention then experts, drafts one token ahead; the same block is applied
again for every further token. The reference does not run this head, so it is put
together here from the reference's own layers: names and sizes match the file.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHAttention,
    NemotronHMoE,
    NemotronHRMSNorm,
)


class MtpHead(nn.Module):
    """Drafts tokens from the backbone's hidden states.

    ``state_dict`` keys without the leading ``layers.`` are the file's names after
    ``llm.mtp.layers.``.
    """

    def __init__(self, config: Any):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_epsilon
        fusion, experts = nn.Module(), nn.Module()
        fusion.enorm = NemotronHRMSNorm(width, eps=eps)
        fusion.hnorm = NemotronHRMSNorm(width, eps=eps)
        fusion.eh_proj = nn.Linear(2 * width, width, bias=False)
        fusion.norm = NemotronHRMSNorm(width, eps=eps)
        fusion.mixer = NemotronHAttention(config, layer_idx=0)
        experts.norm = NemotronHRMSNorm(width, eps=eps)
        experts.mixer = NemotronHMoE(config, layer_idx=1)
        experts.final_layernorm = NemotronHRMSNorm(width, eps=eps)
        self.layers = nn.ModuleList([fusion, experts])

    def fuse(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Joins the next token's embedding (first half) and the hidden before it."""
        block = self.layers[0]
        both = torch.cat([block.enorm(embeds), block.hnorm(hidden)], -1)
        return block.eh_proj(both)

    def keys_values(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``(batch, tokens, kv heads, head size)``."""
        block = self.layers[0]
        normed = block.norm(fused)
        shape = (*fused.shape[:-1], -1, block.mixer.head_dim)
        return (
            block.mixer.k_proj(normed).view(shape),
            block.mixer.v_proj(normed).view(shape),
        )

    def step(
        self,
        fused: torch.Tensor,
        visible: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        chain: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Runs the block for one draft of many chains at once.

        Args:
            fused: ``(batch, chains, width)`` from `fuse`.
            visible: ``(batch, chains, tokens)`` bool: cached positions of the first
                depth that each chain may attend to.
            context: First-depth keys and values of every position.
            chain: Keys and values ``(batch, chains, kv heads, head size)`` of the
                chain's own later depths, this one last; empty at the first depth,
                whose own position is in ``context``.

        Returns:
            ``(batch, chains, width)`` after the final norm.
        """
        block, experts = self.layers
        mixer = block.mixer
        groups = mixer.num_key_value_groups
        query = mixer.q_proj(block.norm(fused)).unflatten(-1, (-1, mixer.head_dim))
        keys = context[0].repeat_interleave(groups, 2)
        values = context[1].repeat_interleave(groups, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, keys)
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        own = [
            torch.einsum("bqhd,bqhd->bhq", query, k.repeat_interleave(groups, 2))
            for k, _ in chain
        ]
        weights = torch.cat([scores, *(s[..., None] for s in own)], -1)
        weights = (weights * mixer.scaling).softmax(-1)
        count = keys.shape[1]
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights[..., :count], values)
        for number, (_, value) in enumerate(chain):
            share = weights[..., count + number].transpose(1, 2)[..., None]
            mixed = mixed + share * value.repeat_interleave(groups, 2)
        fused = fused + mixer.o_proj(mixed.flatten(2))
        fused = fused + experts.mixer(experts.norm(fused))
        return experts.final_layernorm(fused)


def chain_hidden(
    head: MtpHead,
    embeds: torch.Tensor,
    hidden: torch.Tensor,
    starts: torch.Tensor,
    depths: int,
) -> list[torch.Tensor]:
    """Hidden states of every draft depth, given the true tokens.

    Args:
        head: The head.
        embeds: ``(batch, tokens, width)`` input embeddings, audio included.
        hidden: ``(batch, tokens, width)`` the backbone's output after its norm.
        starts: ``(batch, chains)`` last position the backbone has seen.
        depths: How many drafts.

    Returns:
        Per depth ``(batch, chains, width)``; depth ``k`` (from 1) of a chain that
        starts at ``t`` predicts token ``t + 1 + k``.
    """
    shifted = torch.cat([embeds[:, 1:], embeds[:, -1:]], 1)
    first = head.fuse(shifted, hidden)
    context = head.keys_values(first)
    positions = torch.arange(embeds.shape[1])
    visible = positions <= starts[..., None]
    width = embeds.shape[-1]

    def pick(source: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        places = places.clamp(max=source.shape[1] - 1)
        return source.gather(1, places[..., None].expand(-1, -1, width))

    out, chain = [], []
    for depth in range(depths):
        if depth == 0:
            fused = pick(first, starts)
        else:
            fused = head.fuse(pick(embeds, starts + 1 + depth), out[-1])
            chain.append(head.keys_values(fused))
        out.append(head.step(fused, visible, context, chain))
    return out


def draft_tokens(
    head: MtpHead,
    lm_head: nn.Module,
    embed: nn.Module,
    embeds: torch.Tensor,
    hidden: torch.Tensor,
    starts: torch.Tensor,
    depths: int,
) -> torch.Tensor:
    """Greedy drafts ``(chains, depths)`` of one sequence from every start.

    Arguments are those of `chain_hidden` with a batch of one; ``embed`` looks up
    the embedding of a draft.
    """
    shifted = torch.cat([embeds[:, 1:], embeds[:, -1:]], 1)
    first = head.fuse(shifted, hidden)
    context = head.keys_values(first)
    visible = torch.arange(embeds.shape[1]) <= starts[..., None]
    fused, state, chain, drafts = first[:, starts[0]], first, [], []
    for depth in range(depths):
        if depth:
            fused = head.fuse(embed(drafts[-1]), state)
            chain.append(head.keys_values(fused))
        state = head.step(fused, visible, context, chain)
        drafts.append(lm_head(state).argmax(-1))
    return torch.stack(drafts, -1)[0]


def accepted_per_step(
    drafts: torch.Tensor, tokens: list[int], first: int, count: int
) -> tuple[int, int]:
    """Simulates greedy speculative decoding of a finished sequence.

    Args:
        drafts: ``(chains, depths)``; chain ``i`` starts at position ``first - 1 + i``.
        tokens: The whole sequence, prompt included.
        first: Position of the first generated token.
        count: Drafts a step.

    Returns:
        Accepted drafts and steps. Drafts past the end count as refused.
    """
    position, accepted, steps = first, 0, 0
    while position < len(tokens) - 1:
        row = drafts[position - first].tolist()[:count]
        right = 0
        for number, draft in enumerate(row):
            place = position + 1 + number
            if place >= len(tokens) or tokens[place] != draft:
                break
            right += 1
        accepted, steps = accepted + right, steps + 1
        position += right + 1
    return accepted, steps


def mtp_losses(
    head: MtpHead,
    lm_head: nn.Module,
    embeds: torch.Tensor,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    depths: int,
) -> tuple[torch.Tensor, list[float]]:
    """Distils the backbone's own next-token choices into every depth.

    Args:
        head: The head being trained.
        lm_head: The backbone's frozen output layer.
        embeds: ``(batch, tokens, width)``.
        hidden: ``(batch, tokens, width)``.
        labels: ``(batch, tokens)``: -100 outside the answer.
        depths: How many drafts to train.

    Returns:
        The loss and, per depth, the share of drafts equal to the backbone's choice.
    """
    answer = labels != -100
    lengths = answer.sum(1)
    first = answer.float().argmax(1)
    chains = int(lengths.max())
    offsets = torch.arange(chains)
    starts = (first[:, None] - 1 + offsets).clamp(max=embeds.shape[1] - 1)
    with torch.no_grad():
        teacher = lm_head(hidden)
    states = chain_hidden(head, embeds, hidden, starts, depths)
    loss = torch.zeros(())
    shares = []
    for depth, state in enumerate(states, 1):
        # the chain's draft is the token the backbone chooses at starts + depth
        good = offsets[None] + depth < lengths[:, None]
        places = (starts + depth).clamp(max=embeds.shape[1] - 1)
        rows = torch.arange(len(places))[:, None].expand_as(places)
        wanted = teacher[rows[good], places[good]]
        logits = lm_head(state[good])
        if not len(logits):
            shares.append(0.0)
            continue
        loss = loss + F.cross_entropy(logits, wanted.softmax(-1))
        same = logits.argmax(-1) == wanted.argmax(-1)
        shares.append(same.float().mean().item())
    return loss / depths, shares
