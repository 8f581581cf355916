# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Word timing head of Nemotron 3.5 Transcribe: a CTC decoder on the encoder's states.

Module names follow the checkpoint, below `ctc_timestamp.`:

* `decoder.upsample.*`: transposed convolution, 80 ms frames to 40 ms frames.
* `decoder.transformer.*`: encoder layers as in the audio tower.
* `decoder.decoder_layers.0.*`: frames to word pieces and the blank.
* `tokenizer.model_proto`: the SentencePiece model of those pieces.

The sizes are in the metadata of the file that holds these tensors. The head is no
part of decoding: `encode_window` runs the encoders and the head once more, one chunk
of a recording at a time, for a transcript that is already known.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import maybe_prefix
from vllm.transformers_utils.configs.nemotron3_5_transcribe_audio import (
    CTC_CONFIG_KEY,
    Nemotron3_5TranscribeCTCConfig,
)

from .nemotron3_5_transcribe_audio import (
    Nemotron3_5TranscribeAudioTower,
    SpeakerCache,
    TransformerEncoder,
    check_shape,
    checkpoint_shapes,
    plan_chunks,
    stack_frames,
)

logger = init_logger(__name__)

PREFIX = "ctc_timestamp."
_PIECES = "tokenizer.model_proto"

# Repeated in the metadata, so not read: scalars, and TransformerEngine's markers.
_UNUSED = ("decoder.upsample_factor", "decoder.residual_scale")
_UNUSED_SUFFIX = "._extra_state"

# Frames classified at once. A frame of the release has 23,863 classes, so that a
# whole window of them would be 100 MB.
_CLASSIFIED_FRAMES = 256


def read_head_config(
    model: str, revision: str | None, config: Any
) -> Nemotron3_5TranscribeCTCConfig | None:
    """Sizes of a checkpoint's word timing head, None if it has none.

    Reads no more than the headers of the weight files. A file that cannot be read is
    passed over here: loading the weights will say so.

    Args:
        model: folder or Hugging Face repository.
        revision: of the repository.
        config: `Nemotron3_5TranscribeConfig`, whose sizes hold for a file that has
            the head's tensors and no metadata.
    """
    for names, metadata in _read_headers(model, revision):
        if not any(name.startswith(PREFIX) for name in names):
            continue
        if (sizes := metadata.get(CTC_CONFIG_KEY)) is None:
            return config.ctc_config
        return Nemotron3_5TranscribeCTCConfig.from_decoder_config(sizes)
    logger.info("%s has no word timing head: its words cannot be timed.", model)
    return None


def _read_headers(
    model: str, revision: str | None
) -> Iterable[tuple[Iterable[str], Mapping[str, str]]]:
    """Tensor names and metadata of each weight file."""
    folder = Path(model)
    if not folder.is_dir():
        try:
            repository = huggingface_hub.get_safetensors_metadata(
                model, revision=revision
            )
        except Exception as error:
            logger.warning(
                "Cannot look for a word timing head in %s, so word times are off: %s",
                model,
                error,
            )
            return
        for file in repository.files_metadata.values():
            yield file.tensors, file.metadata
        return
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                header = file.keys(), file.metadata() or {}
        except SafetensorError:
            continue
        yield header


