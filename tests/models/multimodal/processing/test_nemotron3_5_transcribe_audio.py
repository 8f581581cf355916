# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The audio tower against the independent reference, and its own invariants."""

import math

import numpy as np
import pytest
import torch

from tests.engine import CHECKPOINTS
from tests.goldens import Goldens
from tests.models.multimodal.tower import build_tower
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.nemotron3_5_transcribe_audio import (
    SpeakerCache,
    _batch_by_frames,
    checkpoint_shapes,
    get_num_audio_tokens,
    get_num_mel_frames,
    normalize_per_feature,
    plan_chunks,
    speaker_table,
    stack_frames,
)


@pytest.fixture(scope="module", params=sorted(CHECKPOINTS))
def checkpoint(request):
    return request.param


@pytest.fixture(scope="module")
def tower(checkpoint):
    with build_tower(CHECKPOINTS[checkpoint], torch.float32) as built:
        yield built


@pytest.fixture(scope="module")
def goldens(checkpoint):
    return Goldens(f"{checkpoint}.safetensors")


def clip_names(goldens):
    return [
        name for name in goldens.info["clips"] if f"{name}.logmel" in goldens.tensors
    ]


def relative_error(actual: torch.Tensor, expected: np.ndarray) -> float:
    """Largest deviation, as a part of the largest expected magnitude."""
    scale = max(float(np.abs(expected).max()), 1e-6)
    return float(np.abs(actual.numpy() - expected).max()) / scale


@torch.inference_mode()
def test_logmel_equals_reference(tower, goldens):
    """Log-mels are within 1e-4 of the reference's, for every length."""
    assert clip_names(goldens)
    for name in clip_names(goldens):
        signal = torch.from_numpy(goldens.audio(name))
        rows, expected = goldens.rows(name, "logmel")
        logmel = tower.preprocessor(signal)
        assert len(logmel) == get_num_mel_frames(len(signal), tower.config.preprocessor)
        assert np.abs(logmel[rows].numpy() - expected).max() < 1e-4, name


@torch.inference_mode()
def test_encoders_equal_reference(tower, goldens):
    """Recognition states and speaker probabilities are the reference's.

    Includes clips whose speaker cache is compressed several times.
    """
    for name in clip_names(goldens):
        signal = torch.from_numpy(goldens.audio(name))
        (states,) = tower.encode_states([signal], [len(signal)])
        rows, expected = goldens.rows(name, "asr_states")
        assert relative_error(states.asr_states[rows], expected) < 1e-4, name
        rows, expected = goldens.rows(name, "speaker_probs_10ms")
        probs = states.speaker_logits.sigmoid()
        assert np.abs(probs[rows].numpy() - expected).max() < 1e-4, name


@torch.inference_mode()
def test_embeddings_equal_reference(tower, goldens):
    """Tower output is within 1e-4 of the reference's, relative, alone and batched."""
    names = clip_names(goldens)
    signals = [torch.from_numpy(goldens.audio(name)) for name in names]
    together = tower.encode(signals, [len(signal) for signal in signals])
    for name, signal, batched in zip(names, signals, together):
        (alone,) = tower.encode([signal], [len(signal)])
        rows, expected = goldens.rows(name, "embeddings")
        assert len(alone) == get_num_audio_tokens(len(signal), tower.config)
        assert relative_error(alone[rows], expected) < 1e-4, name
        assert relative_error(batched[rows], expected) < 1e-4, name


