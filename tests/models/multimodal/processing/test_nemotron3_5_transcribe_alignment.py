# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Word alignment: pure functions, and goldens of the independent reference."""

import itertools
import json
import math
import sys
import tracemalloc

import numpy as np
import pytest

from tests.alignment_goldens import alignment_goldens, build_logits
from vllm.model_executor.models import nemotron3_5_transcribe_alignment as module
from vllm.model_executor.models.nemotron3_5_transcribe_alignment import (
    Alignment,
    AlignmentError,
    DiarizationSegment,
    HeardRecording,
    TokenizedTranscript,
    Word,
    WordPieces,
    align_transcript,
    cut_words,
    detect_language,
    diarization_segments,
    force_align,
    match_tags,
    min_frames,
    resample_frames,
    snap_words,
    split_turns,
    tokenize_transcript,
)

CASES = alignment_goldens()["cases"]
SPECIAL_TOKENS = ["<|im_end|>", "<|audio|>", "<unk>", "<spk:0>", "<ev:laugh>"]


@pytest.fixture(scope="module")
def pieces():
    return WordPieces(alignment_goldens()["tokenizers"]["bpe"], CASES[0]["classes"] - 1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def heard_of(case, tokenized: TokenizedTranscript) -> HeardRecording:
    """What the worker would return for a golden case."""
    logits, speaker_logits = build_logits(case)
    classes = [case["classes"] - 1, *tokenized.classes]
    log_probs = log_softmax(logits)[:, classes]
    return HeardRecording(
        log_probs=log_probs.astype(np.float16),
        greedy=log_probs.argmax(1),
        speaker_probs=1 / (1 + np.exp(-speaker_logits.astype(np.float64))),
        duration=case["mel_frames"] * 0.01,
        num_mel_frames=case["mel_frames"],
        subsampling_factor=case["subsampling"],
        upsampling_factor=case["upsampling"],
        activity_threshold=0.5,
    )


def tag_name(tag: int | None) -> str:
    return "" if tag is None else str(tag)


def test_goldens_are_of_every_kind():
    assert len(CASES) >= 60
    words = [word for case in CASES for word in case["expected"]["words"]]
    failed = [tag for case in CASES for tag in case["expected"]["failed"]]
    assert len(words) > 500 and len(failed) > 10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_alignment_equals_reference(case, pieces):
    """Words within a frame, speakers, tags, failures and diarization identical."""
    tokenized = tokenize_transcript(
        case["transcript"], pieces, case["language"], SPECIAL_TOKENS
    )
    heard = heard_of(case, tokenized)
    actual = align_transcript(tokenized, heard, bind_speakers=case["with_speakers"])
    expected = case["expected"]
    assert set(actual.failed_tags) == {tag_name(tag) for tag in expected["failed"]}
    if case["with_speakers"]:
        assert actual.tag_map == {
            tag_name(tag): speaker
            for tag, speaker in expected["tag_map"]
            if speaker is not None
        }
        assert [s.speaker for s in actual.diarization] == [
            speaker for speaker, _, _ in expected["diarization"]
        ]
        for segment, (_, start, end) in zip(
            actual.diarization, expected["diarization"]
        ):
            assert segment.start == pytest.approx(start, abs=6e-4)
            assert segment.end == pytest.approx(end, abs=6e-4)
    assert len(actual.words) == len(expected["words"])
    frame = case["mel_frames"] * 0.01 / len(heard.log_probs) + 1e-3
    # Rounding may swap words of two speakers that start together.
    by_tag = {}
    for word in actual.words:
        by_tag.setdefault(word.speaker, []).append(word)
    for text, start, end, tag in expected["words"]:
        word = by_tag[None if tag is None else str(tag)].pop(0)
        assert word.text == text
        assert abs(word.start - start) <= frame
        assert abs(word.end - end) <= frame
        assert 0 <= word.confidence <= 1


def test_most_words_equal_the_reference_exactly(pieces):
    """The frame of tolerance is for rare ties, not for a shift."""
    exact = total = 0
    for case in CASES:
        tokenized = tokenize_transcript(
            case["transcript"], pieces, case["language"], SPECIAL_TOKENS
        )
        actual = align_transcript(
            tokenized, heard_of(case, tokenized), bind_speakers=case["with_speakers"]
        )
        for word, (text, start, end, _) in zip(actual.words, case["expected"]["words"]):
            total += 1
            exact += (
                word.text == text
                and abs(word.start - start) < 1e-3
                and abs(word.end - end) < 1e-3
            )
    assert exact >= 0.99 * total


# --- Search --------------------------------------------------------------------------


def best_score_by_hand(log_probs, target, bonus):
    """Try every labelling of the frames."""
    best = -math.inf
    for labels in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        squeezed = [label for label, _ in itertools.groupby(labels)]
        if [label for label in squeezed if label] == list(target):
            score = sum(
                log_probs[frame, label] + (bonus[frame] if label else 0)
                for frame, label in enumerate(labels)
            )
            best = max(best, score)
    return best


def score_of(log_probs, target, bonus, first, last):
    labels = np.zeros(len(log_probs), int)
    for token, start, end in zip(target, first, last):
        assert not labels[start : end + 1].any()
        labels[start : end + 1] = token
    squeezed = [label for label, _ in itertools.groupby(labels) if label]
    assert squeezed == list(target)
    rows = np.arange(len(labels))
    return log_probs[rows, labels].sum() + bonus[labels > 0].sum()


@pytest.mark.parametrize("target", [[1], [1, 2], [1, 1], [2, 1, 1], [1, 2, 2, 1]])
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_search_is_exact(target, block_bytes, monkeypatch):
    """Against all 3^8 labellings, in one block of frames and in blocks of one."""
    monkeypatch.setattr(module, "_BACKPOINTER_BYTES", block_bytes)
    random = np.random.default_rng(len(target))
    target = np.array(target)
    for _ in range(2):
        log_probs = log_softmax(3 * random.standard_normal((8, 3)))
        bonus = -random.random(8)
        first, last = force_align(log_probs, target, bonus=bonus)
        score = score_of(log_probs, target, bonus, first, last)
        expected = best_score_by_hand(log_probs, target, bonus)
        assert score == pytest.approx(expected)


@pytest.mark.parametrize("block_frames", [1, 7, 64, 299])
def test_blocks_change_nothing(block_frames, monkeypatch):
    random = np.random.default_rng(3)
    log_probs = log_softmax(2 * random.standard_normal((300, 9)))
    target = random.integers(1, 9, 60)
    whole = force_align(log_probs, target)
    monkeypatch.setattr(module, "_BACKPOINTER_BYTES", 2 * 60 * block_frames)
    monkeypatch.setattr(module, "_SCORE_FRAMES", 5)
    for actual, expected in zip(force_align(log_probs, target), whole):
        assert actual.tolist() == expected.tolist()


def test_some_frames_are_searched_as_if_there_were_no_others():
    random = np.random.default_rng(4)
    log_probs = log_softmax(2 * random.standard_normal((60, 5)))
    target, frames = random.integers(1, 5, 9), np.flatnonzero(random.random(60) < 0.6)
    alone = force_align(log_probs[frames], target)
    for actual, expected in zip(force_align(log_probs, target, frames), alone):
        assert actual.tolist() == expected.tolist()


def test_tightest_fit_and_one_frame_less():
    target = np.array([1, 1, 2])
    log_probs = np.zeros((4, 3))
    assert min_frames(target) == 4
    first, last = force_align(log_probs, target)
    assert first.tolist() == last.tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match="3 pieces do not fit 3 frames"):
        force_align(log_probs[:3], target)


