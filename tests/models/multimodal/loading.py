# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Load a checkpoint by vLLM's own loader into this process, without an engine."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.plugins import load_general_plugins
from vllm.utils.torch_utils import set_default_torch_dtype


def single_process(stack: contextlib.ExitStack, vllm_config: VllmConfig) -> None:
    """Enter `vllm_config` and a world of one process on `stack`."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    stack.enter_context(set_current_vllm_config(vllm_config))
    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)


@contextlib.contextmanager
def loaded_model(checkpoint: Path, **options: Any) -> Iterator[torch.nn.Module]:
    """Yield the target model of `checkpoint`; float32 unless told.

    Its parameters are as loaded: packing them for the CPU's kernels, which empties
    them, is left out.
    """
    vllm_config = _engine_config(checkpoint, **options)
    with _loaded(vllm_config, vllm_config.model_config) as model:
        yield model


@contextlib.contextmanager
def loaded_drafter(checkpoint: Path, **options: Any) -> Iterator[torch.nn.Module]:
    """Yield the MTP drafter of `checkpoint`, as `loaded_model` does the target.

    What the proposer would share with it is not there.
    """
    speculative = {"method": "mtp", "num_speculative_tokens": 2}
    vllm_config = _engine_config(checkpoint, speculative_config=speculative, **options)
    draft_config = vllm_config.speculative_config.draft_model_config
    with _loaded(vllm_config, draft_config) as model:
        yield model


def _engine_config(checkpoint: Path, **options: Any) -> VllmConfig:
    load_general_plugins()
    args = EngineArgs(
        model=str(checkpoint),
        **{"dtype": "float32", "kv_cache_memory_bytes": 1 << 20, **options},
    )
    vllm_config = args.create_engine_config()
    # Layers of an earlier model in this process would clash by name.
    vllm_config.compilation_config.static_forward_context.clear()
    return vllm_config


@contextlib.contextmanager
def _loaded(
    vllm_config: VllmConfig, model_config: ModelConfig
) -> Iterator[torch.nn.Module]:
    with contextlib.ExitStack() as stack:
        single_process(stack, vllm_config)
        with set_default_torch_dtype(model_config.dtype):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config)
            loader = get_model_loader(vllm_config.load_config)
            loader.load_weights(model, model_config)
        yield model
