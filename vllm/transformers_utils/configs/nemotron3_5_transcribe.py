# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Config of Nemotron 3.5 Transcribe, read from NeMo's keys.

The checkpoint's `config.json` is written by NeMo's export. What we read of it:

* `perception.preprocessor`: log-mel front end.
* `pe_encoder_config`: speech recognition encoder (`asr_encoder_cfg`), diarizer
  (`diarization_model_cfg`) and the chunking numbers they share.
* `llm_config`, or `llm_backbone/config.json` beside it: the NemotronH decoder.
* `mtp`, or the older `compute_mtp` with the decoder's own fields: the draft head.

A key that is absent has the value of the released 30B-A4B checkpoint, so the bare
`{"model_type": "nemo_speechlm"}` is the release. Keys that only matter for training
are ignored. Anything that we would have to guess at is an error naming the key.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import NemotronHConfig, PretrainedConfig

from vllm.transformers_utils.configs.nemotron3_5_transcribe_audio import (
    CTC_CONFIG_KEY,
    Nemotron3_5TranscribeAudioConfig,
    Nemotron3_5TranscribeCTCConfig,
)
from vllm.transformers_utils.configs.nemotron3_5_transcribe_reading import (
    ConfigSection,
    merge_json,
)

_AUDIO_LOCATOR_TAG = "<|audio|>"

# Rows past the trained vocabulary in the embedding and the head: the placeholder's
# id is the first of them. NeMo serves the model with as many.
_EXTRA_VOCAB_ROWS = 10

_ARCHITECTURE = "NeMoSpeechLMForConditionalGeneration"
_BACKBONE_FOLDER = "llm_backbone"

# Layer symbols of NemotronH, and the spellings of each in a list of layer types.
_LAYER_SYMBOLS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}
_MTP_SYMBOLS = "*E"


# ---------------------------------------------------------------------------
# Decoder
# ---------------------------------------------------------------------------


_LLM_RELEASE: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "chunk_size": 128,
    "expand": 2,
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    "intermediate_size": 1856,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
    "num_nextn_predict_layers": 1,
}

# Smallest sensible value of the decoder's integers.
_LLM_INTEGERS = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "mamba_num_heads": 1,
    "mamba_head_dim": 1,
    "n_groups": 1,
    "ssm_state_size": 1,
    "conv_kernel": 1,
    "chunk_size": 1,
    "intermediate_size": 1,
    "moe_intermediate_size": 1,
    "moe_shared_expert_intermediate_size": 0,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 1,
    "num_nextn_predict_layers": 0,
}

# First the name that the model reads, then what other exports call it.
_LLM_SPELLINGS = (
    ("layer_norm_epsilon", "norm_eps", "rms_norm_eps"),
    ("n_groups", "mamba_n_groups"),
    ("conv_kernel", "mamba_d_conv"),
    ("use_conv_bias", "mamba_conv_bias"),
    ("expand", "mamba_expand"),
    ("chunk_size", "mamba_chunk_size"),
    ("time_step_min", "mamba_dt_min"),
    ("time_step_max", "mamba_dt_max"),
    ("time_step_limit", "mamba_dt_limit"),
    ("time_step_floor", "mamba_dt_init_floor"),
    ("n_routed_experts", "num_local_experts"),
)

# (whole, divisor): the first must be a multiple of the second.
_LLM_MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"),
    ("mamba_num_heads", "n_groups"),
    ("n_routed_experts", "n_group"),
)

# (smaller, larger)
_LLM_LIMITS = (
    ("num_experts_per_tok", "n_routed_experts"),
    ("topk_group", "n_group"),
)


