# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which draft model a speculative config means: ours for ``nemo_speechlm``.

vLLM asks ``SpeculativeConfig.hf_config_override`` to turn a target's config into
its drafter's, and pickles that very function into the processes it spawns. So the
replacement is a plain function at module level: pickle finds it here by name, also
in a process that has not registered yet. A closure would not pickle, and a wrapped
function would come back as vLLM's own.
"""

from collections.abc import Callable
from typing import Any

from vllm.config.speculative import SpeculativeConfig
from vllm_nemotron3_5_transcribe.hooks import DRAFT_ARCHITECTURE, MODEL_TYPE

# vLLM's own rule, once ours has taken its place.
_vllm_rule: Callable[..., Any] | None = None


def hf_config_override(*args: Any, **kwargs: Any) -> Any:
    """Turn a target's config into its drafter's.

    Args:
        args: The target's config, and what newer vLLM versions add.
        kwargs: The same by name.

    Returns:
        For ``nemo_speechlm`` the same config, now naming our drafter and vLLM's
        generic MTP type; for any other model what vLLM's own rule returns.

    Raises:
        ValueError: The checkpoint has no draft head, or one of distinct blocks.
        RuntimeError: vLLM's own rule cannot be found.
    """
    config = args[0] if args else kwargs.get("hf_config")
    if getattr(config, "model_type", None) != MODEL_TYPE:
        return _find_vllm_rule()(*args, **kwargs)
    config.require_repeated_mtp()
    # One block serves every depth, so any number of draft tokens is a multiple of
    # what it predicts.
    config.update(
        {
            "architectures": [DRAFT_ARCHITECTURE],
            "num_nextn_predict_layers": 1,
            "n_predict": 1,
        }
    )
    config.model_type = "mtp"
    return config


hf_config_override.routes_nemo_speechlm = True


def install() -> None:
    """Put our rule in front of vLLM's. Installing twice changes nothing."""
    global _vllm_rule
    current = SpeculativeConfig.hf_config_override
    if not _is_ours(current):
        _vllm_rule = current
        SpeculativeConfig.hf_config_override = staticmethod(hf_config_override)


def restore() -> None:
    """Give vLLM its own rule back."""
    global _vllm_rule
    if _vllm_rule is not None:
        SpeculativeConfig.hf_config_override = staticmethod(_vllm_rule)
        _vllm_rule = None


def _is_ours(rule: Callable[..., Any]) -> bool:
    return getattr(rule, "routes_nemo_speechlm", False)


def _find_vllm_rule() -> Callable[..., Any]:
    # Before install(), as when a spawned process unpickles its arguments, vLLM's
    # rule is still in its own place.
    rule = _vllm_rule or SpeculativeConfig.hf_config_override
    if _is_ours(rule):
        raise RuntimeError(
            "vllm-nemotron3-5-transcribe lost vLLM's own speculative config rule: "
            "its module was loaded twice. Check for a second copy of the package."
        )
    return rule
