# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Output tokens a second, and accepted drafts, with and without MTP.

    .venv/bin/python tools/reference/corpus.py heldout --count 220 --out clips
    .venv/bin/python -m benchmarks.mtp examples/demo/checkpoint clips

Each repeat starts one engine after the other, without drafts and with 1 to 4, so that
what else the machine does hits all of them alike; ratios are taken within a repeat.
The first few clips of the folder warm up, the next ones count.

Of one stream, `decoding` counts from the first token to the last one, and `request`
all of a request, the audio tower included. Of more streams there is only `request`.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.drafts import DraftCounts, greedy, mtp, prompt, token_ids
from tests.engine import offline_engine
from tools.word_error_rate import read_clips

WARM_UP = 4
MAX_MODEL_LEN = 1024


class Speed(NamedTuple):
    """Tokens a second of one engine, and the drafts accepted in a step."""

    request: float
    decoding: float | None
    accepted: float


def measure(llm: Any, prompts: Sequence[Any], streams: int) -> Speed:
    """Generate for all prompts, at most `streams` at a time."""
    counts = DraftCounts(llm)
    start = time.perf_counter()
    if streams == 1:
        outputs = [greedy(llm, [one])[0] for one in prompts]
    else:
        outputs = greedy(llm, prompts)
    seconds = time.perf_counter() - start
    lengths = [len(ids) for ids in token_ids(outputs)]
    decoding = None
    if streams == 1:
        times = [output.metrics for output in outputs]
        spent = sum(time.last_token_ts - time.first_token_ts for time in times)
        decoding = (sum(lengths) - len(lengths)) / spent
    return Speed(sum(lengths) / seconds, decoding, counts.accepted_per_step())


def run(options: argparse.Namespace) -> dict[tuple[int, int], list[Speed]]:
    """Return the speeds of all repeats by (streams, drafts)."""
    clips = read_clips(options.folder)[: options.clips + WARM_UP]
    prompts = [prompt(clip["audio"]) for clip in clips]
    speeds = defaultdict(list)
    for repeat in range(options.repeats):
        for drafts in (0, *options.drafts):
            with offline_engine(
                options.checkpoint,
                dtype=options.dtype,
                enforce_eager=options.enforce_eager,
                disable_log_stats=False,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=max(options.streams),
                **mtp(drafts),
            ) as llm:
                for streams in options.streams:
                    measure(llm, prompts[:WARM_UP], streams)
                    speed = measure(llm, prompts[WARM_UP:], streams)
                    speeds[streams, drafts].append(speed)
                    print(f"repeat {repeat + 1}, {streams=}, {drafts=}: {speed}")
    return speeds


def median_and_range(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    return f"{middle:.2f} ({min(values):.2f}-{max(values):.2f})"


def table(speeds: dict[tuple[int, int], list[Speed]]) -> str:
    """Return a Markdown table: medians, ratios to no drafts with their range."""
    lines = [
        "| streams | drafts | accepted | tokens/s | ratio | decoding | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for (streams, drafts), runs in sorted(speeds.items()):
        base = speeds[streams, 0]
        cells = [str(streams), str(drafts), f"{runs[0].accepted:.2f}"]
        for field in ("request", "decoding"):
            values = [getattr(speed, field) for speed in runs]
            if None in values:
                cells += ["", ""]
                continue
            ratios = [
                value / getattr(other, field)
                for value, other in zip(values, base, strict=True)
            ]
            cells += [f"{statistics.median(values):.0f}", median_and_range(ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path, help="of clips, see tools/word_error_rate")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", type=Path, help="write all speeds here")
    options = parser.parse_args()

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    speeds = run(options)
    if options.json:
        rows = [
            {"streams": streams, "drafts": drafts, **speed._asdict()}
            for (streams, drafts), runs in speeds.items()
            for speed in runs
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(speeds))


if __name__ == "__main__":
    main()
