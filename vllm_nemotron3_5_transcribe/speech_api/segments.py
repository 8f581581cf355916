# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Cut a timed transcript into segments: of one turn, one sentence, one subtitle."""

import unicodedata
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm.model_executor.models.nemotron3_5_transcribe_alignment import (
    Alignment,
    DiarizationSegment,
    Word,
)

from .transcript import Turn

# What common subtitle guidelines ask for: two lines of 42 characters, seven seconds.
LINE_CHARACTERS = 42
_MAX_CHARACTERS = 2 * LINE_CHARACTERS
_MAX_SECONDS = 7.0
# A pause that ends a segment, in seconds.
_PAUSE = 0.8

_SENTENCE_ENDS = tuple(".?!…。？！｡؟।")
_CLOSERS = "\"'”’)]}»」』"


@dataclass
class Segment:
    """A stretch of a transcript.

    Attributes:
        text: as in the transcript.
        start, end: seconds.
        speaker: N of its `<spk:N>` tag, as text; None without one.
        words: its words, by time.
        aligned: False if its words could not be aligned, and the times are those of
            the gap that it must lie in.
    """

    text: str
    start: float
    end: float
    speaker: str | None
    words: list[Word] = field(default_factory=list)
    aligned: bool = True


def timed_segments(
    turns: Sequence[Turn], alignment: Alignment, duration: float, *, translated: bool
) -> list[Segment]:
    """Cut a transcript, or a translation, into segments with times.

    Args:
        turns: of the transcript, in order.
        alignment: of the same transcript; of a translation only who speaks when.
        duration: of the recording, in seconds.
        translated: see `spread_segments`.
    """
    if translated:
        return spread_segments(turns, alignment.diarization, duration)
    return build_segments(turns, alignment)


def build_segments(turns: Sequence[Turn], alignment: Alignment) -> list[Segment]:
    """Cut turns at sentences, pauses, and where a subtitle would be too long.

    Args:
        turns: of the transcript, in order.
        alignment: of the same transcript.

    Returns:
        Segments in the order of the transcript; their texts make up the turns'.
    """
    waiting: dict[str | None, deque[Word]] = defaultdict(deque)
    for word in alignment.words:
        waiting[word.speaker].append(word)
    has_tags = any(turn.speaker is not None for turn in turns)
    segments: list[Segment] = []
    for turn in turns:
        # The aligner calls the speaker of a transcript without tags "0".
        words = waiting[turn.speaker if has_tags else "0"]
        segments += _cut_turn(turn, words)
    _place_unaligned(segments, alignment.duration)
    return segments


def _cut_turn(turn: Turn, waiting: deque[Word]) -> list[Segment]:
    """Cut one turn, taking its words off the words of its speaker."""
    text = unicodedata.normalize("NFC", turn.text)
    words: list[Word] = []
    starts: list[int] = []
    end = 0
    while waiting:
        start = text.find(unicodedata.normalize("NFC", waiting[0].text), end)
        if start < 0:
            break
        end = start + len(waiting[0].text)
        words.append(waiting.popleft())
        starts.append(start)
    if not words:
        return [Segment(turn.text, 0.0, 0.0, turn.speaker, aligned=False)]
    firsts = [0]
    for index in range(1, len(words)):
        if _ends_before(index, firsts[-1], words, starts, text):
            firsts.append(index)
    segments = []
    for first, after in zip(firsts, [*firsts[1:], len(words)]):
        begin = starts[first] if first else 0
        stop = starts[after] if after < len(words) else len(text)
        group = words[first:after]
        segments.append(
            Segment(
                text[begin:stop].strip(),
                group[0].start,
                max(word.end for word in group),
                turn.speaker,
                group,
            )
        )
    return segments


def _ends_before(
    index: int, first: int, words: list[Word], starts: list[int], text: str
) -> bool:
    """Whether a segment that began with word `first` ends before word `index`."""
    if words[index].start - words[index - 1].end >= _PAUSE:
        return True
    if words[index].end - words[first].start > _MAX_SECONDS:
        return True
    after = starts[index + 1] if index + 1 < len(starts) else len(text)
    if len(text[starts[first] : after].rstrip()) > _MAX_CHARACTERS:
        return True
    before = text[starts[index - 1] : starts[index]].rstrip().rstrip(_CLOSERS)
    return before.endswith(_SENTENCE_ENDS)


def _place_unaligned(segments: list[Segment], duration: float) -> None:
    """Give segments without words the time between their neighbours."""
    for index, segment in enumerate(segments):
        if segment.aligned:
            continue
        later = (other.start for other in segments[index + 1 :] if other.aligned)
        segment.start = segments[index - 1].end if index else 0.0
        segment.end = max(next(later, duration), segment.start)


def spread_segments(
    turns: Sequence[Turn], speech: Iterable[DiarizationSegment], duration: float
) -> list[Segment]:
    """Lay sentences over the time in which anyone speaks, by their length.

    For a translation: its words have no times in the recording, so these are
    estimates.

    Args:
        turns: of the translation, in order.
        speech: who speaks when; the whole recording counts if nobody does.
        duration: of the recording, in seconds.
    """
    stretches: list[tuple[float, float]] = []
    for heard in sorted(speech, key=lambda heard: heard.start):
        if stretches and heard.start <= stretches[-1][1]:
            start, end = stretches.pop()
            stretches.append((start, max(end, heard.end)))
        else:
            stretches.append((heard.start, heard.end))
    stretches = stretches or [(0.0, duration)]
    spoken = sum(end - start for start, end in stretches)

    def time_at(share: float, *, closing: bool) -> float:
        """Seconds at which this share of the speech is over."""
        left = share * spoken
        for start, end in stretches:
            if left < end - start or (closing and left <= end - start):
                return start + left
            left -= end - start
        return stretches[-1][1]

    # Words as a stand-in, so that sentences and lengths are cut as ever.
    pieces = [
        (turn.speaker, segment.text)
        for turn in turns
        for segment in _cut_turn(turn, deque(_untimed_words(turn.text)))
    ]
    total = sum(len(text) for _, text in pieces)
    segments, done = [], 0
    for speaker, text in pieces:
        start = time_at(done / total, closing=False)
        done += len(text)
        end = time_at(done / total, closing=True)
        segments.append(Segment(text, start, max(end, start), speaker, aligned=False))
    return segments


def _untimed_words(text: str) -> list[Word]:
    words = text.split()
    if len(words) == 1:
        # Written without spaces: cut anywhere.
        words = list(text)
    return [Word(word, 0.0, 0.0, None, 0.0) for word in words]
