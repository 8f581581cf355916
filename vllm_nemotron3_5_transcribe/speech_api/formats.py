# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write segments as subtitles and as labelled text."""

from collections.abc import Iterable, Sequence

import pysubs2

from .segments import LINE_CHARACTERS, Segment
from .transcript import Turn


def speaker_label(speaker: str) -> str:
    """OpenAI's name for a speaker: A, B, … in the order of their tags."""
    number = int(speaker)
    return chr(ord("A") + number) if number < 26 else speaker


def turn_opening(turn: Turn, *, first: bool) -> str:
    """What stands before a turn in labelled text."""
    return f"{'' if first else chr(10)}Speaker {speaker_label(turn.speaker)}: "


def labelled_text(turns: Iterable[Turn]) -> str:
    """One line for each turn, with its speaker."""
    return "".join(
        turn_opening(turn, first=index == 0) + turn.text
        for index, turn in enumerate(turns)
    )


def write_subtitles(
    segments: Sequence[Segment], format_: str, *, with_speakers: bool
) -> str:
    """Write segments as a subtitle file.

    Args:
        segments: one for each subtitle.
        format_: `"srt"` or `"vtt"`.
        with_speakers: name the speaker, in WebVTT by a voice tag.
    """
    subtitles = pysubs2.SSAFile()
    for segment in segments:
        text = r"\N".join(_escape(line, format_) for line in _lines(segment.text))
        if with_speakers:
            speaker = f"Speaker {speaker_label(segment.speaker)}"
            text = f"<v {speaker}>{text}" if format_ == "vtt" else f"{speaker}: {text}"
        start = round(1000 * segment.start)
        # Players skip a subtitle that ends where it starts.
        end = max(round(1000 * segment.end), start + 1)
        subtitles.append(pysubs2.SSAEvent(start=start, end=end, text=text))
    # What looks like SubStation's own tags, in braces, is text here.
    return subtitles.to_string(format_, keep_ssa_tags=True)


def _lines(text: str) -> list[str]:
    """Cut a long text in two, near its middle."""
    text = " ".join(text.split())
    if len(text) <= LINE_CHARACTERS:
        return [text]
    spaces = [index for index, character in enumerate(text) if character == " "]
    middle = len(text) // 2
    cut = min(spaces, key=lambda index: abs(index - middle), default=middle)
    return [text[:cut].rstrip(), text[cut:].lstrip()]


def _escape(text: str, format_: str) -> str:
    # pysubs2 reads a backslash and a letter as a line break.
    text = text.replace("\\", "/")
    if format_ == "vtt":
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("-->", "→")
