# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Inference-only Nemotron 3.5 Transcribe: audio tower, NemotronH decoder, MTP drafter.

The checkpoint layout is:

* `perception.*`: audio tower (`nemotron3_5_transcribe_audio.py`).
* `llm.*`: NemotronH decoder with packed experts, `llm.mtp.*` its multi-token
  prediction head. The quantised checkpoints name the decoder `backbone.*` and
  `lm_head.*` instead, with one tensor for each expert.
* `ctc_timestamp.*`: word timing head, not part of decoding
  (`nemotron3_5_transcribe_timestamps.py`).
"""

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import regex as re
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import BatchFeature

from vllm.config import ModelConfig, SpeechToTextConfig, VllmConfig
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.config.speech_to_text import SpeechToTextParams
from vllm.distributed import get_pp_group
from vllm.exceptions import VLLMValidationError
from vllm.inputs import ModalityData, MultiModalDataDict, PromptType, TextPrompt
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsHybrid,
    MultiModalEmbeddings,
    SupportsEagle3,
    SupportsLoRA,
    SupportsMambaPrefixCaching,
    SupportsMultiModal,
    SupportsMultiModalEmbeddings,
    SupportsPP,
    SupportsQuant,
    SupportsTranscription,
)
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.nemotron_h_mtp import NemotronHMTP
from vllm.model_executor.models.utils import (
    StageMissingLayer,
    WeightsMapper,
    _merge_multimodal_embeddings,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    AudioItem,
    MultiModalFieldConfig,
    MultiModalKwargsItems,
)
from vllm.multimodal.parse import (
    ModalityDataItems,
    MultiModalDataItems,
    MultiModalDataParser,
)
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptReplacement,
    PromptUpdate,
    TimingContext,
)
from vllm.sequence import IntermediateTensors
from vllm.tokenizers import TokenizerLike, cached_tokenizer_from_config
from vllm.utils.tensor_schema import TensorSchema, TensorShape

from .nemotron3_5_transcribe_audio import (
    Nemotron3_5TranscribeAudioTower,
    get_num_audio_tokens,
)
from .nemotron3_5_transcribe_timestamps import (
    Nemotron3_5TranscribeWordTimestamps,
    read_head_config,
)

AUDIO_PLACEHOLDER = "<|audio|>"

# The model card's limit on a recording.
MAX_AUDIO_SECONDS = 3600

# Context kept free beside the longest clip for the chat template, an instruction
# and the first generated tokens.
_TEXT_TOKENS = 96

# Context kept free for the transcript of a piece, in tokens a second: fast speech
# has some 5 word pieces a second, and an hour at this rate still fits the release's
# 65,536 tokens.
_TRANSCRIPT_TOKENS_PER_SECOND = 5

# Outside these, a header is broken or hostile: resampling from 1 Hz would inflate a
# clip 16,000 times.
_SAMPLE_RATES = range(1_000, 768_001)
_MAX_CHANNELS = 64

DEFAULT_INSTRUCTION = (
    "Audio transcription. Language: as spoken. Wording: verbatim, including fillers "
    "and repetitions. Formatting: punctuation and capitalization. "
    "Output: transcript only."
)

# From an earlier form of the released plugin; there is no newer one.
SPEAKER_INSTRUCTION = (
    "Transcribe this audio. Include all spoken words and verbal fillers. Write "
    "numbers as spoken. Use no punctuation and no capitalization. Start every speaker "
    "turn with a speaker tag such as <spk:0>, <spk:1>, <spk:2>, etc.; assign one "
    "stable tag per speaker and keep speaker identities consistent. Output only the "
    "speaker-tagged transcript."
)

# The card lists 40 transcription languages. The first two groups are published, the
# third is known to the checkpoint's word aligner, the fourth is the rest of a sibling
# checkpoint's list. Norwegian Bokmål, `nb`, has no code of its own in vLLM.
_LANGUAGES = {
    **{"cs": "Czech", "nl": "Dutch", "en": "English", "fr": "French"},
    **{"de": "German", "hi": "Hindi", "it": "Italian", "ko": "Korean"},
    **{"pl": "Polish", "pt": "Portuguese", "ru": "Russian", "sk": "Slovak"},
    **{"es": "Spanish"},
    **{"bg": "Bulgarian", "hr": "Croatian", "da": "Danish", "et": "Estonian"},
    **{"fi": "Finnish", "hu": "Hungarian", "ja": "Japanese", "lv": "Latvian"},
    **{"lt": "Lithuanian", "ro": "Romanian", "sl": "Slovenian", "sv": "Swedish"},
    **{"zh": "Chinese", "th": "Thai"},
    **{"ar": "Arabic", "el": "Greek", "he": "Hebrew", "mt": "Maltese"},
    **{"nn": "Norwegian Nynorsk", "no": "Norwegian", "tr": "Turkish"},
    **{"uk": "Ukrainian", "vi": "Vietnamese"},
}

_THINK_BLOCK = re.compile(r"^\s*(?:<think>)?.*?</think>", re.DOTALL)

_TARGET_MAPPER = WeightsMapper(
    orig_to_new_suffix={"._extra_state": None},
    orig_to_new_substr={"._fp32_params.": "."},
    orig_to_new_prefix={
        "llm.mtp.": None,
        "mtp.": None,
        "perception.": "audio_tower.",
        "llm.model.norm.": "language_model.model.norm_f.",
        "llm.model.": "language_model.model.",
        "llm.lm_head.": "language_model.lm_head.",
        "backbone.embeddings.": "language_model.model.embed_tokens.",
        "backbone.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    },
)
_DRAFT_MAPPER = WeightsMapper(
    orig_to_new_suffix={"._extra_state": None},
    orig_to_new_prefix={
        "llm.mtp.": "mtp.",
        "llm.model.embed_tokens.": "model.embed_tokens.",
        "backbone.embeddings.": "model.embed_tokens.",
    },
)
_EMBEDDING = "model.embed_tokens.weight"
_EMBEDDING_NAMES = ("llm.model.embed_tokens.", "backbone.embeddings.", _EMBEDDING)

# Packed experts, (expert, in, out), and the linear of an expert that each one holds.
_PACKED_EXPERTS = {"gate_and_up_projs": "up_proj", "down_projs": "down_proj"}
_SCALES = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")


class Nemotron3_5TranscribeAudioInputs(TensorSchema):
    """Dimensions:
    - b: Number of clips
    - t: Samples of a clip, at the checkpoint's rate
    """

    type: Literal["audio_signal"] = "audio_signal"

    audio_signal: Annotated[
        torch.Tensor | list[torch.Tensor],
        TensorShape("b", "t", dynamic_dims={"t"}),
    ]
    """Mono waveforms, float32."""

    audio_signal_length: Annotated[torch.Tensor, TensorShape("b")]
    """Valid samples of each clip."""


@dataclass
class Nemotron3_5TranscribeParams(SpeechToTextParams):
    """A transcription request, with what vLLM's own has no field for."""

    diarize: bool = False
    """Ask for a `<spk:N>` tag before every turn."""


