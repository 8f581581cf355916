# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare what a checkpoint says with and without MTP drafts, clip by clip.

    .venv/bin/python tools/reference/corpus.py heldout --count 220 --out clips
    .venv/bin/python -m tools.mtp_exactness examples/demo/checkpoint clips

In float32, token ids and transcripts must equal those of an engine without drafts,
without prefix caching and with one request at a time, for every number of drafts and

* `plain`: without prefix caching; one at a time, then 8 at once.
* `small`: a step may have fewer tokens than a clip, so that prefills are split inside
  the audio; one at a time, then 8 at once.
* `cached`: with prefix caching, prompts that end just before a block's border; 8 at
  once, the same prompts and audio again, and again one at a time.

With `--bfloat16`, rounding may differ with the batch: the word error rates must be
equal within half a point, and the number of differing transcripts is printed.

Exits with 1 if anything differs. One engine runs at a time; all of it takes some 17
minutes of one core, and twice that with `--bfloat16` and other work on the machine.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.drafts import (
    DraftCounts,
    greedy,
    mtp,
    num_audio_tokens,
    prompt,
    prompt_of_length,
    token_ids,
)
from tests.engine import offline_engine

CONCURRENT = 8
BUDGET = 16
BLOCK = 128
MAX_TOKENS = 120
MAX_MODEL_LEN = 1024
WER_TOLERANCE = 0.5

MODES: dict[str, dict[str, Any]] = {
    "plain": {"enable_prefix_caching": False},
    "small": {"max_num_batched_tokens": BUDGET},
    "cached": {},
}


@contextmanager
def engine(checkpoint: str, **options: Any) -> Iterator[Any]:
    with offline_engine(
        checkpoint,
        **{
            "enforce_eager": True,
            "disable_log_stats": False,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": CONCURRENT,
            **options,
        },
    ) as llm:
        yield llm


class Answers:
    """Ids and texts of all clips, and how many prompt tokens came from the cache."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.ids = token_ids(outputs)
        self.texts = [output.outputs[0].text for output in outputs]
        self.cached = sum(output.num_cached_tokens or 0 for output in outputs)

    def differences(self, other: "Answers") -> tuple[int, int]:
        """Return how many clips differ in ids, and in texts."""
        ids = sum(a != b for a, b in zip(self.ids, other.ids, strict=True))
        texts = sum(a != b for a, b in zip(self.texts, other.texts, strict=True))
        return ids, texts


def singly(llm: Any, prompts: Sequence[Any]) -> Answers:
    return Answers([greedy(llm, [one], MAX_TOKENS)[0] for one in prompts])


def together(llm: Any, prompts: Sequence[Any]) -> Answers:
    return Answers(greedy(llm, prompts, MAX_TOKENS))


def short_prompts(llm: Any, clips: Sequence[dict[str, Any]]) -> list[Any]:
    return [prompt(clip["audio"]) for clip in clips]


def padded_prompts(llm: Any, clips: Sequence[dict[str, Any]]) -> list[Any]:
    """Prompts that end 1 to 9 tokens before the end of a block: drafts cross it."""
    return [
        prompt_of_length(llm, clip["audio"], 3 * BLOCK - 1 - number % 9)
        for number, clip in enumerate(clips)
    ]


class Report:
    """Prints one line for each comparison and remembers whether all were equal."""

    def __init__(self) -> None:
        self.failed = False
        self.start = time.monotonic()

    def compare(
        self, what: str, answers: Answers, expected: Answers, accepted: float
    ) -> None:
        ids, texts = answers.differences(expected)
        self.failed |= bool(ids or texts)
        tokens = sum(map(len, answers.ids))
        print(
            f"{time.monotonic() - self.start:6.0f} s  {what:30} "
            f"{len(answers.ids)} clips, {tokens} tokens, {answers.cached} from the "
            f"cache, {accepted:.2f} accepted: {ids} differ in ids, {texts} in text",
            flush=True,
        )


def check_float32(
    checkpoint: str,
    clips: Sequence[dict[str, Any]],
    drafts: Sequence[int],
    modes: Sequence[str],
    report: Report,
) -> None:
    with engine(checkpoint, enable_prefix_caching=False) as llm:
        longer = sum(num_audio_tokens(llm, clip["audio"]) > BUDGET for clip in clips)
        print(f"{longer} of {len(clips)} clips exceed the budget of mode `small`.")
        short = singly(llm, short_prompts(llm, clips))
        padded = singly(llm, padded_prompts(llm, clips)) if "cached" in modes else None
    for mode in modes:
        for count in drafts:
            with engine(checkpoint, **MODES[mode], **mtp(count)) as llm:
                if mode == "cached":
                    prompts, expected = padded_prompts(llm, clips), padded
                    runs = (together, together, singly)
                else:
                    prompts, expected = short_prompts(llm, clips), short
                    runs = (singly, together)
                for run in runs:
                    counts = DraftCounts(llm)
                    answers = run(llm, prompts)
                    report.compare(
                        f"{mode}, N={count}, {run.__name__}",
                        answers,
                        expected,
                        counts.accepted_per_step(),
                    )


def check_bfloat16(
    checkpoint: str,
    clips: Sequence[dict[str, Any]],
    drafts: Sequence[int],
    report: Report,
) -> None:
    from tools.word_error_rate import word_error_rate

    runs = {}
    for count in (0, *drafts):
        with engine(checkpoint, dtype="bfloat16", **mtp(count)) as llm:
            answers = together(llm, short_prompts(llm, clips))
        texts = [text.removesuffix("<|im_end|>").strip() for text in answers.texts]
        runs[count] = answers, word_error_rate(clips, texts)
        base, base_rate = runs[0]
        report.failed |= abs(runs[count][1] - base_rate) > WER_TOLERANCE
        print(
            f"bfloat16, N={count}: word error rate {runs[count][1]:.2f} %, "
            f"{answers.differences(base)[1]} of {len(clips)} transcripts differ "
            "from those without drafts",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="clips")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--bfloat16", action="store_true")
    options = parser.parse_args()

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from tools.word_error_rate import read_clips

    clips = read_clips(options.folder)[: options.count]
    report = Report()
    if options.modes:
        check_float32(options.checkpoint, clips, options.drafts, options.modes, report)
    if options.bfloat16:
        check_bfloat16(options.checkpoint, clips, options.drafts, report)
    print("DIFFERENT" if report.failed else "equal")
    sys.exit(int(report.failed))


if __name__ == "__main__":
    main()
