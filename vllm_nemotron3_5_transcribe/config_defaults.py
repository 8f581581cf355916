# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engine settings that follow from the architecture, and from a CPU without room."""

import os
import shutil
import sysconfig
from pathlib import Path

from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import (
    NemotronHForCausalLMConfig,
    VerifyAndUpdateConfig,
)
from vllm.platforms import current_platform
from vllm.utils.mem_constants import GiB_bytes

logger = init_logger(__name__)

# What the server's other processes take between this check and the worker's.
_OTHER_PROCESSES_BYTES = 2 * GiB_bytes


class TranscribeConfigDefaults(VerifyAndUpdateConfig):
    """NemotronH's defaults, read from the text config of the wrapper."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Keep the Mamba state in float32 unless the user chose otherwise.

        On a CPU, also keep vLLM's defaults from stopping the server where memory
        is short or nothing can be compiled.
        """
        NemotronHForCausalLMConfig.update_mamba_ssm_cache_dtype(
            cache_config=vllm_config.cache_config,
            hf_config=vllm_config.model_config.hf_text_config,
        )
        if current_platform.is_cpu():
            _run_eagerly_without_compiler(vllm_config.model_config)
            _fit_into_free_memory(vllm_config.cache_config)


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


def _fit_into_free_memory(cache_config: CacheConfig) -> None:
    """Ask for less memory where vLLM's default share of it is not free.

    The default, 92 % of a memory node, is meant for a GPU of one's own; on a CPU
    the worker refuses to start when other processes hold more than the rest.
    """
    from vllm.utils.cpu_resource_utils import (
        get_allowed_cpu_list,
        get_memory_node_info,
    )

    default = CacheConfig.gpu_memory_utilization
    if (
        cache_config.kv_cache_memory_bytes is not None
        or cache_config.gpu_memory_utilization != default
        or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    ):
        return
    node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    available, total = node.available_memory, node.total_memory
    room = max(available - _OTHER_PROCESSES_BYTES, available // 2)
    if default * total <= room:
        return
    share = max(int(95 * room / total), 1) / 100
    cache_config.gpu_memory_utilization = share
    logger.warning(
        "Only %.1f of %.1f GiB of memory are free: using --gpu-memory-utilization %s "
        "instead of %s.",
        available / GiB_bytes,
        total / GiB_bytes,
        share,
        default,
    )
