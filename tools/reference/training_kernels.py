# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kernels for training on a CPU, in place of the reference's slow ones.

Without `mamba_ssm`, which needs a GPU, the reference scans in plain PyTorch and asks to
install faster kernels. These return the same values up to rounding in fewer operations
(``tests/kernels/test_training_kernels.py``; `check_front_end`, since the suite's
transformers lacks librosa). Only the training uses them: goldens and error rates come
from the reference as it is.
"""

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import NemotronAsrStreamingFeatureExtractor
from transformers.models.nemotron_asr_streaming import (
    feature_extraction_nemotron_asr_streaming as front_end,
)
from transformers.models.nemotron_h import modeling_nemotron_h as decoder

CHUNK = 32  # positions; the scan's result does not depend on it


def _decay(later: torch.Tensor, earlier: torch.Tensor, diagonal: int) -> torch.Tensor:
    """``exp(later[i] - earlier[j])`` on and below a diagonal, 0 above it."""
    gone = later[..., :, None] - earlier[..., None, :]
    known = torch.ones(gone.shape[-2:], dtype=torch.bool).tril(diagonal)
    return gone.masked_fill(~known, -torch.inf).exp()


def chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    **_: Any,
) -> torch.Tensor:
    """Mamba-2's scan from an empty state, as products of matrices.

    The structured state-space duality of Dao and Gu (2024), section 6: inside a chunk
    attention with decaying weights, between chunks the states at their ends. Heads of a
    group share ``C B^T``. Arguments are those of the reference's function as its mixer
    gives them without a cache; ``chunk_size`` is not used.

    Args:
        hidden_states: ``(batch, length, heads, head size)``.
        dt: ``(batch, length, heads)`` before bias and softplus.
        A, D, dt_bias: ``(heads,)``.
        B, C: ``(batch, length, groups, state size)``.
        dt_limit: Bounds of the time step; only the lower one is used.

    Returns:
        ``(batch, length, heads, head size)``.
    """
    batch, length, heads, size = hidden_states.shape
    groups = B.shape[2]
    ratio = heads // groups
    padding = -length % CHUNK
    # b batch, c chunk, g group, r head of a group, l and s positions of a chunk

    def cut(values: torch.Tensor) -> torch.Tensor:
        values = F.pad(values.reshape(batch, length, -1), (0, 0, 0, padding))
        return values.view(batch, -1, CHUNK, groups, values.shape[2] // groups)

    step = F.softplus(dt + dt_bias).clamp(min=dt_limit[0])
    inputs = cut(hidden_states * step[..., None]).unflatten(-1, (ratio, size))
    inputs = inputs.permute(0, 1, 3, 4, 2, 5)  # b c g r l p
    keys, queries = (cut(values).transpose(2, 3)[:, :, :, None] for values in (B, C))
    total = cut(A * step).permute(0, 1, 3, 4, 2).cumsum(-1)  # b c g r l
    out = (_decay(total, total, 0) * (queries @ keys.mT)) @ inputs
    if length > CHUNK:
        end = total[..., -1:]
        left = (inputs * (end - total).exp()[..., None]).mT @ keys  # b c g r p n
        # chunk c begins with what every chunk z before it left, decayed since
        ends = end[..., 0].movedim(1, -1).cumsum(-1)  # b g r c
        carry = _decay(F.pad(ends, (1, -1)), ends, -1)
        states = (carry @ left.movedim(1, 3).flatten(4)).movedim(3, 1)
        states = states.unflatten(-1, left.shape[-2:])
        out = out + (queries @ states.mT) * total.exp()[..., None]
    out = out.permute(0, 1, 4, 2, 3, 5).reshape(batch, -1, heads, size)[:, :length]
    return out + D[:, None] * hidden_states


class FrontEnd(NemotronAsrStreamingFeatureExtractor):
    """The reference's log-mel without the detour over magnitudes."""

    def _torch_extract_fbank_features(
        self, waveform: torch.Tensor, device: str = "cpu", center: bool = True
    ) -> torch.Tensor:
        precision = getattr(torch, self.mel_filters_dtype)
        window = torch.hann_window(self.win_length, periodic=False)
        spectrum = torch.stft(
            waveform,
            self.n_fft,
            self.hop_length,
            self.win_length,
            window.to(precision).float(),
            center=center,
            pad_mode="constant",
            return_complex=True,
        )
        power = spectrum.real.square() + spectrum.imag.square()
        mels = self.mel_filters.to(precision).float() @ power
        return (mels + front_end.LOG_ZERO_GUARD_VALUE).log().transpose(1, 2)


def use_fast_scan() -> None:
    """Lets the reference's decoders in this process scan with `chunk_scan`."""
    decoder.mamba2_chunk_scan = chunk_scan


def check_front_end(front_end: FrontEnd, audio: list[np.ndarray]) -> None:
    """Compares log-mels of mono clips with those of the reference.

    Raises:
        ValueError: They differ by more than 1e-4.
    """
    options = {"sampling_rate": front_end.sampling_rate, "return_tensors": "pt"}
    found = front_end(audio, **options)["input_features"]
    kept = NemotronAsrStreamingFeatureExtractor(**front_end.to_dict())
    wanted = kept(audio, **options)["input_features"]
    difference = (found - wanted).abs().max().item()
    if not difference < 1e-4:
        raise ValueError(f"log-mels differ from the reference's by {difference}")
