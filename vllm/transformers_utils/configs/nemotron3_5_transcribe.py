# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Config of Nemotron 3.5 Transcribe, read from NeMo's keys.

The checkpoint's `config.json` is written by NeMo's export. What we read of it:

* `perception.preprocessor`: log-mel front end.
* `pe_encoder_config`: speech recognition encoder (`asr_encoder_cfg`), diarizer
  (`diarization_model_cfg`) and the chunking numbers they share.
* `llm_config`, or `llm_backbone/config.json` beside it: the NemotronH decoder.
* `mtp`, or the older `compute_mtp` with the decoder's own fields: the draft head.

A key that is absent has the value of the released 30B-A3B checkpoint, so the bare
`{"model_type": "nemo_speechlm"}` is the release. Keys that only matter for training
are ignored. Anything that we would have to guess at is an error naming the key.
"""

import copy
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from transformers import NemotronHConfig, PretrainedConfig

_AUDIO_LOCATOR_TAG = "<|audio|>"

# Rows past the trained vocabulary in the embedding and the head: the placeholder's
# id is the first of them. NeMo serves the model with as many.
_EXTRA_VOCAB_ROWS = 10

_BACKBONE_FOLDER = "llm_backbone"

# Metadata key of the word timing head's sizes; a saved config holds them too.
_CTC_KEY = "ctc_timestamp_decoder_config"

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

_T = TypeVar("_T")


# ---------------------------------------------------------------------------
# Reading JSON with names
# ---------------------------------------------------------------------------


def _spell(value: Any) -> str:
    """Show a value in an error message; JSON can hold whole weight lists."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


class _Section:
    """A JSON object that knows where it stands in the file.

    Args:
        values: The parsed object; None is an absent one.
        path: Dotted path of the object, empty for the file itself.

    Raises:
        TypeError: `values` is not an object.
    """

    def __init__(self, values: Any, path: str = "") -> None:
        self.path = path
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise TypeError(f"`{path}` must be an object, got {_spell(values)}")
        self.values = values

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        """The value, None when it is absent or null: NeMo writes unset keys."""
        return self.values.get(key)

    def section(self, key: str) -> "_Section":
        return _Section(self.get(key), self.name(key))

    def fail(self, key: str, problem: str) -> ValueError:
        return ValueError(f"`{self.name(key)}` {problem}, got {_spell(self.get(key))}")

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise TypeError(
                f"`{self.name(key)}` must be true or false, got {_spell(value)}"
            )
        return value

    def number(
        self,
        key: str,
        default: _T,
        low: float | None = None,
        high: float | None = None,
    ) -> _T:
        """A number of the default's kind, within `low` and `high` (inclusive)."""
        value = self.get(key)
        if value is None:
            return default
        whole = isinstance(default, int)
        if isinstance(value, bool) or not isinstance(
            value, int if whole else (int, float)
        ):
            kind = "an integer" if whole else "a number"
            raise TypeError(f"`{self.name(key)}` must be {kind}, got {_spell(value)}")
        if not math.isfinite(value):
            raise self.fail(key, "must be finite")
        if low is not None and value < low:
            raise self.fail(key, f"must be at least {low}")
        if high is not None and value > high:
            raise self.fail(key, f"must be at most {high}")
        return value if whole else float(value)  # type: ignore[return-value]

    def text(self, key: str, default: str | None) -> str | None:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise TypeError(f"`{self.name(key)}` must be a string, got {_spell(value)}")
        return value

    def only(self, key: str, *supported: Any) -> None:
        """Refuse a value that the model has no implementation for."""
        value = self.get(key)
        if value is None:
            return
        # `0 == False`: a bool matches a bool only.
        if not any(
            value == other and isinstance(value, bool) == isinstance(other, bool)
            for other in supported
        ):
            names = " or ".join(_spell(other) for other in supported)
            raise self.fail(key, f"is supported as {names} only")

    def one_of(self, keys: Iterable[str]) -> str | None:
        """The one key given among several spellings.

        Raises:
            ValueError: Two of them are given with different values.
        """
        given = [key for key in keys if self.get(key) is not None]
        for other in given[1:]:
            if self.get(other) != self.get(given[0]):
                raise ValueError(
                    f"`{self.name(given[0])}` ({_spell(self.get(given[0]))}) and "
                    f"`{self.name(other)}` ({_spell(self.get(other))}) disagree"
                )
        return given[0] if given else None