def test_an_hour_takes_little_memory():
    """90,000 frames of 40 ms and 12,000 pieces: the lattice would be 2 GB."""
    num_frames, num_pieces, num_classes = 90_000, 12_000, 40
    random = np.random.default_rng(5)
    target = random.integers(1, num_classes, num_pieces)
    spread = num_frames // num_pieces
    log_probs = np.full((num_frames, num_classes), -8, np.float16)
    log_probs[:, 0] = -0.01
    heard = np.arange(num_pieces) * spread + 3
    log_probs[heard, target] = -0.5
    tracemalloc.start()
    first, last = force_align(log_probs, target)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 160e6
    assert (first == heard).mean() > 0.999 and (last == heard).mean() > 0.999


# --- Text ----------------------------------------------------------------------------


def test_turns_are_cut_at_tags():
    assert split_turns("one two") == [("0", "one two")]
    assert split_turns("hi <spk:1> a<SPK:02>b") == [
        ("", "hi "),
        ("1", " a"),
        ("2", "b"),
    ]
    text = "<|im_start|><spk:0>a—b<ev:cough><|im_end|>"
    specials = ["<|im_start|>", "<|im_end|>", "<spk:0>", "<ev:cough>"]
    assert split_turns(text, specials)[1] == ("0", "a b<ev:cough> ")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("hello", None),
        ("привет", None),
        ("안녕 今日", "ko"),
        ("今日は", "ja"),
        ("カタカナ", "ja"),
        ("世界 hello", "zh"),
        ("สวัสดี", "th"),
        ("", None),
    ],
)
def test_script_tells_the_language(text, language):
    assert detect_language(text) == language


