# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Word times and speakers for a finished transcript, from a running engine.

The front end drives: it makes the log-mels, has the worker encode them chunk by chunk
(`worker_extension.py`), and aligns what comes back, in threads of its own. Of all the
alignments of a front end, one chunk is in the engine at a time, so other requests
decode in between, and wait for no more than one chunk.
"""

import asyncio
import contextlib
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from vllm.model_executor.models.nemotron3_5_transcribe import (
    control_tokens,
    to_mono_waveform,
)
from vllm.model_executor.models.nemotron3_5_transcribe_alignment import (
    Alignment,
    AlignmentError,
    DiarizationSegment,
    HeardRecording,
    Word,
    WordPieces,
    align_transcript,
    tokenize_transcript,
)
from vllm.model_executor.models.nemotron3_5_transcribe_audio import (
    LogMelSpectrogram,
    feature_statistics,
)
from vllm.model_executor.models.nemotron3_5_transcribe_timestamps import plan_recording
from vllm.tokenizers import cached_tokenizer_from_config
from vllm_nemotron3_5_transcribe.worker_extension import pack_tensor, unpack_tensor

__all__ = [
    "Alignment",
    "AlignmentError",
    "DiarizationSegment",
    "Word",
    "align",
    "align_async",
    "can_align_async",
]

# Alignments computed side by side; the others wait. Of more threads, the event loop
# notices the scramble for the interpreter lock.
_THREADS = min(2, os.cpu_count() or 1)


class _Aligner:
    """What the front end knows of one engine.

    Args:
        model_config: of the engine.
        info: what `alignment_info` answered.

    Raises:
        AlignmentError: the engine cannot time words.
    """

    def __init__(self, model_config: Any, info: Mapping[str, Any]) -> None:
        if info["error"] is not None:
            raise AlignmentError(info["error"])
        self.config = model_config.hf_config.audio_config
        self.pieces = WordPieces(info["tokenizer"], info["blank"])
        self.upsampling_factor = info["upsampling_factor"]
        self.special_tokens = control_tokens(cached_tokenizer_from_config(model_config))
        self.log_mel = LogMelSpectrogram(self.config.preprocessor)
        for name, constant in (("window", "window"), ("fb", "mel_bank")):
            self.log_mel.load_constant(name, unpack_tensor(info[constant]))

    def steps(
        self,
        audio: np.ndarray,
        transcript: str,
        language: str | None,
        diarize: bool,
        max_word_seconds: float,
    ) -> Generator[dict[str, Any], dict[str, Any], Alignment]:
        """Align; see `align_async`.

        Yields:
            Requests for `encode_alignment_window`, whose answers it is to be sent.
        """
        # First, since it may fail.
        tokenized = tokenize_transcript(
            transcript, self.pieces, language, self.special_tokens
        )
        samples = np.ascontiguousarray(to_mono_waveform(audio))
        with torch.inference_mode():
            features = self.log_mel(torch.from_numpy(samples))
        heard = yield from self._encode(features, tokenized.classes)
        del features
        return align_transcript(
            tokenized,
            heard,
            bind_speakers=diarize and tokenized.has_tags,
            max_word_seconds=max_word_seconds,
        )

    def _encode(
        self, features: torch.Tensor, classes: list[int]
    ) -> Generator[dict[str, Any], dict[str, Any], HeardRecording]:
        """Have a recording encoded.

        Args:
            features: (10 ms frames, mels) log-mels.
            classes: of the head; the blank is returned before them.
        """
        config, num_mel_frames = self.config, len(features)
        factor = config.subsampling_factor
        mean, deviation = map(pack_tensor, feature_statistics(features))
        columns = torch.tensor([self.pieces.blank, *classes], dtype=torch.int32)
        answers: list[dict[str, Any]] = []
        state = None
        for index, chunk in enumerate(plan_recording(config, num_mel_frames)):
            seen = slice(chunk.context_start * factor, chunk.context_end * factor)
            answer = yield {
                "features": pack_tensor(features[seen]),
                "mean": mean,
                "deviation": deviation,
                "num_mel_frames": num_mel_frames,
                "index": index,
                "classes": pack_tensor(columns),
                "state": state,
            }
            state = answer.pop("state")
            answers.append(answer)

        def joined(name: str) -> np.ndarray:
            # Popped, so that an hour of them is not there three times.
            parts = [unpack_tensor(answer.pop(name)) for answer in answers]
            return torch.cat(parts).numpy()

        hop = config.preprocessor.hop_length / config.preprocessor.sample_rate
        return HeardRecording(
            log_probs=joined("log_probs"),
            greedy=joined("greedy"),
            speaker_probs=joined("speaker_probs"),
            duration=num_mel_frames * hop,
            num_mel_frames=num_mel_frames,
            subsampling_factor=factor,
            upsampling_factor=self.upsampling_factor,
            activity_threshold=config.speaker_activity_threshold,
        )


def _advance(
    steps: Generator[dict[str, Any], dict[str, Any], Alignment],
    answer: dict[str, Any] | None,
) -> tuple[dict[str, Any] | None, Alignment | None]:
    """Send an answer in, and get the next request, or at the end the result."""
    try:
        # None starts a generator.
        return steps.send(answer), None  # type: ignore[arg-type]
    except StopIteration as stop:
        return None, stop.value


def _answer(replies: list[Any]) -> Any:
    """The one reply among those of all workers."""
    return next(reply for reply in replies if reply is not None)


@contextlib.contextmanager
def _explain_other_workers() -> Iterator[None]:
    """Tell a missing method, which means a choice of the user, from other failures."""
    try:
        yield
    except Exception as error:
        if "'alignment_info' is not implemented" not in str(error):
            raise
        raise AlignmentError(
            "The workers cannot time words: --worker-extension-cls names a class that "
            "does not inherit from vllm_nemotron3_5_transcribe.worker_extension."
            "AlignmentWorkerExtension."
        ) from error


class _AsyncEngine:
    """An engine client, its aligner, and whose turn it is.

    Args:
        engine_client: vLLM's; held weakly, since this is kept in a table by it.
    """

    def __init__(self, engine_client: Any) -> None:
        self._client = weakref.ref(engine_client)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Lock()
        self._aligner: _Aligner | None = None
        self._pool = ThreadPoolExecutor(_THREADS, "nemotron3_5_transcribe_align")

    async def aligner(self) -> _Aligner:
        if self._aligner is None:
            client = self._client()
            with _explain_other_workers():
                info = _answer(await client.collective_rpc("alignment_info"))
            self._aligner = _Aligner(client.model_config, info)
        return self._aligner

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, function, *args)

    async def encode_window(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have one chunk encoded when it is its turn; first come, first served."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._turn = loop, asyncio.Lock()
        is_wanted = True

        async def call() -> Any:
            async with self._turn:
                # The turn is kept until the engine has answered, even if nobody waits
                # for it any more.
                if is_wanted:
                    return await self._client().collective_rpc(
                        "encode_alignment_window", args=(request,)
                    )

        try:
            return _answer(await asyncio.shield(call()))
        except asyncio.CancelledError:
            is_wanted = False
            raise


_engines: weakref.WeakKeyDictionary[Any, _AsyncEngine] = weakref.WeakKeyDictionary()
_aligners: weakref.WeakKeyDictionary[Any, _Aligner] = weakref.WeakKeyDictionary()


def _async_engine(engine_client: Any) -> _AsyncEngine:
    if engine_client not in _engines:
        _engines[engine_client] = _AsyncEngine(engine_client)
    return _engines[engine_client]


async def can_align_async(engine_client: Any) -> bool:
    """Whether the engine's checkpoint has a word timing head, and it is loaded."""
    try:
        await _async_engine(engine_client).aligner()
    except AlignmentError:
        return False
    return True


