# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Word times of Nemotron 3.5 Transcribe: results and pure functions.

CTC log-probabilities and speaker probabilities in, words with times out; nothing
here touches a model or an engine. `nemotron3_5_transcribe_timestamps.py` has the
head that makes the log-probabilities.
"""

import bisect
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import regex as re
import sentencepiece


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


# Speaker tags open a turn; events and styles are heard, and count as words.
_SPEAKER_TAG = re.compile(r"<spk:(\d+)>", re.IGNORECASE)
_KEPT_TAG = re.compile(r"(?i:<spk:\d+>)|<(?:ev|sty):[^<>]*>")

# Key of the words before the first speaker tag, and tag of a transcript without any.
_UNTAGGED = ""
_ONLY_TAG = "0"

# What decides the language of a text, in this order: the beginnings of the Unicode
# names of its characters.
_SCRIPTS = (
    ("ko", ("HANGUL",)),
    ("ja", ("HIRAGANA", "KATAKANA")),
    ("zh", ("CJK UNIFIED", "CJK COMPATIBILITY")),
    ("th", ("THAI",)),
)
# Written without spaces and timed character by character.
_CHARACTER_LANGUAGES = ("zh", "yue", "ja")

# The constants of NeMo's aligner. A speaker is heard in a frame if at least so likely;
# a log-probability is floored; a tag and a speaker of unlike amounts of speech are a
# worse match; a word moves or lasts at most so many encoder frames of at most 80 ms.
_HEARD = 0.01
_PROBABILITY_FLOOR = 1e-6
_AMOUNT_PENALTY = 0.1
_MAX_WORD_FRAMES = 12
_MAX_FRAME_SECONDS = 0.08

# Bytes of backpointers that the search keeps at a time, and frames whose scores it
# widens to float64 at a time.
_BACKPOINTER_BYTES = 64 << 20
_SCORE_FRAMES = 256


class WordPieces:
    """The alphabet of the word timing head.

    Args:
        proto: the serialised SentencePiece model.
        blank: class of the CTC blank, the one after the pieces.
    """

    def __init__(self, proto: bytes, blank: int) -> None:
        self.blank = blank
        self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        self._boundary = self._model.piece_to_id("▁")
        if self._model.get_piece_size() > blank:
            raise AlignmentError(
                f"The alignment tokenizer has {self._model.get_piece_size()} pieces, "
                f"more than the {blank} that the word timing head knows."
            )

    def encode_word(self, word: str) -> list[int]:
        """Pieces of a word that stands between spaces."""
        return self._model.encode(f" {word}")

    def encode_inside(self, text: str) -> list[int]:
        """Pieces of a character or word that need not follow a space.

        Raises:
            AlignmentError: there are none for it.
        """
        unknown = self._model.unk_id()
        if (piece := self._model.piece_to_id(text)) != unknown:
            return [piece]
        pieces = [p for p in self._model.encode(f" {text}") if p != self._boundary]
        if unknown in pieces:
            raise AlignmentError(
                f"The word timing head has no piece for {text!r} "
                f"(U+{ord(text[0]):04X})."
            )
        return pieces


@dataclass
class TokenizedTranscript:
    """What is to be found in a recording.

    Attributes:
        streams: words and their pieces, for each tag in order of appearance.
        failed_tags: why, for each tag whose words have no pieces.
        classes: sorted, the pieces of all streams.
        has_tags: whether the transcript has speaker tags.
    """

    streams: dict[str, list[tuple[str, list[int]]]]
    failed_tags: dict[str, str]
    classes: list[int]
    has_tags: bool


def split_turns(
    transcript: str, special_tokens: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """Cut a transcript at its `<spk:N>` tags.

    Args:
        transcript: generated text.
        special_tokens: taken out, unless they tag a speaker, an event or a style.

    Returns:
        (tag, text) of every turn, in order; the tag is "" for what comes before the
        first one, and "0" in a transcript without tags.
    """
    for token in sorted(special_tokens, key=len, reverse=True):
        if not _KEPT_TAG.fullmatch(token):
            transcript = transcript.replace(token, " ")
    first, *rest = _SPEAKER_TAG.split(transcript.replace("—", " "))
    turns = [(_UNTAGGED if rest else _ONLY_TAG, first)]
    # The same speaker whether written <spk:1> or <spk:01>.
    turns += [(str(int(tag)), text) for tag, text in zip(rest[::2], rest[1::2])]
    return turns


def detect_language(text: str) -> str | None:
    """ISO code of the language that the script of a text stands for, if it does."""
    names = {unicodedata.name(character, "") for character in text}
    for language, beginnings in _SCRIPTS:
        if any(name.startswith(beginnings) for name in names):
            return language
    return None


def cut_words(text: str, language: str | None) -> list[tuple[str, bool]]:
    """Cut the text of a turn into what gets a time of its own.

    Args:
        text: without speaker tags.
        language: ISO code.

    Returns:
        (word, whether it stands between spaces). Characters that are not written as
        words, in Chinese and Japanese, leave out punctuation.

    Raises:
        AlignmentError: Thai, and no `pythainlp` to cut it.
    """
    words: list[tuple[str, bool]] = []
    for word in text.split():
        if _KEPT_TAG.fullmatch(word):
            words.append((word, True))
        elif language in _CHARACTER_LANGUAGES:
            words += [
                (character, False)
                for character in unicodedata.normalize("NFC", word)
                if unicodedata.category(character)[0] in "LMN"
            ]
        elif language == "th":
            pieces = _thai_words(word)
            words += [(piece, index == 0) for index, piece in enumerate(pieces)]
        else:
            words.append((word, True))
    return words


def _thai_words(text: str) -> list[str]:
    try:
        from pythainlp.tokenize import word_tokenize
    except ImportError as error:
        raise AlignmentError(
            "Thai is written without spaces, so its words need a dictionary to be "
            "told apart: install pythainlp for Thai word times."
        ) from error
    return [word for word in word_tokenize(text) if not word.isspace()]


def tokenize_transcript(
    transcript: str,
    pieces: WordPieces,
    language: str | None = None,
    special_tokens: Iterable[str] = (),
) -> TokenizedTranscript:
    """Find the words of a transcript and their pieces.

    Args:
        transcript: generated text, with its speaker tags.
        pieces: the head's alphabet.
        language: ISO code; from the script when None or "auto".
        special_tokens: see `split_turns`.

    Raises:
        AlignmentError: there are no words, or, for Thai, nothing that finds them.
    """
    turns = split_turns(transcript, special_tokens)
    if language in (None, "", "auto"):
        plain = " ".join(_KEPT_TAG.sub(" ", text) for _, text in turns)
        language = detect_language(plain)
    else:
        language = re.split("[-_]", language.lower())[0]

    streams: dict[str, list[tuple[str, list[int]]]] = {}
    failed: dict[str, str] = {}
    for tag, text in turns:
        for word, is_spaced in cut_words(text, language):
            encode = pieces.encode_word if is_spaced else pieces.encode_inside
            try:
                tokens = encode(word)
            except AlignmentError as error:
                failed.setdefault(tag, str(error))
                continue
            if tokens:
                streams.setdefault(tag, []).append((word, tokens))
    for tag in failed:
        streams.pop(tag, None)
    if not streams and not failed:
        raise AlignmentError("The transcript has no words that could be timed.")
    return TokenizedTranscript(
        streams,
        failed,
        sorted({t for words in streams.values() for _, ids in words for t in ids}),
        has_tags=len(turns) > 1,
    )


def resample_frames(values: np.ndarray, num_frames: int) -> np.ndarray:
    """Interpolate (frames, columns) to `num_frames`, first and last frame aligned."""
    if len(values) == num_frames:
        return values
    places = np.linspace(0, len(values) - 1, num_frames)
    return np.stack(
        [np.interp(places, np.arange(len(values)), column) for column in values.T],
        axis=1,
    )


def match_tags(
    targets: Sequence[np.ndarray],
    greedy: np.ndarray,
    is_active: np.ndarray,
    num_classes: int,
) -> list[int | None]:
    """Find the diarizer's speaker of each tag by what both say.

    A speaker says the pieces that begin, in a greedy decoding, while it is active, and
    a tag those of its words. Alike are those that share pieces which few speakers say,
    by the cosine of the square roots of their weighted counts.

    Args:
        targets: class numbers of each tag's pieces.
        greedy: (frames,) most likely class; 0 is the blank.
        is_active: (frames, speakers) bool.
        num_classes: how many, with the blank.

    Returns:
        The speaker of each tag, one to one; None where there are more tags than
        speakers.
    """
    from scipy.optimize import linear_sum_assignment

    begins = greedy != 0
    begins[1:] &= greedy[1:] != greedy[:-1]
    said = np.stack([np.bincount(t, minlength=num_classes) for t in targets])
    heard = np.stack(
        [
            np.bincount(greedy[begins & active], minlength=num_classes)
            for active in is_active.T
        ]
    )
    rarity = np.log1p(len(heard) / (1 + (heard > 0).sum(0)))
    said_vectors, heard_vectors = np.sqrt(said * rarity), np.sqrt(heard * rarity)
    norms = np.outer(
        np.linalg.norm(said_vectors, axis=1), np.linalg.norm(heard_vectors, axis=1)
    )
    likeness = said_vectors @ heard_vectors.T / np.maximum(norms, 1e-8)
    amounts = np.log((said.sum(1)[:, None] + 1) / (heard.sum(1)[None] + 1))
    likeness -= _AMOUNT_PENALTY * np.abs(amounts)
    speakers: list[int | None] = [None] * len(targets)
    for tag, speaker in zip(*linear_sum_assignment(likeness, maximize=True)):
        speakers[tag] = int(speaker)
    return speakers


def min_frames(target: np.ndarray) -> int:
    """Frames that a sequence of pieces needs: a blank parts equal neighbours."""
    return len(target) + int((target[1:] == target[:-1]).sum())


def force_align(
    log_probs: np.ndarray,
    target: np.ndarray,
    frames: np.ndarray | None = None,
    bonus: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the likeliest CTC path through a sequence of pieces: exact Viterbi search.

    Between pieces i - 1 and i lies a blank state i. Scores are relative to the blank's,
    the same for all paths, so a blank state takes the better of itself and piece i - 1,
    and piece i the better of itself and that, unless it equals piece i - 1: then the
    blank state before this frame. Ties are decided for staying, then for the blank.

    Time is frames x pieces. Memory is bounded: backpointers are kept for one block of
    frames; of the blocks before, only the scores they begin with, and they are
    searched again on the way back.

    Args:
        log_probs: (rows, classes), class 0 being the blank.
        target: (pieces,) class numbers, none of them 0.
        frames: (frames,) the rows to search, in order; all of them if None.
        bonus: (frames,) added to every class but the blank.

    Returns:
        First and last of the searched frames of each piece, (pieces,) each.

    Raises:
        ValueError: there are fewer frames than `min_frames` of the target.
    """
    if frames is None:
        frames = np.arange(len(log_probs))
    num_frames, num_pieces = len(frames), len(target)
    if num_frames < min_frames(target) or not num_pieces:
        raise ValueError(f"{num_pieces} pieces do not fit {num_frames} frames")
    repeats = np.flatnonzero(target[1:] == target[:-1]) + 1

    pieces = np.full(num_pieces, -np.inf)
    blanks = np.full(num_pieces + 1, -np.inf)
    blanks[0] = 0.0
    before = np.empty(num_pieces)
    emission = np.empty(num_pieces)

    def search(start: int, end: int, left: np.ndarray, entered: np.ndarray) -> None:
        """Advance `pieces` and `blanks` over frames, filling backpointer rows."""
        for row, frame in enumerate(range(start, end)):
            if row % _SCORE_FRAMES == 0:
                last = min(frame + _SCORE_FRAMES, end)
                scores = log_probs[frames[frame:last]].astype(np.float64)
                scores -= scores[:, :1]
                if bonus is not None:
                    scores += bonus[frame:last, None]
            held = blanks[repeats]
            np.greater(pieces, blanks[1:], out=left[row])
            np.maximum(pieces, blanks[1:], out=blanks[1:])
            np.copyto(before, blanks[:-1])
            before[repeats] = held
            np.greater(before, pieces, out=entered[row])
            np.maximum(before, pieces, out=pieces)
            np.take(scores[row % _SCORE_FRAMES], target, out=emission)
            np.add(pieces, emission, out=pieces)

    block = min(max(_BACKPOINTER_BYTES // (2 * num_pieces), 1), num_frames)
    left = np.empty((block, num_pieces), bool)  # a piece for the blank behind it
    entered = np.empty((block, num_pieces), bool)  # a piece from before
    starts = range(0, num_frames, block)
    saved = []
    for start in starts:
        saved.append((pieces.copy(), blanks.copy()))
        search(start, min(start + block, num_frames), left, entered)

    first = np.zeros(num_pieces, np.int64)
    last = np.full(num_pieces, -1, np.int64)
    is_repeat = np.zeros(num_pieces, bool)
    is_repeat[repeats] = True
    on_piece = bool(pieces[-1] >= blanks[-1])
    at = num_pieces - 1 if on_piece else num_pieces
    for start in reversed(starts):
        end = min(start + block, num_frames)
        if end < num_frames:
            pieces[:], blanks[:] = saved.pop()
            search(start, end, left, entered)
        else:
            saved.pop()
        for row in range(end - start - 1, -1, -1):
            if on_piece:
                if last[at] < 0:
                    last[at] = start + row
                first[at] = start + row
                if not entered[row, at]:
                    continue
                on_piece = False
                if is_repeat[at]:
                    continue
            if at and left[row, at - 1]:
                on_piece, at = True, at - 1
    return first, last


def snap_words(
    words: Sequence[Word], segments: Sequence[tuple[float, float]], limit: float
) -> None:
    """Fit the words of one speaker to the stretches in which it is heard, in place.

    The first word of a stretch starts with it, and a word lasts to the next one of its
    stretch, else to the stretch's end; a word outside of all lasts to the next word.

    Args:
        words: in order.
        segments: (start, end) seconds, in order.
        limit: seconds that a start may move, and that a word may last.
    """
    starts = [start for start, _ in segments]
    places: list[int | None] = []
    for word in words:
        place = bisect.bisect_right(starts, word.start) - 1
        is_inside = place >= 0 and word.start < segments[place][1]
        places.append(place if is_inside else None)
    for index, (word, place) in enumerate(zip(words, places)):
        if place is None or (index and places[index - 1] == place):
            continue
        if word.start - starts[place] <= limit:
            word.start = starts[place]
    for index, (word, place) in enumerate(zip(words, places)):
        has_next = index + 1 < len(words)
        if place is not None and not (has_next and places[index + 1] == place):
            end = segments[place][1]
        else:
            end = words[index + 1].start if has_next else word.end
        word.end = max(word.start, min(end, word.start + limit))


def diarization_segments(
    is_active: np.ndarray, frame_seconds: float, duration: float
) -> list[DiarizationSegment]:
    """Runs of activity.

    Args:
        is_active: (frames, speakers) bool.
        frame_seconds: of a frame.
        duration: of the recording, in seconds; no segment ends later.
    """
    edges = np.diff(np.pad(is_active.astype(np.int8), ((1, 1), (0, 0))), axis=0)
    segments = []
    for speaker, column in enumerate(edges.T):
        starts, ends = np.flatnonzero(column > 0), np.flatnonzero(column < 0)
        for start, end in zip((starts * frame_seconds), ends * frame_seconds):
            end = min(float(end), duration)
            if end > start:
                segments.append(DiarizationSegment(speaker, float(start), end))
    return sorted(segments, key=lambda s: (s.start, s.end, s.speaker))


@dataclass
class HeardRecording:
    """What the encoders and the head found in a recording.

    Attributes:
        log_probs: (frames, 1 + n) of the blank and of the n classes of a
            `TokenizedTranscript`, in order.
        greedy: (frames,) column of the most likely of these, the blank on ties.
        speaker_probs: (10 ms frames, speakers), valid frames and those that fill the
            last encoder frame.
        duration: seconds.
        num_mel_frames: valid 10 ms frames.
        subsampling_factor: 10 ms frames in an encoder frame.
        upsampling_factor: frames of `log_probs` in an encoder frame.
        activity_threshold: probability above which a speaker is active.
    """

    log_probs: np.ndarray
    greedy: np.ndarray
    speaker_probs: np.ndarray
    duration: float
    num_mel_frames: int
    subsampling_factor: int
    upsampling_factor: int
    activity_threshold: float


def align_transcript(
    transcript: TokenizedTranscript,
    heard: HeardRecording,
    *,
    bind_speakers: bool = True,
    max_word_seconds: float = 1.0,
) -> Alignment:
    """Time the words of a transcript.

    Each tag is matched to a speaker of the diarizer, and its words are aligned where
    that one is heard, then fitted to the stretches in which it is active. The method
    and its constants are those of NeMo's aligner, with an exact search.

    Args:
        transcript: the words.
        heard: the recording, with the transcript's classes.
        bind_speakers: False lets words lie anywhere, whoever is heard there.
        max_word_seconds: longest word, before it is fitted.

    Returns:
        The words of every tag but the failed ones. Times are rounded to milliseconds.
    """
    num_frames = len(heard.log_probs)
    step = heard.duration / num_frames
    threshold = heard.activity_threshold
    probs = heard.speaker_probs[: heard.num_mel_frames]
    diarization = diarization_segments(
        probs > threshold, heard.duration / heard.num_mel_frames, heard.duration
    )
    column = {token: index + 1 for index, token in enumerate(transcript.classes)}
    targets = {
        tag: np.array([column[token] for _, ids in words for token in ids])
        for tag, words in transcript.streams.items()
    }

    factor = heard.subsampling_factor
    frame_probs = resample_frames(
        heard.speaker_probs.reshape(-1, factor, probs.shape[1]).mean(1), num_frames
    )
    speakers: dict[str, int | None] = {}
    if targets:
        matched = match_tags(
            list(targets.values()),
            heard.greedy,
            frame_probs >= threshold,
            len(transcript.classes) + 1,
        )
        speakers = dict(zip(targets, matched))

    limit = _MAX_WORD_FRAMES * heard.upsampling_factor * min(step, _MAX_FRAME_SECONDS)
    failed = dict(transcript.failed_tags)
    words: list[Word] = []
    for tag, stream in transcript.streams.items():
        segments: list[tuple[float, float]] = []
        if not bind_speakers:
            speaker_probs = np.ones(num_frames)
        elif (speaker := speakers[tag]) is None:
            failed[tag] = "The diarizer hears no speaker for this tag."
            continue
        else:
            speaker_probs = frame_probs[:, speaker]
            segments = [(s.start, s.end) for s in diarization if s.speaker == speaker]
        frames = np.flatnonzero(speaker_probs >= _HEARD)
        if len(frames) < (needed := min_frames(targets[tag])):
            failed[tag] = (
                f"Its speaker is heard for {len(frames) * step:.2f} s, too short for "
                f"its {len(stream)} words, which need {needed * step:.2f} s."
            )
            continue
        aligned = _align_stream(
            stream,
            None if tag == _UNTAGGED else tag,
            targets[tag],
            heard.log_probs,
            frames,
            np.log(np.maximum(speaker_probs[frames], _PROBABILITY_FLOOR)),
            step,
            max_word_seconds,
        )
        snap_words(aligned, segments, limit)
        words += aligned
    for timed in (*words, *diarization):
        timed.start, timed.end = round(timed.start, 3), round(timed.end, 3)
    return Alignment(
        words=sorted(words, key=lambda word: (word.start, word.end)),
        diarization=diarization,
        tag_map={tag: s for tag, s in speakers.items() if s is not None},
        failed_tags=failed,
        duration=round(heard.duration, 3),
    )


def _align_stream(
    stream: Sequence[tuple[str, list[int]]],
    speaker: str | None,
    target: np.ndarray,
    log_probs: np.ndarray,
    frames: np.ndarray,
    bonus: np.ndarray,
    step: float,
    max_word_seconds: float,
) -> list[Word]:
    """Time the words of one tag on the frames of its speaker.

    Args:
        stream: words and their pieces.
        speaker: of the words.
        target: (pieces,) columns of `log_probs`.
        log_probs: (frames, classes) of the recording.
        frames: (n,) those that may be used.
        bonus: (n,) see `force_align`.
        step: seconds of a frame.
        max_word_seconds: longest word.
    """
    first, last = force_align(log_probs, target, frames, bonus)
    # How well each piece fits: its mean log-probability over its frames.
    counts = last - first + 1
    owners = np.repeat(np.arange(len(target)), counts)
    places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    fits = log_probs[frames[first[owners] + places], target[owners]].astype(np.float64)
    fit = np.bincount(owners, fits, len(target)) / counts

    words, piece = [], 0
    for text, tokens in stream:
        end_piece = piece + len(tokens)
        start = float(frames[first[piece]] * step)
        end = float((frames[last[end_piece - 1]] + 1) * step)
        words.append(
            Word(
                text,
                start,
                min(end, start + max_word_seconds),
                speaker,
                round(float(np.exp(fit[piece:end_piece].mean())), 4),
            )
        )
        piece = end_piece
    return words