def test_words_are_cut_by_language():
    assert cut_words("it's  so.", "en") == [("it's", True), ("so.", True)]
    assert cut_words("你好，A1。", "zh") == [(c, False) for c in "你好A1"]
    assert cut_words("<ev:laugh> は", "ja") == [("<ev:laugh>", True), ("は", False)]
    # A decomposed character is one character.
    assert cut_words("か\u3099", "ja") == [("が", False)]


def test_thai_needs_pythainlp(monkeypatch, pieces):
    monkeypatch.setitem(sys.modules, "pythainlp.tokenize", None)
    with pytest.raises(AlignmentError, match="install pythainlp"):
        tokenize_transcript("สวัสดีครับ", pieces)


def test_thai_is_cut_by_pythainlp(monkeypatch):
    from types import SimpleNamespace

    stub = SimpleNamespace(word_tokenize=lambda text: [text[:3], " ", text[3:]])
    monkeypatch.setitem(sys.modules, "pythainlp", SimpleNamespace(tokenize=stub))
    monkeypatch.setitem(sys.modules, "pythainlp.tokenize", stub)
    assert cut_words("สวัสดี", "th") == [("สวั", True), ("สดี", False)]


@pytest.mark.parametrize("text", ["", "  ", "<spk:0> <spk:1>", "<|im_end|>", "，。你"])
def test_a_transcript_without_words_is_refused(text, pieces):
    language = "zh" if "，" in text else None
    if "你" in text:
        text = text.replace("你", "")
    with pytest.raises(AlignmentError, match="no words"):
        tokenize_transcript(text, pieces, language, SPECIAL_TOKENS)


def test_a_character_without_a_piece_fails_its_speaker_only(pieces):
    tokenized = tokenize_transcript("<spk:0>你好<spk:1>你龘好", pieces)
    assert list(tokenized.streams) == ["0"]
    assert "龘" in tokenized.failed_tags["1"]
    assert tokenized.classes == sorted(
        piece for character in "你好" for piece in pieces.encode_inside(character)
    )


def test_a_regional_code_is_its_language(pieces):
    by_region = tokenize_transcript("你好", pieces, "zh-CN")
    assert [word for word, _ in by_region.streams["0"]] == ["你", "好"]
    assert tokenize_transcript("你好", pieces, "auto") == by_region


def test_more_pieces_than_classes_are_refused():
    proto = alignment_goldens()["tokenizers"]["bpe"]
    with pytest.raises(AlignmentError, match="320 pieces, more than the 100"):
        WordPieces(proto, 100)


# --- Speakers ------------------------------------------------------------------------


def test_resampling_keeps_the_ends():
    values = np.array([[0.0], [1.0], [3.0]])
    assert resample_frames(values, 5)[:, 0].tolist() == [0, 0.5, 1, 2, 3]
    assert resample_frames(values, 3) is values
    assert resample_frames(values[:1], 2)[:, 0].tolist() == [0, 0]


def test_tags_are_matched_by_what_is_said():
    greedy = np.array([1, 1, 0, 2, 3, 0, 3])
    is_active = np.zeros((7, 3), bool)
    is_active[:4, 2] = True
    is_active[4:, 0] = True
    targets = [np.array([3, 3]), np.array([1, 2])]
    assert match_tags(targets, greedy, is_active, 4) == [0, 2]
    assert match_tags(targets[::-1], greedy, is_active, 4) == [2, 0]


