# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engine settings that follow from the architecture, and from running on a CPU."""

import os
import shutil
import sysconfig
from pathlib import Path

from transformers import PretrainedConfig

from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import (
    NemotronHForCausalLMConfig,
    VerifyAndUpdateConfig,
)
from vllm.platforms import current_platform
from vllm.utils.mem_constants import GiB_bytes

# A child of vLLM's logger, for its handlers.
logger = init_logger("vllm.nemotron3_5_transcribe")

# What the front end calls for word times.
_WORKER_EXTENSION = (
    "vllm_nemotron3_5_transcribe.worker_extension.AlignmentWorkerExtension"
)

# Size of the KV cache on a CPU, if the user names none.
_FULL_LENGTH_REQUESTS = 8
_SMALLEST_CACHE_BYTES = GiB_bytes // 2
# Mamba states that a request holds: running, saved, and after some drafts.
_STATES_PER_REQUEST = 8


class TranscribeConfigDefaults(VerifyAndUpdateConfig):
    """NemotronH's defaults, read from the text config of the wrapper."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Keep the Mamba state in float32 unless the user chose otherwise.

        The workers get the method that times words, unless the user extends them.
        On a CPU, also keep vLLM's defaults from taking all of the memory, and from
        stopping the server where nothing can be compiled.
        """
        NemotronHForCausalLMConfig.update_mamba_ssm_cache_dtype(
            cache_config=vllm_config.cache_config,
            hf_config=vllm_config.model_config.hf_text_config,
        )
        parallel_config = vllm_config.parallel_config
        _refuse_drafts_across_v1_stages(vllm_config)
        if not parallel_config.worker_extension_cls:
            parallel_config.worker_extension_cls = _WORKER_EXTENSION
        if current_platform.is_cpu():
            _run_eagerly_without_compiler(vllm_config.model_config)
            _limit_kv_cache(vllm_config)


def _refuse_drafts_across_v1_stages(vllm_config: VllmConfig) -> None:
    """Say early what vLLM's V1 runner would only crash on.

    All of its stages ask for the drafter, which the last one alone has. The CPU knows
    no other runner.
    """
    if (
        vllm_config.speculative_config is not None
        and vllm_config.parallel_config.pipeline_parallel_size > 1
        and not vllm_config.use_v2_model_runner
    ):
        raise ValueError(
            "Speculative decoding does not run with pipeline parallelism on vLLM's V1 "
            "model runner: leave out --speculative-config or --pipeline-parallel-size."
        )


def _run_eagerly_without_compiler(model_config: ModelConfig) -> None:
    """Turn compilation off where Inductor could not build its C++ kernels."""
    compiler = os.environ.get("CXX") or "g++"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which(compiler) is None:
        missing = f"C++ compiler ({compiler})"
    elif not header.is_file():
        missing = f"Python header ({header})"
    else:
        return
    if not model_config.enforce_eager:
        model_config.enforce_eager = True
        logger.warning(
            "No %s found: running without torch.compile, which is slower.", missing
        )


def _limit_kv_cache(vllm_config: VllmConfig) -> None:
    """Reserve what some requests need in place of nearly all of the memory.

    vLLM's default, 92 % of a memory node, is meant for a GPU of one's own. On a CPU
    other programs want memory, too, and the worker refuses to start when they have
    it. A checkpoint that is not in a folder keeps vLLM's default: how much of the
    memory its weights will take is not known here.
    """
    from vllm.utils.cpu_resource_utils import (
        get_allowed_cpu_list,
        get_memory_node_info,
    )

    cache, model = vllm_config.cache_config, vllm_config.model_config
    folder = Path(model.model)
    if (
        cache.kv_cache_memory_bytes is not None
        or cache.gpu_memory_utilization != CacheConfig.gpu_memory_utilization
        or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        or not folder.is_dir()
    ):
        return
    weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    wanted = _FULL_LENGTH_REQUESTS * _request_bytes(
        model.hf_text_config, model.max_model_len
    )
    room = max(node.available_memory - weights, 0) // 2
    cache.kv_cache_memory_bytes = min(max(wanted, _SMALLEST_CACHE_BYTES), room)
    logger.info(
        "Reserving %.2f GiB for the KV cache; --kv-cache-memory-bytes sets another "
        "size.",
        cache.kv_cache_memory_bytes / GiB_bytes,
    )


def _request_bytes(text_config: PretrainedConfig, max_model_len: int) -> int:
    """Keys, values and Mamba states of a request of full length, roughly.

    In float32, which is twice what bfloat16 needs.
    """
    pattern = text_config.hybrid_override_pattern
    token = 2 * text_config.num_key_value_heads * text_config.head_dim
    inner = text_config.mamba_num_heads * text_config.mamba_head_dim
    channels = inner + 2 * text_config.n_groups * text_config.ssm_state_size
    state = inner * text_config.ssm_state_size + channels * text_config.conv_kernel
    return 4 * (
        pattern.count("*") * token * max_model_len
        + pattern.count("M") * state * _STATES_PER_REQUEST
    )
