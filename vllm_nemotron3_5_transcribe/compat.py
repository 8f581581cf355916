# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which vLLM versions the hooks were written for."""

from packaging.version import InvalidVersion, Version

OLDEST_VLLM = (0, 32)
NEWEST_VLLM = (0, 33)


def is_supported_vllm(version: str) -> bool:
    """Whether ``version`` is a release, pre-release or build of 0.32 or 0.33.

    The hooks touch private parts of vLLM, which change with every minor version,
    so a version that nobody has tried counts as unsupported.
    """
    try:
        minor = Version(version).release[:2]
    except InvalidVersion:
        return False
    return OLDEST_VLLM <= minor <= NEWEST_VLLM


def supported_range() -> str:
    """The supported versions, for messages."""
    oldest = ".".join(map(str, OLDEST_VLLM))
    newest = ".".join(map(str, NEWEST_VLLM))
    return f"{oldest} to {newest}"