def test_a_tag_too_many_stays_alone():
    greedy, is_active = np.array([1, 2]), np.ones((2, 1), bool)
    targets = [np.array([3]), np.array([1, 2])]
    assert match_tags(targets, greedy, is_active, 4) == [None, 0]


def test_segments_are_runs_that_end_with_the_recording():
    is_active = np.array([[1, 0], [1, 1], [0, 1], [0, 1]], bool)
    assert diarization_segments(is_active, 0.5, 1.75) == [
        DiarizationSegment(0, 0.0, 1.0),
        DiarizationSegment(1, 0.5, 1.75),
    ]
    assert diarization_segments(np.zeros((4, 2), bool), 0.5, 2.0) == []


def words_at(*spans):
    return [Word("w", start, end, "0", 1.0) for start, end in spans]


@pytest.mark.parametrize(
    ("spans", "segments", "expected"),
    [
        # The first word of a segment starts with it, the last one ends with it.
        ([(1.1, 1.2), (1.5, 1.6)], [(1.0, 2.0)], [(1.0, 1.5), (1.5, 2.0)]),
        # Not over more than the limit of one second.
        ([(2.5, 2.6)], [(1.0, 4.0)], [(2.5, 3.5)]),
        # Outside of segments a word lasts to the next one; the last as it was.
        ([(5.0, 5.1), (5.3, 5.4)], [(1.0, 2.0)], [(5.0, 5.3), (5.3, 5.4)]),
        # Two segments, a word in each.
        (
            [(0.2, 0.3), (1.2, 1.3)],
            [(0.1, 0.8), (1.0, 1.5)],
            [(0.1, 0.8), (1.0, 1.5)],
        ),
        # A segment that ended before the word.
        ([(0.9, 1.0)], [(0.1, 0.9)], [(0.9, 1.0)]),
        ([], [(0.0, 1.0)], []),
    ],
)
def test_snapping(spans, segments, expected):
    words = words_at(*spans)
    snap_words(words, segments, 1.0)
    assert [(w.start, pytest.approx(w.end)) for w in words] == expected


def one_word(num_frames=20, bind_speakers=True, speaker_probs=None, **heard):
    """Align the word "w", class 7, heard in frame 10 of an 80 ms / 40 ms grid."""
    log_probs = np.full((num_frames, 2), [-0.01, -5.0])
    log_probs[10] = [-5.0, -0.01]
    if speaker_probs is None:
        speaker_probs = np.full((num_frames * 4, 1), 0.9)
    return align_transcript(
        TokenizedTranscript({"0": [("w", [7])]}, {}, [7], has_tags=True),
        HeardRecording(
            log_probs=log_probs,
            greedy=log_probs.argmax(1),
            speaker_probs=speaker_probs,
            duration=num_frames * 0.04,
            num_mel_frames=num_frames * 4,
            subsampling_factor=8,
            upsampling_factor=2,
            activity_threshold=0.5,
            **heard,
        ),
        bind_speakers=bind_speakers,
    )


def test_confidence_is_that_of_the_words_frames():
    (word,) = one_word(bind_speakers=False).words
    assert (word.start, word.end) == (0.4, 0.44)
    assert word.confidence == pytest.approx(math.exp(-0.01), abs=1e-4)


def test_speakers_are_reported_even_if_they_do_not_bind_the_words():
    silent_at_word = np.full((80, 1), 0.9)
    silent_at_word[32:56] = 1e-4
    free = one_word(bind_speakers=False, speaker_probs=silent_at_word)
    assert free.words[0].start == 0.4 and free.tag_map == {"0": 0}
    assert [(s.start, s.end) for s in free.diarization] == [(0, 0.32), (0.56, 0.8)]
    bound = one_word(speaker_probs=silent_at_word)
    assert bound.tag_map == {"0": 0}
    assert not 0.32 <= bound.words[0].start < 0.56


def test_a_speaker_who_is_not_heard_long_enough_fails_with_a_reason():
    alignment = one_word(speaker_probs=np.full((80, 1), 1e-4))
    assert not alignment.words
    assert "heard for 0.00 s" in alignment.failed_tags["0"]


def test_results_survive_json():
    alignment = one_word()
    again = Alignment.from_dict(json.loads(json.dumps(alignment.to_dict())))
    assert again == alignment