def _read_pattern(
    section: ConfigSection, keys: Iterable[str], symbols: str
) -> tuple[str, str] | None:
    """A layer pattern under any of its spellings.

    Args:
        section: Where the keys are.
        keys: The spellings, each holding symbols ("ME*E") or a list of layer types.
        symbols: The layer symbols allowed.

    Returns:
        The key that said so and the symbols, or None when no key is given.
    """
    found: tuple[str, str] | None = None
    for key in keys:
        value = section.get(key)
        if value is None:
            continue
        if isinstance(value, (list, tuple)):
            unknown = [
                kind
                for kind in value
                if not isinstance(kind, str)
                or _LAYER_SYMBOLS.get(kind, "?") not in symbols
            ]
            if unknown:
                known = sorted(k for k, s in _LAYER_SYMBOLS.items() if s in symbols)
                raise ValueError(
                    f"`{section.name(key)}` holds the layer type {unknown[0]!r}; "
                    f"known are {', '.join(known)}"
                )
            pattern = "".join(_LAYER_SYMBOLS[kind] for kind in value)
        elif isinstance(value, str):
            pattern = value
            unknown = [symbol for symbol in value if symbol not in symbols]
            if unknown:
                raise ValueError(
                    f"`{section.name(key)}` ({value!r}) holds the symbol "
                    f"{unknown[0]!r}; known are {', '.join(symbols)}"
                )
        else:
            raise section.wrong_type(key, "a string or a list")
        if not pattern:
            raise section.fail(key, "must name at least one layer")
        if found is not None and found[1] != pattern:
            raise ValueError(
                f"`{section.name(found[0])}` ({found[1]!r}) and "
                f"`{section.name(key)}` ({pattern!r}) disagree"
            )
        found = found or (key, pattern)
    return found


_PATTERN_KEYS = ("hybrid_override_pattern", "layers_block_type", "layer_types")
_MTP_PATTERN_KEYS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")


def _read_llm(section: ConfigSection) -> dict[str, Any]:
    """Arguments of the decoder's config class, release values filled in.

    The draft head's two keys are left out: they depend on the whole file.
    """
    section.only("model_type", "nemotron_h")
    section.only("tie_word_embeddings", False)
    section.only("attention_bias", False)
    values = {k: v for k, v in section.values.items() if v is not None}
    for names in _LLM_SPELLINGS:
        given = section.one_of(names)
        for name in names:
            values.pop(name, None)
        if given is not None:
            values[names[0]] = section.get(given)

    checked = ConfigSection(values, section.path)
    for key, low in _LLM_INTEGERS.items():
        checked.number(key, _LLM_RELEASE[key], low=low)
    for key in ("routed_scaling_factor", "layer_norm_epsilon"):
        checked.number(key, _LLM_RELEASE[key], low=0.0)
    for key in ("use_conv_bias", "norm_topk_prob"):
        checked.boolean(key, _LLM_RELEASE[key])
    pattern = _read_pattern(section, _PATTERN_KEYS, "ME*-")
    layers = section.number("num_hidden_layers", 0, low=1)
    symbols = pattern[1] if pattern else _LLM_RELEASE["hybrid_override_pattern"]
    if layers and layers != len(symbols):
        key = pattern[0] if pattern else "hybrid_override_pattern"
        raise ValueError(
            f"`{section.name('num_hidden_layers')}` ({layers}) and the "
            f"{len(symbols)} layers of `{section.name(key)}` disagree"
        )
    for key in (
        *_PATTERN_KEYS,
        *_MTP_PATTERN_KEYS,
        "num_hidden_layers",
        "model_type",
        "architectures",
        "dtype",
        "torch_dtype",
        "auto_map",
        "transformers_version",
    ):
        values.pop(key, None)

    values = _LLM_RELEASE | values | {"hybrid_override_pattern": symbols}
    for whole, divisor in _LLM_MULTIPLES:
        if values[whole] % values[divisor]:
            raise ValueError(
                f"`{section.name(whole)}` ({values[whole]}) must be a multiple of "
                f"`{section.name(divisor)}` ({values[divisor]})"
            )
    for small, large in _LLM_LIMITS:
        if values[small] > values[large]:
            raise ValueError(
                f"`{section.name(small)}` ({values[small]}) must be at most "
                f"`{section.name(large)}` ({values[large]})"
            )
    return values


@dataclass
class Nemotron3_5TranscribeMTPConfig:
    """The draft head (multi-token prediction).

    Args:
        num_nextn_predict_layers: Draft depths that the head was trained for.
        use_repeated_layer: One stored block serves all depths.
        hybrid_override_pattern: Layers of a block: `*` attention, `E` experts.
        source: The key that turned the head on, `mtp` or `compute_mtp`.
    """

    num_nextn_predict_layers: int
    use_repeated_layer: bool
    hybrid_override_pattern: str
    source: str

    def to_nemo(self) -> dict[str, Any]:
        """The root's keys; the decoder's own two are written with the decoder."""
        if self.source == "compute_mtp":
            return {"compute_mtp": True}
        return {
            "mtp": {
                "enabled": True,
                "num_nextn_predict_layers": self.num_nextn_predict_layers,
                "use_repeated_layer": self.use_repeated_layer,
                "hybrid_override_pattern": self.hybrid_override_pattern,
            }
        }


