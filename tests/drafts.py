# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engines that draft with the MTP head, and prompts for them.

Shared by the tests, `tools/mtp_exactness.py` and `benchmarks/mtp.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

SAMPLE_RATE = 16_000


def mtp(drafts: int) -> dict[str, Any]:
    """Return the engine options of `drafts` draft tokens a step; 0 is none."""
    if not drafts:
        return {}
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}}


def prompt(clip: np.ndarray, *, filler: int = 0, answer: str = "") -> dict[str, Any]:
    """Return the published transcription prompt.

    Args:
        clip: (samples,) at 16 kHz.
        filler: Tokens of nonsense before the clip, to choose the prompt's length.
        answer: Begun answer to go on from.
    """
    from vllm.model_executor.models.nemotron3_5_transcribe import (
        AUDIO_PLACEHOLDER,
        DEFAULT_INSTRUCTION,
    )

    return {
        "prompt": (
            f"<|im_start|>system\n{'x' * filler}<|im_end|>\n<|im_start|>user\n"
            f"{DEFAULT_INSTRUCTION} {AUDIO_PLACEHOLDER}<|im_end|>\n"
            f"<|im_start|>assistant\n<think></think>{answer}"
        ),
        "multi_modal_data": {"audio": (clip, SAMPLE_RATE)},
    }


def prompt_of_length(llm: Any, clip: np.ndarray, length: int, answer: str = "") -> Any:
    """Return a prompt that has `length` tokens before `answer`."""
    text = prompt(clip)["prompt"]
    bare = len(llm.get_tokenizer()(text)["input_ids"]) - 1 + num_audio_tokens(llm, clip)
    return prompt(clip, filler=length - bare, answer=answer)


def num_audio_tokens(llm: Any, clip: np.ndarray) -> int:
    """Return the tokens that a clip takes in a prompt."""
    from vllm.model_executor.models.nemotron3_5_transcribe_audio import (
        get_num_audio_tokens,
    )

    return get_num_audio_tokens(len(clip), llm.model_config.hf_config.audio_config)


def greedy(llm: Any, prompts: Sequence[Any], max_tokens: int = 60) -> list[Any]:
    """Generate greedily, all prompts at once; special tokens stay in the texts."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, skip_special_tokens=False
    )
    return llm.generate(prompts, params, use_tqdm=False)


def token_ids(outputs: Sequence[Any]) -> list[list[int]]:
    """Return the generated ids of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


class DraftCounts:
    """Steps with drafts, and the drafts accepted in them, since it was made.

    The engine needs `disable_log_stats=False`.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.before = self._read()

    def _read(self) -> tuple[int, int]:
        metrics = {metric.name: metric for metric in self.llm.get_metrics()}
        names = ("num_drafts", "num_accepted_tokens")
        counters = [metrics.get(f"vllm:spec_decode_{name}") for name in names]
        return tuple(counter.value if counter else 0 for counter in counters)

    def accepted_per_step(self) -> float:
        """Return the mean number of accepted drafts; 0 if there was no draft."""
        steps, accepted = (
            now - then for now, then in zip(self._read(), self.before, strict=True)
        )
        return accepted / steps if steps else 0.0


class WithheldAudio:
    """Worker extension with a switch: the drafter embeds the prompt's text alone."""

    def withhold_audio(self) -> None:
        """Call by `collective_rpc("withhold_audio")`."""
        drafter = self.model_runner.drafter.model
        embed = drafter.embed_input_ids
        drafter.embed_input_ids = lambda input_ids, *args, **kwargs: embed(input_ids)
