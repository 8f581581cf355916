# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The word timing head, window by window, and the way from audio to word times."""

import asyncio
import gc
import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import save_file

from tests.engine import CHECKPOINTS
from tests.goldens import HELDOUT, Goldens
from tests.models.multimodal.aligning import (
    AligningEngine,
    AsyncAligningEngine,
    aligning_model,
)
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models import nemotron3_5_transcribe_timestamps as module
from vllm.model_executor.models.nemotron3_5_transcribe_audio import feature_statistics
from vllm.model_executor.models.nemotron3_5_transcribe_timestamps import (
    encode_window,
    plan_recording,
    read_head_config,
)
from vllm.transformers_utils.configs.nemotron3_5_transcribe import (
    Nemotron3_5TranscribeConfig,
)
from vllm.transformers_utils.configs.nemotron3_5_transcribe_audio import CTC_CONFIG_KEY
from vllm_nemotron3_5_transcribe.alignment import (
    AlignmentError,
    align,
    align_async,
    can_align_async,
)

# Words that both checkpoints have pieces for.
TEXTS = {"demo": "one two three", "odd": "speaker and speaker"}


@pytest.fixture(scope="module", params=sorted(CHECKPOINTS))
def checkpoint(request):
    return request.param


@pytest.fixture(scope="module")
def model(checkpoint):
    with aligning_model(CHECKPOINTS[checkpoint]) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def goldens(checkpoint):
    return Goldens(f"{checkpoint}.safetensors")


