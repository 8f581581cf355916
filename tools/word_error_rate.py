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
from pathlib import Path

import jiwer
import soundfile

from vllm import LLM, SamplingParams
from vllm.model_executor.models.nemotron3_5_transcribe import (
    AUDIO_PLACEHOLDER,
    DEFAULT_INSTRUCTION,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--errors", action="store_true", help="print every mistake")
    options = parser.parse_args()

    clips = json.loads((options.folder / "transcripts.json").read_text("utf-8"))
    llm = LLM(options.checkpoint, dtype=options.dtype, kv_cache_memory_bytes=1 << 30)
    prompt = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": f"{DEFAULT_INSTRUCTION} {AUDIO_PLACEHOLDER}"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    audio = [soundfile.read(options.folder / clip["file"]) for clip in clips]
    outputs = llm.generate(
        [{"prompt": prompt, "multi_modal_data": {"audio": pair}} for pair in audio],
        SamplingParams(temperature=0, max_tokens=1000),
    )
    said = [clip["text"] for clip in clips]
    heard = [output.outputs[0].text.strip() for output in outputs]
    if options.errors:
        for clip, text in zip(clips, heard):
            if clip["text"] != text:
                print(f"{clip['file']}: {clip['text']!r} heard as {text!r}")
    words = sum(len(text.split()) for text in said)
    print(
        f"{options.dtype}: {len(clips)} clips, {words} words, "
        f"word error rate {100 * jiwer.wer(said, heard):.2f} %"
    )


if __name__ == "__main__":
    main()