def _key(
    key: str, default: Any, *, low: float | None = None, high: float | None = None
) -> Any:
    """A dataclass field read from NeMo's `key`, of the kind of its default."""
    return field(default=default, metadata={"key": key, "low": low, "high": high})


def _keyed_fields(cls: Any) -> Iterable[Field]:
    return (entry for entry in fields(cls) if "key" in entry.metadata)


def _read_fields(defaults: Any, section: _Section) -> dict[str, Any]:
    """Values of a dataclass's keyed fields; `defaults` is an instance of it."""
    values = {}
    for entry in _keyed_fields(defaults):
        key = entry.metadata["key"]
        default = getattr(defaults, entry.name)
        if isinstance(default, bool):
            values[entry.name] = section.boolean(key, default)
        else:
            values[entry.name] = section.number(
                key, default, entry.metadata["low"], entry.metadata["high"]
            )
    return values


def _write_fields(config: Any) -> dict[str, Any]:
    """The inverse of :func:`_read_fields`."""
    return {
        entry.metadata["key"]: getattr(config, entry.name)
        for entry in _keyed_fields(config)
    }


def _merge(base: Mapping[str, Any], over: Any) -> Any:
    """Lay `over` over `base`, object by object; a null leaves the base's value."""
    if not isinstance(over, Mapping):
        return over
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping):
            merged[key] = below if value is None else _merge(below, value)
        elif value is not None or key not in merged:
            merged[key] = value
    return merged


# ---------------------------------------------------------------------------
# Audio
# ---------------------------------------------------------------------------


@dataclass
class Nemotron3_5TranscribePreprocessorConfig:
    """Log-mel front end (`perception.preprocessor`); lengths are in samples."""

    sample_rate: int = _key("sample_rate", 16000, low=1)
    num_mel_bins: int = _key("features", 128, low=1)
    n_fft: int = _key("n_fft", 512, low=2)
    preemphasis: float = _key("preemph", 0.97, low=0.0, high=1.0)
    log_zero_guard: float = _key("log_zero_guard_value", 2.0**-24, low=0.0)
    hop_length: int = 160
    win_length: int = 400
    window: str = "hann"
    mel_norm: str = "slaney"

    @classmethod
    def from_nemo(cls, section: _Section) -> "Nemotron3_5TranscribePreprocessorConfig":
        release = cls()
        section.only("window", "hann")
        section.only("log", True)
        section.only("frame_splicing", 1)
        # The encoder normalises for itself, each branch in its own way.
        section.only("normalize", "NA", "per_feature", False)
        section.only("mag_power", 2, 2.0)
        section.only("mel_norm", "slaney")
        section.only("log_zero_guard_type", "add")
        section.only("exact_pad", False)
        section.only("lowfreq", 0)
        values = _read_fields(release, section)
        rate = values["sample_rate"]
        if section.get("highfreq") not in (None, rate / 2):
            raise section.fail("highfreq", f"is supported as {rate / 2} only")
        if values["log_zero_guard"] == 0:
            raise section.fail("log_zero_guard_value", "must be positive")
        for name, key, release_key in (
            ("hop_length", "window_stride", "n_window_stride"),
            ("win_length", "window_size", "n_window_size"),
        ):
            seconds = section.number(key, 0.0, low=0.0)
            samples = section.number(release_key, 0, low=1)
            if section.get(key) is None and section.get(release_key) is None:
                # The release's lengths are times: another rate scales them.
                samples = round(getattr(release, name) * rate / release.sample_rate)
            elif section.get(key) is not None:
                if samples not in (0, round(seconds * rate)):
                    raise ValueError(
                        f"`{section.name(key)}` ({seconds} s) and "
                        f"`{section.name(release_key)}` ({samples}) disagree"
                    )
                samples = round(seconds * rate)
            if samples < 1:
                raise section.fail(key, "must be at least one sample long")
            values[name] = samples
        if values["win_length"] > values["n_fft"]:
            raise ValueError(
                f"`{section.name('window_size')}` is {values['win_length']} samples, "
                f"more than `{section.name('n_fft')}` ({values['n_fft']})"
            )
        return cls(**values)

    def to_nemo(self) -> dict[str, Any]:
        return _write_fields(self) | {
            "window_stride": self.hop_length / self.sample_rate,
            "window_size": self.win_length / self.sample_rate,
            "window": self.window,
            "mel_norm": self.mel_norm,
            "log": True,
            "normalize": "NA",
        }