def get_max_audio_samples(
    audio_config: Any,
    max_model_len: int,
    max_samples: int | None = None,
    extra_tokens_per_second: int = 0,
) -> int:
    """Samples of the longest clip that fits the context beside a short prompt.

    Args:
        audio_config: audio part of the model's config.
        max_model_len: context length in tokens.
        max_samples: the user's own limit in place of one hour.
        extra_tokens_per_second: context to leave free for each second of the clip.
    """
    sample_rate = audio_config.preprocessor.sample_rate
    if max_samples is None:
        max_samples = MAX_AUDIO_SECONDS * sample_rate

    def num_tokens(num_samples: int) -> int:
        extra = math.ceil(num_samples * extra_tokens_per_second / sample_rate)
        return get_num_audio_tokens(num_samples, audio_config) + extra

    budget = max(max_model_len - _TEXT_TOKENS, 1)
    candidates = range(1, max_samples + 1)
    return max(bisect.bisect_right(candidates, budget, key=num_tokens), 1)


def _audio_length_option(model_config: ModelConfig) -> int | None:
    """Samples that `--limit-mm-per-prompt` allows a clip, if it says so."""
    options = model_config.get_multimodal_config().limit_per_prompt.get("audio")
    return getattr(options, "length", None)


def to_mono_waveform(audio: Any, sample_rate: float | None = None) -> np.ndarray:
    """Check a clip as users give it and mix it down.

    Args:
        audio: samples, (time,), (channels, time) or (time, channels). Integers are
            taken for PCM and scaled to [-1, 1).
        sample_rate: Hz, checked only.

    Returns:
        (time,) float32.

    Raises:
        VLLMValidationError: there is nothing to hear, or it is not sound.
    """

    def invalid(message: str) -> VLLMValidationError:
        return VLLMValidationError(message, parameter="audio")

    if sample_rate is not None and not (
        _SAMPLE_RATES.start <= sample_rate < _SAMPLE_RATES.stop
    ):
        raise invalid(
            f"Audio sample rate of {sample_rate} Hz is outside "
            f"{_SAMPLE_RATES.start}-{_SAMPLE_RATES.stop - 1} Hz."
        )
    try:
        samples = np.asarray(audio)
    except (TypeError, ValueError, RuntimeError) as error:
        raise invalid(f"Audio is not an array of samples: {error}") from error
    if samples.dtype.kind not in "fiu":
        raise invalid(f"Audio samples are not real numbers but {samples.dtype}.")
    if samples.ndim not in (1, 2):
        raise invalid(
            f"Audio has shape {samples.shape}, expected (time,), (channels, time) or "
            "(time, channels)."
        )
    if samples.size == 0:
        raise invalid("Audio has no samples.")
    if samples.dtype.kind in "iu":
        info = np.iinfo(samples.dtype)
        scale = (float(info.max) - float(info.min) + 1) / 2
        middle = scale + float(info.min)
        samples = (samples.astype(np.float32) - middle) / scale
    samples = samples.astype(np.float32, copy=False)
    if samples.ndim == 2:
        # More channels than samples do not occur: the short axis is the channels.
        channel_axis = int(samples.shape[1] < samples.shape[0])
        if (num_channels := samples.shape[channel_axis]) > _MAX_CHANNELS:
            raise invalid(
                f"Audio has {num_channels} channels, at most {_MAX_CHANNELS} are mixed."
            )
        samples = samples.mean(channel_axis)
    if not np.isfinite(samples).all():
        raise invalid("Audio has NaN or infinite samples.")
    return samples