@torch.inference_mode()
def test_padded_batch_equals_ragged_clips(tower):
    """Samples past a clip's length are not heard."""
    signals = torch.rand(2, 20_000, generator=torch.Generator().manual_seed(1)) - 0.5
    padded = tower.encode(signals, [20_000, 7_000])
    (alone,) = tower.encode([signals[1, :7_000]], [7_000])
    assert len(padded[1]) == len(alone)
    torch.testing.assert_close(padded[1], alone, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_frame_budget_changes_nothing(tower, monkeypatch):
    """Passes through the encoders may be cut anywhere between windows."""
    from vllm.model_executor.models import nemotron3_5_transcribe_audio as module

    chunk_samples = tower.config.chunk_length * 1280
    generator = torch.Generator().manual_seed(2)
    signals = [
        torch.rand(n, generator=generator) - 0.5
        for n in (3_000, int(2.2 * chunk_samples), 900)
    ]
    lengths = [len(signal) for signal in signals]
    expected = tower.encode(signals, lengths)
    monkeypatch.setattr(module, "_FRAME_BUDGET", 1)
    for actual, whole in zip(tower.encode(signals, lengths), expected):
        torch.testing.assert_close(actual, whole, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_spectrogram_blocks_change_nothing(tower, monkeypatch):
    """A long clip is transformed in blocks; their seams do not show."""
    from vllm.model_executor.models import nemotron3_5_transcribe_audio as module

    signal = torch.rand(16_000, generator=torch.Generator().manual_seed(3)) - 0.5
    whole = tower.preprocessor(signal)
    monkeypatch.setattr(module, "_SPECTROGRAM_BLOCK", 7)
    torch.testing.assert_close(tower.preprocessor(signal), whole)


@pytest.mark.parametrize("num_samples", [1, 2, 159, 160, 161, 319, 1279, 1280, 1281])
def test_token_count_matches_embeddings(tower, num_samples):
    """Any clip of at least one sample yields the tokens that its prompt reserves."""
    with torch.inference_mode():
        (embeddings,) = tower.encode([torch.zeros(num_samples)], [num_samples])
    assert len(embeddings) == get_num_audio_tokens(num_samples, tower.config)
    assert torch.isfinite(embeddings).all()


def test_bfloat16_tower_keeps_speaker_decisions(checkpoint, tower, goldens):
    """In bfloat16 the diarizer still decides as the float32 reference does."""
    with (
        torch.inference_mode(),
        build_tower(CHECKPOINTS[checkpoint], torch.bfloat16) as narrow,
    ):
        assert narrow.proj.weight.dtype == torch.bfloat16
        for name in clip_names(goldens):
            signal = torch.from_numpy(goldens.audio(name))
            (wide,) = tower.encode_states([signal], [len(signal)])
            (states,) = narrow.encode_states([signal], [len(signal)])
            assert torch.equal(wide.speaker_logits > 0, states.speaker_logits > 0)
            assert states.asr_states.dtype == torch.bfloat16


def test_load_rejects_unknown_and_misshapen_tensors(tower):
    with pytest.raises(ValueError, match="perception.encoder.asr_encoder.extra"):
        tower.load_weights([("encoder.asr_encoder.extra.weight", torch.zeros(1))])
    with pytest.raises(ValueError, match="perception.proj.bias.*expected"):
        tower.load_weights([("proj.bias", torch.zeros(3))])


def test_replicated_linears_are_whole_on_every_rank(tower, monkeypatch):
    """They know the number of tensor-parallel ranks, but are not sharded."""
    replicated = [m for m in tower.modules() if isinstance(m, ReplicatedLinear)]
    assert replicated
    for module in replicated:
        monkeypatch.setattr(module, "tp_size", 2)
    assert checkpoint_shapes(tower) == {
        name: param.shape for name, param in tower.named_parameters()
    }


def test_load_skips_what_inference_does_not_read(tower):
    skipped = [
        "encoder.diarization_model.sortformer_modules.hidden_to_spks.weight",
        "encoder.diarization_model.preprocessor.featurizer.fb",
        "encoder.asr_encoder.layers.0.attn.w_qkv._extra_state",
    ]
    assert not tower.load_weights([(name, torch.zeros(0)) for name in skipped])


@pytest.mark.parametrize("num_frames", [1, 8, 19, 20, 21, 40, 68])
def test_chunks_cover_a_clip_once(num_frames):
    chunks = plan_chunks(num_frames, 20, 5, 3)
    covered = [frame for c in chunks for frame in range(c.start, c.end)]
    assert covered == list(range(num_frames))
    for chunk in chunks:
        assert max(chunk.start - 5, 0) == chunk.context_start
        assert min(chunk.end + 3, num_frames) == chunk.context_end


def test_no_frames_no_chunks():
    assert plan_chunks(0, 20, 5, 3) == []


@pytest.mark.parametrize(
    ("lengths", "budget", "sizes"),
    [
        ([], 10, []),
        ([3, 3, 3], 6, [2, 1]),
        ([30, 1], 6, [1, 1]),
        ([1, 30, 1], 6, [1, 1, 1]),
        ([2, 2, 2], 100, [3]),
    ],
)
def test_batches_respect_the_budget(lengths, budget, sizes):
    batches = list(_batch_by_frames(lengths, budget))
    assert [batch.stop - batch.start for batch in batches] == sizes


def test_stacking_pads_the_last_group_with_zeros():
    stacked = stack_frames(torch.arange(6.0).view(3, 2), 2)
    assert stacked.tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]


def test_normalization_is_unbiased_over_the_clip():
    features = torch.tensor([[1.0], [2.0], [6.0]])
    std = features.std(0, unbiased=True)
    expected = (features - 3) / (std + 1e-5)
    torch.testing.assert_close(normalize_per_feature(features), expected)
    assert normalize_per_feature(features[:1]).tolist() == [[0.0]]


def test_speaker_table_is_sinusoidal():
    table = speaker_table(3, 4)
    expected = [math.sin(2.0), math.cos(2.0), math.sin(0.02), math.cos(0.02)]
    torch.testing.assert_close(table[2], torch.tensor(expected))


def cache_config(**changes):
    from types import SimpleNamespace

    return SimpleNamespace(
        **{
            "num_speakers": 2,
            "fifo_length": 2,
            "speaker_cache_length": 8,
            "speaker_cache_update_period": 3,
            "silence_frames_per_speaker": 1,
            "prediction_score_threshold": 0.25,
            "latest_frames_score_boost": 0.05,
            "strong_boost_rate": 0.75,
            "weak_boost_rate": 1.5,
            "min_positive_scores_rate": 0.5,
            **changes,
        }
    )


def push(cache, frames, probs):
    """Push frames whose every probability this step, cached ones too, is given."""
    cached = torch.full((len(cache), 2), 0.5)
    cache.push(frames, cached, probs, silence=torch.tensor([-1.0]))


def test_fifo_overflow_moves_the_oldest_frames():
    """Nothing moves until the FIFO is full; then at least one period's worth does."""
    cache = SpeakerCache(cache_config(), torch.zeros(0, 1))
    push(cache, torch.arange(2.0)[:, None], torch.full((2, 2), 0.1))
    assert (len(cache.embeds), len(cache.fifo)) == (0, 2)
    push(cache, torch.tensor([[2.0], [3.0]]), torch.full((2, 2), 0.1))
    assert cache.embeds.flatten().tolist() == [0, 1, 2]
    assert cache.fifo.flatten().tolist() == [3]


def test_compression_groups_frames_by_speaker():
    """A full cache keeps each speaker's clear frames, in order, and one silence."""
    cache = SpeakerCache(cache_config(), torch.zeros(0, 1))
    probs = torch.tensor([[0.99, 0.01], [0.01, 0.99]]).repeat(6, 1)
    push(cache, torch.arange(12.0)[:, None], probs)
    assert cache.is_compressed
    kept = cache.embeds.flatten().tolist()
    assert len(kept) == 8
    first, second = kept[: kept.index(-1.0)], kept[kept.index(-1.0) + 1 : -1]
    assert kept[-1] == -1.0
    assert first == sorted(first) and all(frame % 2 == 0 for frame in first)
    assert second == sorted(second) and all(frame % 2 == 1 for frame in second)


def test_compression_fills_with_silence_where_nobody_speaks():
    cache = SpeakerCache(cache_config(), torch.zeros(0, 1))
    push(cache, torch.arange(12.0)[:, None], torch.full((12, 2), 0.1))
    assert cache.embeds.flatten().tolist() == [-1.0] * 8
    assert cache.probs.abs().max() == 0
