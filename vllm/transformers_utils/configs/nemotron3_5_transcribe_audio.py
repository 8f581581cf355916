# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Audio sizes of Nemotron 3.5 Transcribe, read from NeMo's keys.

`perception` and `pe_encoder_config` of `config.json` hold the audio tower, the
metadata of the weights the word timing head.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.transformers_utils.configs.nemotron3_5_transcribe_reading import (
    ConfigSection,
    keyed,
    read_fields,
    write_fields,
)

# Metadata key of the word timing head's sizes; a saved config holds them too.
CTC_CONFIG_KEY = "ctc_timestamp_decoder_config"


@dataclass
class Nemotron3_5TranscribePreprocessorConfig:
    """Log-mel front end (`perception.preprocessor`); lengths are in samples."""

    sample_rate: int = keyed("sample_rate", 16000, low=1)
    num_mel_bins: int = keyed("features", 128, low=1)
    n_fft: int = keyed("n_fft", 512, low=2)
    preemphasis: float = keyed("preemph", 0.97, low=0.0, high=1.0)
    log_zero_guard: float = keyed("log_zero_guard_value", 2.0**-24, low=1e-38)
    hop_length: int = 160
    win_length: int = 400
    window: str = "hann"
    mel_norm: str = "slaney"

    @classmethod
    def from_nemo(
        cls, section: ConfigSection
    ) -> "Nemotron3_5TranscribePreprocessorConfig":
        section.only("window", "hann")
        section.only("log", True)
        section.only("log_zero_guard_type", "add")
        section.only("mag_power", 2)
        section.only("mel_norm", "slaney")
        section.only("frame_splicing", 1)
        section.only("exact_pad", False)
        section.only("lowfreq", 0)
        # Of no effect: each branch of the encoder normalises for itself.
        section.only("normalize", "NA", "per_feature", False)
        release = cls()
        values = read_fields(release, section)
        if "preemph" in section.values and section.get("preemph") is None:
            values["preemphasis"] = 0.0
        rate = values["sample_rate"]
        section.only("highfreq", rate / 2, 0)
        values["hop_length"] = _read_samples(
            section, "window_stride", rate, release.hop_length / release.sample_rate
        )
        values["win_length"] = _read_samples(
            section, "window_size", rate, release.win_length / release.sample_rate
        )
        if values["win_length"] > values["n_fft"]:
            raise ValueError(
                f"`{section.name('window_size')}` is {values['win_length']} samples, "
                f"more than `{section.name('n_fft')}` ({values['n_fft']})"
            )
        return cls(**values)

    def to_nemo(self) -> dict[str, Any]:
        return write_fields(self) | {
            "window_stride": self.hop_length / self.sample_rate,
            "window_size": self.win_length / self.sample_rate,
            "window": self.window,
            "mel_norm": self.mel_norm,
            "log": True,
            "normalize": "NA",
        }


def _read_samples(section: ConfigSection, key: str, rate: int, release: float) -> int:
    """A time in seconds as samples; NeMo also takes samples, under `n_<key>`."""
    samples = section.number(f"n_{key}", 0, low=1)
    if not samples or section.get(key) is not None:
        from_seconds = round(section.number(key, release, low=0.0) * rate)
        if samples not in (0, from_seconds):
            raise ValueError(
                f"`{section.name(key)}` ({section.get(key)} s) and "
                f"`{section.name(f'n_{key}')}` ({samples}) disagree"
            )
        samples = from_seconds
    if samples < 1:
        raise section.fail(key, "must be at least one sample long")
    return samples


