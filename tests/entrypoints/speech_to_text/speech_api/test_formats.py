# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Subtitles and labelled text, read back by pysubs2."""

import html

import pysubs2
import pytest

from vllm_nemotron3_5_transcribe.speech_api.formats import (
    labelled_text,
    speaker_label,
    write_subtitles,
)
from vllm_nemotron3_5_transcribe.speech_api.segments import Segment
from vllm_nemotron3_5_transcribe.speech_api.transcript import Turn


def read_back(text, format_):
    return pysubs2.SSAFile.from_string(text, format_, keep_html_tags=True)


@pytest.mark.parametrize("format_", ["srt", "vtt"])
def test_times_and_texts_are_read_back(format_):
    segments = [
        Segment("Hello there.", 0.0, 1.2345, None),
        Segment("Later.", 3599.9996, 3725.5, None),
    ]
    written = write_subtitles(segments, format_, with_speakers=False)
    assert [(e.start, e.end, e.text) for e in read_back(written, format_)] == [
        (0, 1234, "Hello there."),
        (3600000, 3725500, "Later."),
    ]


def test_files_begin_as_players_expect():
    segments = [Segment("Hello.", 0.5, 1.0, None)]
    assert write_subtitles(segments, "vtt", with_speakers=False).startswith(
        "WEBVTT\n\n1\n00:00:00.500 --> 00:00:01.000\nHello.\n"
    )
    assert write_subtitles(segments, "srt", with_speakers=False).startswith(
        "1\n00:00:00,500 --> 00:00:01,000\nHello.\n"
    )


def test_no_segments_are_an_empty_file():
    assert write_subtitles([], "srt", with_speakers=False) == ""
    assert write_subtitles([], "vtt", with_speakers=False).strip() == "WEBVTT"


@pytest.mark.parametrize("format_", ["srt", "vtt"])
@pytest.mark.parametrize(
    "text",
    [
        "a --> b",
        "{\\i1}not italic{\\i0}",
        "{curly} braces",
        "C:\\new \\N",
        "1 < 2 & 3 > 2",
        "<v Somebody>faked",
        "two\n\nlines",
    ],
)
def test_text_cannot_break_a_subtitle_file(format_, text):
    segments = [Segment(text, 0, 1, None), Segment("next", 1, 2, None)]
    written = write_subtitles(segments, format_, with_speakers=False)
    first, second = read_back(written, format_)
    assert second.text == "next"
    shown = html.unescape(first.text) if format_ == "vtt" else first.text
    expected = " ".join(text.replace("\\", "/").split())
    if format_ == "srt":
        expected = expected.replace("-->", "→")
    assert shown == expected
    if format_ == "vtt":
        assert "<" not in first.text


def test_long_texts_are_two_lines():
    text = "one two three four five six seven eight nine ten eleven twelve"
    written = write_subtitles([Segment(text, 0, 5, None)], "srt", with_speakers=False)
    lines = written.strip().splitlines()[2:]
    assert len(lines) == 2 and " ".join(lines) == text
    assert max(map(len, lines)) <= 42


def test_a_subtitle_lasts():
    written = write_subtitles([Segment("now", 1, 1, None)], "srt", with_speakers=False)
    (event,) = read_back(written, "srt")
    assert event.end > event.start


def test_speakers_are_named():
    segments = [Segment("Hello.", 0, 1, "0"), Segment("Hi & bye.", 1, 2, "1")]
    srt = write_subtitles(segments, "srt", with_speakers=True)
    assert "Speaker A: Hello." in srt and "Speaker B: Hi & bye." in srt
    vtt = write_subtitles(segments, "vtt", with_speakers=True)
    assert "<v Speaker A>Hello." in vtt and "<v Speaker B>Hi &amp; bye." in vtt


def test_labels():
    labels = [speaker_label(tag) for tag in ("0", "7", "25", "26")]
    assert labels == ["A", "H", "Z", "26"]
    turns = [Turn("0", "Hello."), Turn("1", "Hi."), Turn("0", "Eh?")]
    assert labelled_text(turns) == ("Speaker A: Hello.\nSpeaker B: Hi.\nSpeaker A: Eh?")