def _read_mtp(
    root: ConfigSection, llm: ConfigSection
) -> Nemotron3_5TranscribeMTPConfig | None:
    """Resolve the draft head: an explicit `mtp` wins over `compute_mtp`.

    Args:
        root: The whole file.
        llm: The decoder's config, whose own two fields describe what is stored.
    """
    section = root.section("mtp")
    explicit = bool(section.values)
    enabled = root.boolean("compute_mtp", False)
    if explicit:
        enabled = section.boolean(
            "enabled", section.get("num_nextn_predict_layers") != 0
        )
    if not enabled:
        return None

    backbone_depths = llm.number("num_nextn_predict_layers", 0, low=0)
    backbone = _read_pattern(llm, _MTP_PATTERN_KEYS, _MTP_SYMBOLS)
    if not explicit:
        if backbone_depths == 0:
            raise ValueError(
                f"`compute_mtp` is true, but "
                f"`{llm.name('num_nextn_predict_layers')}` names no draft layer"
            )
        if backbone is None:
            raise ValueError(
                f"`compute_mtp` is true, but neither "
                f"`{llm.name(_MTP_PATTERN_KEYS[0])}` nor "
                f"`{llm.name(_MTP_PATTERN_KEYS[1])}` names the draft layers"
            )
        return Nemotron3_5TranscribeMTPConfig(
            num_nextn_predict_layers=backbone_depths,
            use_repeated_layer=False,
            hybrid_override_pattern=backbone[1],
            source="compute_mtp",
        )

    depths = section.number("num_nextn_predict_layers", backbone_depths or 1, low=1)
    # One block stored for several depths can only be a repeated one.
    repeated = section.boolean(
        "use_repeated_layer", depths > 1 and backbone_depths == 1
    )
    own = _read_pattern(section, ("hybrid_override_pattern",), _MTP_SYMBOLS)
    if own and backbone and own[1] != backbone[1]:
        raise ValueError(
            f"`{section.name(own[0])}` ({own[1]!r}) and "
            f"`{llm.name(backbone[0])}` ({backbone[1]!r}) disagree"
        )
    if repeated and backbone_depths > 1:
        raise ValueError(
            f"`{section.name('use_repeated_layer')}` is true, so that one block is "
            f"stored, but `{llm.name('num_nextn_predict_layers')}` is "
            f"{backbone_depths}"
        )
    if not repeated and backbone_depths not in (0, depths):
        raise ValueError(
            f"`{section.name('num_nextn_predict_layers')}` ({depths}) and "
            f"`{llm.name('num_nextn_predict_layers')}` ({backbone_depths}) disagree "
            f"while `{section.name('use_repeated_layer')}` is false"
        )
    pattern = own or backbone
    return Nemotron3_5TranscribeMTPConfig(
        num_nextn_predict_layers=depths,
        use_repeated_layer=repeated,
        hybrid_override_pattern=pattern[1] if pattern else _MTP_SYMBOLS,
        source="mtp",
    )


# ---------------------------------------------------------------------------
# Transformers' spelling
# ---------------------------------------------------------------------------


