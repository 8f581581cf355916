# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the front end asks of the workers to time words; nothing stays there."""

from typing import Any


class AlignmentWorkerExtension:
    """Mixed into vLLM's worker through `worker_extension_cls`."""

    def alignment_info(self) -> dict[str, Any]:
        """Say whether and how this worker's model can time words."""
        raise NotImplementedError