def merge_audio_embeddings(
    embed_tokens: Any,
    input_ids: torch.Tensor,
    multimodal_embeddings: MultiModalEmbeddings | None,
    is_multimodal: torch.Tensor | None,
) -> torch.Tensor:
    """Embed a prompt and put the audio embeddings in place of its placeholders.

    Args:
        embed_tokens: token ids to embeddings.
        input_ids: (tokens,).
        multimodal_embeddings: embeddings of the clips, in prompt order.
        is_multimodal: (tokens,) bool, the placeholders.

    Returns:
        (tokens, hidden).

    Raises:
        ValueError: there are embeddings, but no mask that says where they go.
    """
    if multimodal_embeddings is None or len(multimodal_embeddings) == 0:
        return embed_tokens(input_ids)
    if is_multimodal is None:
        raise ValueError(
            "Audio embeddings were given without `is_multimodal`, the mask of their "
            "placeholders."
        )
    return _merge_multimodal_embeddings(
        embed_tokens(input_ids), multimodal_embeddings, is_multimodal
    )


def mask_untrained_logits(
    logits: torch.Tensor | None, output_vocab_size: int
) -> torch.Tensor | None:
    """Rule out the placeholder and the rows that pad the vocabulary, in place.

    Args:
        logits: (tokens, padded vocabulary), or None where another rank has them.
        output_vocab_size: trained vocabulary.
    """
    if logits is not None:
        logits[..., output_vocab_size:] = -math.inf
    return logits


def control_tokens(tokenizer: TokenizerLike) -> set[str]:
    """Texts that the tokenizer reads as special tokens, or the template as markup."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {
        *tokenizer.all_special_tokens,
        # Speaker tags and others need not be in the list of special tokens.
        *(token.content for token in added if token.special),
        # `<think>` need not be special, but the template gives it a meaning.
        *(AUDIO_PLACEHOLDER, "<think>", "</think>", "<|im_start|>", "<|im_end|>"),
    }


def remove_control_tokens(text: str, tokenizer: TokenizerLike) -> str:
    """Take the tokenizer's special tokens out of user text.

    What is left after one removal may form a new token, as in
    `<|im_<|im_end|>end|>`: the text is built up character by character, and a token
    goes as soon as it is complete, so the time is linear however deep they nest.
    """
    tokens = control_tokens(tokenizer)
    last_characters = {token[-1] for token in tokens}
    lengths = sorted({len(token) for token in tokens})
    kept: list[str] = []
    for character in text:
        kept.append(character)
        if character in last_characters:
            for length in lengths:
                if "".join(kept[-length:]) in tokens:
                    del kept[-length:]
                    break
    return "".join(kept)


def build_instruction(
    task_type: str = "transcribe",
    *,
    language: str | None = None,
    to_language: str | None = None,
    prompt: str = "",
    hotwords: str = "",
    diarize: bool = False,
) -> str:
    """Word what the model is asked to do with a clip.

    The published instructions are used where there are any. How a language is named
    beside another instruction, and how hotwords are, is not published.

    Args:
        task_type: `"transcribe"` or `"translate"`.
        language, to_language: of the speech and of the translation, in words.
        prompt: the user's own instruction. It replaces the one for transcription, and
            follows the others: without them there would be no tags, no translation.
        hotwords: terms to expect, as the user lists them.
        diarize: ask for a `<spk:N>` tag before every turn.

    Raises:
        VLLMValidationError: the model has no such task.
    """
    if task_type not in ("transcribe", "translate"):
        raise VLLMValidationError(
            f"Nemotron 3.5 Transcribe cannot {task_type!r}: it can 'transcribe' and "
            "'translate'.",
            parameter="task_type",
        )
    parts = []
    if task_type == "translate":
        speech = f"{language} speech" if language else "speech"
        parts.append(f"Translate the {speech} into {to_language or 'English'}.")
    if diarize:
        parts.append(SPEAKER_INSTRUCTION)
    if prompt:
        parts.append(prompt)
    if not parts:
        parts.append(DEFAULT_INSTRUCTION.replace("as spoken", language or "as spoken"))
    elif language and task_type != "translate":
        parts.append(f"Language: {language}.")
    if hotwords:
        parts.append(f"Key terms: {hotwords}.")
    return " ".join(parts)


def decoder_tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Tensors of a NemotronH decoder, experts unpacked, and their whole shapes.

    Args:
        config: NemotronH config; its vocabulary is the trained one.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes = {
        "model.embed_tokens.weight": vocabulary,
        "model.norm_f.weight": (config.hidden_size,),
        "lm_head.weight": vocabulary,
    }
    for index, symbol in enumerate(config.hybrid_override_pattern):
        for name, shape in _layer_tensor_shapes(config, symbol).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


def mtp_tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Tensors of the multi-token prediction head, experts unpacked."""
    hidden_size, pattern = config.hidden_size, config.mtp_hybrid_override_pattern
    shapes = {
        "mtp.layers.0.enorm.weight": (hidden_size,),
        "mtp.layers.0.hnorm.weight": (hidden_size,),
        "mtp.layers.0.eh_proj.weight": (hidden_size, 2 * hidden_size),
        f"mtp.layers.{len(pattern) - 1}.final_layernorm.weight": (hidden_size,),
    }
    for index, symbol in enumerate(pattern):
        for name, shape in _layer_tensor_shapes(config, symbol).items():
            shapes[f"mtp.layers.{index}.{name}"] = shape
    return shapes


