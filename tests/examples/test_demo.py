# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parts of the demo's client; `tools/demo.sh` runs all of it."""

from examples.demo.transcribe_samples import tagged_text


def segment(text, speaker=None):
    return {"text": text, **({} if speaker is None else {"speaker": speaker})}


def test_turns_of_a_response_are_tagged_as_in_the_references():
    segments = [segment("one", "A"), segment("two", "A"), segment("three", "B")]
    assert tagged_text({"segments": segments}) == "<spk:0> one two <spk:1> three"


def test_without_speakers_there_are_no_tags():
    assert tagged_text({"segments": [segment("one"), segment("two")]}) == "one two"
