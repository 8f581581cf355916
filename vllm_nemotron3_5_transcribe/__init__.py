# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Glue that makes a stock vLLM serve Nemotron 3.5 Transcribe.

The model itself lives inside the installed ``vllm`` package, at the paths where
an upstream merge would put it. This package registers it and holds the few hooks
into vLLM that such a merge would turn into edits.
"""

import logging

logger = logging.getLogger("vllm.nemotron3_5_transcribe")

_warned_about_version = False


def register() -> None:
    """Register the model with the installed vLLM.

    vLLM calls this in every process through the ``vllm.general_plugins`` entry
    point. It is cheap and can be called any number of times. It never raises: an
    exception here would stop vLLM for every model, so a vLLM version outside the
    supported range, or a hook that no longer fits, is logged instead.
    """
    global _warned_about_version

    import vllm
    from vllm_nemotron3_5_transcribe import compat, hooks

    if not compat.is_supported_vllm(vllm.__version__):
        if not _warned_about_version:
            logger.warning(
                "vllm-nemotron3-5-transcribe supports vLLM %s, but %s is installed. "
                "Nemotron 3.5 Transcribe is not registered; other models are not "
                "affected.",
                compat.supported_range(),
                vllm.__version__,
            )
            _warned_about_version = True
        return

    for hook in hooks.ALL_HOOKS:
        try:
            hook()
        except Exception:
            logger.exception(
                "vllm-nemotron3-5-transcribe: %s failed on vLLM %s; Nemotron 3.5 "
                "Transcribe may not work.",
                hook.__name__,
                vllm.__version__,
            )