async def align_async(
    engine_client: Any,
    audio: np.ndarray,
    transcript: str,
    *,
    language: str | None = None,
    diarize: bool = True,
    max_word_seconds: float = 1.0,
) -> Alignment:
    """Time the words of a transcript and say who speaks them.

    Args:
        engine_client: vLLM's asynchronous engine client.
        audio: (samples,) float32, mono, at the checkpoint's rate (16 kHz).
        transcript: generated text with its `<spk:N>` tags; other special tokens are
            ignored.
        language: ISO code that decides how words are cut; from the script when None.
        diarize: align each tag's words where its speaker is heard. Without tags, or
            if False, speakers are still reported, but do not bind the words.
        max_word_seconds: longest word.

    Raises:
        AlignmentError: the checkpoint has no word timing head, the transcript has no
            words, or nothing can cut it into words. One speaker's words that do not
            fit are reported in `failed_tags` instead.
    """
    engine = _async_engine(engine_client)
    aligner = await engine.aligner()
    steps = aligner.steps(audio, transcript, language, diarize, max_word_seconds)
    request, alignment = await engine.in_thread(_advance, steps, None)
    while request is not None:
        answer = await engine.encode_window(request)
        request, alignment = await engine.in_thread(_advance, steps, answer)
    return alignment


def align(
    llm: Any,
    audio: np.ndarray,
    transcript: str,
    *,
    language: str | None = None,
    diarize: bool = True,
    max_word_seconds: float = 1.0,
) -> Alignment:
    """Time the words of a transcript with a `vllm.LLM`; see `align_async`."""
    if llm not in _aligners:
        with _explain_other_workers():
            info = _answer(llm.collective_rpc("alignment_info"))
        _aligners[llm] = _Aligner(llm.llm_engine.model_config, info)
    steps = _aligners[llm].steps(audio, transcript, language, diarize, max_word_seconds)
    request, alignment = _advance(steps, None)
    while request is not None:
        replies = llm.collective_rpc("encode_alignment_window", args=(request,))
        request, alignment = _advance(steps, _answer(replies))
    return alignment