@dataclass
class Nemotron3_5TranscribeEncoderConfig:
    """NeMo's `TransformerEncoder`, pre-norm with rotary positions, over log-mels."""

    num_mel_bins: int = keyed("feat_in", 128, low=1)
    hidden_size: int = keyed("d_model", 1280, low=1)
    num_hidden_layers: int = keyed("n_layers", 32, low=1)
    num_attention_heads: int = keyed("n_heads", 10, low=1)
    subsampling_factor: int = keyed("subsampling_factor", 8, low=1)
    rope_theta: float = keyed("rope_base", 10000.0, low=1.0)
    partial_rotary_factor: float = keyed("rotary_fraction", 0.5, low=0.0, high=1.0)
    qk_norm: bool = keyed("qk_norm", True)
    intermediate_size: int = 5120
    layer_norm_eps: float = 1e-5

    @classmethod
    def from_nemo(
        cls, section: ConfigSection, release: "Nemotron3_5TranscribeEncoderConfig"
    ) -> "Nemotron3_5TranscribeEncoderConfig":
        target = section.text("_target_", None)
        if target is not None and not target.endswith("TransformerEncoder"):
            raise section.fail("_target_", "must be a TransformerEncoder")
        section.only("self_attention_model", "rope")
        section.only("subsampling", "feature_stacking")
        section.only("attn_mode", "full")
        section.only("qkv_bias", False)
        section.only("pre_block_norm", True)
        section.only("feat_out", -1)
        values = read_fields(release, section)
        values["intermediate_size"] = _read_intermediate_size(
            section,
            values["hidden_size"],
            release.intermediate_size / release.hidden_size,
        )
        _check_heads(section, "d_model", values)
        return cls(**values, layer_norm_eps=release.layer_norm_eps)

    def to_nemo(self) -> dict[str, Any]:
        return write_fields(self) | {
            "ff_expansion": self.intermediate_size / self.hidden_size,
            "subsampling": "feature_stacking",
            "self_attention_model": "rope",
        }


def _read_intermediate_size(
    section: ConfigSection, hidden_size: int, release: float
) -> int:
    size = round(section.number("ff_expansion", release) * hidden_size)
    if size < 1:
        raise section.fail("ff_expansion", "must make at least one feature")
    return size


