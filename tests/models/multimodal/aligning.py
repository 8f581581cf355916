# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine that can do no more than time words, in this process."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.models.multimodal.loading import loaded_model
from vllm_nemotron3_5_transcribe.worker_extension import AlignmentWorkerExtension


class AligningWorker(AlignmentWorkerExtension):
    """The worker's part without vLLM's worker."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def get_model(self) -> Any:
        return self.model


class AligningEngine:
    """Stands in for `vllm.LLM`.

    Attributes:
        calls: names of the worker methods called so far.
    """

    def __init__(self, model: Any) -> None:
        self.worker = AligningWorker(model)
        self.model_config = model.model_config
        self.llm_engine = self
        self.calls: list[str] = []

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = ()
    ) -> list[Any]:
        self.calls.append(method)
        # Of two workers, one does not answer.
        return [None, getattr(self.worker, method)(*args)]


class AsyncAligningEngine(AligningEngine):
    """Stands in for the asynchronous engine client.

    Attributes:
        running, most_running: calls under way, now and at most.
        pause: seconds that a call takes besides.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.running = self.most_running = 0
        self.pause = 0.0

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = ()
    ) -> list[Any]:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(self.pause)
            return super().collective_rpc(method, timeout, args)
        finally:
            self.running -= 1


@contextlib.contextmanager
def aligning_model(checkpoint: Path, **options: Any) -> Iterator[Any]:
    """Load a checkpoint whose audio tower and word timing head can run."""
    with loaded_model(checkpoint, **options) as model:
        for part in (model.audio_tower, model.ctc_timestamp):
            for module in part.modules() if part is not None else ():
                if (method := getattr(module, "quant_method", None)) is not None:
                    method.process_weights_after_loading(module)
        yield model