# Transformers 5.24 saves the same checkpoint with sub-configs of its own. Path there
# -> path in NeMo's keys; an encoder's path leads to its whole block.
_TRANSFORMERS_ENCODERS = (
    ("audio_config.asr_config", "pe_encoder_config.asr_encoder_cfg"),
    (
        "audio_config.diarization_config.audio_config",
        "pe_encoder_config.diarization_model_cfg.encoder",
    ),
    ("word_timestamp_config", CTC_CONFIG_KEY),
)
_TRANSFORMERS_ENCODER_KEYS = (
    ("num_hidden_layers", "n_layers"),
    ("num_attention_heads", "n_heads"),
    ("num_mel_bins", "feat_in"),
    ("subsampling_factor", "subsampling_factor"),
    ("rope_parameters.rope_theta", "rope_base"),
    ("rope_parameters.partial_rotary_factor", "rotary_fraction"),
    ("residual_scale", "residual_scale"),
    ("upsampling_factor", "upsample_factor"),
)
_DIARIZATION = "audio_config.diarization_config"
_MODULES = "pe_encoder_config.diarization_model_cfg.sortformer_modules"
_TRANSFORMERS_KEYS = (
    ("audio_config.asr_config.num_mel_bins", "perception.preprocessor.features"),
    (
        "audio_config.speaker_activity_threshold",
        "pe_encoder_config.speaker_activity_threshold",
    ),
    (f"{_DIARIZATION}.chunk_length", "pe_encoder_config.online_inference_length"),
    (f"{_DIARIZATION}.chunk_left_context", "pe_encoder_config.chunk_left_context"),
    (f"{_DIARIZATION}.chunk_right_context", "pe_encoder_config.chunk_right_context"),
    (f"{_DIARIZATION}.fifo_length", f"{_MODULES}.fifo_len"),
    (
        f"{_DIARIZATION}.speaker_cache_update_period",
        f"{_MODULES}.spkcache_update_period",
    ),
    (f"{_DIARIZATION}.head_config.hidden_size", f"{_MODULES}.tf_d_model"),
    (f"{_DIARIZATION}.head_config.num_speakers", f"{_MODULES}.num_spks"),
    *(
        (f"{_DIARIZATION}.streaming_config.{ours}", f"{_MODULES}.{theirs}")
        for ours, theirs in (
            ("speaker_cache_length", "spkcache_len"),
            ("speaker_cache_silence_frames_per_speaker", "spkcache_sil_frames_per_spk"),
            ("prediction_score_threshold", "pred_score_threshold"),
            ("latest_frames_score_boost", "scores_boost_latest"),
            ("strong_boost_rate", "strong_boost_rate"),
            ("weak_boost_rate", "weak_boost_rate"),
            ("min_positive_scores_rate", "min_pos_scores_rate"),
        )
    ),
)


def _with_transformers_keys(root: ConfigSection) -> Mapping[str, Any]:
    """Fill in what NeMo's keys leave out from the sub-configs of transformers.

    Raises:
        TypeError, ValueError: Naming the key of transformers.
    """
    nemo: dict[str, Any] = {}
    for source, target in _TRANSFORMERS_KEYS:
        _copy_key(root, source, nemo, target)
    for source, target in _TRANSFORMERS_ENCODERS:
        block = root
        for key in source.split("."):
            block = block.section(key)
        for ours, theirs in _TRANSFORMERS_ENCODER_KEYS:
            _copy_key(root, f"{source}.{ours}", nemo, f"{target}.{theirs}")
        width = block.number("hidden_size", 0, low=1)
        inner = block.number("intermediate_size", 0, low=1)
        if width:
            name = "feat_in" if target == CTC_CONFIG_KEY else "d_model"
            _set_key(nemo, f"{target}.{name}", width)
        if width and inner:
            _set_key(nemo, f"{target}.ff_expansion", inner / width)
        if classes := block.number("vocab_size", 0, low=2):
            block.equal("blank_token_id", classes - 1, block.name("vocab_size"))
            _set_key(nemo, f"{target}.num_classes", classes - 1)
        if heads := block.number("num_attention_heads", 0, low=1):
            block.equal("num_key_value_heads", heads, block.name("num_attention_heads"))
    return merge_json(nemo, root.values)


def _copy_key(
    root: ConfigSection, source: str, nemo: dict[str, Any], target: str
) -> None:
    *parents, leaf = source.split(".")
    section = root
    for key in parents:
        section = section.section(key)
    if section.get(leaf) is not None:
        _set_key(nemo, target, section.get(leaf))


def _set_key(nemo: dict[str, Any], target: str, value: Any) -> None:
    *parents, leaf = target.split(".")
    for key in parents:
        nemo = nemo.setdefault(key, {})
    nemo[leaf] = value


# ---------------------------------------------------------------------------
# The whole file
# ---------------------------------------------------------------------------


# Written by the export, kept for tools that look for them; nothing is built on them.
_KEPT_KEYS = ("pretrained_llm", "pretrained_asr", "prompt_format", "tokenizer_path")

# Base class arguments that a file may carry.
_BASE_KEYS = (
    "attn_implementation",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "transformers_version",
)
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPES = ("bfloat16", "float16", "float32")

# Blocks of the file, and the objects that they are resolved into.
_SOURCE_KEYS = ("perception", "pe_encoder_config", "llm_config", "mtp", "compute_mtp")
_RESOLVED_KEYS = ("text_config", "audio_config", "ctc_config", "mtp_config")


