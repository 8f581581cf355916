# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's transcription and translation servings, with times, speakers and formats.

vLLM's own code checks the model, decodes the audio, builds the prompt and starts the
engine requests; it is handed a request that asks for a stream, and gives back the
engine's generators. What is generated is read here, and timed by one more call to the
worker.
"""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import Request

from vllm.config.speech_to_text import SpeechToTextParams
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.entrypoints.speech_to_text.base.serving import asr_inter_chunk_separator
from vllm.entrypoints.speech_to_text.transcription.protocol import (
    TranscriptionRequest,
)
from vllm.entrypoints.speech_to_text.transcription.serving import (
    OpenAIServingTranscription,
)
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest
from vllm.entrypoints.speech_to_text.translation.serving import OpenAIServingTranslation
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.logger import init_logger
from vllm.model_executor.models.nemotron3_5_transcribe import (
    Nemotron3_5TranscribeParams,
    control_tokens,
)
from vllm.model_executor.models.nemotron3_5_transcribe_alignment import (
    Alignment,
    AlignmentError,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.async_utils import merge_async_iterators
from vllm_nemotron3_5_transcribe.alignment import align_async, can_align_async

from . import limits
from .answers import (
    Answer,
    Transcript,
    Usage,
    build_answer,
    delta_event,
    diarized_segments,
    done_event,
    labels_text,
    segment_event,
)
from .formats import speaker_label, turn_opening
from .protocol import SpeechOptions
from .segments import Segment, timed_segments
from .transcript import Delta, TranscriptReader, Turn, opens_thought

logger = init_logger("vllm.nemotron3_5_transcribe.speech_api")


class _EngineRequest:
    """A request as vLLM's serving code gets to see it.

    It has the attributes of the user's, but for those that decide what vLLM does with
    the output, and it remembers the audio.

    Attributes:
        clips: (samples,) float32 each, the pieces that the recording is cut into.
    """

    response_format = "json"

    def __init__(
        self,
        request: TranscriptionRequest | TranslationRequest,
        options: SpeechOptions,
    ) -> None:
        self._request = request
        self._options = options
        # A stream is handed over as the engine's generators.
        self.stream = not request.use_beam_search
        self.language = options.language
        self.to_language = options.to_language
        self.clips: list[np.ndarray] = []
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def build_stt_params(self, audio: np.ndarray, **fields: Any) -> SpeechToTextParams:
        stt_config = fields["stt_config"]
        self.clips.append(audio)
        self.seconds = max(self.seconds, len(audio) / stt_config.sample_rate)
        if self._options.diarize and len(self.clips) > 1:
            raise limits.clip_too_long(stt_config.max_audio_clip_s)
        return Nemotron3_5TranscribeParams(
            audio=audio,
            stt_config=stt_config,
            model_config=fields["model_config"],
            language=self.language,
            hotwords=self._request.hotwords,
            task_type=self._options.task,
            request_prompt=self._request.prompt,
            to_language=self.to_language,
            diarize=self._options.diarize,
        )

    def to_sampling_params(
        self, default_max_tokens: int, default_sampling_params: dict | None = None
    ) -> SamplingParams:
        params = self._request.to_sampling_params(
            self._bounded(default_max_tokens), default_sampling_params
        )
        params.output_kind = (
            RequestOutputKind.DELTA
            if self._options.stream
            else RequestOutputKind.FINAL_ONLY
        )
        # Speaker tags are special tokens, and so is what encloses a thought.
        params.skip_special_tokens = False
        params.repetition_detection = limits.loop_detection()
        if self._options.response_format == "verbose_json" and self._options.segments:
            # Of the chosen tokens alone.
            params.logprobs = 0
        return params

    def to_beam_search_params(
        self, default_max_tokens: int, default_sampling_params: dict | None = None
    ) -> BeamSearchParams:
        return self._request.to_beam_search_params(
            self._bounded(default_max_tokens), default_sampling_params
        )

    def _bounded(self, max_tokens: int) -> int:
        if self._request.max_completion_tokens is not None:
            return max_tokens
        own_instruction = bool(self._request.prompt.strip())
        return min(
            max_tokens,
            limits.max_transcript_tokens(self.seconds, own_instruction=own_instruction),
        )


@dataclass
class _Piece:
    """A piece of the recording and what is generated for it.

    Attributes:
        audio: (samples,) float32 at the checkpoint's rate.
        offset: seconds that come before it.
        tokens: generated ids with their text and log-probability, if asked for.
    """

    audio: np.ndarray
    offset: float
    reader: TranscriptReader
    audio_tokens: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    tokens: list[tuple[int, str, float]] = field(default_factory=list)

    def take(self, output: RequestOutput) -> list[Delta]:
        """Take in what the engine has generated since."""
        completion = output.outputs[0]
        if output.prompt_token_ids is not None:
            self.prompt_tokens = len(output.prompt_token_ids)
        self.output_tokens += len(completion.token_ids)
        self.finish_reason = completion.finish_reason
        self._take_logprobs(completion)
        return self.reader.read(
            completion.text, final=completion.finish_reason is not None
        )

    def _take_logprobs(self, completion: CompletionOutput) -> None:
        for token, choices in zip(completion.token_ids, completion.logprobs or ()):
            chosen = choices[token]
            self.tokens.append((token, chosen.decoded_token or "", chosen.logprob))


@dataclass
class _Decoding:
    """What vLLM's serving code hands over: the engine at work on a recording."""

    generators: list[AsyncGenerator[RequestOutput, None]]
    request_id: str
    metadata: RequestResponseMetadata
    duration: float
    pieces: list[_Piece] = field(default_factory=list)

    @classmethod
    def hand_over(
        cls,
        request: _EngineRequest,
        generators: list[AsyncGenerator[RequestOutput, None]],
        request_id: str,
        metadata: RequestResponseMetadata,
        duration: float,
        separator: str,
    ) -> "_Decoding":
        """Stand in for vLLM's method that writes a stream."""
        return cls(generators, request_id, metadata, duration)

    async def close(self) -> None:
        """Stop what is not finished; the engine aborts it."""
        await asyncio.gather(
            *(generator.aclose() for generator in self.generators),
            return_exceptions=True,
        )


