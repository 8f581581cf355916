# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Generated text with its special tokens, to turns."""

import pytest

from vllm_nemotron3_5_transcribe.speech_api.transcript import (
    TranscriptReader,
    Turn,
    opens_thought,
)

TOKENS = {"<|im_end|>", "<|im_start|>", "</s>", "<spk:0>", "<spk:1>", "<|audio|>"}


def read(raw, pieces=None, **options):
    """Read `raw` whole, or in pieces of so many characters; return reader, deltas."""
    reader = TranscriptReader(TOKENS, **options)
    size = pieces or max(len(raw), 1)
    deltas = []
    for start in range(0, len(raw), size):
        deltas += reader.read(raw[start : start + size], start + size >= len(raw))
    return reader, deltas


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("hello there<|im_end|>", "hello there"),
        (" \n hello  there \n", "hello  there"),
        ("a < b and c <d", "a < b and c <d"),
        ("<|im_x|> stays", "<|im_x|> stays"),
        ("one<|im_start|>two", "onetwo"),
        ("<spk:0> a <spk:1> b", "a b"),
        ("<SPK:0>a", "a"),
        ("", ""),
        ("<|im_end|>", ""),
        ("<think>they say</think>hello", "hello"),
        ("hello <think>was that it?", "hello"),
        ("<think>", ""),
        ("wait, he says </think> hello", "hello"),
        ("a<think>1</think>b<think>2</think>c", "abc"),
    ],
)
@pytest.mark.parametrize("pieces", [None, 1, 2, 3, 7])
def test_markup_and_thoughts_go(raw, text, pieces):
    assert read(raw, pieces)[0].text == text


def test_a_thought_that_the_prompt_opens_is_dropped():
    assert opens_thought("user<|im_end|>\nassistant\n<think>\n")
    assert not opens_thought("assistant\n<think></think>")
    assert not opens_thought("assistant\n")
    assert read("they say hello</think> hello", thinking=True)[0].text == "hello"
    assert read("they say hello, I thi", thinking=True)[0].text == ""


@pytest.mark.parametrize("pieces", [None, 1, 2, 5])
def test_speaker_tags_open_turns(pieces):
    reader, _ = read(" <spk:0>  one two<spk:1> three <spk:0><spk:2> four", pieces)
    assert reader.turns == [Turn("0", "one two"), Turn("1", "three"), Turn("2", "four")]
    assert reader.tagged_text == "<spk:0> one two <spk:1> three <spk:2> four"


def test_text_before_the_first_tag_has_no_speaker():
    reader, _ = read("well <spk:0> one")
    assert reader.turns == [Turn(None, "well"), Turn("0", "one")]
    assert reader.tagged_text == "well <spk:0> one"


@pytest.mark.parametrize("raw", ["well <spk:1> one", "<|im_end|>well <spk:1>one"])
def test_text_before_the_first_tag_can_be_somebodys(raw):
    reader, _ = read(raw, diarize=True)
    assert reader.turns == [Turn("0", "well"), Turn("1", "one")]
    assert reader.tagged_text == "<spk:0> well <spk:1> one"


@pytest.mark.parametrize("pieces", [1, 2, 3, 5, 100])
def test_deltas_make_up_the_turns(pieces):
    raw = "<think>x</think> one  two <spk:0> three<|im_end|>"
    reader, deltas = read(raw, pieces)
    for turn in reader.turns:
        assert "".join(d.text for d in deltas if d.turn is turn) == turn.text
    assert [d.opens_transcript for d in deltas] == [True] + [False] * (len(deltas) - 1)
    assert sum(d.opens_turn for d in deltas) == len(reader.turns)
    assert all(d.text for d in deltas)


def test_nothing_of_a_token_is_sent_before_it_is_known():
    reader = TranscriptReader(TOKENS)
    assert reader.read("one <|im") and not reader.read("_en")
    assert not reader.read("d|>", final=True)
    assert reader.text == "one"


def test_what_looked_like_a_token_is_sent_at_the_end():
    reader = TranscriptReader(TOKENS)
    reader.read("one <|im")
    assert [delta.text for delta in reader.read("", final=True)] == [" <|im"]
    assert reader.text == "one <|im"
