# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Word times to segments."""

import pytest

from vllm.model_executor.models.nemotron3_5_transcribe_alignment import (
    Alignment,
    DiarizationSegment,
    Word,
)
from vllm_nemotron3_5_transcribe.speech_api.segments import (
    build_segments,
    spread_segments,
)
from vllm_nemotron3_5_transcribe.speech_api.transcript import Turn


def words(text, speaker="0", start=0.0, step=0.5, units=None):
    """Words of `text`, one after the other."""
    return [
        Word(unit, start + step * i, start + step * (i + 1), speaker, 0.9)
        for i, unit in enumerate(units or text.split())
    ]


def segments_of(turns, spoken, duration=60.0, **fields):
    spoken = sorted(spoken, key=lambda word: (word.start, word.end))
    return build_segments(turns, Alignment(spoken, duration=duration, **fields))


def test_one_sentence_is_one_segment():
    text = "Hello there, you."
    (segment,) = segments_of([Turn(None, text)], words(text))
    assert (segment.text, segment.start, segment.end) == (text, 0.0, 1.5)
    assert [word.text for word in segment.words] == text.split()


@pytest.mark.parametrize("end", list(".?!…。？！") + ['."', ".)"])
def test_sentences_are_segments(end):
    text = f"One two{end} Three four"
    segments = segments_of([Turn(None, text)], words(text))
    assert [segment.text for segment in segments] == [f"One two{end}", "Three four"]
    assert segments[1].start == 1.0


def test_a_pause_ends_a_segment():
    text = "one two three"
    spoken = words("one two") + words("three", start=1.9)
    segments = segments_of([Turn(None, text)], spoken)
    assert [segment.text for segment in segments] == ["one two", "three"]


def test_segments_fit_a_subtitle():
    text = " ".join(["word"] * 100)
    segments = segments_of([Turn(None, text)], words(text, step=0.3))
    assert max(len(segment.text) for segment in segments) <= 84
    assert max(segment.end - segment.start for segment in segments) <= 7.0
    assert " ".join(segment.text for segment in segments) == text


def test_characters_of_chinese_keep_their_punctuation():
    text = "你好，世界。再见！"
    spoken = words("", units="你好世界再见")
    segments = segments_of([Turn(None, text)], spoken)
    assert [segment.text for segment in segments] == ["你好，世界。", "再见！"]
    assert [segment.start for segment in segments] == [0.0, 2.0]


def test_words_go_to_the_turns_of_their_speaker():
    turns = [Turn("0", "one two"), Turn("1", "two"), Turn("0", "two one")]
    spoken = words("one two two one", "0") + words("two", "1", start=0.2)
    segments = segments_of(turns, spoken)
    assert [(s.speaker, s.text, s.start) for s in segments] == [
        ("0", "one two", 0.0),
        ("1", "two", 0.2),
        ("0", "two one", 1.0),
    ]


def test_unaligned_speaker_gets_the_gap():
    turns = [Turn("0", "one"), Turn("1", "lost words"), Turn("0", "two")]
    spoken = words("one", "0") + words("two", "0", start=3.0)
    segments = segments_of(turns, spoken, failed_tags={"1": "too long"})
    assert [(s.text, s.start, s.end, s.aligned) for s in segments] == [
        ("one", 0.0, 0.5, True),
        ("lost words", 0.5, 3.0, False),
        ("two", 3.0, 3.5, True),
    ]


def test_unaligned_speakers_at_the_edges():
    turns = [Turn("1", "lost"), Turn("0", "one"), Turn("1", "lost too")]
    segments = segments_of(turns, words("one", "0", start=2.0), duration=9.0)
    assert [(s.start, s.end) for s in segments] == [(0.0, 2.0), (2.0, 2.5), (2.5, 9.0)]


def test_text_before_the_first_tag():
    turns = [Turn(None, "well"), Turn("0", "one")]
    segments = segments_of(turns, words("well", None) + words("one", "0", start=1.0))
    assert [(s.speaker, s.start) for s in segments] == [(None, 0.0), ("0", 1.0)]


def test_words_unknown_to_the_text_end_a_turn_without_harm():
    (segment,) = segments_of([Turn(None, "one two three")], words("one too three"))
    assert segment.text == "one two three"
    assert [word.text for word in segment.words] == ["one"]


def test_translations_are_spread_over_the_speech():
    speech = [DiarizationSegment(0, 1.0, 3.0), DiarizationSegment(1, 2.0, 4.0)]
    speech.append(DiarizationSegment(0, 10.0, 13.0))
    segments = spread_segments([Turn(None, "One two. Two two.")], speech, 20.0)
    assert [segment.text for segment in segments] == ["One two.", "Two two."]
    assert [(s.start, s.end) for s in segments] == [(1.0, 4.0), (10.0, 13.0)]
    assert not any(segment.aligned for segment in segments)


def test_translations_without_speech_take_the_whole_recording():
    (segment,) = spread_segments([Turn(None, "Hello.")], [], 5.0)
    assert (segment.start, segment.end) == (0.0, 5.0)


def test_translations_without_spaces_are_cut():
    segments = spread_segments([Turn(None, "你好。" * 60)], [], 60.0)
    assert "".join(segment.text for segment in segments) == "你好。" * 60
    assert len(segments) == 60
