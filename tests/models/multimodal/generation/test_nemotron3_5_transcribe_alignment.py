# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Word times from real engines: offline, and beside other requests."""

import asyncio
import contextlib
import uuid

import numpy as np
import pytest
import soundfile

from tests.engine import CHECKPOINTS, KV_CACHE_BYTES, offline_engine
from tests.goldens import Goldens, heldout, heldout_index, heldout_speakers
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_nemotron3_5_transcribe.alignment import (
    AlignmentError,
    align,
    align_async,
    can_align_async,
)
from vllm_nemotron3_5_transcribe.offline import Transcription, transcribe

pytestmark = pytest.mark.engine

CHECKPOINT = CHECKPOINTS["demo"]
TEXT = "one two three"


def heldout_clip(number: int) -> tuple[np.ndarray, str]:
    """Samples and reference transcript of a held-out clip."""
    return heldout(number).astype(np.float32) / 32768, heldout_index()[number]["text"]


@pytest.fixture(scope="module")
def llm():
    with offline_engine(CHECKPOINT, enforce_eager=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def goldens():
    return Goldens("demo.safetensors")


def test_transcribe_gives_text_words_and_segments(llm):
    audio, text = heldout_clip(0)
    result = transcribe(llm, audio)
    assert result.text and result.finish_reason == "stop"
    assert [word.text for word in result.words] == result.text.split()
    assert " ".join(segment["text"] for segment in result.segments) == result.text
    starts = [word.start for word in result.words]
    assert starts == sorted(starts)
    assert 0 <= starts[0] < result.words[-1].end <= result.duration + 1e-3
    assert result.duration == pytest.approx(len(audio) / 16000, abs=1e-3)
    assert result.usage["input_tokens"] > result.usage["output_tokens"] > 0
    assert Transcription.from_dict(result.to_dict()) == result


def test_transcribe_takes_files_bytes_and_other_rates(llm, tmp_path):
    audio, _ = heldout_clip(1)
    path = tmp_path / "clip.flac"
    soundfile.write(path, audio, 16000, subtype="PCM_16")
    expected = transcribe(llm, audio)
    assert transcribe(llm, path) == expected
    assert transcribe(llm, path.read_bytes()) == expected
    stereo = np.stack([audio, audio])
    assert transcribe(llm, stereo, sample_rate=16000) == expected
    at_8_khz = transcribe(llm, audio[::2], sample_rate=8000)
    assert at_8_khz.duration == pytest.approx(expected.duration, abs=0.01)


def test_transcribe_tells_speakers_apart(llm):
    result = transcribe(llm, heldout_speakers(), diarize=True)
    assert "<spk:" not in result.text
    tags = {segment["speaker"] for segment in result.segments}
    assert tags == {word.speaker for word in result.words} | set(result.failed_tags)
    assert set(result.tag_map) >= {word.speaker for word in result.words}
    assert {s.speaker for s in result.diarization} >= set(result.tag_map.values())


def test_transcribe_without_times_and_translations(llm):
    audio, _ = heldout_clip(2)
    plain = transcribe(llm, audio, times=False)
    assert plain.text == transcribe(llm, audio).text
    assert not plain.words and not plain.segments
    translated = transcribe(llm, audio, to_language="de")
    assert translated.language == "de" and not translated.words


def test_transcribe_refuses_what_cannot_be(llm):
    audio, _ = heldout_clip(0)
    with pytest.raises(VLLMValidationError):
        transcribe(llm, b"no audio")
    with pytest.raises(FileNotFoundError):
        transcribe(llm, "nowhere.wav")
    with pytest.raises(VLLMValidationError):
        transcribe(llm, audio, language="klingon")
    with pytest.raises(VLLMValidationError, match="transcripts only"):
        transcribe(llm, audio, to_language="de", diarize=True)


def test_alignment_does_not_touch_other_requests(llm, goldens):
    """Same words before and after; same tokens with alignments in between."""
    params = SamplingParams(temperature=0, max_tokens=48, skip_special_tokens=False)
    case = goldens.info["greedy"]["cases"][0]
    prompt = {
        "prompt_token_ids": goldens.info["texts"][case["text"]]["ids"],
        "multi_modal_data": {
            "audio": [(goldens.audio(clip), 16000) for clip in case["clips"]]
        },
    }
    long_clip = goldens.audio("chunks_3_4")
    first = align(llm, long_clip, TEXT)
    for _ in range(2):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == goldens.greedy_ids(0)
        assert align(llm, long_clip, TEXT) == first


def test_errors_leave_the_engine_usable(llm, goldens):
    audio = goldens.audio("chunk")
    with pytest.raises(AlignmentError):
        align(llm, audio, "<spk:0>")
    with pytest.raises(VLLMValidationError):
        align(llm, np.full(100, np.inf, np.float32), TEXT)
    assert align(llm, audio, TEXT).duration > 1


# --- Beside other requests, with drafts and prefix caching ---------------------------


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as loop_runner:
        yield loop_runner


@pytest.fixture(scope="module")
def server(llm, runner):
    """An asynchronous engine with the drafter on, and prefix caching by default."""
    args = AsyncEngineArgs(
        model=str(CHECKPOINT),
        dtype="float32",
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enforce_eager=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )

    async def start():
        return AsyncLLM.from_engine_args(args)

    engine = runner.run(start())
    yield engine
    engine.shutdown()


async def generated(engine, goldens, number, **options):
    """Tokens of a greedy golden case, or of an endless answer."""
    case = goldens.info["greedy"]["cases"][number]
    prompt = {
        "prompt_token_ids": goldens.info["texts"][case["text"]]["ids"],
        "multi_modal_data": {
            "audio": [(goldens.audio(clip), 16000) for clip in case["clips"]]
        },
    }
    params = SamplingParams(
        **{
            "temperature": 0,
            "max_tokens": 48,
            "skip_special_tokens": False,
            **options,
        }
    )
    async for output in engine.generate(prompt, params, str(uuid.uuid4())):
        yield list(output.outputs[0].token_ids)


async def last(tokens):
    ids = []
    async for ids in tokens:
        pass
    return ids


def test_decoding_and_aligning_do_not_disturb_each_other(server, runner, goldens):
    """With drafts: golden tokens, equal word times, and aborted alignments between."""
    clips = ["chunks_3_4", "eight_frames", "chunk_and_one"]

    async def run():
        assert await can_align_async(server)
        alone = [await align_async(server, goldens.audio(c), TEXT) for c in clips]
        tasks = [
            asyncio.create_task(align_async(server, goldens.audio(clip), TEXT))
            for clip in clips * 2
        ]
        aborted = [
            asyncio.create_task(align_async(server, goldens.audio("long"), TEXT))
            for _ in range(3)
        ]
        decoding = [
            asyncio.create_task(last(generated(server, goldens, number)))
            for number in range(8)
        ]
        await asyncio.sleep(0.5)
        for task in aborted:
            task.cancel()
        tokens = await asyncio.gather(*decoding)
        together = await asyncio.gather(*tasks)
        for task in aborted:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return alone, together, tokens

    alone, together, tokens = runner.run(run())
    assert together == alone * 2
    assert tokens == [goldens.greedy_ids(number) for number in range(8)]


def test_a_decoding_request_goes_on_between_windows(server, runner, goldens):
    """Other requests wait for one window at a time, not for the whole recording."""

    async def run():
        grew = asyncio.Event()
        arrivals = 0

        async def decode():
            nonlocal arrivals
            async for _ in generated(
                server, goldens, 0, ignore_eos=True, max_tokens=3000
            ):
                arrivals += 1
                grew.set()

        task = asyncio.create_task(decode())
        await grew.wait()
        before = arrivals
        await align_async(server, goldens.audio("long"), TEXT)
        during = arrivals - before
        is_still_decoding = not task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return during, is_still_decoding

    during, is_still_decoding = runner.run(run())
    windows = goldens.info["clips"]["long"]["samples"] // (500 * 1280)
    assert is_still_decoding and during >= windows - 1