@dataclass
class Nemotron3_5TranscribeEncoderConfig:
    """NeMo's `TransformerEncoder`, pre-norm with rotary positions, over log-mels."""

    num_mel_bins: int = _key("feat_in", 128, low=1)
    hidden_size: int = _key("d_model", 1280, low=1)
    num_hidden_layers: int = _key("n_layers", 32, low=1)
    num_attention_heads: int = _key("n_heads", 10, low=1)
    subsampling_factor: int = _key("subsampling_factor", 8, low=1)
    rope_theta: float = _key("rope_base", 10000.0, low=1.0)
    partial_rotary_factor: float = _key("rotary_fraction", 0.5, low=0.0, high=1.0)
    qk_norm: bool = _key("qk_norm", True)
    intermediate_size: int = 5120
    layer_norm_eps: float = 1e-5

    @classmethod
    def from_nemo(
        cls, section: _Section, release: "Nemotron3_5TranscribeEncoderConfig"
    ) -> "Nemotron3_5TranscribeEncoderConfig":
        section.only("self_attention_model", "rope")
        section.only("subsampling", "feature_stacking")
        section.only("attn_mode", "full")
        section.only("qkv_bias", False)
        section.only("pre_block_norm", True)
        section.only("feat_out", -1)
        values = _read_fields(release, section)
        values["intermediate_size"] = _read_intermediate_size(
            section,
            values["hidden_size"],
            release.intermediate_size / release.hidden_size,
        )
        _check_heads(section, "d_model", values)
        return cls(**values, layer_norm_eps=release.layer_norm_eps)

    def to_nemo(self) -> dict[str, Any]:
        return _write_fields(self) | {
            "ff_expansion": self.intermediate_size / self.hidden_size,
            "subsampling": "feature_stacking",
            "self_attention_model": "rope",
        }


def _read_intermediate_size(section: _Section, hidden_size: int, release: float) -> int:
    size = round(section.number("ff_expansion", release) * hidden_size)
    if size < 1:
        raise section.fail("ff_expansion", "must make at least one feature")
    return size


