# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build the audio tower of a checkpoint on its own, without an engine."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from tests.models.multimodal.loading import single_process
from vllm.config import VllmConfig
from vllm.model_executor.models.nemotron3_5_transcribe_audio import (
    Nemotron3_5TranscribeAudioTower,
)
from vllm.transformers_utils.configs.nemotron3_5_transcribe import (
    Nemotron3_5TranscribeConfig,
)
from vllm.utils.torch_utils import set_default_torch_dtype


@contextlib.contextmanager
def build_tower(
    checkpoint: Path, dtype: torch.dtype
) -> Iterator[Nemotron3_5TranscribeAudioTower]:
    """Load the tower of `checkpoint` in `dtype` as a single-process vLLM would."""
    config = Nemotron3_5TranscribeConfig.from_pretrained(checkpoint)
    with contextlib.ExitStack() as stack, set_default_torch_dtype(dtype):
        single_process(stack, VllmConfig())
        tower = Nemotron3_5TranscribeAudioTower(
            config.audio_config, prefix="audio_tower"
        )
        with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
            tower.load_weights(
                (name.removeprefix("perception."), file.get_tensor(name))
                for name in file.keys()  # noqa: SIM118
                if name.startswith("perception.")
            )
        for module in tower.modules():
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)
        yield tower.eval()
