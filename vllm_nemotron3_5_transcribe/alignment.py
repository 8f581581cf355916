# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Word times and speakers for a finished transcript, from a running engine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vllm.model_executor.models.nemotron3_5_transcribe_alignment import (
    Alignment,
    AlignmentError,
    DiarizationSegment,
    Word,
)

__all__ = [
    "Alignment",
    "AlignmentError",
    "DiarizationSegment",
    "Transcription",
    "Word",
    "align",
    "align_async",
    "can_align_async",
    "transcribe",
]


@dataclass
class Transcription:
    """A transcript with everything known about it; the routes' answers hold the same.

    Attributes:
        text: without speaker tags.
        language: ISO code that was asked for, or None.
        duration: seconds of audio.
        words, diarization, tag_map, failed_tags: see `Alignment`.
        segments: stretches of the transcript, as the routes report them.
        usage: prompt, completion and total tokens, and seconds of audio.
    """

    text: str
    language: str | None
    duration: float
    words: list[Word] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    diarization: list[DiarizationSegment] = field(default_factory=list)
    tag_map: dict[str, int] = field(default_factory=dict)
    failed_tags: dict[str, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Transcription":
        return cls(
            **{
                **values,
                "words": [Word.from_dict(word) for word in values["words"]],
                "diarization": [
                    DiarizationSegment.from_dict(segment)
                    for segment in values["diarization"]
                ],
            }
        )


async def can_align_async(engine_client: Any) -> bool:
    """Whether the engine's checkpoint has a word timing head, and it is loaded."""
    raise NotImplementedError


async def align_async(
    engine_client: Any,
    audio: np.ndarray,
    transcript: str,
    *,
    language: str | None = None,
    diarize: bool | None = None,
    max_word_seconds: float = 1.0,
) -> Alignment:
    """Time the words of a transcript and say who speaks them.

    Args:
        engine_client: vLLM's asynchronous engine client.
        audio: (samples,) float32, mono, at the checkpoint's rate (16 kHz).
        transcript: generated text with its `<spk:N>` tags; other special tokens are
            ignored.
        language: ISO code that decides how words are cut; from the script when None.
        diarize: align each tag's words where its speaker is heard. None does so if
            the transcript has tags; otherwise the speakers are still reported, but
            do not bind the words.
        max_word_seconds: longest word.

    Raises:
        AlignmentError: the checkpoint has no word timing head, the transcript has no
            words, or the head has no tokens for them. One speaker's words that do
            not fit are reported in `failed_tags` instead.
    """
    raise NotImplementedError


def align(
    llm: Any,
    audio: np.ndarray,
    transcript: str,
    *,
    language: str | None = None,
    diarize: bool | None = None,
    max_word_seconds: float = 1.0,
) -> Alignment:
    """As `align_async`, with a `vllm.LLM`."""
    raise NotImplementedError


def transcribe(llm: Any, audio: Any, **fields: Any) -> Transcription:
    """Transcribe a recording with a `vllm.LLM`, as the routes do."""
    raise NotImplementedError
