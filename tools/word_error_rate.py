# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Word error rate of a checkpoint through vLLM, on a folder of clips.

    .venv/bin/python tools/reference/corpus.py heldout --count 200 --out clips
    .venv/bin/python tools/word_error_rate.py examples/demo/checkpoint clips

The folder has audio files and `transcripts.json`, a list of objects with `file` and
`text`. Greedy decoding, the published transcription instruction.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jiwer
import soundfile

from vllm import LLM, SamplingParams
from vllm.model_executor.models.nemotron3_5_transcribe import (
    AUDIO_PLACEHOLDER,
    DEFAULT_INSTRUCTION,
)


def read_clips(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of `transcripts.json`, their samples read: `audio`, `rate`."""
    clips = json.loads((folder / "transcripts.json").read_text("utf-8"))
    for clip in clips:
        clip["audio"], clip["rate"] = soundfile.read(folder / clip["file"])
    return clips


def word_error_rate(clips: Sequence[dict[str, Any]], heard: Sequence[str]) -> float:
    """Return the word error rate, in percent."""
    return 100 * jiwer.wer([clip["text"] for clip in clips], list(heard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--errors", action="store_true", help="print every mistake")
    options = parser.parse_args()

    clips = read_clips(options.folder)
    llm = LLM(options.checkpoint, dtype=options.dtype, kv_cache_memory_bytes=1 << 30)
    prompt = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": f"{DEFAULT_INSTRUCTION} {AUDIO_PLACEHOLDER}"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    audio = [(clip["audio"], clip["rate"]) for clip in clips]
    outputs = llm.generate(
        [{"prompt": prompt, "multi_modal_data": {"audio": pair}} for pair in audio],
        SamplingParams(temperature=0, max_tokens=1000),
    )
    heard = [output.outputs[0].text.strip() for output in outputs]
    if options.errors:
        for clip, text in zip(clips, heard):
            if clip["text"] != text:
                print(f"{clip['file']}: {clip['text']!r} heard as {text!r}")
    words = sum(len(clip["text"].split()) for clip in clips)
    print(
        f"{options.dtype}: {len(clips)} clips, {words} words, "
        f"word error rate {word_error_rate(clips, heard):.2f} %"
    )


if __name__ == "__main__":
    main()
