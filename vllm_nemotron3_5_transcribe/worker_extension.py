# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the front end asks of the workers to time words; nothing stays there.

A call of a worker method runs to its end between two decoding steps, so one call
takes one chunk of a recording (40 s of the release) and the front end asks for the
next when it has the answer. The word timing head looks at a chunk's neighbours and
the diarizer at everything before, so something has to pass from chunk to chunk. It
passes through the front end, which gets it with each answer and sends it back with the
next chunk: at most 550 recognition states and the diarizer's memory of 228 frames,
about 3 MB of the release in float32. Keeping it in the worker instead would need an
owner, a limit and a clean-up after every abort; computing it anew would make the work
grow with the square of the length.

Tensors travel as bytes: plain data passes through every executor and serialiser.
"""

from typing import Any

import numpy as np
import torch

from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.models.nemotron3_5_transcribe_audio import SpeakerCache
from vllm.model_executor.models.nemotron3_5_transcribe_timestamps import (
    Nemotron3_5TranscribeWordTimestamps,
    WindowState,
    encode_window,
)


def pack_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Turn a tensor into plain data."""
    # Cloned: a tensor of one element counts as contiguous whatever its stride, and
    # cannot be viewed as bytes with another stride than one.
    tensor = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": tensor.view(torch.uint8).numpy().tobytes(),
    }


def unpack_tensor(packed: dict[str, Any]) -> torch.Tensor:
    """Undo `pack_tensor`; the tensor owns its memory."""
    dtype = getattr(torch, packed["dtype"])
    if not packed["data"]:
        return torch.empty(packed["shape"], dtype=dtype)
    flat = torch.frombuffer(bytearray(packed["data"]), dtype=dtype)
    return flat.view(packed["shape"])


def _pack_state(state: WindowState) -> dict[str, Any]:
    cache = state.cache
    return {
        "asr_states": pack_tensor(state.asr_states),
        "embeds": pack_tensor(cache.embeds),
        "fifo": pack_tensor(cache.fifo),
        "probs": pack_tensor(cache.probs),
        "is_compressed": cache.is_compressed,
    }


def _unpack_state(
    packed: dict[str, Any], diarizer_config: Any, device: torch.device
) -> WindowState:
    def tensor(name: str) -> torch.Tensor:
        return unpack_tensor(packed[name]).to(device)

    cache = SpeakerCache(diarizer_config, tensor("embeds"))
    cache.embeds, cache.fifo = tensor("embeds"), tensor("fifo")
    cache.probs, cache.is_compressed = tensor("probs"), packed["is_compressed"]
    return WindowState(tensor("asr_states"), cache)


class AlignmentWorkerExtension:
    """Mixed into vLLM's worker through `worker_extension_cls`.

    Both methods are called by `collective_rpc` on every worker. Those that share the
    encoders' layers (tensor parallel) all compute, and one of them answers; later
    pipeline stages do nothing.
    """

    def alignment_info(self) -> dict[str, Any] | None:
        """Say whether and how this worker's model can time words.

        Returns:
            None on a worker that does not answer. `error` is None, or says why words
            cannot be timed. Then, if they can: `tokenizer`, the serialised
            SentencePiece model; `blank`, the class of the blank;
            `upsampling_factor`; `window` and `mel_bank`, packed constants of the
            log-mel spectrogram.
        """
        if not _answers():
            return None
        model = self.get_model()  # type: ignore[attr-defined]
        head = getattr(model, "ctc_timestamp", None)
        if not isinstance(head, Nemotron3_5TranscribeWordTimestamps):
            return {
                "error": "Word times need the checkpoint's word timing head "
                "(`ctc_timestamp.*`), which it does not have or which was not loaded."
            }
        constants = model.audio_tower.preprocessor.featurizer
        return {
            "error": None,
            "tokenizer": head.tokenizer_proto,
            "blank": head.config.blank_token_id,
            "upsampling_factor": head.config.upsampling_factor,
            "window": pack_tensor(constants.window),
            "mel_bank": pack_tensor(constants.fb),
        }

    @torch.inference_mode()
    def encode_alignment_window(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Encode one chunk of a recording; see `encode_window`.

        Args:
            request: packed tensors `features`, `mean`, `deviation` and `classes`,
                numbers `num_mel_frames` and `index`, and `state`, the answer's for
                the chunk before, None for the first.

        Returns:
            None on a worker that does not answer. Packed tensors `speaker_probs`
            (10 ms frames, speakers) float32, `log_probs` (frames, classes) float16
            and `greedy` (frames,) int32, the most likely of the classes, the first
            one on ties; `state`, None after the last chunk.
        """
        if not get_pp_group().is_first_rank:
            return None
        model = self.get_model()  # type: ignore[attr-defined]
        tower, state = model.audio_tower, request["state"]
        device = tower.encoder.speaker_table.device

        def tensor(name: str) -> torch.Tensor:
            return unpack_tensor(request[name]).to(device)

        output = encode_window(
            tower,
            model.ctc_timestamp,
            tensor("features"),
            (tensor("mean"), tensor("deviation")),
            request["num_mel_frames"],
            request["index"],
            tensor("classes").long(),
            state and _unpack_state(state, tower.config.diarizer, device),
        )
        if not _answers():
            return None
        log_probs = output.log_probs.cpu()
        # NumPy's takes the first on ties; PyTorch's says nothing about them.
        greedy = log_probs.numpy().argmax(1).astype(np.int32)
        return {
            "speaker_probs": pack_tensor(output.speaker_logits.sigmoid()),
            "log_probs": pack_tensor(log_probs.half()),
            "greedy": pack_tensor(torch.from_numpy(greedy)),
            "state": output.state and _pack_state(output.state),
        }


def _answers() -> bool:
    """Whether the front end reads this worker's answer, and not another's."""
    return get_pp_group().is_first_rank and get_tensor_model_parallel_rank() == 0
