# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Audio tower of Nemotron 3.5 Transcribe: waveform in, one embedding per 80 ms out.

Module names follow the checkpoint, below `perception.`:

* `preprocessor.featurizer.{window,fb}`: the analysis window and the mel bank.
* `encoder.asr_encoder.*`: speech recognition encoder, on normalised log-mels.
* `encoder.diarization_model.*`: Sortformer speaker diarizer, on raw log-mels.
* `encoder.{asr_norm,diar_norm}.*`: fusion of the two.
* `proj.*`: projection to the decoder's hidden size.

The formulas are those of NeMo's parallel expert encoder and of Sortformer with an
arrival-order speaker cache (arXiv:2409.06656, arXiv:2507.18446).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.audio_utils import mel_filter_bank

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import MMEncoderAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import maybe_prefix
from vllm.model_executor.models.vision import is_vit_use_data_parallel
from vllm.utils.torch_utils import set_default_torch_dtype

# Encoder frames (80 ms each) that go through an encoder in one pass: bounds the
# activations, whatever the length and the number of the clips. 16 windows of the
# release (500 + 2 x 50 frames).
_FRAME_BUDGET = 9600

# Spectrogram frames transformed at once, 5 minutes of the release: an hour needs
# 0.7 GB of complex bins otherwise.
_SPECTROGRAM_BLOCK = 30_000

# Tensors of the checkpoint that no inference path reads: the diarizer's copy of the
# filter bank, its training-only heads and TransformerEngine's empty markers.
_UNUSED_PREFIXES = (
    "encoder.diarization_model.preprocessor.",
    "encoder.diarization_model.sortformer_modules.hidden_to_spks.",
    "encoder.diarization_model.sortformer_modules.activity_head.",
)
_EXTRA_STATE_SUFFIX = "._extra_state"