def _check_heads(section: _Section, width_key: str, values: dict[str, Any]) -> None:
    """Check that heads divide the width and that the rotary part is whole pairs."""
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if width % heads:
        raise ValueError(
            f"`{section.name(width_key)}` ({width}) must be a multiple of "
            f"`{section.name('n_heads')}` ({heads})"
        )
    rotary = int(width // heads * values["partial_rotary_factor"])
    if rotary % 2:
        raise ValueError(
            f"`{section.name('rotary_fraction')}` "
            f"({values['partial_rotary_factor']}) must rotate an even number of a "
            f"head's {width // heads} features, not {rotary}"
        )


_ASR_RELEASE = Nemotron3_5TranscribeEncoderConfig()
_DIARIZER_RELEASE = Nemotron3_5TranscribeEncoderConfig(
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=31,
    num_attention_heads=8,
    partial_rotary_factor=1.0,
    qk_norm=False,
)


@dataclass
class Nemotron3_5TranscribeDiarizerConfig:
    """Sortformer's head and its speaker cache; lengths are in encoder frames."""

    num_speakers: int = _key("num_spks", 8, low=1)
    head_hidden_size: int = _key("tf_d_model", 192, low=1)
    fifo_length: int = _key("fifo_len", 40, low=0)
    speaker_cache_length: int = _key("spkcache_len", 188, low=1)
    speaker_cache_update_period: int = _key("spkcache_update_period", 300, low=1)
    silence_frames_per_speaker: int = _key("spkcache_sil_frames_per_spk", 1, low=0)
    prediction_score_threshold: float = _key("pred_score_threshold", 0.25, low=0.0)
    latest_frames_score_boost: float = _key("scores_boost_latest", 0.05)
    strong_boost_rate: float = _key("strong_boost_rate", 0.75, low=0.0)
    weak_boost_rate: float = _key("weak_boost_rate", 1.5, low=0.0)
    min_positive_scores_rate: float = _key("min_pos_scores_rate", 0.5, low=0.0)
    use_learnable_silence_embedding: bool = _key("use_learnable_sil_emb", True)

    @classmethod
    def from_nemo(
        cls, bundle: _Section, modules: _Section
    ) -> "Nemotron3_5TranscribeDiarizerConfig":
        values = _read_fields(cls(), modules)
        # The bundle's own numbers win: it runs a diarizer that was trained with
        # others.
        for name, key in (
            ("fifo_length", "diar_fifo_len"),
            ("speaker_cache_length", "diar_spkcache_len"),
            ("speaker_cache_update_period", "diar_spkcache_update_period"),
        ):
            low = 0 if name == "fifo_length" else 1
            values[name] = bundle.number(key, values[name], low=low)
        if not 0 < values["prediction_score_threshold"] < 1:
            raise modules.fail("pred_score_threshold", "must lie between 0 and 1")
        slots = (1 + values["silence_frames_per_speaker"]) * values["num_speakers"]
        if values["speaker_cache_length"] < slots:
            section, key = (
                (modules, "spkcache_len")
                if bundle.get("diar_spkcache_len") is None
                else (bundle, "diar_spkcache_len")
            )
            raise ValueError(
                f"`{section.name(key)}` ({values['speaker_cache_length']}) must be at "
                f"least {slots}: one frame and "
                f"`{modules.name('spkcache_sil_frames_per_spk')}` "
                f"({values['silence_frames_per_speaker']}) of silence for each of "
                f"`{modules.name('num_spks')}` ({values['num_speakers']}) speakers"
            )
        return cls(**values)

    def to_nemo(self) -> dict[str, Any]:
        return _write_fields(self)


@dataclass
class Nemotron3_5TranscribeAudioConfig:
    """The audio tower: log-mel, speech recognition encoder, diarizer, projection.

    Chunk lengths are in encoder frames (80 ms in the release). A chunk is encoded
    together with the contexts on either side, of which nothing is kept.
    """

    chunk_length: int = _key("online_inference_length", 500, low=1)
    chunk_left_context: int = _key("chunk_left_context", 50, low=0)
    chunk_right_context: int = _key("chunk_right_context", 50, low=0)
    speaker_activity_threshold: float = _key(
        "speaker_activity_threshold", 0.5, low=0.0, high=1.0
    )
    preprocessor: Nemotron3_5TranscribePreprocessorConfig = field(
        default_factory=Nemotron3_5TranscribePreprocessorConfig
    )
    asr_encoder: Nemotron3_5TranscribeEncoderConfig = field(
        default_factory=lambda: copy.copy(_ASR_RELEASE)
    )
    diarizer_encoder: Nemotron3_5TranscribeEncoderConfig = field(
        default_factory=lambda: copy.copy(_DIARIZER_RELEASE)
    )
    diarizer: Nemotron3_5TranscribeDiarizerConfig = field(
        default_factory=Nemotron3_5TranscribeDiarizerConfig
    )
    output_size: int = 2688

    @property
    def hidden_size(self) -> int:
        """Width of the fused encoder states."""
        return self.asr_encoder.hidden_size

    @property
    def num_speakers(self) -> int:
        return self.diarizer.num_speakers

    @property
    def subsampling_factor(self) -> int:
        """Spectrogram frames in an encoder frame."""
        return self.asr_encoder.subsampling_factor

    @classmethod
    def from_nemo(
        cls, root: _Section, output_size: int
    ) -> "Nemotron3_5TranscribeAudioConfig":
        """Read the tower of a `config.json`.

        Args:
            root: The whole file.
            output_size: Hidden size of the decoder.

        Raises:
            TypeError, ValueError: Naming the key.
        """
        perception = root.section("perception")
        bundle = root.section("pe_encoder_config")
        bundle.only("asr_normalize_type", "per_feature")
        bundle.only("diar_normalize_type", "NA")
        bundle.only("speaker_feature_mode", "thresholded")
        bundle.only("speaker_feature_config_version", 1)
        bundle.only("spk_kernel_scale", 1)
        bundle.only("spk_kernel_row_stride", 1)
        bundle.only("speaker_row_offset", 0)
        bundle.only("spk_kernel_calibrate", False)
        values = _read_fields(cls(), bundle)
        if values["chunk_right_context"] >= values["chunk_length"]:
            raise ValueError(
                f"`{bundle.name('chunk_right_context')}` "
                f"({values['chunk_right_context']}) must be smaller than "
                f"`{bundle.name('online_inference_length')}` "
                f"({values['chunk_length']})"
            )

        asr_section = bundle.section("asr_encoder_cfg")
        diarizer_section = bundle.section("diarization_model_cfg")
        encoder_section = diarizer_section.section("encoder")
        modules = diarizer_section.section("sortformer_modules")
        preprocessor = Nemotron3_5TranscribePreprocessorConfig.from_nemo(
            perception.section("preprocessor")
        )
        asr = Nemotron3_5TranscribeEncoderConfig.from_nemo(asr_section, _ASR_RELEASE)
        diarizer = Nemotron3_5TranscribeEncoderConfig.from_nemo(
            encoder_section, _DIARIZER_RELEASE
        )
        for section, key, value, other, expected in (
            (
                asr_section,
                "feat_in",
                asr.num_mel_bins,
                "perception.preprocessor.features",
                preprocessor.num_mel_bins,
            ),
            (
                encoder_section,
                "feat_in",
                diarizer.num_mel_bins,
                "perception.preprocessor.features",
                preprocessor.num_mel_bins,
            ),
            (
                encoder_section,
                "subsampling_factor",
                diarizer.subsampling_factor,
                asr_section.name("subsampling_factor"),
                asr.subsampling_factor,
            ),
            (
                modules,
                "subsampling_factor",
                modules.number("subsampling_factor", diarizer.subsampling_factor),
                encoder_section.name("subsampling_factor"),
                diarizer.subsampling_factor,
            ),
            (
                modules,
                "fc_d_model",
                modules.number("fc_d_model", diarizer.hidden_size),
                encoder_section.name("d_model"),
                diarizer.hidden_size,
            ),
            (
                perception.section("modality_adapter"),
                "d_model",
                perception.section("modality_adapter").number(
                    "d_model", asr.hidden_size
                ),
                asr_section.name("d_model"),
                asr.hidden_size,
            ),
            (
                perception,
                "output_dim",
                perception.number("output_dim", output_size),
                "llm_config.hidden_size",
                output_size,
            ),
        ):
            if value != expected:
                raise ValueError(
                    f"`{section.name(key)}` ({value}) must equal `{other}` ({expected})"
                )
        if asr.hidden_size % 2:
            # The table of speaker positions pairs sines with cosines.
            raise asr_section.fail("d_model", "must be even")
        return cls(
            **values,
            preprocessor=preprocessor,
            asr_encoder=asr,
            diarizer_encoder=diarizer,
            diarizer=Nemotron3_5TranscribeDiarizerConfig.from_nemo(bundle, modules),
            output_size=output_size,
        )

    def to_nemo(self) -> dict[str, Any]:
        """The `perception` and `pe_encoder_config` blocks."""
        return {
            "perception": {
                "output_dim": self.output_size,
                "preprocessor": self.preprocessor.to_nemo(),
                "modality_adapter": {"d_model": self.hidden_size},
            },
            "pe_encoder_config": _write_fields(self)
            | {
                "asr_normalize_type": "per_feature",
                "diar_normalize_type": "NA",
                "speaker_feature_mode": "thresholded",
                "speaker_feature_config_version": 1,
                "asr_encoder_cfg": self.asr_encoder.to_nemo(),
                "diarization_model_cfg": {
                    "encoder": self.diarizer_encoder.to_nemo(),
                    "sortformer_modules": self.diarizer.to_nemo(),
                },
            },
        }


@dataclass
class Nemotron3_5TranscribeCTCConfig:
    """The CTC head that times words; its input is the encoder's states.

    Its sizes are in the metadata of the weights, not in `config.json`.
    """

    hidden_size: int = _key("feat_in", 1280, low=1)
    num_hidden_layers: int = _key("n_layers", 2, low=1)
    num_attention_heads: int = _key("n_heads", 16, low=1)
    rope_theta: float = _key("rope_base", 10000.0, low=1.0)
    partial_rotary_factor: float = _key("rotary_fraction", 0.5, low=0.0, high=1.0)
    qk_norm: bool = _key("qk_norm", True)
    upsampling_factor: int = _key("upsample_factor", 2, low=1)
    residual_scale: float = _key("residual_scale", 0.1, low=0.0)
    intermediate_size: int = 640
    num_classes: int = 23863
    layer_norm_eps: float = 1e-5

    @property
    def blank_token_id(self) -> int:
        """The class after the pieces."""
        return self.num_classes - 1

    @classmethod
    def from_decoder_config(
        cls, decoder_config: Mapping[str, Any] | str
    ) -> "Nemotron3_5TranscribeCTCConfig":
        """Read `ctc_timestamp_decoder_config` of the safetensors metadata.

        Args:
            decoder_config: The JSON text, or the parsed object. `num_classes` counts
                the pieces, as in NeMo, or the pieces and the blank; `vocabulary`,
                the list of pieces, tells which.

        Raises:
            TypeError, ValueError: Naming the key.
        """
        if isinstance(decoder_config, str):
            try:
                decoder_config = json.loads(decoder_config)
            except json.JSONDecodeError as error:
                raise ValueError(f"`{_CTC_KEY}` is not JSON: {error}") from error
        section = _Section(decoder_config, _CTC_KEY)
        section.only("use_transformer", True)
        section.only("residual", True)
        section.only("self_attention_model", "rope")
        section.only("qkv_bias", False)
        section.only("pre_block_norm", True)
        release = cls()
        values = _read_fields(release, section)
        values["intermediate_size"] = _read_intermediate_size(
            section,
            values["hidden_size"],
            release.intermediate_size / release.hidden_size,
        )
        _check_heads(section, "feat_in", values)
        return cls(**values, num_classes=_read_num_classes(section, release))

    def to_decoder_config(self) -> dict[str, Any]:
        """The inverse, without the vocabulary."""
        return _write_fields(self) | {
            "ff_expansion": self.intermediate_size / self.hidden_size,
            "num_classes": self.num_classes - 1,
        }


def _read_num_classes(
    section: _Section, release: Nemotron3_5TranscribeCTCConfig
) -> int:
    """Classes of the CTC head, with the blank."""
    vocabulary = section.get("vocabulary")
    if vocabulary is None:
        # NeMo's decoders add the blank to `num_classes`.
        return section.number("num_classes", release.num_classes - 1, low=1) + 1
    if not isinstance(vocabulary, (list, tuple)) or not all(
        isinstance(piece, str) for piece in vocabulary
    ):
        raise TypeError(
            f"`{section.name('vocabulary')}` must be a list of strings, "
            f"got {_spell(vocabulary)}"
        )
    pieces = len(vocabulary)
    # NeMo also writes -1, to be filled in from the vocabulary.
    declared = section.number("num_classes", pieces)
    if declared not in (-1, pieces, pieces + 1):
        raise ValueError(
            f"`{section.name('num_classes')}` ({declared}) does not fit the {pieces} "
            f"pieces of `{section.name('vocabulary')}`"
        )
    return pieces + 1


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
    section: _Section, keys: Iterable[str], symbols: str
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
            raise TypeError(
                f"`{section.name(key)}` must be a string or a list, got {_spell(value)}"
            )
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


def _read_llm(section: _Section) -> dict[str, Any]:
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

    checked = _Section(values, section.path)
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


def _read_mtp(root: _Section, llm: _Section) -> Nemotron3_5TranscribeMTPConfig | None:
    """Resolve the draft head; see checkpoint layouts in the module docstring."""
    section = root.section("mtp")
    explicit = root.get("mtp") is not None
    legacy = root.boolean("compute_mtp", False)
    enabled = section.boolean("enabled", True) if explicit else legacy
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
    repeated = section.boolean("use_repeated_layer", False)
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
# The whole file
# ---------------------------------------------------------------------------

# Written by the export, kept for tools that look for them; nothing is built on them.
_KEPT_KEYS = ("pretrained_llm", "pretrained_asr", "prompt_format", "tokenizer_path")

# Base class arguments that a file may carry.
_BASE_KEYS = (
    "architectures",
    "attn_implementation",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "transformers_version",
)
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
        if values.get("llm_config") is None and name_or_path:
            values["llm_config"] = _find_backbone_config(
                Path(name_or_path), values.get("pretrained_llm")
            )
        root = _Section(values)

        root.only("audio_locator_tag", _AUDIO_LOCATOR_TAG)
        self.audio_locator_tag = _AUDIO_LOCATOR_TAG
        for key in _KEPT_KEYS:
            setattr(self, key, root.text(key, None))
        dtype = root.one_of(("dtype", "torch_dtype"))
        dtype = root.get(dtype) if dtype else "bfloat16"

        llm = root.section("llm_config")
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
        except (TypeError, ValueError) as error:
            raise ValueError(f"`llm_config`: {error}") from error

        self.audio_config = Nemotron3_5TranscribeAudioConfig.from_nemo(
            root, self.text_config.hidden_size
        )
        self.ctc_config = Nemotron3_5TranscribeCTCConfig.from_decoder_config(
            root.section(_CTC_KEY).values
        )
        self.audio_token_id = self.output_vocab_size
        self.tie_word_embeddings = False
        for key in _TOKEN_KEYS:
            own = root.get(key)
            setattr(self, key, getattr(self.text_config, key) if own is None else own)
        if root.get("quantization_config") is not None:
            self.quantization_config = kwargs["quantization_config"]

        base = {key: values[key] for key in _BASE_KEYS if values.get(key) is not None}
        super().__init__(**base, dtype=dtype, name_or_path=name_or_path or "")

    def __eq__(self, other: object) -> bool:
        # The base class makes a dataclass of this one, whose equality would see the
        # base class's fields only.
        return isinstance(other, type(self)) and self.to_dict() == other.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """NeMo's keys, as they stand after resolution and later changes."""
        output = super().to_dict()
        for key in (
            "text_config",
            "audio_config",
            "ctc_config",
            "mtp_config",
            "output_vocab_size",
            "audio_token_id",
        ):
            output.pop(key)
        text = self.text_config.to_diff_dict()
        output["llm_config"] = text | {"vocab_size": self.output_vocab_size}
        output |= self.audio_config.to_nemo()
        output[_CTC_KEY] = self.ctc_config.to_decoder_config()
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


def _find_backbone_config(checkpoint: Path, pretrained_llm: Any) -> Any:
    """The decoder's config that an export without `llm_config` puts in a folder.

    Args:
        checkpoint: Folder of the checkpoint, or its `config.json`.
        pretrained_llm: The export's name for the folder. Older exports hold a Hub
            name or the path of the training machine, which lead nowhere.

    Returns:
        The parsed file, or None when there is none.
    """
    folder = checkpoint.parent if checkpoint.is_file() else checkpoint
    names = [_BACKBONE_FOLDER]
    if isinstance(pretrained_llm, str) and pretrained_llm:
        names.insert(0, pretrained_llm)
    for name in names:
        path = folder / name / "config.json"
        if path.is_file():
            return PretrainedConfig._dict_from_json_file(path)
    return None
