#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write the goldens of word alignment with the reference implementation.

    python tools/reference/alignment_goldens.py --out tests/data/goldens/alignment.json

Runs the reference's `align_word_timestamps` on transcripts and synthetic logits, which
`tests/alignment_goldens.py` rebuilds, so that the file depends on no checkpoint. It
needs torchaudio's `forced_align`, which does not load beside the PyTorch of
`.venv-reference`; `README.md` says which environment has it.
"""

import argparse
import base64
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import sentencepiece
import torch
import torchaudio
import transformers
from demo_tokenizer import train_pieces
from transformers.models.nemotron3_5_transcribe.processing_nemotron3_5_transcribe import (  # noqa: E501
    Nemotron3_5TranscribeProcessor,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.alignment_goldens import build_logits  # noqa: E402

_WORDS = """
hello goodbye please thank you sorry yes no your call phone number message today
tomorrow yesterday time is the from with and now try again later enter press star
pound key hold while connect person first last next new old work family friends urgent
bookkeeper balloon coffee committee llama aardvark zero one two three four five six
seven eight nine ten it's co-operate Mississippi
"""
WORDS = _WORDS.split()
CHINESE = "你好世界今天天气很好我们去公园散步谢谢再见一二三四五六七八九十"
JAPANESE = "こんにちは今日はいい天気ですねありがとうカタカナ東京駅へ行きます"
KOREAN = "안녕하세요 오늘 날씨가 좋네요 감사합니다 다음에 봐요"
SPECIAL_TOKENS = ["<|im_end|>", "<|audio|>", "<unk>", "<spk:0>", "<ev:laugh>"]

SAMPLE_RATE, HOP = 16_000, 160


def build_pieces() -> bytes:
    """Train a small BPE model; return it serialised."""
    letters = "abcdefghijklmnopqrstuvwxyzHM'-.,!?<>:0123456789"
    return train_pieces(
        [w for w in WORDS for _ in range(20)],
        320,
        required_chars=letters + CHINESE + JAPANESE + KOREAN.replace(" ", ""),
    )


class PieceTokenizer:
    """SentencePiece with the three methods that the reference calls."""

    def __init__(self, proto: bytes) -> None:
        self.model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        self.unk_token_id = self.model.unk_id()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.model.encode(text)

    def convert_tokens_to_ids(self, piece: str) -> int:
        return self.model.piece_to_id(piece)


def reference_processor(
    tokenizer: PieceTokenizer, subsampling: int
) -> Nemotron3_5TranscribeProcessor:
    """The reference's processor with no more than alignment needs."""
    processor = object.__new__(Nemotron3_5TranscribeProcessor)
    processor.alignment_tokenizer = tokenizer
    processor.tokenizer = SimpleNamespace(all_special_tokens=SPECIAL_TOKENS)
    processor.feature_extractor = SimpleNamespace(
        hop_length=HOP, sampling_rate=SAMPLE_RATE
    )
    processor.subsampling_factor = subsampling
    return processor


@dataclass
class Turn:
    """What one speaker says without a break.

    Attributes:
        speaker: of the diarizer; None is heard by nobody.
        units: words, or characters where those are aligned.
        tag: what the transcript writes before it.
        said: False leaves it out of the recording.
        written: False leaves it out of the transcript.
    """

    speaker: int | None
    units: list[str]
    tag: str = ""
    said: bool = True
    written: bool = True
    joiner: str = " "


