# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Word times of Nemotron 3.5 Transcribe: results and pure functions.

CTC log-probabilities and speaker probabilities in, words with times out; nothing
here touches a model or an engine. `nemotron3_5_transcribe_timestamps.py` has the
head that makes the log-probabilities.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


class AlignmentError(ValueError):
    """A transcript cannot be aligned at all, or the checkpoint cannot align."""


@dataclass
class Word:
    """One word of a transcript; a character in Chinese and Japanese.

    Attributes:
        text: as in the transcript.
        start, end: seconds.
        speaker: N of the `<spk:N>` tag it stands under, as text; None before the
            first tag, "0" in a transcript without tags.
        confidence: between 0 and 1, how well its tokens fit what is heard in it.
    """

    text: str
    start: float
    end: float
    speaker: str | None
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Word":
        return cls(**values)


@dataclass
class DiarizationSegment:
    """A stretch of speech of one speaker of the diarizer, to 10 ms.

    Attributes:
        speaker: index of the diarizer's speaker, by arrival.
        start, end: seconds.
    """

    speaker: int
    start: float
    end: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DiarizationSegment":
        return cls(**values)


@dataclass
class Alignment:
    """What is known of a transcript's words, and of who speaks when.

    Attributes:
        words: by start, then end.
        diarization: by start, then end, then speaker.
        tag_map: speaker of the diarizer for each tag that has one. Tags are the N of
            `<spk:N>` as text; "" stands for what comes before the first tag.
        failed_tags: why, for each tag whose words could not be aligned. They are not
            in `words`.
        duration: of the recording, in seconds.
    """

    words: list[Word] = field(default_factory=list)
    diarization: list[DiarizationSegment] = field(default_factory=list)
    tag_map: dict[str, int] = field(default_factory=dict)
    failed_tags: dict[str, str] = field(default_factory=dict)
    duration: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Alignment":
        return cls(
            words=[Word.from_dict(word) for word in values["words"]],
            diarization=[
                DiarizationSegment.from_dict(segment)
                for segment in values["diarization"]
            ],
            tag_map=dict(values["tag_map"]),
            failed_tags=dict(values["failed_tags"]),
            duration=values["duration"],
        )