def _read_dtype(root: ConfigSection) -> str:
    key = root.one_of(("dtype", "torch_dtype")) or "dtype"
    # A caller may pass a `torch.dtype`.
    dtype = str(root.get(key) or "bfloat16").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise root.fail(key, f"must be one of {', '.join(_DTYPES)}")
    return dtype


def _read_token_id(root: ConfigSection, key: str) -> int | list[int] | None:
    """A token id, or for the end of a turn a list of them."""
    value = root.get(key)
    ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
    if value is not None and not all(
        isinstance(entry, int) and not isinstance(entry, bool) for entry in ids
    ):
        raise root.wrong_type(key, "a token id")
    return value


def _read_architectures(root: ConfigSection) -> list[str]:
    names = root.get("architectures") or [_ARCHITECTURE]
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise root.wrong_type("architectures", "a list of names")
    return names


def _backbone_section(root: ConfigSection, name_or_path: Any) -> ConfigSection:
    """The decoder's config: embedded, in its own folder, or transformers' own."""
    embedded = root.section("llm_config")
    if embedded.values:
        return embedded
    if name_or_path and (found := _find_backbone(str(name_or_path), root)):
        return found
    return root.section("text_config")


def _find_backbone(checkpoint: str, root: ConfigSection) -> ConfigSection | None:
    """The decoder's config that an export without `llm_config` puts in a folder.

    Args:
        checkpoint: Folder of the checkpoint, or its `config.json`.
        root: The file. `pretrained_llm` is the folder's name; older exports hold a
            Hub name there, or a path of the training machine, and lead nowhere.
    """
    folder = os.path.dirname(checkpoint) if os.path.isfile(checkpoint) else checkpoint
    for name in (_BACKBONE_FOLDER, root.text("pretrained_llm", None)):
        # Unlike `Path.is_file`, false for a folder that we may not look into.
        if name and os.path.isfile(path := os.path.join(folder, name, "config.json")):
            try:
                values = PretrainedConfig._dict_from_json_file(path)
            except ValueError as error:
                raise ValueError(
                    f"`{name}/config.json` is not JSON: {error}"
                ) from error
            return ConfigSection(values, name)
    return None