def _check_heads(
    section: ConfigSection, width_key: str, values: dict[str, Any]
) -> None:
    """Check that heads divide the width and that the rotary part is whole pairs."""
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if width % heads:
        raise ValueError(
            f"`{section.name(width_key)}` ({width}) must be a multiple of "
            f"`{section.name('n_heads')}` ({heads})"
        )
    rotary = int(width // heads * values["partial_rotary_factor"])
    if rotary < 2 or rotary % 2:
        raise ValueError(
            f"`{section.name('rotary_fraction')}` "
            f"({values['partial_rotary_factor']}) of the {width // heads} features "
            f"that `{section.name('n_heads')}` ({heads}) leave a head is {rotary}: "
            "must be an even number of them"
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

    num_speakers: int = keyed("num_spks", 8, low=1)
    head_hidden_size: int = keyed("tf_d_model", 192, low=1)
    fifo_length: int = keyed("fifo_len", 40, low=0)
    speaker_cache_length: int = keyed("spkcache_len", 188, low=1)
    speaker_cache_update_period: int = keyed("spkcache_update_period", 300, low=1)
    silence_frames_per_speaker: int = keyed("spkcache_sil_frames_per_spk", 1, low=0)
    prediction_score_threshold: float = keyed(
        "pred_score_threshold", 0.25, low=1e-6, high=1.0
    )
    latest_frames_score_boost: float = keyed("scores_boost_latest", 0.05)
    strong_boost_rate: float = keyed("strong_boost_rate", 0.75, low=0.0)
    weak_boost_rate: float = keyed("weak_boost_rate", 1.5, low=0.0)
    min_positive_scores_rate: float = keyed("min_pos_scores_rate", 0.5, low=0.0)
    use_learnable_silence_embedding: bool = keyed("use_learnable_sil_emb", True)

    @classmethod
    def from_nemo(
        cls, bundle: ConfigSection, modules: ConfigSection
    ) -> "Nemotron3_5TranscribeDiarizerConfig":
        modules.only("use_learnable_sil_emb", True)
        values = read_fields(cls(), modules)
        # The bundle's own numbers win: it runs a diarizer that was trained with
        # others.
        for name, key in (
            ("fifo_length", "diar_fifo_len"),
            ("speaker_cache_length", "diar_spkcache_len"),
            ("speaker_cache_update_period", "diar_spkcache_update_period"),
        ):
            low = 0 if name == "fifo_length" else 1
            values[name] = bundle.number(key, values[name], low=low)
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
        return write_fields(self)


@dataclass
class Nemotron3_5TranscribeAudioConfig:
    """The audio tower: log-mel, speech recognition encoder, diarizer, projection.

    Chunk lengths are in encoder frames (80 ms in the release). A chunk is encoded
    together with the contexts on either side, of which nothing is kept.
    """

    chunk_length: int = keyed("online_inference_length", 500, low=1)
    chunk_left_context: int = keyed("chunk_left_context", 50, low=0)
    chunk_right_context: int = keyed("chunk_right_context", 50, low=0)
    speaker_activity_threshold: float = keyed(
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
        cls, root: ConfigSection, output_size: int, output_key: str
    ) -> "Nemotron3_5TranscribeAudioConfig":
        """Read the tower of a `config.json`.

        Args:
            root: The whole file.
            output_size: Hidden size of the decoder.
            output_key: Full name of the key that says so.

        Raises:
            TypeError, ValueError: Naming the key.
        """
        perception = root.section("perception")
        bundle = root.section("pe_encoder_config")
        target = bundle.text("target", None)
        if target is not None and "ParallelExpertEncoder" not in target:
            raise bundle.fail("target", "must be a ParallelExpertEncoder")
        bundle.not_null("asr_normalize_type")
        bundle.only("asr_normalize_type", "per_feature")
        bundle.only("diar_normalize_type", "NA")
        bundle.only("speaker_feature_config_version", 1)
        bundle.only("speaker_feature_mode", "thresholded")
        bundle.not_null("speaker_activity_threshold")
        bundle.only("spk_kernel_scale", 1)
        bundle.only("spk_kernel_row_stride", 1)
        bundle.only("spk_kernel_calibrate", False)
        bundle.only("speaker_row_offset", 0)
        values = read_fields(cls(), bundle)
        if values["chunk_right_context"] >= values["chunk_length"]:
            raise ValueError(
                f"`{bundle.name('chunk_right_context')}` "
                f"({values['chunk_right_context']}) must be smaller than "
                f"`{bundle.name('online_inference_length')}` "
                f"({values['chunk_length']})"
            )

        preprocessor = Nemotron3_5TranscribePreprocessorConfig.from_nemo(
            perception.section("preprocessor")
        )
        asr_section = bundle.section("asr_encoder_cfg")
        asr = Nemotron3_5TranscribeEncoderConfig.from_nemo(asr_section, _ASR_RELEASE)
        if asr.hidden_size % 2:
            # The table of speaker codes pairs sines with cosines.
            raise asr_section.fail("d_model", "must be even")
        diarizer_section = bundle.section("diarization_model_cfg")
        diarizer_section.only("high_resolution", True)
        encoder_section = diarizer_section.section("encoder")
        encoder = Nemotron3_5TranscribeEncoderConfig.from_nemo(
            encoder_section, _DIARIZER_RELEASE
        )
        modules = diarizer_section.section("sortformer_modules")
        diarizer = Nemotron3_5TranscribeDiarizerConfig.from_nemo(bundle, modules)

        mels = preprocessor.num_mel_bins
        asr_section.equal("feat_in", mels, "perception.preprocessor.features")
        encoder_section.equal("feat_in", mels, "perception.preprocessor.features")
        for section in (encoder_section, modules):
            section.equal(
                "subsampling_factor",
                asr.subsampling_factor,
                asr_section.name("subsampling_factor"),
            )
        modules.equal(
            "fc_d_model", encoder.hidden_size, encoder_section.name("d_model")
        )
        perception.section("modality_adapter").equal(
            "d_model", asr.hidden_size, asr_section.name("d_model")
        )
        perception.equal("output_dim", output_size, output_key)
        # What a block leaves out follows the block that says it.
        asr.num_mel_bins = encoder.num_mel_bins = mels
        encoder.subsampling_factor = asr.subsampling_factor
        return cls(
            **values,
            preprocessor=preprocessor,
            asr_encoder=asr,
            diarizer_encoder=encoder,
            diarizer=diarizer,
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
            "pe_encoder_config": write_fields(self)
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

    hidden_size: int = keyed("feat_in", 1280, low=1)
    num_hidden_layers: int = keyed("n_layers", 2, low=1)
    num_attention_heads: int = keyed("n_heads", 16, low=1)
    rope_theta: float = keyed("rope_base", 10000.0, low=1.0)
    partial_rotary_factor: float = keyed("rotary_fraction", 0.5, low=0.0, high=1.0)
    qk_norm: bool = keyed("qk_norm", True)
    upsampling_factor: int = keyed("upsample_factor", 2, low=1)
    residual_scale: float = keyed("residual_scale", 0.1, low=0.0)
    intermediate_size: int = 640
    num_classes: int = 23863
    layer_norm_eps: float = 1e-5

    @property
    def blank_token_id(self) -> int:
        """The class after the pieces."""
        return self.num_classes - 1

    @classmethod
    def from_decoder_config(
        cls, decoder_config: Mapping[str, Any] | str | bytes
    ) -> "Nemotron3_5TranscribeCTCConfig":
        """Read `ctc_timestamp_decoder_config` of the safetensors metadata.

        Args:
            decoder_config: The JSON text, or the parsed object. `num_classes` counts
                the pieces, as in NeMo, or the pieces and the blank; `vocabulary`,
                the list of pieces, tells which.

        Raises:
            TypeError, ValueError: Naming the key.
        """
        if isinstance(decoder_config, (str, bytes)):
            try:
                decoder_config = json.loads(decoder_config)
            except json.JSONDecodeError as error:
                raise ValueError(f"`{CTC_CONFIG_KEY}` is not JSON: {error}") from error
        section = ConfigSection(decoder_config, CTC_CONFIG_KEY)
        section.only("use_transformer", True)
        section.only("residual", True)
        section.only("self_attention_model", "rope")
        section.only("qkv_bias", False)
        section.only("pre_block_norm", True)
        release = cls()
        values = read_fields(release, section)
        values["intermediate_size"] = _read_intermediate_size(
            section,
            values["hidden_size"],
            release.intermediate_size / release.hidden_size,
        )
        _check_heads(section, "feat_in", values)
        return cls(**values, num_classes=_read_num_classes(section, release))

    def to_decoder_config(self) -> dict[str, Any]:
        """The inverse, without the vocabulary."""
        return write_fields(self) | {
            "ff_expansion": self.intermediate_size / self.hidden_size,
            "num_classes": self.num_classes - 1,
        }


def _read_num_classes(
    section: ConfigSection, release: Nemotron3_5TranscribeCTCConfig
) -> int:
    """Classes of the CTC head, with the blank."""
    vocabulary = section.get("vocabulary")
    if vocabulary is None:
        # NeMo's decoders add the blank to `num_classes`.
        return section.number("num_classes", release.num_classes - 1, low=1) + 1
    if not isinstance(vocabulary, (list, tuple)) or not all(
        isinstance(piece, str) for piece in vocabulary
    ):
        raise section.wrong_type("vocabulary", "a list of strings")
    pieces = len(vocabulary)
    # NeMo also writes -1, to be filled in from the vocabulary.
    declared = section.number("num_classes", pieces)
    if declared not in (-1, pieces, pieces + 1):
        raise ValueError(
            f"`{section.name('num_classes')}` ({declared}) does not fit the {pieces} "
            f"pieces of `{section.name('vocabulary')}`"
        )
    return pieces + 1