class _SpeechServing:
    """What both servings do; comes before vLLM's class in their bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tokenizer = cached_tokenizer_from_config(self.model_config)
        self._control_tokens = control_tokens(tokenizer)
        self._special_ids = {
            tokenizer.convert_tokens_to_ids(token) for token in self._control_tokens
        }
        self._prompt_thinks = self._ends_within_a_thought()
        self._can_align: bool | None = None
        # A length in the checkpoint's generation config is meant for chat; one that
        # the operator sets holds.
        overrides = self.model_config.override_generation_config
        if not {"max_tokens", "max_new_tokens"} & overrides.keys():
            self.default_sampling_params.pop("max_tokens", None)

    def _ends_within_a_thought(self) -> bool:
        """Whether the chat template opens a thought although it is told not to."""
        silence = np.zeros(1, np.float32)
        prompt = self.model_cls.get_generation_prompt(
            SpeechToTextParams(
                audio=silence,
                stt_config=self.asr_config,
                model_config=self.model_config,
            )
        )["prompt"]
        return opens_thought(prompt)

    async def _create_speech_to_text(
        self,
        audio_data: bytes,
        request: TranscriptionRequest | TranslationRequest,
        raw_request: Request | None = None,
        **vllm_arguments: Any,
    ) -> Answer | AsyncGenerator[str, None] | ErrorResponse:
        """Transcribe or translate a recording.

        Raises:
            VLLMValidationError: the request cannot be fulfilled; says why.
        """
        options = SpeechOptions.of(request, self.task_type, self.model_cls)
        if options.needs_times and options.task == "transcribe":
            await self._require_word_times(options)
        engine_request = _EngineRequest(request, options)
        decoding = await super()._create_speech_to_text(
            audio_data,
            engine_request,
            raw_request,
            **{**vllm_arguments, "stream_generator_method": _Decoding.hand_over},
        )
        if isinstance(decoding, ErrorResponse):
            return decoding
        if request.use_beam_search:
            decoding = self._of_beam_search(decoding.text, engine_request)
        else:
            decoding.pieces = self._pieces(
                engine_request.clips, diarize=options.diarize
            )
        if options.stream:
            return self._stream(options, decoding, request.temperature)
        try:
            async for index, output in merge_async_iterators(*decoding.generators):
                piece = decoding.pieces[index]
                piece.take(output)
                self._raise_if_error(piece.finish_reason, decoding.request_id)
            transcript = await self._finish(options, decoding)
        finally:
            await decoding.close()
        return build_answer(transcript, options, self.task_type, request.temperature)

    async def _require_word_times(self, options: SpeechOptions) -> None:
        if self._can_align is None:
            self._can_align = await can_align_async(self.engine_client)
        if not self._can_align:
            raise VLLMValidationError(
                f"response_format {options.response_format!r} needs word times, and "
                "this checkpoint has no word timing head, or the server was told not "
                "to load it. 'json' and 'text' need none.",
                parameter="response_format",
            )

    def _pieces(self, clips: list[np.ndarray], *, diarize: bool) -> list[_Piece]:
        pieces, samples = [], 0
        rate = self.asr_config.sample_rate
        for clip in clips:
            reader = TranscriptReader(
                self._control_tokens,
                self._prompt_thinks,
                diarize=diarize,
            )
            audio_tokens = self.model_cls.get_num_audio_tokens(
                len(clip) / rate, self.asr_config, self.model_config
            )
            pieces.append(_Piece(clip, samples / rate, reader, audio_tokens))
            samples += len(clip)
        return pieces

    def _of_beam_search(self, text: str, request: _EngineRequest) -> _Decoding:
        """Make up a finished decoding from what beam search leaves: its text."""
        audio = np.concatenate(request.clips)
        [piece] = self._pieces([audio], diarize=False)
        piece.reader.read(text, final=True)
        piece.finish_reason = "stop"
        tokenizer = cached_tokenizer_from_config(self.model_config)
        piece.output_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        return _Decoding(
            generators=[],
            request_id="",
            metadata=RequestResponseMetadata(request_id=""),
            duration=len(audio) / self.asr_config.sample_rate,
            pieces=[piece],
        )

    async def _stream(
        self, options: SpeechOptions, decoding: _Decoding, temperature: float | None
    ) -> AsyncGenerator[str, None]:
        """Answer with OpenAI's transcript events, as the engine goes on."""
        try:
            opening = ""
            for piece, generator in zip(decoding.pieces, decoding.generators):
                async for output in generator:
                    deltas = piece.take(output)
                    self._raise_if_error(piece.finish_reason, decoding.request_id)
                    for delta in deltas:
                        yield self._delta(delta, opening, options, decoding)
                        opening = ""
                if any(before.reader.text for before in decoding.pieces):
                    opening = self._separator(options)
            transcript = await self._finish(options, decoding)
            answer = None
            if options.needs_times:
                answer = build_answer(transcript, options, self.task_type, temperature)
            if options.response_format == "diarized_json":
                for segment in diarized_segments(transcript):
                    yield segment_event(segment)
            yield done_event(transcript, options, answer)
        except Exception as error:
            if not isinstance(error, VLLMClientError):
                logger.exception("Streaming a transcript failed.")
            yield f"data: {self.create_streaming_error_response(error)}\n\n"
        finally:
            await decoding.close()
        yield "data: [DONE]\n\n"

    def _delta(
        self, delta: Delta, opening: str, options: SpeechOptions, decoding: _Decoding
    ) -> str:
        """Event of new text.

        Args:
            opening: what comes before the first text of a piece.
        """
        if delta.opens_turn and labels_text(options):
            opening += turn_opening(delta.turn, first=delta.opens_transcript)
        elif delta.opens_turn and not delta.opens_transcript:
            opening += " "
        usage = self._usage(decoding).to_dict("tokens")
        return delta_event(
            opening + delta.text,
            speaker=speaker_label(delta.turn.speaker) if options.diarize else None,
            usage=usage if options.stream_usage else None,
        )

    def _separator(self, options: SpeechOptions) -> str:
        return asr_inter_chunk_separator(
            options.output_language, self.model_cls.no_space_languages
        )

    def _usage(self, decoding: _Decoding) -> Usage:
        pieces = decoding.pieces
        audio_tokens = sum(piece.audio_tokens for piece in pieces)
        prompt_tokens = sum(piece.prompt_tokens for piece in pieces)
        return Usage(
            seconds=decoding.duration,
            audio_tokens=audio_tokens,
            text_tokens=max(prompt_tokens - audio_tokens, 0),
            output_tokens=sum(piece.output_tokens for piece in pieces),
        )

    async def _finish(self, options: SpeechOptions, decoding: _Decoding) -> Transcript:
        """Put the pieces together, with times if they are asked for.

        Raises:
            VLLMValidationError: times are asked for, and cannot be had.
        """
        pieces = decoding.pieces
        usage = self._usage(decoding)
        # For vLLM's middleware.
        decoding.metadata.final_usage_info = UsageInfo(
            prompt_tokens=usage.input_tokens,
            completion_tokens=usage.output_tokens,
            total_tokens=usage.total_tokens,
        )
        reasons = [piece.finish_reason for piece in pieces]
        transcript = Transcript(
            text=self._separator(options).join(
                piece.reader.text for piece in pieces if piece.reader.text
            ),
            turns=pieces[0].reader.turns if options.diarize else [],
            duration=round(decoding.duration, 3),
            usage=usage,
            finish_reason=next((r for r in reasons if r != "stop"), "stop"),
        )
        if options.needs_times:
            for piece in pieces:
                if piece.reader.text:
                    await self._time(transcript, piece, options)
        return transcript

    async def _time(
        self, transcript: Transcript, piece: _Piece, options: SpeechOptions
    ) -> None:
        """Add the segments and words of one piece to the transcript."""
        turns = transcript.turns or [Turn(None, piece.reader.text)]
        translated = options.task == "translate"
        align = self._align_or_none if translated else self._align
        alignment = await align(piece, options)
        duration = len(piece.audio) / self.asr_config.sample_rate
        segments = timed_segments(turns, alignment, duration, translated=translated)
        for timed in (*segments, *alignment.words, *alignment.diarization):
            timed.start += piece.offset
            timed.end += piece.offset
        transcript.segments += segments
        transcript.words += alignment.words
        transcript.diarization += alignment.diarization
        transcript.tag_map |= alignment.tag_map
        transcript.failed_tags |= alignment.failed_tags
        if piece.tokens:
            transcript.tokens += self._tokens_by_segment(piece, segments)

    async def _align(self, piece: _Piece, options: SpeechOptions) -> Alignment:
        try:
            alignment = await align_async(
                self.engine_client,
                piece.audio,
                piece.reader.tagged_text if options.diarize else piece.reader.text,
                language=options.language,
                diarize=options.diarize,
            )
        except AlignmentError as error:
            raise VLLMValidationError(
                f"The transcript cannot be timed: {error} 'json' and 'text' need no "
                "times.",
                parameter="response_format",
            ) from error
        if not alignment.words:
            reasons = " ".join(dict.fromkeys(alignment.failed_tags.values()))
            raise VLLMValidationError(
                f"No word of the transcript can be timed: {reasons} 'json' and 'text' "
                "need no times.",
                parameter="response_format",
            )
        return alignment

    async def _align_or_none(self, piece: _Piece, options: SpeechOptions) -> Alignment:
        """Say who speaks when; nothing where the checkpoint cannot."""
        try:
            alignment = await align_async(
                self.engine_client,
                piece.audio,
                piece.reader.text,
                language=options.to_language,
                diarize=False,
            )
        except AlignmentError:
            return Alignment()
        # The words are not what is heard, so their times mean nothing.
        return Alignment(diarization=alignment.diarization)

    def _tokens_by_segment(
        self, piece: _Piece, segments: list[Segment]
    ) -> list[list[tuple[int, float]]]:
        """Sort generated tokens into segments, by the letters before them."""
        ends, letters = [], 0
        for segment in segments:
            letters += _count_letters(segment.text)
            ends.append(letters)
        sorted_tokens: list[list[tuple[int, float]]] = [[] for _ in segments]
        letters = 0
        for token, text, logprob in piece.tokens:
            if token not in self._special_ids:
                index = min(bisect_right(ends, letters), len(segments) - 1)
                sorted_tokens[index].append((token, logprob))
                letters += _count_letters(text)
        return sorted_tokens


def _count_letters(text: str) -> int:
    return sum(map(str.isalnum, text))


class TranscribeServing(_SpeechServing, OpenAIServingTranscription):
    """`/v1/audio/transcriptions`."""


class TranslateServing(_SpeechServing, OpenAIServingTranslation):
    """`/v1/audio/translations`."""