class Nemotron3_5TranscribeConfig(PretrainedConfig):
    """Config of a `nemo_speechlm` checkpoint, resolved and checked.

    Args:
        **kwargs: The keys of `config.json`. With `name_or_path`, the checkpoint's
            folder, a decoder config that is not embedded is looked for there.

    Attributes:
        audio_config: Sizes of the audio tower.
        text_config: The decoder, with its vocabulary padded by the placeholder's
            row and some spare ones.
        ctc_config: The word timing head, in the release's sizes until the weights'
            metadata tell others.
        ctc_timestamps: Settings of the word timing head; `{"enabled": false}` leaves
            it on disk.
        mtp_config: The draft head, None without one.
        output_vocab_size: The trained vocabulary: ids at or past it are never
            generated.
        audio_token_id: Id of the placeholder, also as `image_token_index`, the name
            that vLLM's V1 proposer asks a multimodal target for.

    Raises:
        TypeError, ValueError: A key is wrong, naming it in full.
    """

    model_type = "nemo_speechlm"
    sub_configs = {"text_config": NemotronHConfig}
    attribute_map = {"image_token_index": "audio_token_id"}
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, **kwargs: Any) -> None:
        values = self._decode_special_floats(kwargs)
        name_or_path = values.get("name_or_path") or values.get("_name_or_path")
        root = ConfigSection(_with_transformers_keys(ConfigSection(values)))

        root.only("audio_locator_tag", _AUDIO_LOCATOR_TAG)
        self.audio_locator_tag = _AUDIO_LOCATOR_TAG
        for key in _KEPT_KEYS:
            setattr(self, key, root.text(key, None))
        if root.get("speaker_encoder"):
            raise root.fail("speaker_encoder", "is not supported")
        dtype = _read_dtype(root)

        llm = _backbone_section(root, name_or_path)
        text = _read_llm(llm)
        self.output_vocab_size = text["vocab_size"]
        text["vocab_size"] += _EXTRA_VOCAB_ROWS
        self.mtp_config = mtp = _read_mtp(root, llm)
        # Blocks that are stored, not depths that they are used for.
        text["num_nextn_predict_layers"] = 0
        if mtp is not None:
            text["mtp_hybrid_override_pattern"] = mtp.hybrid_override_pattern
            text["num_nextn_predict_layers"] = (
                1 if mtp.use_repeated_layer else mtp.num_nextn_predict_layers
            )
        try:
            self.text_config = NemotronHConfig(
                **text, architectures=["NemotronHForCausalLM"], dtype=dtype
            )
        except (TypeError, ValueError, StrictDataclassError) as error:
            raise ValueError(f"`{llm.path}`: {error}") from error

        self.audio_config = Nemotron3_5TranscribeAudioConfig.from_nemo(
            root, self.text_config.hidden_size, llm.name("hidden_size")
        )
        self.ctc_config = Nemotron3_5TranscribeCTCConfig.from_decoder_config(
            root.section(CTC_CONFIG_KEY).values
        )
        timestamps = root.section("ctc_timestamps")
        timestamps.boolean("enabled", True)
        self.ctc_timestamps = timestamps.values
        self.audio_token_id = root.number(
            "audio_token_id",
            self.output_vocab_size,
            low=self.output_vocab_size,
            high=self.text_config.vocab_size - 1,
        )
        self.tie_word_embeddings = False
        for key in _TOKEN_KEYS:
            own = _read_token_id(root, key)
            setattr(self, key, getattr(self.text_config, key) if own is None else own)
        if root.section("quantization_config").values:
            self.quantization_config = kwargs["quantization_config"]

        base = {key: values[key] for key in _BASE_KEYS if values.get(key) is not None}
        super().__init__(
            **base,
            architectures=_read_architectures(root),
            dtype=dtype,
            name_or_path=name_or_path or "",
        )

    def __setattr__(self, key: str, value: Any) -> None:
        # An override that nothing would read, or that would break the model later.
        if key in _SOURCE_KEYS or (key in _RESOLVED_KEYS and isinstance(value, dict)):
            raise ValueError(
                f"`{key}` is read when the config is made and cannot be set later"
            )
        super().__setattr__(key, value)

    def __eq__(self, other: object) -> bool:
        # The base class makes a dataclass of this one, whose equality would see the
        # base class's fields only.
        return isinstance(other, type(self)) and self.to_dict() == other.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """NeMo's keys, as they stand after resolution and later changes."""
        output = super().to_dict()
        for key in (*_RESOLVED_KEYS, "output_vocab_size"):
            output.pop(key)
        text = self.text_config.to_diff_dict()
        output["llm_config"] = text | {"vocab_size": self.output_vocab_size}
        output |= self.audio_config.to_nemo()
        if self.ctc_config != Nemotron3_5TranscribeCTCConfig():
            output[CTC_CONFIG_KEY] = self.ctc_config.to_decoder_config()
        if self.mtp_config is not None:
            output |= self.mtp_config.to_nemo()
        return output

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a `config.json`, noting where it came from."""
        values, kwargs = super().get_config_dict(
            pretrained_model_name_or_path, **kwargs
        )
        values.setdefault("name_or_path", str(pretrained_model_name_or_path))
        return values, kwargs

    @property
    def wants_ctc_head(self) -> bool:
        """Whether to load the word timing head, if the checkpoint has one.

        Raises:
            TypeError: `ctc_timestamps.enabled` is no boolean.
        """
        section = ConfigSection(self.ctc_timestamps, "ctc_timestamps")
        return section.boolean("enabled", True)

    def require_repeated_mtp(self) -> Nemotron3_5TranscribeMTPConfig:
        """The draft head, if it is one block that serves every depth.

        Raises:
            ValueError: There is no head, or one of several distinct blocks.
        """
        mtp = self.mtp_config
        if mtp is None:
            raise ValueError(
                "The checkpoint has no draft head: `mtp` is absent or disabled in its "
                "config.json"
            )
        if mtp.num_nextn_predict_layers > 1 and not mtp.use_repeated_layer:
            key = (
                "mtp.use_repeated_layer"
                if mtp.source == "mtp"
                else "llm_config.num_nextn_predict_layers"
            )
            raise ValueError(
                f"A draft head of {mtp.num_nextn_predict_layers} distinct blocks is "
                f"not supported (`{key}`): only one block used at every depth is"
            )
        return mtp