def _layer_tensor_shapes(config: Any, symbol: str) -> dict[str, tuple[int, ...]]:
    hidden_size = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if symbol == "M":
        heads = config.mamba_num_heads
        inner = heads * config.mamba_head_dim
        convolved = inner + 2 * config.n_groups * config.ssm_state_size
        shapes = {
            "in_proj.weight": (inner + convolved + heads, hidden_size),
            "conv1d.weight": (convolved, 1, config.conv_kernel),
            "A_log": (heads,),
            "D": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden_size, inner),
        }
        if config.use_conv_bias:
            shapes["conv1d.bias"] = (convolved,)
        if config.use_bias:
            shapes["in_proj.bias"] = (inner + convolved + heads,)
            shapes["out_proj.bias"] = (hidden_size,)
    elif symbol == "*":
        head_dim = config.head_dim or hidden_size // config.num_attention_heads
        query = config.num_attention_heads * head_dim
        key = config.num_key_value_heads * head_dim
        shapes = {
            "q_proj.weight": (query, hidden_size),
            "k_proj.weight": (key, hidden_size),
            "v_proj.weight": (key, hidden_size),
            "o_proj.weight": (hidden_size, query),
        }
    elif symbol == "E":
        num_experts, width = config.n_routed_experts, config.moe_intermediate_size
        shapes = {
            "gate.weight": (num_experts, hidden_size),
            "gate.e_score_correction_bias": (num_experts,),
        }
        for expert in range(num_experts):
            shapes[f"experts.{expert}.up_proj.weight"] = (width, hidden_size)
            shapes[f"experts.{expert}.down_proj.weight"] = (hidden_size, width)
        if config.n_shared_experts:
            width = config.moe_shared_expert_intermediate_size * config.n_shared_experts
            shapes["shared_experts.up_proj.weight"] = (width, hidden_size)
            shapes["shared_experts.down_proj.weight"] = (hidden_size, width)
    elif symbol == "-":
        width = config.intermediate_size
        shapes = {
            "up_proj.weight": (width, hidden_size),
            "down_proj.weight": (hidden_size, width),
        }
    return {
        "norm.weight": (hidden_size,),
        **{f"mixer.{name}": shape for name, shape in shapes.items()},
    }