class WordTimestampDecoder(nn.Module):
    """Encoder states to classes, upsampled, in one window of a recording.

    Args:
        config: sizes of the head.
        prefix: name of this module in the model.
    """

    def __init__(
        self, config: Nemotron3_5TranscribeCTCConfig, prefix: str = ""
    ) -> None:
        super().__init__()
        self.config = config
        hidden_size, factor = config.hidden_size, config.upsampling_factor
        self.upsample = nn.ConvTranspose1d(
            hidden_size, hidden_size, kernel_size=factor, stride=factor
        )
        self.transformer = TransformerEncoder(
            config,
            with_pre_encode=False,
            prefix=maybe_prefix(prefix, "transformer"),
        )
        self.decoder_layers = nn.ModuleList(
            [nn.Conv1d(hidden_size, config.num_classes, kernel_size=1)]
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Upsample and contextualise.

        Args:
            states: (encoder frames, hidden), before the tower's `asr_norm`.

        Returns:
            (encoder frames x upsampling factor, hidden).
        """
        upsampled = self.upsample(states.to(self.transformer.dtype).T[None])[0].T
        (context,) = self.transformer([upsampled])
        # NeMo rounds the scale to the dtype of the states before it multiplies.
        scale = upsampled.new_tensor(self.config.residual_scale)
        return upsampled + scale * context

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """(frames, hidden) to (frames, classes) logits; the blank is the last one."""
        head = self.decoder_layers[0]
        return F.linear(hidden, head.weight[..., 0], head.bias)

    def log_probabilities(
        self, hidden: torch.Tensor, classes: torch.Tensor
    ) -> torch.Tensor:
        """Log-probabilities of some classes among all of them.

        Args:
            hidden: (frames, hidden), from `forward`.
            classes: (n,) class numbers.

        Returns:
            (frames, n) float32.
        """
        blocks = [
            self.classify(block).log_softmax(-1, dtype=torch.float32)[:, classes]
            for block in hidden.split(_CLASSIFIED_FRAMES)
        ]
        return torch.cat(blocks)


class Nemotron3_5TranscribeWordTimestamps(nn.Module):
    """The word timing head and its SentencePiece model.

    Built in the default dtype of its caller.

    Attributes:
        tokenizer_proto: the serialised SentencePiece model, empty until loaded.
    """

    def __init__(
        self, config: Nemotron3_5TranscribeCTCConfig, prefix: str = ""
    ) -> None:
        super().__init__()
        self.config = config
        self.tokenizer_proto = b""
        self.decoder = WordTimestampDecoder(
            config, prefix=maybe_prefix(prefix, "decoder")
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors named as in the checkpoint, without `ctc_timestamp.`.

        Each tensor is copied before the next one is asked for. Call again for more.

        Returns:
            Names of the tensors that were loaded.

        Raises:
            ValueError: a tensor is unknown or has another shape than its parameter.
        """
        params = dict(self.named_parameters())
        shapes = checkpoint_shapes(self)
        loaded: set[str] = set()
        for name, tensor in weights:
            if name in _UNUSED or name.endswith(_UNUSED_SUFFIX):
                continue
            if name == _PIECES:
                self.tokenizer_proto = tensor.cpu().numpy().tobytes()
            else:
                check_shape(PREFIX + name, tensor, shapes.get(name))
                param = params[name]
                load = getattr(param, "weight_loader", default_weight_loader)
                load(param, tensor)
            loaded.add(name)
        return loaded

    def missing_tensors(self, loaded: Iterable[str]) -> set[str]:
        """Names on disk of what `load_weights` has not been given."""
        expected = {_PIECES, *(name for name, _ in self.named_parameters())}
        return {PREFIX + name for name in expected.difference(loaded)}


@dataclass
class WindowState:
    """What one window of a recording leaves to the next.

    Attributes:
        asr_states: (frames, hidden) recognition states that are still to be
            classified, and the left context of the first of these.
        cache: the diarizer's memory.
    """

    asr_states: torch.Tensor
    cache: SpeakerCache


@dataclass
class WindowOutput:
    """What the encoders and the head find in one window.

    Attributes:
        speaker_logits: (chunk frames x subsampling factor, speakers) float32 of this
            chunk, one row for each 10 ms.
        log_probs: (frames x upsampling factor, n) float32 of the chunk before, and,
            in the last window, of this one, too.
        state: for the next window; None after the last one.
    """

    speaker_logits: torch.Tensor
    log_probs: torch.Tensor
    state: WindowState | None


def plan_recording(audio_config: Any, num_mel_frames: int) -> list[Any]:
    """Chunks of a recording, as the encoders and the head cut it."""
    return plan_chunks(
        -(-num_mel_frames // audio_config.subsampling_factor),
        audio_config.chunk_length,
        audio_config.chunk_left_context,
        audio_config.chunk_right_context,
    )


def encode_window(
    tower: Nemotron3_5TranscribeAudioTower,
    head: Nemotron3_5TranscribeWordTimestamps,
    features: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor],
    num_mel_frames: int,
    index: int,
    classes: torch.Tensor,
    state: WindowState | None,
) -> WindowOutput:
    """Run the encoders on one chunk of a recording, and the head on the one before.

    The head sees, left and right of a chunk, states that the encoder gave as the
    centre of its own chunks, so it lags one chunk behind. The result is that of the
    whole recording at once.

    Args:
        tower, head: of one model.
        features: (frames, mels) float32 raw log-mels that the chunk sees, from its
            context's start to its context's end.
        statistics: mean and deviation over the whole recording, (mels,) each.
        num_mel_frames: of the whole recording.
        index: which chunk of `plan_recording`.
        classes: (n,) classes of the head to return.
        state: what the chunk before left; None for the first.
    """
    config, encoder = tower.config, tower.encoder
    factor = config.subsampling_factor
    plan = plan_recording(config, num_mel_frames)
    chunk, is_last = plan[index], index + 1 == len(plan)
    mean, deviation = statistics

    asr = encoder.asr_encoder
    stacked = stack_frames((features - mean) / deviation, factor)
    (asr_states,) = asr([asr.pre_encode(stacked.to(asr.dtype))])
    offset = chunk.start - chunk.context_start
    asr_states = asr_states[offset : offset + chunk.end - chunk.start]

    diarizer = encoder.diarization_model
    frames = diarizer.encoder.pre_encode(stack_frames(features, factor))
    cache = SpeakerCache(config.diarizer, frames) if state is None else state.cache
    # As in `SortformerDiarizer.forward`: one frame of padding may follow the clip.
    has_tail = num_mel_frames % factor == 0
    end = diarizer.window_end(chunk, plan[-1].end + has_tail)
    masked = end > plan[-1].end
    if masked:
        frames = F.pad(frames, (0, 0, 0, 1))
    (speaker_logits,) = diarizer.step([chunk], [frames], [masked], [cache], [is_last])

    if state is not None:
        asr_states = torch.cat([state.asr_states, asr_states])
    first_frame = chunk.end - len(asr_states)
    ready = plan[max(index - 1, 0) : index] + ([chunk] if is_last else [])
    upsampling = head.config.upsampling_factor
    log_probs = [features.new_empty(0, len(classes))]
    for done in ready:
        hidden = head.decoder(
            asr_states[
                done.context_start - first_frame : done.context_end - first_frame
            ]
        )
        offset = done.start - done.context_start
        centre = hidden[
            offset * upsampling : (offset + done.end - done.start) * upsampling
        ]
        log_probs.append(head.decoder.log_probabilities(centre, classes))
    return WindowOutput(
        speaker_logits,
        torch.cat(log_probs),
        None
        if is_last
        else WindowState(asr_states[chunk.context_start - first_frame :], cache),
    )
