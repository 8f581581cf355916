# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Response objects and stream events, in OpenAI's shapes.

vLLM's response classes are used as they are. What they have no field for (tokens in
`usage`, confidences, who speaks when) rides along as extra fields, which both OpenAI's
client and vLLM's batch runner pass on.
"""

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.speech_to_text.transcription.protocol import (
    TranscriptionDiarizedSegment,
    TranscriptionResponse,
    TranscriptionResponseDiarized,
    TranscriptionResponseVerbose,
    TranscriptionSegment,
    TranscriptionWord,
)
from vllm.entrypoints.speech_to_text.translation.protocol import (
    TranslationResponse,
    TranslationResponseVerbose,
    TranslationSegment,
    TranslationWord,
)
from vllm.model_executor.models.nemotron3_5_transcribe_alignment import (
    DiarizationSegment,
    Word,
)

from .formats import labelled_text, speaker_label, write_subtitles
from .protocol import SpeechOptions, TaskType
from .segments import Segment
from .transcript import Turn

# ISO 639-2 for a language that nobody has named.
_UNKNOWN_LANGUAGE = "und"

Answer = (
    TranscriptionResponse
    | TranscriptionResponseVerbose
    | TranscriptionResponseDiarized
    | TranslationResponse
    | TranslationResponseVerbose
)


@dataclass
class Usage:
    """What a request has cost.

    Attributes:
        seconds: of audio.
        audio_tokens, text_tokens: of the prompt.
        output_tokens: generated.
    """

    seconds: float = 0.0
    audio_tokens: int = 0
    text_tokens: int = 0
    output_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        return self.audio_tokens + self.text_tokens

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def to_dict(self, type_: str) -> dict[str, Any]:
        """Report both tokens and seconds, as OpenAI's usage of this type.

        Args:
            type_: `"tokens"` or `"duration"`.
        """
        return {
            "type": type_,
            # Whole seconds, as vLLM and OpenAI count them.
            "seconds": math.ceil(self.seconds),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "total_tokens": self.total_tokens,
            "input_token_details": {
                "audio_tokens": self.audio_tokens,
                "text_tokens": self.text_tokens,
            },
        }


@dataclass
class Transcript:
    """All that an answer may hold; times only where they were asked for.

    Attributes:
        text: the transcript without speakers.
        turns: the same by speaker.
        segments: see `build_segments`.
        words, diarization, tag_map, failed_tags: see `Alignment`.
        tokens: of each segment, generated token ids and their log-probabilities.
        finish_reason: vLLM's; `"stop"` unless the transcript is cut short.
        duration: of the recording, in seconds.
    """

    text: str
    turns: list[Turn]
    duration: float
    usage: Usage
    finish_reason: str | None
    segments: list[Segment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    diarization: list[DiarizationSegment] = field(default_factory=list)
    tag_map: dict[str, int] = field(default_factory=dict)
    failed_tags: dict[str, str] = field(default_factory=dict)
    tokens: list[list[tuple[int, float]]] = field(default_factory=list)


def build_answer(
    transcript: Transcript,
    options: SpeechOptions,
    route: TaskType,
    temperature: float | None,
) -> Answer:
    """Put a transcript in the asked format.

    `text`, `srt` and `vtt` are bodies of their own over HTTP; here they are the text
    of a plain response, as a batch file has them.
    """
    format_ = options.response_format
    if format_ == "verbose_json":
        return _verbose(transcript, options, route, temperature or 0.0)
    extras = {
        "usage": transcript.usage.to_dict("duration"),
        "finish_reason": transcript.finish_reason,
    }
    if format_ == "diarized_json":
        return TranscriptionResponseDiarized(
            duration=transcript.duration,
            text=transcript.text,
            segments=diarized_segments(transcript),
            **_speakers(transcript),
            **extras,
        )
    if format_ in ("srt", "vtt"):
        text = write_subtitles(
            transcript.segments, format_, with_speakers=options.diarize
        )
    else:
        text = labelled_text(transcript.turns) if options.diarize else transcript.text
    response_class = (
        TranscriptionResponse if route == "transcribe" else TranslationResponse
    )
    return response_class(text=text, **extras)


def diarized_segments(transcript: Transcript) -> list[TranscriptionDiarizedSegment]:
    """Segments of `diarized_json`, also the events that stream them."""
    return [
        TranscriptionDiarizedSegment(
            id=f"seg_{index}",
            start=_milliseconds(segment.start),
            end=_milliseconds(segment.end),
            text=segment.text,
            speaker=speaker_label(segment.speaker),
            **({} if segment.aligned else {"aligned": False}),
        )
        for index, segment in enumerate(transcript.segments)
    ]


def delta_event(text: str, **extras: Any) -> str:
    """Event of new text."""
    return _event(
        {"type": "transcript.text.delta", "delta": text, **_without_none(extras)}
    )


def segment_event(segment: TranscriptionDiarizedSegment) -> str:
    """Event of a segment with its speaker."""
    return _event(segment.model_dump())


def done_event(
    transcript: Transcript, options: SpeechOptions, answer: Answer | None
) -> str:
    """Last event: the whole text, usage, and the times.

    Args:
        answer: the same in a format with times, None for one without.
    """
    timed = {} if answer is None else answer.model_dump(exclude_none=True)
    text = labelled_text(transcript.turns) if labels_text(options) else transcript.text
    return _event(
        {
            **{name: timed[name] for name in timed if name != "task"},
            "type": "transcript.text.done",
            "text": text,
            "usage": transcript.usage.to_dict("tokens"),
            "finish_reason": transcript.finish_reason,
        }
    )


def labels_text(options: SpeechOptions) -> bool:
    """Whether speakers stand in the text itself."""
    return options.diarize and options.response_format in ("json", "text")


def _verbose(
    transcript: Transcript, options: SpeechOptions, route: TaskType, temperature: float
) -> TranscriptionResponseVerbose | TranslationResponseVerbose:
    transcribes = route == "transcribe"
    segment_class = TranscriptionSegment if transcribes else TranslationSegment
    word_class = TranscriptionWord if transcribes else TranslationWord
    verbose_class = (
        TranscriptionResponseVerbose if transcribes else TranslationResponseVerbose
    )

    def speaker(tag: str | None) -> dict[str, str]:
        return {"speaker": speaker_label(tag)} if options.diarize else {}

    segments = words = None
    if options.segments:
        tokens = transcript.tokens or [[] for _ in transcript.segments]
        segments = [
            segment_class(
                id=index,
                seek=0,
                start=_milliseconds(segment.start),
                end=_milliseconds(segment.end),
                temperature=temperature,
                text=segment.text,
                tokens=[token for token, _ in spoken],
                avg_logprob=_mean([logprob for _, logprob in spoken]),
                compression_ratio=_compression_ratio(segment.text),
                no_speech_prob=_silent_share(segment, transcript.diarization),
                **speaker(segment.speaker),
                **({} if segment.aligned else {"aligned": False}),
            )
            for index, (segment, spoken) in enumerate(zip(transcript.segments, tokens))
        ]
    if options.words:
        words = [
            word_class(
                word=word.text,
                start=_milliseconds(word.start),
                end=_milliseconds(word.end),
                confidence=round(word.confidence, 4),
                **speaker(word.speaker),
            )
            for word in transcript.words
        ]
    return verbose_class(
        duration=transcript.duration,
        language=options.output_language or _UNKNOWN_LANGUAGE,
        text=transcript.text,
        segments=segments,
        words=words,
        usage=transcript.usage.to_dict("duration"),
        finish_reason=transcript.finish_reason,
        **(_speakers(transcript) if options.diarize else {}),
    )


def _speakers(transcript: Transcript) -> dict[str, Any]:
    """Who speaks when, whatever is said, and what could not be aligned."""
    tags = dict.fromkeys(turn.speaker for turn in transcript.turns)
    return {
        "diarization": [
            {
                "speaker": heard.speaker,
                "start": _milliseconds(heard.start),
                "end": _milliseconds(heard.end),
            }
            for heard in transcript.diarization
        ],
        "speaker_map": {
            speaker_label(tag): transcript.tag_map.get(tag) for tag in tags
        },
        "failed_speakers": {
            speaker_label(tag): reason for tag, reason in transcript.failed_tags.items()
        },
    }


def _silent_share(segment: Segment, diarization: Sequence[DiarizationSegment]) -> float:
    """Share of a segment in which the diarizer hears nobody."""
    length = segment.end - segment.start
    if length <= 0 or not diarization:
        return 0.0
    heard, done = 0.0, segment.start
    for stretch in sorted(diarization, key=lambda stretch: stretch.start):
        start, end = max(stretch.start, done), min(stretch.end, segment.end)
        if end > start:
            heard += end - start
            done = end
    return round(max(1 - heard / length, 0.0), 4)


def _compression_ratio(text: str) -> float:
    """How much shorter zlib makes a text: repetitive ones a lot."""
    data = text.encode()
    return round(len(data) / len(zlib.compress(data)), 4)


def _mean(values: list[float]) -> float:
    return round(sum(values) / max(len(values), 1), 4)


def _milliseconds(seconds: float) -> float:
    return round(seconds, 3)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n"
