# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engine settings that vLLM derives from the architecture."""

from vllm.config import VllmConfig
from vllm.model_executor.models.config import (
    NemotronHForCausalLMConfig,
    VerifyAndUpdateConfig,
)


class TranscribeConfigDefaults(VerifyAndUpdateConfig):
    """NemotronH's defaults, read from the text config of the wrapper."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Keep the Mamba state in float32 unless the user chose otherwise."""
        NemotronHForCausalLMConfig.update_mamba_ssm_cache_dtype(
            cache_config=vllm_config.cache_config,
            hf_config=vllm_config.model_config.hf_text_config,
        )