def _frame_overhang(n_fft: int) -> int:
    """Samples that centre padding leaves uncovered: 0 for an even `n_fft`, else 1."""
    return n_fft - 2 * (n_fft // 2)


def get_min_audio_samples(preprocessor: Any) -> int:
    """Samples below which a clip has no whole frame and is zero-padded."""
    return preprocessor.hop_length + _frame_overhang(preprocessor.n_fft)


def get_num_mel_frames(num_samples: int, preprocessor: Any) -> int:
    """Valid spectrogram frames of `num_samples` samples, at least one."""
    num_samples = max(num_samples, get_min_audio_samples(preprocessor))
    return (
        num_samples - _frame_overhang(preprocessor.n_fft)
    ) // preprocessor.hop_length


def get_num_audio_tokens(num_samples: int, audio_config: Any) -> int:
    """Embeddings, hence prompt tokens, of a clip of `num_samples` samples.

    The one formula behind prompt expansion, profiling, limits and usage accounting.
    """
    num_frames = get_num_mel_frames(num_samples, audio_config.preprocessor)
    return math.ceil(num_frames / audio_config.subsampling_factor)


class EncoderChunk(NamedTuple):
    """Frames `start:end` of a clip, encoded while seeing `context_start:context_end`.

    All four are encoder frame indices of the clip.
    """

    start: int
    end: int
    context_start: int
    context_end: int


def plan_chunks(
    num_frames: int, chunk_length: int, left_context: int, right_context: int
) -> list[EncoderChunk]:
    """Cut a clip of `num_frames` encoder frames into chunks with context."""
    return [
        EncoderChunk(
            start,
            end := min(start + chunk_length, num_frames),
            max(start - left_context, 0),
            min(end + right_context, num_frames),
        )
        for start in range(0, num_frames, chunk_length)
    ]


def _batch_by_frames(lengths: Sequence[int], budget: int) -> Iterator[slice]:
    """Slices of consecutive sequences whose lengths sum to at most `budget`."""
    start = total = 0
    for index, length in enumerate(lengths):
        if index > start and total + length > budget:
            yield slice(start, index)
            start, total = index, 0
        total += length
    if start < len(lengths):
        yield slice(start, len(lengths))


def stack_frames(features: torch.Tensor, factor: int) -> torch.Tensor:
    """Stack groups of `factor` spectrogram frames, the last one zero-padded.

    Args:
        features: (frames, mels).
        factor: frames in a group.

    Returns:
        (ceil(frames / factor), factor x mels), frame-major.
    """
    num_frames, num_mels = features.shape
    features = F.pad(features, (0, 0, 0, -num_frames % factor))
    return features.reshape(-1, factor * num_mels)


def feature_statistics(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each mel bin over a whole clip, (mels,) each.

    The variance is unbiased, and NeMo adds its epsilon to the deviation.

    Args:
        features: (frames, mels) log-mels.
    """
    mean = features.mean(0)
    variance = (features - mean).square().sum(0) / max(len(features) - 1, 1)
    return mean, variance.sqrt() + 1e-5


def normalize_per_feature(features: torch.Tensor) -> torch.Tensor:
    """Zero mean, unit variance of each mel bin over a whole clip, (frames, mels)."""
    mean, deviation = feature_statistics(features)
    return (features - mean) / deviation


class LogMelSpectrogram(nn.Module):
    """Log-mel spectrogram, float32 whatever the model's dtype.

    The window and the mel bank are rounded to bfloat16, as the checkpoint stores
    them.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        window = torch.hann_window(config.win_length, periodic=False)
        mel_bank = mel_filter_bank(
            num_frequency_bins=config.n_fft // 2 + 1,
            num_mel_filters=config.num_mel_bins,
            min_frequency=0.0,
            max_frequency=config.sample_rate / 2,
            sampling_rate=config.sample_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        # Not persistent: dummy weights must not overwrite constants.
        self.featurizer = nn.Module()
        self.featurizer.register_buffer("window", self._round(window), persistent=False)
        self.featurizer.register_buffer(
            "fb",
            self._round(
                torch.tensor(mel_bank.T.astype(np.float32), device=window.device)[None]
            ),
            persistent=False,
        )

    @staticmethod
    def _round(constant: torch.Tensor) -> torch.Tensor:
        return constant.to(torch.bfloat16).to(torch.float32)

    def load_constant(self, name: str, stored: torch.Tensor) -> None:
        """Take the window (`"window"`) or the mel bank (`"fb"`) of a checkpoint."""
        self.featurizer.get_buffer(name).copy_(self._round(stored))

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        """Transform one clip.

        Args:
            signal: (samples,), float, at the configured rate.

        Returns:
            (frames, mels) float32, the valid frames only.
        """
        config = self.config
        signal = signal.to(torch.float32)
        signal = F.pad(signal, (0, max(get_min_audio_samples(config) - len(signal), 0)))
        num_frames = get_num_mel_frames(len(signal), config)
        signal = torch.cat([signal[:1], signal[1:] - config.preemphasis * signal[:-1]])
        signal = F.pad(signal, (config.n_fft // 2, config.n_fft // 2))

        mel_bank = self.featurizer.fb[0]
        blocks = []
        for start in range(0, num_frames, _SPECTROGRAM_BLOCK):
            end = min(start + _SPECTROGRAM_BLOCK, num_frames)
            bins = torch.stft(
                signal[
                    start * config.hop_length : (end - 1) * config.hop_length
                    + config.n_fft
                ],
                n_fft=config.n_fft,
                hop_length=config.hop_length,
                win_length=config.win_length,
                window=self.featurizer.window,
                center=False,
                return_complex=True,
            )
            power = torch.view_as_real(bins).square().sum(-1)
            blocks.append(torch.log(mel_bank @ power + config.log_zero_guard).T)
        return torch.cat(blocks)


@dataclass
class PackedSequences:
    """Sequences laid one after the other, with what attention needs to know of them.

    Attributes:
        lengths: frames of each sequence.
        masked_tail: per sequence, whether its last frame is padding: it attends, but
            nothing attends to it. Empty when no sequence has one.
        cos, sin: (frames, rotary dims / 2), positions restarting in each sequence.
        cu_seqlens, max_seqlen, sequence_lengths: arguments of `MMEncoderAttention`.
    """

    lengths: list[int]
    masked_tail: list[bool]
    cos: torch.Tensor
    sin: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: torch.Tensor | None
    sequence_lengths: torch.Tensor | None


class EncoderAttention(nn.Module):
    """Bidirectional attention over packed sequences, rotary on part of each head."""

    def __init__(
        self,
        config: Any,
        quant_config: QuantizationConfig | None,
        disable_tp: bool,
        prefix: str,
    ) -> None:
        super().__init__()
        hidden_size, num_heads = config.hidden_size, config.num_attention_heads
        tp_size = 1 if disable_tp else get_tensor_model_parallel_world_size()
        self.head_dim = hidden_size // num_heads
        self.num_heads = num_heads // tp_size
        self.w_qkv = QKVParallelLinear(
            hidden_size,
            self.head_dim,
            num_heads,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.w_qkv",
            disable_tp=disable_tp,
        )
        self.out_proj = RowParallelLinear(
            hidden_size,
            hidden_size,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
            disable_tp=disable_tp,
        )
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps)
            self.k_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps)
        self.attn = MMEncoderAttention(
            self.num_heads,
            self.head_dim,
            scale=self.head_dim**-0.5,
            prefix=f"{prefix}.attn",
        )

    def forward(self, states: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        qkv, _ = self.w_qkv(states)
        query, key, value = qkv.view(-1, 3, self.num_heads, self.head_dim).unbind(1)
        query = self._rotate(self.q_norm(query), packed)
        key = self._rotate(self.k_norm(key), packed)
        if packed.masked_tail:
            output = self._attend_past_tails(query, key, value, packed)
        else:
            output = self.attn(
                query[None],
                key[None],
                value[None],
                cu_seqlens=packed.cu_seqlens,
                max_seqlen=packed.max_seqlen,
                sequence_lengths=packed.sequence_lengths,
            )
        output, _ = self.out_proj(output.reshape(len(states), -1))
        return output

    @staticmethod
    def _rotate(heads: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        rotary_dim = 2 * packed.cos.shape[-1]
        rotated = ApplyRotaryEmb.forward_static(
            heads[..., :rotary_dim], packed.cos, packed.sin
        )
        return torch.cat([rotated, heads[..., rotary_dim:]], dim=-1)

    def _attend_past_tails(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed: PackedSequences,
    ) -> torch.Tensor:
        # Fewer keys than queries, which no varlen kernel behind MMEncoderAttention
        # takes. Only the last step of some clips comes here.
        outputs = []
        for *heads, masked in zip(
            query.split(packed.lengths),
            key.split(packed.lengths),
            value.split(packed.lengths),
            packed.masked_tail,
        ):
            q, k, v = (head.transpose(0, 1)[None] for head in heads)
            if masked:
                k, v = k[:, :, :-1], v[:, :, :-1]
            output = F.scaled_dot_product_attention(q, k, v, scale=self.attn.scale)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)


class EncoderFeedForward(nn.Module):
    """Linear, exact GELU, linear, under the checkpoint's names `net.0`, `net.3`."""

    def __init__(
        self,
        config: Any,
        quant_config: QuantizationConfig | None,
        disable_tp: bool,
        prefix: str,
    ) -> None:
        super().__init__()
        self.net = nn.ModuleDict(
            {
                "0": ColumnParallelLinear(
                    config.hidden_size,
                    config.intermediate_size,
                    quant_config=quant_config,
                    prefix=f"{prefix}.net.0",
                    disable_tp=disable_tp,
                ),
                "3": RowParallelLinear(
                    config.intermediate_size,
                    config.hidden_size,
                    quant_config=quant_config,
                    prefix=f"{prefix}.net.3",
                    disable_tp=disable_tp,
                ),
            }
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states, _ = self.net["0"](states)
        states, _ = self.net["3"](F.gelu(states))
        return states


class EncoderLayer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(
        self,
        config: Any,
        quant_config: QuantizationConfig | None,
        disable_tp: bool,
        prefix: str,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = EncoderAttention(
            config, quant_config, disable_tp, prefix=f"{prefix}.attn"
        )
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn = EncoderFeedForward(
            config, quant_config, disable_tp, prefix=f"{prefix}.ffn"
        )

    def forward(self, states: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        states = states + self.attn(self.norm1(states), packed)
        return states + self.ffn(self.norm2(states))


class FeatureStacking(nn.Module):
    """Projection of stacked spectrogram frames to the encoder's hidden size."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        self.proj = ReplicatedLinear(
            config.subsampling_factor * config.num_mel_bins,
            config.hidden_size,
            bias=False,
            prefix=f"{prefix}.proj",
            return_bias=False,
        )

    def forward(self, stacked: torch.Tensor) -> torch.Tensor:
        return self.proj(stacked)


class TransformerEncoder(nn.Module):
    """NeMo's transformer encoder, on sequences packed without padding.

    Built in the default dtype of its caller.

    Args:
        config: sizes (`hidden_size`, `num_hidden_layers`, ...).
        quant_config: quantisation of the layers' linears, if any.
        with_pre_encode: own the projection of stacked spectrogram frames.
        prefix: name of this module in the model.
    """

    def __init__(
        self,
        config: Any,
        quant_config: QuantizationConfig | None = None,
        with_pre_encode: bool = True,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.config = config
        self.disable_tp = is_vit_use_data_parallel(config.num_attention_heads)
        if with_pre_encode:
            self.pre_encode = FeatureStacking(config, prefix=f"{prefix}.pre_encode")
        self.embed_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(
            EncoderLayer(
                config, quant_config, self.disable_tp, prefix=f"{prefix}.layers.{index}"
            )
            for index in range(config.num_hidden_layers)
        )
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        head_dim = config.hidden_size // config.num_attention_heads
        self.rotary_dim = int(head_dim * config.partial_rotary_factor)

    @property
    def dtype(self) -> torch.dtype:
        return self.final_norm.weight.dtype

    def _pack(
        self, lengths: list[int], masked_tail: list[bool], device: torch.device
    ) -> PackedSequences:
        positions = torch.cat([torch.arange(length) for length in lengths])
        frequencies = self.config.rope_theta ** (
            -torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        )
        angles = (positions[:, None] * frequencies).to(device)

        # The layers share one attention geometry: any of them can size it.
        attn = self.layers[0].attn.attn if len(self.layers) else None
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        cu_seqlens, max_seqlen, sequence_lengths = torch.empty(0), None, None
        if attn is not None:
            backend = attn.attn_backend
            tp_size = 1 if self.disable_tp else get_tensor_model_parallel_world_size()
            # A Python int sizes kernels on the host; only backends that want a
            # maximum get one.
            if longest := MMEncoderAttention.compute_max_seqlen(backend, bounds):
                max_seqlen = torch.tensor(longest, dtype=torch.int32)
            sequence_lengths = MMEncoderAttention.maybe_compute_seq_lens(
                backend, bounds, device
            )
            cu_seqlens = MMEncoderAttention.maybe_recompute_cu_seqlens(
                backend, bounds, self.config.hidden_size, tp_size, device
            )
        return PackedSequences(
            lengths,
            masked_tail if any(masked_tail) else [],
            angles.cos(),
            angles.sin(),
            cu_seqlens,
            max_seqlen,
            sequence_lengths,
        )

    def forward(
        self, sequences: list[torch.Tensor], masked_tail: Sequence[bool] = ()
    ) -> list[torch.Tensor]:
        """Encode sequences of pre-encoded frames, each on its own.

        Args:
            sequences: (frames, hidden) each.
            masked_tail: see `PackedSequences`.

        Returns:
            One (frames, hidden) tensor for each sequence.
        """
        lengths = [len(sequence) for sequence in sequences]
        masked_tail = list(masked_tail)
        outputs: list[torch.Tensor] = []
        for batch in _batch_by_frames(lengths, _FRAME_BUDGET):
            states = torch.cat(sequences[batch])
            packed = self._pack(lengths[batch], masked_tail[batch], states.device)
            states = self.embed_norm(states)
            for layer in self.layers:
                states = layer(states, packed)
            outputs += self.final_norm(states).split(packed.lengths)
        return outputs


class SpeakerCache:
    """What the diarizer remembers of one clip: a speaker cache and a FIFO.

    Frames leave the FIFO for the cache; a full cache keeps the frames that tell its
    speakers apart best, in order of speaker, then time. The scores are those of
    streaming Sortformer (arXiv:2507.18446, section 3).

    Attributes:
        embeds: (cache frames, hidden) pre-encoded frames of the cache.
        fifo: (FIFO frames, hidden) the newest frames.
    """

    def __init__(self, config: Any, embeds: torch.Tensor) -> None:
        self.config = config
        self.embeds = self.fifo = embeds[:0]
        self.probs = embeds.new_empty(0, config.num_speakers)
        self.is_compressed = False
        # Cache slots of a speaker, without its silence frames.
        self.budget = (
            config.speaker_cache_length // config.num_speakers
            - config.silence_frames_per_speaker
        )

    def __len__(self) -> int:
        return len(self.embeds) + len(self.fifo)

    def push(
        self,
        chunk: torch.Tensor,
        cached_probs: torch.Tensor,
        chunk_probs: torch.Tensor,
        silence: torch.Tensor,
    ) -> None:
        """Take in a diarized chunk.

        Args:
            chunk: (frames, hidden) its pre-encoded frames, without context.
            cached_probs: (`len(self)`, speakers) probabilities that this step gave
                the cache and the FIFO.
            chunk_probs: (frames, speakers) probabilities of the chunk.
            silence: (hidden,) learnt silence frame.
        """
        config, num_cached = self.config, len(self.embeds)
        fifo = torch.cat([self.fifo, chunk])
        if len(fifo) <= config.fifo_length:
            self.fifo = fifo
            return

        num_popped = min(
            max(config.speaker_cache_update_period, len(fifo) - config.fifo_length),
            len(fifo),
        )
        fifo_probs = torch.cat([cached_probs[num_cached:], chunk_probs])
        # Until it is compressed, the cache is the start of the clip in order, and
        # this step's probabilities of it are the better ones. Later they are not: its
        # frames are out of context.
        probs = self.probs if self.is_compressed else cached_probs[:num_cached]
        self.embeds = torch.cat([self.embeds, fifo[:num_popped]])
        self.probs = torch.cat([probs, fifo_probs[:num_popped]])
        self.fifo = fifo[num_popped:]
        if len(self.embeds) > config.speaker_cache_length:
            self._compress(silence)

    def _scores(self) -> torch.Tensor:
        """(frames, speakers): how well a frame shows one speaker speaking alone."""
        config, probs = self.config, self.probs
        floor = config.prediction_score_threshold
        present = probs.clamp(min=floor).log()
        absent = (1.0 - probs).clamp(min=floor).log()
        scores = present - absent + absent.sum(1, keepdim=True) - math.log(0.5)

        is_speech = probs > 0.5
        is_positive = is_speech & (scores > 0)
        # A speaker with enough clean frames does without the overlapped ones.
        enough = is_positive.sum(0) >= math.floor(
            self.budget * config.min_positive_scores_rate
        )
        return scores.masked_fill(
            ~torch.where(enough, is_positive, is_speech), -math.inf
        )

    def _compress(self, silence: torch.Tensor) -> None:
        config, num_frames = self.config, len(self.embeds)
        scores = self._scores()
        scores[config.speaker_cache_length :] += config.latest_frames_score_boost
        # Two rounds see to it that every speaker keeps its best frames.
        for rate, boost in (
            (config.strong_boost_rate, 2 * math.log(2)),
            (config.weak_boost_rate, math.log(2)),
        ):
            best = scores.topk(math.floor(self.budget * rate), dim=0).indices
            scores.scatter_add_(0, best, scores.new_full(best.shape, boost))
        scores = F.pad(
            scores, (0, 0, 0, config.silence_frames_per_speaker), value=math.inf
        )

        rows = len(scores)
        top, picks = scores.T.flatten().topk(config.speaker_cache_length)
        # Places for which there is no frame go to the end, as silence.
        picks = picks.masked_fill(top == -math.inf, scores.numel()).sort().values
        frames = (picks % rows).masked_fill(picks == scores.numel(), num_frames)
        frames = frames.clamp(max=num_frames)
        self.embeds = torch.cat([self.embeds, silence[None]])[frames]
        self.probs = F.pad(self.probs, (0, 0, 0, 1))[frames]
        self.is_compressed = True


class SortformerModules(nn.Module):
    """Diarization head: encoder states to speaker logits at the spectrogram rate."""

    def __init__(self, audio_config: Any) -> None:
        super().__init__()
        config, encoder = audio_config.diarizer, audio_config.diarizer_encoder
        hidden_size = config.head_hidden_size
        self.factor = encoder.subsampling_factor
        self.encoder_proj = nn.Linear(encoder.hidden_size, hidden_size)
        self.subpixel_upsample = nn.Conv1d(
            hidden_size, hidden_size * self.factor, kernel_size=3, padding=1
        )
        self.first_hidden_to_hidden = nn.Linear(hidden_size, hidden_size)
        self.single_hidden_to_spks = nn.Linear(hidden_size, config.num_speakers)
        self.learnable_sil_emb = nn.Parameter(torch.zeros(encoder.hidden_size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(frames, hidden) to (frames x factor, speakers)."""
        states = self.subpixel_upsample(self.encoder_proj(states).T).T
        states = states.reshape(len(states) * self.factor, -1)
        states = self.first_hidden_to_hidden(states.relu())
        return self.single_hidden_to_spks(states.relu())


class SortformerDiarizer(nn.Module):
    """Speaker diarizer, chunk after chunk of a clip, clips side by side.

    Float32 whatever the model's dtype: its decisions are hard thresholds and a top-k
    that later chunks build on, so rounding must not turn with the batch. It is 3 % of
    the tower's work.
    """

    def __init__(self, audio_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = audio_config
        self.encoder = TransformerEncoder(
            audio_config.diarizer_encoder, prefix=f"{prefix}.encoder"
        )
        self.sortformer_modules = SortformerModules(audio_config)

    def forward(self, features: list[torch.Tensor]) -> list[torch.Tensor]:
        """Diarize clips.

        Args:
            features: (frames, mels) raw log-mels of each clip.

        Returns:
            (encoder frames x factor, speakers) logits of each clip.
        """
        config = self.config
        factor = config.subsampling_factor
        embeds, chunks, caches = [], [], []
        for clip in features:
            frames = self.encoder.pre_encode(stack_frames(clip, factor))
            chunks.append(
                plan_chunks(
                    len(frames),
                    config.chunk_length,
                    config.chunk_left_context,
                    config.chunk_right_context,
                )
            )
            caches.append(SpeakerCache(config.diarizer, frames))
            # The transform of a clip has one frame more than the valid ones. Where it
            # begins an encoder frame, that frame is masked, but the last valid one
            # meets it in the upsampling convolution.
            if len(clip) % factor == 0:
                frames = F.pad(frames, (0, 0, 0, 1))
            embeds.append(frames)

        logits: list[list[torch.Tensor]] = [[] for _ in features]
        for step in range(max(map(len, chunks), default=0)):
            active = [i for i, plan in enumerate(chunks) if step < len(plan)]
            ends = [self.window_end(chunks[i][step], len(embeds[i])) for i in active]
            outputs = self.step(
                [chunks[i][step] for i in active],
                [
                    embeds[i][chunks[i][step].context_start : end]
                    for i, end in zip(active, ends)
                ],
                [end > chunks[i][-1].end for i, end in zip(active, ends)],
                [caches[i] for i in active],
                # Nothing looks at a cache after its last chunk.
                [step + 1 == len(chunks[i]) for i in active],
            )
            for i, output in zip(active, outputs):
                logits[i].append(output)
        return [torch.cat(clip_logits) for clip_logits in logits]

    def window_end(self, chunk: EncoderChunk, num_frames: int) -> int:
        """Where the frames end that a chunk sees, of `num_frames` with the tail."""
        end = min(chunk.start + self.config.chunk_length, num_frames)
        return min(end + self.config.chunk_right_context, num_frames)

    def step(
        self,
        chunks: Sequence[EncoderChunk],
        windows: Sequence[torch.Tensor],
        masked_tail: Sequence[bool],
        caches: Sequence[SpeakerCache],
        is_last: Sequence[bool],
    ) -> list[torch.Tensor]:
        """Diarize the next chunk of some clips.

        Args:
            chunks: which frames of each clip.
            windows: (frames, hidden) pre-encoded, from the chunk's `context_start` on.
            masked_tail: whether the last frame of a window is padding.
            caches: what is remembered of each clip; takes in the chunk ...
            is_last: ... unless it is the clip's last.

        Returns:
            (chunk frames x factor, speakers) logits of each clip.
        """
        factor = self.config.subsampling_factor
        silence = self.sortformer_modules.learnable_sil_emb
        inputs = [
            torch.cat([cache.embeds, cache.fifo, window])
            for cache, window in zip(caches, windows)
        ]
        outputs = []
        for chunk, window, cache, last, states in zip(
            chunks, windows, caches, is_last, self.encoder(inputs, masked_tail)
        ):
            logits = self.sortformer_modules(states)
            num_cached, length = len(cache), chunk.end - chunk.start
            offset = chunk.start - chunk.context_start
            start = num_cached + offset
            outputs.append(logits[start * factor : (start + length) * factor])
            if not last:
                probs = frame_probabilities(logits, factor)
                cache.push(
                    window[offset : offset + length],
                    probs[:num_cached],
                    probs[start : start + length],
                    silence,
                )
        return outputs


def frame_probabilities(speaker_logits: torch.Tensor, factor: int) -> torch.Tensor:
    """Mean speaker probabilities over the spectrogram frames of an encoder frame.

    Args:
        speaker_logits: (encoder frames x factor, speakers).
        factor: spectrogram frames in an encoder frame.

    Returns:
        (encoder frames, speakers).
    """
    return speaker_logits.sigmoid().unflatten(0, (-1, factor)).mean(1)


def speaker_table(num_speakers: int, hidden_size: int) -> torch.Tensor:
    """(speakers, hidden) sinusoids that mark the active speakers.

    The table of "Attention Is All You Need" (arXiv:1706.03762, section 3.5), with the
    speaker for position.
    """
    rates = 10000.0 ** (
        -torch.arange(0, hidden_size, 2, dtype=torch.float32) / hidden_size
    )
    angles = torch.arange(num_speakers, dtype=torch.float32)[:, None] * rates
    table = torch.stack([angles.sin(), angles.cos()], dim=-1)
    return table.flatten(1)[:, :hidden_size]


class AudioStates(NamedTuple):
    """What the encoders find in one clip.

    Attributes:
        asr_states: (encoder frames, hidden), before `asr_norm`: the input of the
            word-timestamp head.
        speaker_logits: (encoder frames x factor, speakers) float32.
    """

    asr_states: torch.Tensor
    speaker_logits: torch.Tensor


class ParallelExpertEncoder(nn.Module):
    """Speech recognition encoder and diarizer on the same spectrogram, and fusion."""

    def __init__(
        self,
        config: Any,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.config = config
        self.asr_encoder = TransformerEncoder(
            config.asr_encoder, quant_config, prefix=f"{prefix}.asr_encoder"
        )
        with set_default_torch_dtype(torch.float32):
            self.diarization_model = SortformerDiarizer(
                config, prefix=f"{prefix}.diarization_model"
            )
            self.asr_norm = nn.LayerNorm(config.hidden_size)
            self.diar_norm = nn.LayerNorm(config.num_speakers)
        self.register_buffer(
            "speaker_table",
            speaker_table(config.num_speakers, config.hidden_size),
            persistent=False,
        )

    def encode_speech(self, features: list[torch.Tensor]) -> list[torch.Tensor]:
        """Recognition states of clips, (encoder frames, hidden) each.

        The chunks of all clips are independent of each other and run together.

        Args:
            features: (frames, mels) log-mels of each clip.
        """
        config, encoder = self.config, self.asr_encoder
        windows, plans = [], []
        for clip in features:
            stacked = stack_frames(
                normalize_per_feature(clip), config.subsampling_factor
            )
            frames = encoder.pre_encode(stacked.to(encoder.dtype))
            plan = plan_chunks(
                len(frames),
                config.chunk_length,
                config.chunk_left_context,
                config.chunk_right_context,
            )
            plans.append(plan)
            windows += [frames[c.context_start : c.context_end] for c in plan]

        outputs = iter(encoder(windows))
        return [
            torch.cat(
                [
                    output[c.start - c.context_start : c.end - c.context_start]
                    for c, output in zip(plan, outputs)
                ]
            )
            for plan in plans
        ]

    def forward(self, features: list[torch.Tensor]) -> list[AudioStates]:
        return [
            AudioStates(*clip)
            for clip in zip(
                self.encode_speech(features), self.diarization_model(features)
            )
        ]

    def fuse(self, states: AudioStates) -> torch.Tensor:
        """Add the active speakers to the recognition states.

        Returns:
            (encoder frames, hidden) float32.
        """
        config = self.config
        probs = frame_probabilities(states.speaker_logits, config.subsampling_factor)
        active = (probs > config.speaker_activity_threshold).to(torch.float32)
        return self.asr_norm(states.asr_states.float()) + (
            self.diar_norm(active) @ self.speaker_table
        )


def checkpoint_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Whole shape of every parameter, however it is sharded here."""
    shapes = {name: param.shape for name, param in module.named_parameters()}
    for prefix, child in module.named_modules():
        # A replicated linear knows the number of ranks, too, but is whole on each.
        if not isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
            continue
        if (tp_size := child.tp_size) == 1:
            continue
        sharded = (
            "input_dim"
            if child.input_size != child.input_size_per_partition
            else "output_dim"
        )
        for name, param in child.named_parameters(prefix=prefix):
            if (dim := getattr(param, sharded, None)) is not None:
                shape = list(param.shape)
                shape[dim] *= tp_size
                shapes[name] = torch.Size(shape)
    return shapes


def check_shape(
    name: str, tensor: torch.Tensor, expected: Sequence[int] | None
) -> None:
    """Check a tensor of the checkpoint, `name` being its whole name there.

    Raises:
        ValueError: it is unknown (`expected` is None), or of another shape.
    """
    if expected is None:
        raise ValueError(f"Unknown tensor {name!r} in checkpoint.")
    # The scales of a quantised linear are laid out by its method.
    if not name.endswith("_scale") and tensor.shape != expected:
        raise ValueError(
            f"Tensor {name!r} has shape {tuple(tensor.shape)}, "
            f"expected {tuple(expected)}."
        )


class Nemotron3_5TranscribeAudioTower(nn.Module):
    """Waveforms to decoder embeddings.

    Args:
        config: audio part of `Nemotron3_5TranscribeConfig`.
        quant_config: quantisation of the recognition encoder's linears, if any.
        prefix: name of this module in the model.
    """

    def __init__(
        self,
        config: Any,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.config = config
        self.preprocessor = LogMelSpectrogram(config.preprocessor)
        self.encoder = ParallelExpertEncoder(
            config, quant_config, prefix=maybe_prefix(prefix, "encoder")
        )
        self.proj = ReplicatedLinear(
            config.hidden_size,
            config.output_size,
            prefix=maybe_prefix(prefix, "proj"),
            return_bias=False,
        )

    def encode_states(
        self, signals: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> list[AudioStates]:
        """Run the encoders on clips; see `encode` for the arguments."""
        device = self.encoder.speaker_table.device
        features = [
            self.preprocessor(signal[:length].to(device))
            for signal, length in zip(signals, lengths, strict=True)
        ]
        return self.encoder(features)

    def encode(
        self, signals: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        """Embed clips.

        Args:
            signals: (samples,) each, at the configured rate, perhaps padded.
            lengths: valid samples of each.

        Returns:
            (tokens, decoder hidden) for each clip, with
            `get_num_audio_tokens(length)` tokens.
        """
        embeddings = []
        for states in self.encode_states(signals, lengths):
            fused = self.encoder.fuse(states)
            embeddings.append(self.proj(fused.to(self.proj.weight.dtype)))
        return embeddings

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors named as in the checkpoint, without `perception.`.

        Each tensor is copied before the next one is asked for. Call again for more.

        Returns:
            Names of the parameters that were loaded.

        Raises:
            ValueError: a tensor is unknown or has another shape than its parameter.
        """
        params = dict(self.named_parameters())
        constants = dict(self.preprocessor.named_buffers(prefix="preprocessor"))
        shapes = checkpoint_shapes(self) | {
            name: constant.shape for name, constant in constants.items()
        }
        loaded: set[str] = set()
        for name, tensor in weights:
            if name.startswith(_UNUSED_PREFIXES) or name.endswith(_EXTRA_STATE_SUFFIX):
                continue
            check_shape(f"perception.{name}", tensor, shapes.get(name))
            if name in params:
                param = params[name]
                load = getattr(param, "weight_loader", default_weight_loader)
                load(param, tensor)
                loaded.add(name)
            else:
                self.preprocessor.load_constant(name.rsplit(".", 1)[1], tensor)
        return loaded