def _unpack_experts(
    name: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Split packed experts (expert, in, out) into one (out, in) matrix for each."""
    parent, _, leaf = name.rpartition(".")
    if leaf not in _PACKED_EXPERTS:
        yield name, tensor
        return
    if tensor.ndim != 3:
        raise ValueError(
            f"expected (experts, in, out), got shape {tuple(tensor.shape)}"
        )
    for expert, weight in enumerate(tensor):
        yield f"{parent}.{expert}.{_PACKED_EXPERTS[leaf]}.weight", weight.T


def _checkpoint_name(name: str, packed: bool) -> str:
    """Name in the checkpoint of a tensor of `decoder_tensor_shapes` or of the head."""
    if packed:
        name = re.sub(
            r"\.experts\.\d+\.up_proj\.weight$", ".experts.gate_and_up_projs", name
        )
        name = re.sub(
            r"\.experts\.\d+\.down_proj\.weight$", ".experts.down_projs", name
        )
        name = re.sub(r"\.mixer\.(A_log|D|dt_bias)$", r".mixer._fp32_params.\1", name)
        return "llm." + name.replace("model.norm_f.", "model.norm.")
    if name.startswith("mtp."):
        return "llm." + name
    name = name.replace("model.embed_tokens.", "model.embeddings.")
    return re.sub(r"^model\.", "backbone.", name)


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    mapper: WeightsMapper,
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    quantized: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Rename, unpack and check the decoder tensors of a checkpoint as they stream by.

    Args:
        weights: (name, tensor) as on disk.
        mapper: names on disk to names here; None drops a tensor.
        prefix: what to strip from the mapped names to look them up in `shapes`.
            Tensors with another one are passed on unchecked.
        shapes: every tensor that must come.
        quantized: allow scales, and packed weights of another shape.

    Yields:
        Renamed tensors, in order.

    Raises:
        ValueError: a tensor is unknown, missing or has the wrong shape.
    """
    missing = set(shapes)
    packed = True
    for disk_name, disk_tensor in weights:
        mapped = mapper.map_name(disk_name)
        if mapped is None:
            continue
        if not mapped.startswith(prefix):
            yield mapped, disk_tensor
            continue
        packed = packed and not disk_name.startswith(("backbone.", "lm_head."))
        try:
            for name, tensor in _unpack_experts(
                mapped.removeprefix(prefix), disk_tensor
            ):
                module, _, leaf = name.rpartition(".")
                if quantized and leaf in _SCALES and f"{module}.weight" in shapes:
                    yield prefix + name, tensor
                    continue
                if name not in shapes:
                    raise ValueError("the model has no such tensor")
                if not (quantized and tensor.dtype == torch.uint8) and (
                    tuple(tensor.shape) != shapes[name]
                ):
                    raise ValueError(
                        f"expected shape {shapes[name]}, got {tuple(tensor.shape)}"
                    )
                missing.discard(name)
                yield prefix + name, tensor
        except ValueError as error:
            raise ValueError(
                f"Cannot load tensor {disk_name!r} of the checkpoint: {error}."
            ) from error
    _raise_if_missing([_checkpoint_name(name, packed) for name in missing])


def _raise_if_missing(names: Iterable[str]) -> None:
    if missing := sorted(set(names)):
        shown = ", ".join(map(repr, missing[:5]))
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(
            f"The checkpoint lacks the tensor(s) {shown}{more}. "
            "Are all of its files there?"
        )


def readable_weights(
    weights: Iterable[tuple[str, torch.Tensor]], model: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass `weights` on, and say which file of `model` is damaged, if one is."""
    try:
        yield from weights
    except SafetensorError as error:
        damaged = []
        for path in sorted(Path(model).glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt"):
                    pass
            except SafetensorError:
                damaged.append(path.name)
        names = ", ".join(damaged) or "a weight file"
        raise ValueError(
            f"Cannot read {names} of {model}: truncated or not a safetensors file "
            f"({error})."
        ) from error


def _pad_vocabulary(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Append zero rows up to `num_rows`."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, num_rows - len(tensor)))


class Nemotron3_5TranscribeDataParser(MultiModalDataParser):
    """Parser that checks clips before anything else touches them.

    Args:
        max_samples: longest clip, in samples at `sample_rate`.
        sample_rate: the checkpoint's rate, in Hz.
    """

    def __init__(self, *, max_samples: int, sample_rate: int, **kwargs: Any) -> None:
        # The transcription routes decode and resample by PyAV: one resampler makes
        # one transcript of one file on every route.
        super().__init__(
            target_sr=sample_rate,
            target_channels=1,
            audio_resample_method="pyav",
            **kwargs,
        )
        self.max_samples = max_samples
        self.sample_rate = sample_rate

    def _parse_audio_data(
        self, data: ModalityData[AudioItem]
    ) -> ModalityDataItems[Any, Any] | None:
        if data is None or self.is_embeddings(data):
            return super()._parse_audio_data(data)
        is_one_clip = (
            isinstance(data, tuple)
            or (isinstance(data, (np.ndarray, torch.Tensor)) and data.ndim == 1)
            or (isinstance(data, list) and data and isinstance(data[0], (float, int)))
        )
        items = [data] if is_one_clip else list(data)
        if not items:
            return None
        return super()._parse_audio_data([self._parse_clip(item) for item in items])

    def _parse_clip(self, item: Any) -> Any:
        if item is None:
            return None
        if isinstance(item, tuple):
            if len(item) != 2:
                raise VLLMValidationError(
                    f"Audio tuples are (samples, sample rate), got {len(item)} values.",
                    parameter="audio",
                )
            samples, rate = item
        else:
            samples, rate = item, self.sample_rate
        if isinstance(samples, torch.Tensor):
            samples = samples.cpu().numpy()
        mono = to_mono_waveform(samples, rate)
        seconds, limit = len(mono) / rate, self.max_samples / self.sample_rate
        if seconds > limit:
            raise VLLMValidationError(
                f"Audio of {seconds:.1f} s exceeds the limit of {limit:.1f} s a clip. "
                "Raise --max-model-len, or the audio length of --limit-mm-per-prompt, "
                "or split the recording.",
                parameter="audio",
            )
        return mono, rate


class Nemotron3_5TranscribeProcessingInfo(BaseProcessingInfo):
    """Facts of the model's inputs. There is no Hugging Face processor."""

    def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
        return {}

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": None}

    def get_max_audio_samples(self) -> int:
        """Samples of the longest clip that the limits allow."""
        model_config = self.ctx.model_config
        return get_max_audio_samples(
            self.get_hf_config().audio_config,
            model_config.max_model_len,
            _audio_length_option(model_config),
        )

    def get_data_parser(self) -> MultiModalDataParser:
        return Nemotron3_5TranscribeDataParser(
            max_samples=self.get_max_audio_samples(),
            sample_rate=self.get_hf_config().audio_config.preprocessor.sample_rate,
            expected_hidden_size=self._get_expected_hidden_size(),
            allow_missing_mm_embeddings=self.allow_missing_mm_embeddings,
        )

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        audio_config = self.get_hf_config().audio_config
        return {
            "audio": get_num_audio_tokens(self.get_max_audio_samples(), audio_config)
        }


class Nemotron3_5TranscribeDummyInputsBuilder(
    BaseDummyInputsBuilder[Nemotron3_5TranscribeProcessingInfo]
):
    """Silence, as long as the limits allow."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return AUDIO_PLACEHOLDER * mm_counts.get("audio", 0)

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: MultiModalDummyOptions,
    ) -> MultiModalDataDict:
        audios = self._get_dummy_audios(
            length=self.info.get_max_audio_samples(),
            num_audios=mm_counts.get("audio", 0),
            overrides=mm_options.get("audio"),
        )
        return {"audio": audios}


class Nemotron3_5TranscribeMultiModalProcessor(
    BaseMultiModalProcessor[Nemotron3_5TranscribeProcessingInfo]
):
    """Waveforms to model inputs, placeholders to one token for each 80 ms."""

    def _placeholder_id(self) -> int:
        tokenizer = self.info.get_tokenizer()
        token_id = tokenizer.get_vocab().get(AUDIO_PLACEHOLDER)
        if token_id is None:
            raise ValueError(
                f"The tokenizer has no {AUDIO_PLACEHOLDER!r} token, so a prompt has "
                "no place for audio."
            )
        return token_id

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> Any:
        num_clips = inputs.mm_data_items.get_count("audio", strict=False)
        num_places = list(inputs.prompt).count(self._placeholder_id())
        if num_clips != num_places:
            raise VLLMValidationError(
                f"The prompt has {num_places} {AUDIO_PLACEHOLDER} placeholder(s) for "
                f"{num_clips} audio clip(s).",
                parameter="prompt",
            )
        return super().apply(inputs, timing_ctx)

    def _call_hf_processor(
        self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        signals = [torch.from_numpy(np.ascontiguousarray(a)) for a in hf_data["audio"]]
        return BatchFeature(
            {
                "audio_signal": signals,
                "audio_signal_length": torch.tensor([len(s) for s in signals]),
            }
        )

    def _get_mm_fields_config(
        self,
        hf_inputs: BatchFeature,
        hf_processor_mm_kwargs: Mapping[str, object],
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {
            "audio_signal": MultiModalFieldConfig.batched("audio"),
            "audio_signal_length": MultiModalFieldConfig.batched(
                "audio", keep_on_cpu=True
            ),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        audio_config = self.info.get_hf_config().audio_config
        placeholder = self._placeholder_id()
        lengths = out_mm_kwargs.get_data().get("audio_signal_length", [])

        def replacement(index: int) -> list[int]:
            return [placeholder] * get_num_audio_tokens(
                int(lengths[index]), audio_config
            )

        return [
            PromptReplacement(
                modality="audio", target=[placeholder], replacement=replacement
            )
        ]


@MULTIMODAL_REGISTRY.register_processor(
    Nemotron3_5TranscribeMultiModalProcessor,
    info=Nemotron3_5TranscribeProcessingInfo,
    dummy_inputs=Nemotron3_5TranscribeDummyInputsBuilder,
)
class Nemotron3_5TranscribeForConditionalGeneration(
    nn.Module,
    SupportsMultiModal,
    SupportsTranscription,
    HasInnerState,
    IsHybrid,
    SupportsMambaPrefixCaching,
    SupportsLoRA,
    SupportsPP,
    SupportsQuant,
    SupportsEagle3,
):
    """Audio tower and NemotronH decoder."""

    supported_languages = _LANGUAGES
    supports_encoder_tp_data: ClassVar[bool] = True

    hf_to_vllm_mapper = _TARGET_MAPPER
    is_non_gated_moe = NemotronHForCausalLM.is_non_gated_moe
    packed_modules_mapping = NemotronHForCausalLM.packed_modules_mapping
    embedding_modules = NemotronHForCausalLM.embedding_modules
    lora_skip_prefixes = [*NemotronHForCausalLM.lora_skip_prefixes, "ctc_timestamp."]

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality == "audio":
            return AUDIO_PLACEHOLDER
        raise ValueError(
            f"Nemotron 3.5 Transcribe takes audio and text, not {modality}."
        )

    @classmethod
    def validate_language(cls, language: str | None) -> str | None:
        """Take `"auto"` for none, and a regional code for its language."""
        if language is None or language.lower() == "auto":
            return None
        return super().validate_language(re.split("[-_]", language.lower())[0])

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelConfig, task_type: str
    ) -> SpeechToTextConfig:
        audio_config = model_config.hf_config.audio_config
        sample_rate = audio_config.preprocessor.sample_rate
        max_samples = get_max_audio_samples(
            audio_config,
            model_config.max_model_len,
            _audio_length_option(model_config),
            _TRANSCRIPT_TOKENS_PER_SECOND,
        )
        return SpeechToTextConfig(
            sample_rate=sample_rate,
            max_audio_clip_s=max(max_samples // sample_rate, 1),
        )

    @classmethod
    def get_num_audio_tokens(
        cls,
        audio_duration_s: float,
        stt_config: SpeechToTextConfig,
        model_config: ModelConfig,
    ) -> int:
        return get_num_audio_tokens(
            math.ceil(audio_duration_s * stt_config.sample_rate),
            model_config.hf_config.audio_config,
        )

    @classmethod
    def get_generation_prompt(cls, stt_params: SpeechToTextParams) -> PromptType:
        tokenizer = cached_tokenizer_from_config(stt_params.model_config)
        instruction = cls._get_instruction(stt_params, tokenizer)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{instruction} {AUDIO_PLACEHOLDER}"}],
            tokenize=False,
            add_generation_prompt=True,
            # A model that thinks first says its thoughts, not the transcript.
            enable_thinking=False,
        )
        return TextPrompt(
            prompt=prompt,
            multi_modal_data={
                "audio": (stt_params.audio, stt_params.stt_config.sample_rate)
            },
        )

    @classmethod
    def _get_instruction(
        cls, stt_params: SpeechToTextParams, tokenizer: TokenizerLike
    ) -> str:
        def clean(text: str | None) -> str:
            return remove_control_tokens(text or "", tokenizer).strip()

        # Hotwords are one sentence of the instruction, whatever separates them.
        terms = (
            term.strip() for term in re.split("[,;\n]", clean(stt_params.hotwords))
        )
        return build_instruction(
            stt_params.task_type,
            language=cls.language_name(stt_params.language),
            to_language=cls.language_name(stt_params.to_language),
            prompt=clean(stt_params.request_prompt),
            hotwords=", ".join(filter(None, terms)).rstrip("."),
            diarize=getattr(stt_params, "diarize", False),
        )

    @classmethod
    def language_name(cls, code: str | None) -> str | None:
        """Name a language in English, as instructions do."""
        if code is None:
            return None
        return cls.supported_languages.get(code) or cls.get_other_languages()[code]

    @classmethod
    def post_process_output(cls, text: str) -> str:
        return _THINK_BLOCK.sub("", text, count=1).strip()

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        return NemotronHForCausalLM.get_mamba_state_shape_from_config(
            cls._text_vllm_config(vllm_config)
        )

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        return NemotronHForCausalLM.get_mamba_state_dtype_from_config(
            cls._text_vllm_config(vllm_config)
        )

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return NemotronHForCausalLM.get_mamba_state_copy_func()

    @staticmethod
    def _text_vllm_config(vllm_config: VllmConfig) -> VllmConfig:
        return vllm_config.with_hf_config(
            vllm_config.model_config.hf_config.text_config
        )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.model_config = vllm_config.model_config
        self.config = config = vllm_config.model_config.hf_config
        self.quant_config = vllm_config.quant_config

        with self._mark_tower_model(vllm_config, "audio"):
            self.audio_tower = Nemotron3_5TranscribeAudioTower(
                config.audio_config,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "audio_tower"),
            )
            self.ctc_timestamp = self._build_word_timestamps(vllm_config, prefix)
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=config.text_config,
                prefix=maybe_prefix(prefix, "language_model"),
                architectures=["NemotronHForCausalLM"],
            )
            _keep_mamba_params_float32(self.language_model)
        self.make_empty_intermediate_tensors = (
            self.language_model.make_empty_intermediate_tensors
        )

    @staticmethod
    def _build_word_timestamps(
        vllm_config: VllmConfig, prefix: str
    ) -> Nemotron3_5TranscribeWordTimestamps | None:
        """The word timing head, None without one or if the config leaves it out."""
        model_config = vllm_config.model_config
        config = model_config.hf_config
        if not config.wants_ctc_head:
            return None
        head_config = read_head_config(
            model_config.model, model_config.revision, config
        )
        if head_config is None:
            return None
        return Nemotron3_5TranscribeWordTimestamps(
            head_config, prefix=maybe_prefix(prefix, "ctc_timestamp")
        )

    def get_mm_mapping(self) -> MultiModelKeys:
        return MultiModelKeys.from_string_field(
            language_model="language_model",
            connector="audio_tower.proj",
            tower_model=[
                "audio_tower.preprocessor",
                "audio_tower.encoder",
                "ctc_timestamp",
            ],
        )

    def _parse_and_validate_audio_input(
        self, **kwargs: object
    ) -> Nemotron3_5TranscribeAudioInputs | None:
        if kwargs.get("audio_signal") is None:
            return None
        return Nemotron3_5TranscribeAudioInputs(
            audio_signal=kwargs["audio_signal"],
            audio_signal_length=kwargs["audio_signal_length"],
        )

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        audio_input = self._parse_and_validate_audio_input(**kwargs)
        if audio_input is None:
            return []
        return self.audio_tower.encode(
            audio_input["audio_signal"], audio_input["audio_signal_length"].tolist()
        )

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return merge_audio_embeddings(
            self.language_model.embed_input_ids,
            input_ids,
            multimodal_embeddings,
            is_multimodal,
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        if intermediate_tensors is not None:
            inputs_embeds = None
        return self.language_model(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=inputs_embeds,
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return mask_untrained_logits(
            self.language_model.compute_logits(hidden_states),
            self.config.output_vocab_size,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint, whichever its layout.

        Raises:
            ValueError: a file is damaged, or a tensor is unknown, missing or of the
                wrong shape; the message names it.
        """
        text_config = self.config.text_config
        shapes = decoder_tensor_shapes(_with_trained_vocabulary(self.config))
        has_tower = not isinstance(self.audio_tower, StageMissingLayer)
        has_decoder = not isinstance(self.language_model, StageMissingLayer)
        head = self.ctc_timestamp
        if isinstance(head, StageMissingLayer):
            head = None
        head_loaded: set[str] = set()
        loaded: set[str] = set()

        def decoder_weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in checked_weights(
                readable_weights(weights, self.model_config.model),
                self.hf_to_vllm_mapper,
                "language_model.",
                shapes,
                quantized=self.quant_config is not None,
            ):
                root, _, rest = name.partition(".")
                if root == "language_model":
                    if rest in ("model.embed_tokens.weight", "lm_head.weight"):
                        tensor = _pad_vocabulary(tensor, text_config.vocab_size)
                    yield rest, tensor
                elif root == "ctc_timestamp":
                    if head is not None:
                        head_loaded.update(head.load_weights([(rest, tensor)]))
                elif root != "audio_tower":
                    raise ValueError(f"Unknown tensor {name!r} in checkpoint.")
                elif has_tower:
                    # At once: the reader may reuse the tensor's memory.
                    loaded.update(
                        f"audio_tower.{done}"
                        for done in self.audio_tower.load_weights([(rest, tensor)])
                    )

        if has_decoder:
            loaded.update(
                f"language_model.{name}"
                for name in self.language_model.load_weights(decoder_weights())
            )
        else:
            for _ in decoder_weights():
                pass
        if has_tower:
            _raise_if_missing(
                f"perception.{name}"
                for name, _ in self.audio_tower.named_parameters()
                if f"audio_tower.{name}" not in loaded
            )
        if head is not None:
            _raise_if_missing(head.missing_tensors(head_loaded))
            loaded.update(
                f"ctc_timestamp.{name}"
                for name, _ in head.named_parameters()
                if name in head_loaded
            )
        return loaded


def _with_trained_vocabulary(config: Any) -> Any:
    """The text config as the checkpoint has it: without padding rows."""
    text_config = config.text_config.__class__.from_dict(config.text_config.to_dict())
    text_config.vocab_size = config.output_vocab_size
    return text_config


def _keep_mamba_params_float32(model: nn.Module) -> None:
    """Widen the state-space parameters that vLLM creates in the model's dtype.

    The checkpoint stores them in float32, and their error grows with the sequence.
    """
    for module in model.modules():
        if isinstance(module, MambaMixer2):
            for param in (module.A, module.D, module.dt_bias):
                param.data = param.data.float()


class Nemotron3_5TranscribeMTP(NemotronHMTP, SupportsMultiModalEmbeddings):
    """Draft model: the checkpoint's repeated multi-token prediction head.

    It drafts from the target's audio embeddings, and has no output head and no token
    embedding of its own: the proposer shares the target's. Only with pipeline
    parallelism, where the target's embedding is on another rank, it loads one.
    """

    has_own_lm_head = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        draft_config = vllm_config.speculative_config.draft_model_config
        self.draft_hf_config = draft_config.hf_config
        self.draft_hf_config.require_repeated_mtp()
        # NemotronHMTP builds one projection in the config's dtype, not in the one
        # that the engine runs in.
        self.draft_hf_config.text_config.dtype = draft_config.dtype
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model_name = draft_config.model
        # What the proposer is going to share takes no memory until then, and is not
        # packed for the CPU's kernels.
        del self.lm_head
        self.has_own_embed_tokens = get_pp_group().world_size > 1
        width = self.config.hidden_size
        self.model.embed_tokens = (
            VocabParallelEmbedding(self.config.vocab_size, width)
            if self.has_own_embed_tokens
            else nn.Embedding(0, width)
        )

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return merge_audio_embeddings(
            self.model.get_input_embeddings,
            input_ids,
            multimodal_embeddings,
            is_multimodal,
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return mask_untrained_logits(
            super().compute_logits(hidden_states),
            self.draft_hf_config.output_vocab_size,
        )

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """Keep only the tensors of the drafter; vLLM then skips the other shards."""
        if self.has_own_embed_tokens and name.startswith(_EMBEDDING_NAMES):
            return False
        return not name.startswith(("llm.mtp.", "mtp."))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load `llm.mtp.*`, and the embedding where the target's is on another rank.

        Raises:
            ValueError: a tensor of the head is unknown, missing or of the wrong
                shape; the message names it.
        """
        shapes = mtp_tensor_shapes(self.config)
        if self.has_own_embed_tokens:
            shapes[_EMBEDDING] = (
                self.draft_hf_config.output_vocab_size,
                self.config.hidden_size,
            )
        used = (
            (name, tensor)
            for name, tensor in readable_weights(weights, self.model_name)
            if not self.is_unused_checkpoint_weight(name)
        )
        checked = checked_weights(
            used, _DRAFT_MAPPER, "", shapes, quantized=self.quant_config is not None
        )
        padded = (
            (name, _pad_vocabulary(tensor, self.config.vocab_size))
            if name == _EMBEDDING
            else (name, tensor)
            for name, tensor in checked
        )
        # An embedding that was not read is the proposer's to share.
        return super().load_weights(padded) | {_EMBEDDING}