@torch.inference_mode()
def encode(model, signal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all classes and speaker logits, window by window."""
    tower, head = model.audio_tower, model.ctc_timestamp
    features = tower.preprocessor(signal)
    factor = tower.config.subsampling_factor
    classes = torch.arange(head.config.num_classes)
    state, log_probs, speaker_logits = None, [], []
    for index, chunk in enumerate(plan_recording(tower.config, len(features))):
        output = encode_window(
            tower,
            head,
            features[chunk.context_start * factor : chunk.context_end * factor],
            feature_statistics(features),
            len(features),
            index,
            classes,
            state,
        )
        state = output.state
        log_probs.append(output.log_probs)
        speaker_logits.append(output.speaker_logits)
    assert state is None
    return torch.cat(log_probs), torch.cat(speaker_logits)


def test_head_equals_reference(model, goldens):
    """The reference's log-probabilities, over seams between windows too."""
    clips = [
        name
        for name in goldens.info["clips"]
        if f"{name}.ctc_logits" in goldens.tensors
    ]
    assert len(clips) >= 4
    for clip in clips:
        log_probs, _ = encode(model, torch.from_numpy(goldens.audio(clip)))
        rows, logits = goldens.rows(clip, "ctc_logits")
        expected = torch.from_numpy(logits).log_softmax(-1)
        assert (log_probs[rows] - expected).abs().max() < 5e-4, clip


def test_windows_give_the_speakers_of_the_whole_clip(model, goldens):
    """The diarizer's memory survives the way from window to window, bit for bit."""
    for clip in ("chunk_and_one", "chunks_3_4", "long"):
        signal = torch.from_numpy(goldens.audio(clip))
        with torch.inference_mode():
            (whole,) = model.audio_tower.encode_states([signal], [len(signal)])
        _, speaker_logits = encode(model, signal)
        assert torch.equal(speaker_logits, whole.speaker_logits), clip


def test_frames_may_be_classified_in_any_blocks(model, goldens, monkeypatch):
    signal = torch.from_numpy(goldens.audio("eight_frames"))
    whole, _ = encode(model, signal)
    monkeypatch.setattr(module, "_CLASSIFIED_FRAMES", 3)
    blocks, _ = encode(model, signal)
    torch.testing.assert_close(blocks, whole)


def test_the_worker_keeps_nothing(model, checkpoint, goldens):
    """Its answer depends on the request alone, in any order, any number of times."""
    engine = AligningEngine(model)
    audio, text = goldens.audio("chunks_3_4"), TEXTS[checkpoint]
    first = align(engine, audio, text)
    attributes = set(vars(engine.worker))
    align(engine, goldens.audio("chunk_and_one"), text)
    assert align(engine, audio, text) == first
    assert set(vars(engine.worker)) == attributes
    windows = len(plan_recording(model.audio_tower.config, int(first.duration * 100)))
    assert engine.calls.count("encode_alignment_window") >= 2 * windows


def test_alignments_side_by_side_equal_those_one_by_one(model, checkpoint, goldens):
    """One window at a time in the engine, whoever asks; the clips take turns."""
    clips = ["chunks_3_4", "chunk_and_one", "eight_frames", "chunk"] * 2
    expected = [
        align(AligningEngine(model), goldens.audio(clip), TEXTS[checkpoint])
        for clip in clips
    ]
    engine = AsyncAligningEngine(model)

    async def all_at_once():
        assert await can_align_async(engine)
        return await asyncio.gather(
            *(align_async(engine, goldens.audio(c), TEXTS[checkpoint]) for c in clips)
        )

    assert asyncio.run(all_at_once()) == expected
    assert engine.most_running == 1
    # A second event loop, as in another server of the same process.
    assert asyncio.run(all_at_once()) == expected


def test_an_abort_leaves_nothing_behind(model, checkpoint, goldens):
    """The window under way is waited for before the next one is sent."""
    engine = AsyncAligningEngine(model)
    engine.pause = 0.05
    text = TEXTS[checkpoint]

    async def abort_some():
        await can_align_async(engine)
        tasks = [
            asyncio.create_task(align_async(engine, goldens.audio("chunks_3_4"), text))
            for _ in range(4)
        ]
        await asyncio.sleep(0.1)
        for task in tasks[:3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results[:3]] == [asyncio.CancelledError] * 3
        return results[3]

    survivor = asyncio.run(abort_some())
    assert survivor == align(AligningEngine(model), goldens.audio("chunks_3_4"), text)
    assert engine.most_running == 1 and engine.running == 0


def test_an_engine_that_is_gone_is_forgotten(model, checkpoint, goldens):
    def reference_to_used_engine():
        engine = AsyncAligningEngine(model)
        audio = goldens.audio("eight_frames")
        asyncio.run(align_async(engine, audio, TEXTS[checkpoint]))
        return weakref.ref(engine)

    reference = reference_to_used_engine()
    gc.collect()
    assert reference() is None


def test_a_failing_engine_is_reported_and_the_next_request_works(
    model, checkpoint, goldens, monkeypatch
):
    engine = AsyncAligningEngine(model)
    audio, text = goldens.audio("eight_frames"), TEXTS[checkpoint]
    working = engine.worker.encode_alignment_window

    async def both():
        await can_align_async(engine)

        def broken(request):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine.worker, "encode_alignment_window", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            await align_async(engine, audio, text)
        monkeypatch.setattr(engine.worker, "encode_alignment_window", working)
        return await align_async(engine, audio, text)

    assert asyncio.run(both()) == align(AligningEngine(model), audio, text)


@pytest.mark.parametrize("clip", ["one_sample", "one_hop", "one_frame", "chunk"])
def test_any_length_is_diarized_and_aligned_or_failed(model, checkpoint, goldens, clip):
    alignment = align(AligningEngine(model), goldens.audio(clip), TEXTS[checkpoint])
    total = len(TEXTS[checkpoint].split())
    assert len(alignment.words) == total or list(alignment.failed_tags) == ["0"]
    assert all(0 <= w.start <= w.end <= alignment.duration for w in alignment.words)


def test_other_special_tokens_are_not_words(model, checkpoint, goldens):
    engine, audio = AligningEngine(model), goldens.audio("chunk")
    text = TEXTS[checkpoint]
    with_tokens = align(engine, audio, f"<think></think>{text}<|im_end|>")
    assert with_tokens == align(engine, audio, text)


def test_bad_audio_and_empty_transcripts_are_refused(model, checkpoint, goldens):
    engine = AligningEngine(model)
    with pytest.raises(VLLMValidationError, match="NaN"):
        align(engine, np.full(1000, np.nan, np.float32), TEXTS[checkpoint])
    with pytest.raises(AlignmentError, match="no words"):
        align(engine, goldens.audio("chunk"), "<spk:0> <|im_end|>")
    assert "encode_alignment_window" not in engine.calls


def test_workers_of_another_kind_are_explained(model, checkpoint):
    class OtherWorkers(AsyncAligningEngine):
        async def collective_rpc(self, method, timeout=None, args=()):
            raise RuntimeError(f"Worker failed: Method {method!r} is not implemented.")

    engine = OtherWorkers(model)
    assert not asyncio.run(can_align_async(engine))
    with pytest.raises(AlignmentError, match="--worker-extension-cls"):
        audio = np.zeros(1600, np.float32)
        asyncio.run(align_async(engine, audio, TEXTS[checkpoint]))


def test_without_the_head_nothing_is_aligned():
    overrides = {"ctc_timestamps": {"enabled": False}}
    with aligning_model(CHECKPOINTS["odd"], hf_overrides=overrides) as headless:
        engine = AligningEngine(headless)
        with pytest.raises(AlignmentError, match="word timing head"):
            align(engine, np.zeros(1600, np.float32), "speaker")
        assert not asyncio.run(can_align_async(AsyncAligningEngine(headless)))


# --- Finding the head ----------------------------------------------------------------

SIZES = '{"feat_in": 40, "n_heads": 5, "num_classes": 61}'


def repository(*files):
    """What the hub tells of a repository: (tensor names, metadata) of each file."""
    return SimpleNamespace(
        files_metadata={
            str(index): SimpleNamespace(tensors=dict.fromkeys(names), metadata=metadata)
            for index, (names, metadata) in enumerate(files)
        }
    )


def test_sizes_are_read_from_a_repository_without_its_files(monkeypatch):
    asked = []

    def get_safetensors_metadata(model, revision):
        asked.append((model, revision))
        return repository(
            (["llm.lm_head.weight"], {"format": "pt"}),
            (["ctc_timestamp.decoder.upsample.weight"], {CTC_CONFIG_KEY: SIZES}),
        )

    monkeypatch.setattr(
        module.huggingface_hub, "get_safetensors_metadata", get_safetensors_metadata
    )
    config = Nemotron3_5TranscribeConfig()
    head = read_head_config("some/repository", "main", config)
    assert (head.hidden_size, head.num_classes) == (40, 62)
    assert asked == [("some/repository", "main")]


def test_an_unreachable_repository_means_no_word_times(monkeypatch):
    def get_safetensors_metadata(model, revision):
        raise ConnectionError("no network")

    monkeypatch.setattr(
        module.huggingface_hub, "get_safetensors_metadata", get_safetensors_metadata
    )
    assert read_head_config("some/repository", None, None) is None


def test_a_head_without_metadata_has_the_sizes_of_the_config(tmp_path):
    tensor = {"ctc_timestamp.decoder.upsample.weight": torch.zeros(1)}
    save_file(tensor, tmp_path / "model.safetensors")
    config = Nemotron3_5TranscribeConfig()
    assert read_head_config(str(tmp_path), None, config) == config.ctc_config


def test_a_damaged_file_is_left_to_the_loader(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"no header")
    save_file(
        {"ctc_timestamp.decoder.upsample.weight": torch.zeros(1)},
        tmp_path / "b.safetensors",
        {CTC_CONFIG_KEY: SIZES},
    )
    assert read_head_config(str(tmp_path), None, None).hidden_size == 40
    (tmp_path / "b.safetensors").unlink()
    assert read_head_config(str(tmp_path), None, None) is None


# --- Against what was really said ----------------------------------------------------


def timed_clips(kind):
    """Held-out clips with known times: description and samples."""
    audio, rate = soundfile.read(HELDOUT / "timed.ogg", dtype="float32")
    assert rate == 16000
    start = 0
    for entry in json.loads((HELDOUT / "timed.json").read_text("utf-8")):
        if entry["kind"] == kind:
            yield entry, audio[start : start + entry["samples"]]
        start += entry["samples"]
    assert start == len(audio)


@pytest.fixture(scope="module")
def demo():
    with aligning_model(CHECKPOINTS["demo"]) as loaded:
        yield AligningEngine(loaded)


def test_words_start_when_they_are_said(demo):
    """Mean absolute error of starts; 25 ms when this was written."""
    errors = []
    for entry, audio in timed_clips("words"):
        words = align(demo, audio, entry["text"]).words
        errors += [
            abs(word.start - said["start"])
            for word, said in zip(words, entry["words"], strict=True)
        ]
    assert len(errors) >= 200
    assert np.mean(errors) <= 0.08


def test_words_are_said_by_the_speaker_of_their_tag(demo):
    """The middle of a word lies in a turn of its speaker; 97 % when this was written.

    A word that could not be aligned counts as wrong.
    """
    right = total = 0
    for entry, audio in timed_clips("speakers"):
        total += sum(not word.startswith("<spk:") for word in entry["text"].split())
        for word in align(demo, audio, entry["text"]).words:
            middle = (word.start + word.end) / 2
            right += any(
                word.speaker == str(speaker) and start - 0.1 <= middle <= end + 0.1
                for speaker, start, end in entry["activity"]
            )
    assert total >= 100
    assert right / total >= 0.9


def test_bfloat16_times_are_those_of_float32(demo):
    """In the checkpoint's own dtype few words move, and none by more than a little."""
    moves = []
    with aligning_model(CHECKPOINTS["demo"], dtype="bfloat16") as narrow:
        assert narrow.ctc_timestamp.decoder.upsample.weight.dtype == torch.bfloat16
        for entry, audio in list(timed_clips("words"))[:12]:
            wide = align(demo, audio, entry["text"]).words
            words = align(AligningEngine(narrow), audio, entry["text"]).words
            moves += [abs(a.start - b.start) for a, b in zip(words, wide, strict=True)]
    assert len(moves) >= 40
    assert np.mean(moves) < 0.02 and max(moves) < 0.3
