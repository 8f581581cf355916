# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Output tokens a second, and accepted drafts, with and without MTP.

    .venv/bin/python tools/reference/corpus.py heldout --kind speakers \\
        --count 40 --out clips
    .venv/bin/python -m benchmarks.mtp examples/demo/checkpoint clips

All engines, without drafts and with 1 to 4, are there at once and take turns of a few
clips, so that what else the machine does hits all of them alike; ratios are taken
within a repeat. Between turns nothing runs until the workers have stopped spinning.
Each time a clip is a little quieter, so that no cache answers it.

Of one stream, `decoding` counts from the first token to the last one, and `request`
all of a request, the audio tower included. Of more streams there is only `request`.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.drafts import DraftCounts, greedy, mtp, prompt, token_ids
from tests.engine import offline_engine
from tools.word_error_rate import read_clips

MAX_MODEL_LEN = 1024
MAX_TOKENS = 120
TURN = 5  # clips, one after the other

# A worker looks for its next message without sleeping until nothing came for a second
# (`SpinCondition` of vLLM), and would take a core from the engine whose turn it is.
SPIN_SECONDS = 1.2


class Speed(NamedTuple):
    """Tokens a second of one engine."""

    request: float
    decoding: float | None


@dataclass
class Tally:
    """What an engine has done.

    Attributes:
        tokens, seconds: generated, and the time that it took.
        decoded, decoding_seconds: the same from the first token of a request on.
    """

    tokens: int = 0
    seconds: float = 0.0
    decoded: int = 0
    decoding_seconds: float = 0.0

    def generate(self, llm: Any, prompts: Sequence[Any]) -> None:
        start = time.perf_counter()
        outputs = greedy(llm, prompts, MAX_TOKENS)
        self.seconds += time.perf_counter() - start
        for ids, output in zip(token_ids(outputs), outputs, strict=True):
            self.tokens += len(ids)
            self.decoded += len(ids) - 1
            times = output.metrics
            self.decoding_seconds += times.last_token_ts - times.first_token_ts


def measure(
    engines: Mapping[int, Any], prompts: Sequence[Any], streams: int
) -> dict[int, Speed]:
    """Generate for all prompts with all engines.

    Args:
        engines: by their number of drafts.
        streams: 1 for one prompt at a time; engines bound a larger number themselves.
    """
    tallies = {drafts: Tally() for drafts in engines}
    groups = [[one] for one in prompts] if streams == 1 else [prompts]
    for first in range(0, len(groups), TURN):
        for drafts, llm in engines.items():
            time.sleep(SPIN_SECONDS)
            for group in groups[first : first + TURN]:
                tallies[drafts].generate(llm, group)
    return {
        drafts: Speed(
            tally.tokens / tally.seconds,
            tally.decoded / tally.decoding_seconds if streams == 1 else None,
        )
        for drafts, tally in tallies.items()
    }


class Runs(NamedTuple):
    """All that is measured.

    Attributes:
        accepted: mean drafts accepted in a step, by the number of drafts.
        speeds: of all repeats, by (streams, drafts).
    """

    accepted: dict[int, float]
    speeds: dict[tuple[int, int], list[Speed]]


def run(options: argparse.Namespace) -> Runs:
    clips = read_clips(options.folder)[: options.clips]
    loudness = itertools.count()

    def prompts() -> list[Any]:
        gain = 1 - 1e-3 * next(loudness)
        return [prompt(gain * clip["audio"]) for clip in clips]

    runs, engines = Runs({}, defaultdict(list)), {}
    with contextlib.ExitStack() as stack:
        for drafts in (0, *options.drafts):
            llm = engines[drafts] = stack.enter_context(
                offline_engine(
                    options.checkpoint,
                    dtype=options.dtype,
                    enforce_eager=options.enforce_eager,
                    disable_log_stats=False,
                    max_model_len=MAX_MODEL_LEN,
                    max_num_seqs=max(options.streams),
                    **mtp(drafts),
                )
            )
            # Now, since the counters are those of the newest engine; it warms up, too.
            counts = DraftCounts(llm)
            greedy(llm, prompts(), MAX_TOKENS)
            runs.accepted[drafts] = counts.accepted_per_step()
        for repeat, streams in itertools.product(
            range(1, options.repeats + 1), options.streams
        ):
            for drafts, speed in measure(engines, prompts(), streams).items():
                runs.speeds[streams, drafts].append(speed)
                print(f"{repeat=}, {streams=}, {drafts=}: {speed}", flush=True)
    return runs


def median_and_range(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    return f"{middle:.2f} ({min(values):.2f}-{max(values):.2f})"


def table(runs: Runs) -> str:
    """Return a Markdown table: medians, ratios to no drafts with their range."""
    lines = [
        "| streams | drafts | accepted | tokens/s | ratio | decoding | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for (streams, drafts), speeds in sorted(runs.speeds.items()):
        base = runs.speeds[streams, 0]
        cells = [str(streams), str(drafts), f"{runs.accepted[drafts]:.2f}"]
        for field in ("request", "decoding"):
            values = [getattr(speed, field) for speed in speeds]
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
    runs = run(options)
    if options.json:
        rows = [
            {"streams": streams, "drafts": drafts, **speed._asdict()}
            for (streams, drafts), speeds in runs.speeds.items()
            for speed in speeds
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