class CaseBuilder:
    """Lays turns on a time line and describes the logits they would give."""

    def __init__(self, tokenizer: PieceTokenizer) -> None:
        self.tokenizer = tokenizer
        self.cases: list[dict[str, Any]] = []

    def _pieces(self, unit: str, joiner: str) -> list[int]:
        if joiner == " ":
            return self.tokenizer.encode(" " + unit)
        piece = self.tokenizer.convert_tokens_to_ids(unit)
        return [piece] if piece else self.tokenizer.encode(" " + unit)

    def add(
        self,
        name: str,
        turns: list[Turn],
        *,
        speakers: int = 4,
        language: str | None = None,
        text: str | None = None,
        with_speakers: bool = True,
        pace: float = 0.38,
        overlap: float = 0.0,
        gap: float = 0.3,
        weak: float = 0.0,
        factors: tuple[int, int] = (8, 2),
        extra_seconds: float = 0.4,
    ) -> None:
        """Add a case.

        Args:
            name: for messages.
            turns: in order.
            speakers: columns of the diarizer.
            language: as given to the aligner.
            text: the transcript, if it is not the turns'.
            with_speakers: give the diarizer's logits to the aligner.
            pace: seconds of a word.
            overlap: seconds that a turn begins before the last one ends.
            gap: seconds between turns.
            weak: share of the pieces that are hardly heard.
            factors: subsampling and upsampling.
            extra_seconds: silence at the end.
        """
        seed = 1000 + 10 * len(self.cases)
        random = np.random.default_rng(seed)
        subsampling, upsampling = factors
        frame = subsampling * 0.01 / upsampling
        time, peaks, activity, written = 0.25, [], [], []
        for turn in turns:
            if turn.written:
                written.append(turn.tag + turn.joiner.join(turn.units))
            if not turn.said:
                continue
            begin = time
            for unit in turn.units:
                length = pace * random.uniform(0.6, 1.4)
                if unit.startswith("<"):
                    length = 0.5
                pieces = self._pieces(unit, turn.joiner)
                for number, piece in enumerate(pieces):
                    at = time + length * (number + random.uniform(0.1, 0.6)) / len(
                        pieces
                    )
                    height = 3.0 if random.random() < weak else 10.0
                    peaks.append([int(at / frame), piece, height])
                    if random.random() < 0.3:
                        peaks.append([int(at / frame) + 1, piece, 8.0])
                time += length
            if turn.speaker is not None:
                first = begin - random.uniform(-0.05, 0.15)
                last = time + random.uniform(-0.05, 0.15)
                activity.append(
                    [turn.speaker, max(int(first * 100), 0), int(last * 100)]
                )
            time += gap - overlap
        seconds = max([time, *(end / 100 for _, _, end in activity)]) + extra_seconds
        mel_frames = int(seconds * 100)
        frames = -(-mel_frames // subsampling) * upsampling
        transcript = text if text is not None else " ".join(written)
        self.cases.append(
            {
                "name": name,
                "transcript": transcript,
                "language": language,
                "with_speakers": with_speakers,
                "seed": seed,
                "mel_frames": mel_frames,
                "subsampling": subsampling,
                "upsampling": upsampling,
                "classes": self.tokenizer.model.get_piece_size() + 1,
                "speakers": speakers,
                "peaks": [p for p in peaks if p[0] < frames],
                "activity": activity,
            }
        )


def some(random: np.random.Generator, count: int) -> list[str]:
    """Random words."""
    return [str(word) for word in random.choice(WORDS, count)]


def build_cases(builder: CaseBuilder) -> None:
    """Add every kind of case."""
    random = np.random.default_rng(7)
    add = builder.add
    for number in range(8):
        words = some(random, int(random.integers(1, 12)))
        add(f"one speaker {number}", [Turn(number % 3, words)], weak=0.1)
    for number in range(4):
        turns = [Turn(1, some(random, 4)) for _ in range(number + 1)]
        add(f"pauses {number}", turns, gap=0.7 + number)
    for number in range(4):
        turns = [Turn(0, some(random, 5)), Turn(1, some(random, 3))]
        add(f"no diarizer {number}", turns, with_speakers=False)
    for number in range(4):
        turns = [Turn(2, some(random, 6), "<spk:0> ")]
        add(f"one tag {number}", turns, speakers=5, weak=0.2)
    for number in range(10):
        turns = [
            Turn(
                turn % 2,
                some(random, int(random.integers(1, 6))),
                f"<spk:{turn % 2}> ",
            )
            for turn in range(2 + number % 4)
        ]
        add(f"two speakers {number}", turns, gap=0.1 + 0.1 * (number % 5), weak=0.05)
    for number in range(5):
        # The diarizer numbers them the other way round, and they overlap.
        turns = [
            Turn(1 - turn % 2, some(random, 5), f"<spk:{turn % 2}> ")
            for turn in range(4)
        ]
        add(f"overlap {number}", turns, gap=0.2, overlap=0.3 + 0.15 * number)
    for number in range(4):
        order = (2, 0, 3, 2, 0)
        turns = [
            Turn(order[turn], some(random, 4), f"<spk:{(0, 1, 2, 0, 1)[turn]}> ")
            for turn in range(5)
        ]
        add(f"three speakers {number}", turns)
    for number in range(6):
        # More tags than the diarizer has speakers.
        tags = 3 + number % 2
        turns = [
            Turn(turn % 2, some(random, 4), f"<spk:{turn}> ") for turn in range(tags)
        ]
        add(f"unmatched tag {number}", turns, speakers=2)
    for number in range(3):
        # A tag whose words nobody says.
        turns = [
            Turn(0, some(random, 5), "<spk:0> "),
            Turn(None, some(random, 3), "<spk:1> ", said=False),
            Turn(1, some(random, 4), "<spk:2> "),
        ]
        add(f"unheard tag {number}", turns, speakers=3)
    for number in range(3):
        turns = [
            Turn(0, some(random, 3)),
            Turn(0, some(random, 40 + 20 * number), said=False),
        ]
        add(f"text too long {number}", turns, with_speakers=number != 1)
    for number in range(4):
        turns = [
            Turn(0, some(random, 4), "<spk:0> "),
            Turn(1, some(random, 2), "<spk:1> "),
            Turn(1, some(random, 70), said=False),
        ]
        add(f"one speaker too long {number}", turns)
    # Fits by its number of pieces, but for the blanks between equal ones.
    add("repeats too long", [Turn(0, ["zero"])], text="zero " * 9, gap=0.0)
    for number, words in enumerate(
        (
            ["bookkeeper", "balloon", "coffee", "committee"],
            ["llama", "aardvark", "Mississippi"],
            ["zero"] * 6,
            ["a", "a", "a", "b", "b"],
            ["aaaa", "nn", "oooo"],
            ["no", "no", "yes", "yes", "no", "no"],
        )
    ):
        tag = "<spk:0> " if number % 2 else ""
        add(f"repeated letters {number}", [Turn(0, words, tag)], weak=0.1)
    for number in range(6):
        start = 3 * number
        turns = [
            Turn(0, list(CHINESE[start : start + 9]), "<spk:0> ", joiner=""),
            Turn(1, list(CHINESE[start + 4 : start + 10]), "<spk:1> ", joiner=""),
        ]
        text = None
        if number == 1:
            text = f"<spk:0>{CHINESE[3:12]}，<spk:1>{CHINESE[7:13]}。"
        add(
            f"Chinese {number}",
            turns if number % 3 else turns[:1],
            language="zh" if number == 2 else None,
            text=text,
            pace=0.22,
        )
    for number in range(3):
        turns = [Turn(0, list(JAPANESE[8 * number : 8 * number + 9]), joiner="")]
        add(f"Japanese {number}", turns, pace=0.2)
    add("Korean", [Turn(1, KOREAN.split())], pace=0.5)
    add("Chinese by words", [Turn(0, ["你好", "世界"])], language="en")
    add(
        "before the first tag",
        [Turn(1, some(random, 4)), Turn(0, some(random, 4), "<spk:1> ")],
    )
    add(
        "only a tag at the end",
        [Turn(1, some(random, 4)), Turn(0, some(random, 3), "<SPK:7> ")],
    )
    add(
        "events are words",
        [Turn(0, ["<ev:laugh>", "hello", "friends", "<sty:fast>", "now"], "<spk:0> ")],
    )
    add(
        "special tokens and dashes",
        [Turn(0, ["hello", "you", "work", "now"])],
        text="<|audio|>hello—you work<unk> now<|im_end|>",
    )
    for number, factors in enumerate(((6, 3), (8, 1), (4, 2), (6, 3))):
        turns = [
            Turn(turn % 2, some(random, 5), f"<spk:{turn % 2}> ") for turn in range(3)
        ]
        add(f"other factors {number}", turns, factors=factors, pace=0.5)


def align(builder: CaseBuilder, case: dict[str, Any]) -> dict[str, Any]:
    """Run the reference on a case; return its result as plain data."""
    logits, speaker_logits = build_logits(case)
    processor = reference_processor(builder.tokenizer, case["subsampling"])
    result = processor.align_word_timestamps(
        case["transcript"],
        torch.from_numpy(logits)[None],
        torch.ones(1, case["mel_frames"], dtype=torch.long),
        torch.from_numpy(speaker_logits)[None] if case["with_speakers"] else None,
        language=case["language"],
    )
    return {
        "words": [
            [chunk["text"], *chunk["timestamp"], chunk["speaker"]]
            for chunk in result["chunks"]
        ],
        "diarization": [
            [segment["speaker"], *segment["timestamp"]]
            for segment in result["diarization"]
        ],
        "tag_map": list(result["speaker_tag_to_diarization_speaker"].items()),
        "failed": result["failed_speakers"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    proto = build_pieces()
    builder = CaseBuilder(PieceTokenizer(proto))
    build_cases(builder)
    for case in builder.cases:
        case["expected"] = align(builder, case)
    lines = ",\n".join(
        json.dumps(case, ensure_ascii=False, separators=(",", ":"))
        for case in builder.cases
    )
    head = json.dumps(
        {
            "tokenizers": {"bpe": base64.b64encode(proto).decode()},
            "versions": {
                "torch": torch.__version__,
                "torchaudio": torchaudio.__version__,
                "transformers": transformers.__version__,
            },
        }
    )
    out.write_text(f'{head[:-1]}, "cases": [\n{lines}\n]}}\n', "utf-8")
    words = sum(len(case["expected"]["words"]) for case in builder.cases)
    failed = sum(len(case["expected"]["failed"]) for case in builder.cases)
    print(
        f"{out}: {len(builder.cases)} cases, {words} words, {failed} failed tags, "
        f"{out.stat().st_size / 1000:.0f} kB"
    )


if __name__ == "__main__":
    main()
