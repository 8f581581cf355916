# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Translate between the reference implementation and the on-disk NeMo layout.

The reference (transformers' ``nemotron3_5_transcribe``) and the released checkpoint
name the same sizes and tensors differently, and the released ``config.json`` holds
none of the sub-configurations the reference needs to build a model of another size.
This module translates configurations in both directions, writes a model in the
layout of the BF16 release, and loads such a folder back.

Runs in the reference environment (``tools/setup.sh --reference``).
"""

import hashlib
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import (
    AutoTokenizer,
    Nemotron3_5TranscribeConfig,
    Nemotron3_5TranscribeForConditionalGeneration,
    NemotronAsrStreamingFeatureExtractor,
)

AUDIO_TAG = "<|audio|>"
CTC_FORMAT = "nemo_ctc_timestamp_artifact_v1"
ASR_PREFIX = "perception.encoder.asr_encoder."
DIARIZER_PREFIX = "perception.encoder.diarization_model."
MTP_PREFIX = "llm.mtp.layers."

# NeMo's SentencePiece wrapper options, as they stand in the release's metadata.
CTC_TOKENIZER_CONFIG = {
    "legacy": False,
    "ignore_extra_whitespaces": True,
    "trim_spm_separator_after_special_token": True,
    "spm_separator": "\u2581",
}

# Reference prefix -> stored prefix; the first match wins.
_PREFIXES = (
    ("model.audio_tower.asr_encoder.", ASR_PREFIX),
    (
        "model.audio_tower.diarization_model.model.audio_tower.",
        DIARIZER_PREFIX + "encoder.",
    ),
    (
        "model.audio_tower.diarization_model.model.proj.",
        DIARIZER_PREFIX + "sortformer_modules.encoder_proj.",
    ),
    (
        "model.audio_tower.diarization_model.model.upsampler.conv.",
        DIARIZER_PREFIX + "sortformer_modules.subpixel_upsample.",
    ),
    (
        "model.audio_tower.diarization_model.classifier.dense.",
        DIARIZER_PREFIX + "sortformer_modules.first_hidden_to_hidden.",
    ),
    (
        "model.audio_tower.diarization_model.classifier.out_proj.",
        DIARIZER_PREFIX + "sortformer_modules.single_hidden_to_spks.",
    ),
    (
        "model.audio_tower.diarization_model.silence_embeds",
        DIARIZER_PREFIX + "sortformer_modules.learnable_sil_emb",
    ),
    ("model.audio_tower.asr_norm.", "perception.encoder.asr_norm."),
    ("model.audio_tower.speaker_norm.", "perception.encoder.diar_norm."),
    ("model.multi_modal_projector.", "perception.proj."),
    ("model.language_model.embeddings.", "llm.model.embed_tokens."),
    ("model.language_model.norm_f.", "llm.model.norm."),
    ("model.language_model.layers.", "llm.model.layers."),
    ("lm_head.", "llm.lm_head."),
    ("model.word_timestamp_encoder.upsampler.", "ctc_timestamp.decoder.upsample."),
    ("model.word_timestamp_encoder.", "ctc_timestamp.decoder.transformer."),
    ("word_timestamp_head.", "ctc_timestamp.decoder.decoder_layers.0."),
)

# Renamings inside the three NeMo transformer encoders.
_ENCODER_LEAVES = (
    ("embedder.projection.", "pre_encode.proj."),
    ("input_layer_norm.", "embed_norm."),
    ("layer_norm1.", "norm1."),
    ("layer_norm2.", "norm2."),
    ("layer_norm.", "final_norm."),
    ("self_attn.o_proj.", "attn.out_proj."),
    ("self_attn.", "attn."),
    ("mlp.fc1.", "ffn.net.0."),
    ("mlp.fc2.", "ffn.net.3."),
)
_ENCODER_PREFIXES = (
    ASR_PREFIX,
    DIARIZER_PREFIX + "encoder.",
    "ctc_timestamp.decoder.transformer.",
)
_FLOAT32_NAMES = re.compile(
    r"\._fp32_params\.(A_log|D|dt_bias)$|\.e_score_correction_bias$"
)
_MTP_NAME = re.compile(
    r"0\.(enorm|hnorm|eh_proj|norm|mixer)\.|1\.(norm|mixer|final_layernorm)\."
)
_QKV = re.compile(r"attn\.([qkv])_proj\.weight$")

_DTYPES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}


# --------------------------------------------------------------------------------------
# Configuration
# --------------------------------------------------------------------------------------


def reference_config(
    nemo_config: dict[str, Any],
    ctc_decoder_config: dict[str, Any] | None = None,
) -> Nemotron3_5TranscribeConfig:
    """Build the reference's configuration from a NeMo-keyed ``config.json``.

    Args:
        nemo_config: The parsed ``config.json``. A key that is absent has its release
            value; ``llm_config`` must be embedded.
        ctc_decoder_config: The parsed ``ctc_timestamp_decoder_config`` of the
            safetensors metadata, which alone gives the sizes of the word-timestamp
            head. None takes the release's head, scaled to the ASR width.

    Returns:
        The configuration, with ``audio_token_id`` one past the text vocabulary.

    Raises:
        KeyError: ``llm_config`` is missing.
    """
    bundle = nemo_config.get("pe_encoder_config", {})
    asr = _encoder_config(
        bundle.get("asr_encoder_cfg", {}), {"rotary_fraction": 0.5, "n_layers": 32}
    )
    diarizer = bundle.get("diarization_model_cfg", {})
    encoder = _encoder_config(
        diarizer.get("encoder", {}),
        {"d_model": 512, "n_layers": 31, "n_heads": 8, "rotary_fraction": 1.0},
    )
    modules = diarizer.get("sortformer_modules", {})
    speakers = modules.get("num_spks", 8)
    factor = encoder["subsampling_factor"]
    fifo = bundle.get("diar_fifo_len", 40)
    period = bundle.get("diar_spkcache_update_period", 300)
    diarization_config = {
        "model_type": "nemotron3_diarization",
        "audio_config": encoder,
        "head_config": {
            "hidden_size": modules.get("tf_d_model", 192),
            "num_speakers": speakers,
            "audio_hidden_size": encoder["hidden_size"],
            "subsampling_factor": factor,
        },
        "streaming_config": {
            "fifo_length": fifo,
            "speaker_cache_update_period": period,
            "speaker_cache_length": bundle.get("diar_spkcache_len", 188),
            "speaker_cache_silence_frames_per_speaker": modules.get(
                "spkcache_sil_frames_per_spk", 1
            ),
            "prediction_score_threshold": modules.get("pred_score_threshold", 0.25),
            "latest_frames_score_boost": modules.get("scores_boost_latest", 0.05),
            "strong_boost_rate": modules.get("strong_boost_rate", 0.75),
            "weak_boost_rate": modules.get("weak_boost_rate", 1.5),
            "min_positive_scores_rate": modules.get("min_pos_scores_rate", 0.5),
            "num_speakers": speakers,
            "subsampling_factor": factor,
        },
        "chunk_length": bundle.get("online_inference_length", 500),
        "chunk_left_context": bundle.get("chunk_left_context", 50),
        "chunk_right_context": bundle.get("chunk_right_context", 50),
        "fifo_length": fifo,
        "speaker_cache_update_period": period,
    }

    width = asr["hidden_size"]
    if ctc_decoder_config is None:
        ctc_decoder_config = {"feat_in": width}
    classes = ctc_decoder_config.get("num_classes", 23862) + 1
    word_timestamp_config = {
        "hidden_size": ctc_decoder_config["feat_in"],
        "intermediate_size": round(
            ctc_decoder_config.get("ff_expansion", 0.5) * ctc_decoder_config["feat_in"]
        ),
        "num_hidden_layers": ctc_decoder_config.get("n_layers", 2),
        "num_attention_heads": ctc_decoder_config.get("n_heads", 16),
        "max_position_embeddings": ctc_decoder_config.get("pos_emb_max_len", 5000),
        "rope_parameters": _rope(
            ctc_decoder_config.get("rope_base", 10000.0),
            ctc_decoder_config.get("rotary_fraction", 0.5),
        ),
        "vocab_size": classes,
        "blank_token_id": classes - 1,
        "residual_scale": ctc_decoder_config.get("residual_scale", 0.1),
        "upsampling_factor": ctc_decoder_config.get("upsample_factor", 2),
    }

    text_config = dict(nemo_config["llm_config"])
    return Nemotron3_5TranscribeConfig(
        audio_config={
            "asr_config": asr,
            "diarization_config": diarization_config,
            "speaker_activity_threshold": bundle.get("speaker_activity_threshold", 0.5),
        },
        text_config=text_config,
        word_timestamp_config=word_timestamp_config,
        audio_token_id=text_config["vocab_size"],
    )


def nemo_config(
    tf_config: Nemotron3_5TranscribeConfig,
    *,
    mtp_depths: int,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    sample_rate: int = 16000,
    n_fft: int = 512,
    window_size: float = 0.025,
    window_stride: float = 0.01,
) -> dict[str, Any]:
    """Write the reference's configuration with NeMo's keys, as an export does.

    Args:
        tf_config: The reference's configuration.
        mtp_depths: Number of draft depths the repeated MTP block was trained for;
            0 leaves the MTP head out.
        eos_token_id: Turn end(s); default the text configuration's.
        pad_token_id: Default the text configuration's.
        sample_rate: Hz.
        n_fft: Samples of the Fourier transform.
        window_size: Seconds.
        window_stride: Seconds between log-mel frames.

    Returns:
        A JSON-ready dict, ``llm_config`` embedded.
    """
    audio, text = tf_config.audio_config, tf_config.text_config
    asr, diarizer = audio.asr_config, audio.diarization_config
    cache = diarizer.streaming_config
    preprocessor = {
        "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
        "sample_rate": sample_rate,
        "normalize": "NA",
        "window_size": window_size,
        "window_stride": window_stride,
        "window": "hann",
        "features": asr.num_mel_bins,
        "n_fft": n_fft,
        "log": True,
        "frame_splicing": 1,
        "dither": 1e-05,
        "pad_to": 16,
        "pad_value": 0.0,
    }
    if eos_token_id is None:
        eos_token_id = text.eos_token_id
    eos_ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    pad_id = text.pad_token_id if pad_token_id is None else pad_token_id
    llm_config = _llm_config(text, with_mtp=mtp_depths > 0)
    llm_config |= {"eos_token_id": eos_ids, "pad_token_id": pad_id}
    config: dict[str, Any] = {
        "architectures": ["NeMoSpeechLMForConditionalGeneration"],
        "model_type": "nemo_speechlm",
        "dtype": "bfloat16",
        "pretrained_llm": "llm_backbone",
        "pretrained_asr": "asr_encoder",
        "pretrained_weights": False,
        "prompt_format": "nemotron-nano-v3",
        "audio_locator_tag": AUDIO_TAG,
        "perception": {
            "target": "nemo.collections.speechlm2.modules.perception."
            "AudioPerceptionModule",
            "output_dim": text.hidden_size,
            "preprocessor": preprocessor,
            "encoder": {
                "_target_": "nemo.collections.asr.modules.TransformerEncoder",
            },
            "modality_adapter": {
                "_target_": "nemo.collections.speechlm2.modules.perception."
                "IdentityConnector",
                "d_model": asr.hidden_size,
            },
        },
        "pe_encoder_path": None,
        "pe_encoder_config": {
            "target": "nemo.collections.asr.modules.parallel_expert_encoder."
            "ParallelExpertEncoderPT",
            "asr_normalize_type": "per_feature",
            "diar_normalize_type": "NA",
            "online_inference_length": diarizer.chunk_length,
            "chunk_left_context": diarizer.chunk_left_context,
            "chunk_right_context": diarizer.chunk_right_context,
            "diar_chunk_len": diarizer.chunk_length,
            "diar_fifo_len": diarizer.fifo_length,
            "diar_spkcache_update_period": diarizer.speaker_cache_update_period,
            "diar_spkcache_len": cache.speaker_cache_length,
            "speaker_activity_threshold": audio.speaker_activity_threshold,
            "speaker_feature_mode": "thresholded",
            "speaker_feature_config_version": 1,
            "spk_kernel_scale": 1.0,
            "spk_kernel_row_stride": 1,
            "speaker_row_offset": 0,
            "spk_kernel_calibrate": False,
            "freeze_asr": False,
            "freeze_diar": True,
            "asr_encoder_cfg": _nemo_encoder(asr, qk_norm=True),
            "diarization_model_cfg": {
                "target": "nemo.collections.asr.models.sortformer_diar_models."
                "SortformerEncLabelModel",
                "high_resolution": True,
                "output_subsampling_factor": 1,
                "preprocessor": preprocessor,
                "encoder": _nemo_encoder(diarizer.audio_config, qk_norm=False),
                "sortformer_modules": {
                    "num_spks": diarizer.head_config.num_speakers,
                    "fc_d_model": diarizer.audio_config.hidden_size,
                    "tf_d_model": diarizer.head_config.hidden_size,
                    "subsampling_factor": diarizer.head_config.subsampling_factor,
                    "chunk_len": diarizer.chunk_length,
                    "chunk_left_context": diarizer.chunk_left_context,
                    "chunk_right_context": diarizer.chunk_right_context,
                    "fifo_len": diarizer.fifo_length,
                    "spkcache_len": cache.speaker_cache_length,
                    "spkcache_update_period": diarizer.speaker_cache_update_period,
                    "spkcache_sil_frames_per_spk": (
                        cache.speaker_cache_silence_frames_per_speaker
                    ),
                    "pred_score_threshold": cache.prediction_score_threshold,
                    "scores_boost_latest": cache.latest_frames_score_boost,
                    "sil_threshold": 0.2,
                    "strong_boost_rate": cache.strong_boost_rate,
                    "weak_boost_rate": cache.weak_boost_rate,
                    "min_pos_scores_rate": cache.min_positive_scores_rate,
                    "use_learnable_sil_emb": True,
                    "max_index": 99999,
                },
            },
        },
        "audio_token_estimator": {
            "preprocessor": {
                "n_fft": n_fft,
                "hop_length": round(window_stride * sample_rate),
                "stft_pad_amount": None,
            },
            "subsampling": {
                "type": "feature_stacking",
                "factor": asr.subsampling_factor,
            },
            "chunk_size_seconds": None,
        },
        "encoder_chunk_size_seconds": None,
        "speaker_encoder": None,
        "llm_config": llm_config,
        "eos_token_id": eos_ids,
        "pad_token_id": pad_id,
        # Leftovers of training that a reader must ignore.
        "use_nemo_automodel": True,
        "packed_sequences": False,
        "freeze_params": ["^perception\\.encoder\\.diarization_model\\..+$"],
        "prevent_freeze_params": [],
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.001},
        "aux_loss_coeff": 0.0,
        "init_configure_model": True,
    }
    if mtp_depths:
        config["mtp"] = {
            "enabled": True,
            "num_nextn_predict_layers": mtp_depths,
            "use_repeated_layer": True,
            "hybrid_override_pattern": "*E",
        }
    return config


def ctc_decoder_config(
    tf_config: Nemotron3_5TranscribeConfig, vocabulary: list[str]
) -> dict[str, Any]:
    """Describe the word-timestamp head for the safetensors metadata.

    Args:
        tf_config: The reference's configuration.
        vocabulary: The head's pieces by id, without the blank.

    Raises:
        ValueError: The vocabulary does not have one piece per non-blank class.
    """
    head = tf_config.word_timestamp_config
    if len(vocabulary) != head.vocab_size - 1:
        raise ValueError(
            f"{len(vocabulary)} pieces for {head.vocab_size - 1} non-blank classes"
        )
    return {
        "feat_in": head.hidden_size,
        "num_classes": head.vocab_size - 1,
        "vocabulary": vocabulary,
        "use_transformer": True,
        "n_layers": head.num_hidden_layers,
        "n_heads": head.num_attention_heads,
        "ff_expansion": head.intermediate_size / head.hidden_size,
        "qk_norm": True,
        "rope_base": head.rope_parameters["rope_theta"],
        "rotary_fraction": head.rope_parameters["partial_rotary_factor"],
        "upsample_factor": head.upsampling_factor,
        "residual": True,
        "residual_scale": head.residual_scale,
    }


def _rope(base: float, fraction: float) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": float(base),
        "partial_rotary_factor": float(fraction),
    }


def _encoder_config(encoder: dict[str, Any], release: dict[str, Any]) -> dict[str, Any]:
    """Translate one NeMo ``TransformerEncoder`` block to the reference's keys."""
    values = {"d_model": 1280, "n_heads": 10} | release | encoder
    return {
        "hidden_size": values["d_model"],
        "intermediate_size": round(values.get("ff_expansion", 4.0) * values["d_model"]),
        "num_hidden_layers": values["n_layers"],
        "num_attention_heads": values["n_heads"],
        "max_position_embeddings": values.get("pos_emb_max_len", 5000),
        "num_mel_bins": values.get("feat_in", 128),
        "subsampling_factor": values.get("subsampling_factor", 8),
        "rope_parameters": _rope(
            values.get("rope_base", 10000.0), values["rotary_fraction"]
        ),
    }


def _nemo_encoder(encoder: Any, *, qk_norm: bool) -> dict[str, Any]:
    return {
        "_target_": "nemo.collections.asr.modules.TransformerEncoder",
        "feat_in": encoder.num_mel_bins,
        "feat_out": -1,
        "n_layers": encoder.num_hidden_layers,
        "d_model": encoder.hidden_size,
        "n_heads": encoder.num_attention_heads,
        "subsampling": "feature_stacking",
        "subsampling_factor": encoder.subsampling_factor,
        "ff_expansion": encoder.intermediate_size / encoder.hidden_size,
        "qkv_bias": False,
        "qk_norm": qk_norm,
        "pre_block_norm": True,
        "self_attention_model": "rope",
        "rope_base": encoder.rope_parameters["rope_theta"],
        "rotary_fraction": encoder.rope_parameters.get("partial_rotary_factor", 1.0),
        "attn_mode": "full",
        "pos_emb_max_len": encoder.max_position_embeddings,
        "xscaling": False,
        "dropout": 0.0,
        "dropout_emb": 0.0,
        "dropout_att": 0.0,
    }


_LLM_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attention_bias",
    "attention_dropout",
    "intermediate_size",
    "mlp_hidden_act",
    "mlp_bias",
    "mamba_num_heads",
    "mamba_head_dim",
    "mamba_hidden_act",
    "mamba_proj_bias",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "use_conv_bias",
    "chunk_size",
    "expand",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "mamba_ssm_cache_dtype",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_overlap",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "use_bias",
    "use_cache",
    "layer_norm_epsilon",
    "initializer_range",
    "residual_in_fp32",
    "rescale_prenorm_residual",
    "hidden_dropout",
    "max_position_embeddings",
    "num_logits_to_keep",
    "tie_word_embeddings",
    "bos_token_id",
)


def _llm_config(text: Any, *, with_mtp: bool) -> dict[str, Any]:
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "num_hidden_layers": text.num_hidden_layers,
        "hybrid_override_pattern": text.hybrid_override_pattern,
    }
    config |= {key: getattr(text, key) for key in _LLM_KEYS}
    config["norm_eps"] = text.layer_norm_epsilon
    if with_mtp:
        # The block is stored once however many depths reuse it.
        config["num_nextn_predict_layers"] = 1
        config["mtp_hybrid_override_pattern"] = "*E"
    return config


# --------------------------------------------------------------------------------------
# Export
# --------------------------------------------------------------------------------------


def export_checkpoint(
    model: Nemotron3_5TranscribeForConditionalGeneration,
    out_dir: str | Path,
    *,
    nemo_config: dict[str, Any],
    mtp_state: dict[str, torch.Tensor] | None,
    sentencepiece_proto: bytes,
    ctc_decoder_config: dict[str, Any],
    ctc_tokenizer_config: dict[str, Any] | None = None,
    tokenizer_dir: str | Path | None = None,
) -> None:
    """Write a checkpoint folder in the layout of the BF16 release.

    The same model always gives the same bytes.

    Args:
        model: The reference model; its values are rounded to bfloat16, except the
            float32 set (Mamba's ``A_log``, ``D``, ``dt_bias`` and the router bias).
        out_dir: Folder to write; existing files of the same names are replaced.
        nemo_config: See :func:`nemo_config`.
        mtp_state: MTP tensors named as in the file without ``llm.mtp.layers.``:
            ``0.{enorm,hnorm,eh_proj,norm}.weight``,
            ``0.mixer.{q,k,v,o}_proj.weight``, ``1.norm.weight``,
            ``1.mixer.gate.{weight,e_score_correction_bias}``,
            ``1.mixer.shared_experts.{up,down}_proj.weight``,
            ``1.final_layernorm.weight`` and the routed experts, either as
            ``1.mixer.experts.{up_proj,down_proj}`` in the reference's (expert, out,
            in) order, transposed here, or as ``1.mixer.experts.gate_and_up_projs`` /
            ``down_projs`` already in the file's (expert, in, out) order. None writes
            no MTP head.
        sentencepiece_proto: The serialized SentencePiece model of the CTC head.
        ctc_decoder_config: See :func:`ctc_decoder_config`.
        ctc_tokenizer_config: Default :data:`CTC_TOKENIZER_CONFIG`.
        tokenizer_dir: Folder with ``tokenizer.json``, ``tokenizer_config.json`` and
            optionally ``chat_template.jinja``, which is inlined. None copies nothing.

    Raises:
        KeyError: A model tensor or MTP tensor has no place in the layout.
        ValueError: A name is produced twice.
    """
    out_dir = Path(out_dir)
    (out_dir / "llm_backbone").mkdir(parents=True, exist_ok=True)
    metadata = {
        "format": "pt",
        "ctc_timestamp_format": CTC_FORMAT,
        "ctc_timestamp_decoder_config": _compact_json(ctc_decoder_config),
        "ctc_timestamp_tokenizer_config": _compact_json(
            CTC_TOKENIZER_CONFIG
            if ctc_tokenizer_config is None
            else ctc_tokenizer_config
        ),
    }
    tensors = stored_tensors(
        model,
        nemo_config=nemo_config,
        mtp_state=mtp_state,
        sentencepiece_proto=sentencepiece_proto,
    )
    write_safetensors(out_dir / "model.safetensors", tensors, metadata)
    _write_json(out_dir / "config.json", nemo_config)
    _write_json(out_dir / "llm_backbone" / "config.json", nemo_config["llm_config"])
    _write_json(
        out_dir / "generation_config.json",
        {
            "_from_model_config": True,
            "bos_token_id": nemo_config["llm_config"]["bos_token_id"],
            "eos_token_id": nemo_config["eos_token_id"],
            "pad_token_id": nemo_config["pad_token_id"],
        },
    )
    if tokenizer_dir is not None:
        _copy_tokenizer(Path(tokenizer_dir), out_dir)


def stored_tensors(
    model: Nemotron3_5TranscribeForConditionalGeneration,
    *,
    nemo_config: dict[str, Any],
    mtp_state: dict[str, torch.Tensor] | None,
    sentencepiece_proto: bytes,
) -> dict[str, torch.Tensor]:
    """Return every tensor of the file by its stored name, shape and dtype.

    Raises:
        KeyError: A tensor has no place in the layout.
        ValueError: A name is produced twice.
    """
    tensors: dict[str, torch.Tensor] = {}
    fused: dict[str, dict[str, torch.Tensor]] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        if name in tensors:
            raise ValueError(f"two tensors for {name}")
        if tensor.is_floating_point():
            dtype = torch.float32 if _FLOAT32_NAMES.search(name) else torch.bfloat16
            tensor = tensor.to(dtype)
        tensors[name] = tensor.detach().cpu().contiguous()

    for name, tensor in model.state_dict().items():
        stored = _stored_name(name)
        if stored.startswith(_ENCODER_PREFIXES) and (match := _QKV.search(stored)):
            group = fused.setdefault(stored[: match.start()] + "attn.w_qkv", {})
            group[match.group(1)] = tensor
            continue
        stored, tensor = _pack_experts(stored, tensor)
        add(stored, tensor)
    for name, parts in fused.items():
        add(name + ".weight", torch.cat([parts[key] for key in "qkv"]))

    for name, tensor in (mtp_state or {}).items():
        if not re.match(
            r"[01]\.(enorm|hnorm|eh_proj|norm|mixer|final_layernorm)\.", name
        ):
            raise KeyError(f"MTP tensor {name} has no place in the layout")
        stored, tensor = _pack_experts(MTP_PREFIX + name, tensor)
        add(stored, tensor)

    _add_unused(add, model.config, nemo_config, sentencepiece_proto, bool(mtp_state))
    return tensors


def is_float32(name: str) -> bool:
    """Tell whether a model tensor (reference name) is stored in float32."""
    return _FLOAT32_NAMES.search(_stored_name(name)) is not None


def _stored_name(name: str) -> str:
    for old, new in _PREFIXES:
        if name.startswith(old):
            name = new + name[len(old) :]
            break
    else:
        raise KeyError(f"model tensor {name} has no place in the layout")
    if name.startswith(_ENCODER_PREFIXES):
        for old, new in _ENCODER_LEAVES:
            name = name.replace("." + old, "." + new)
    return re.sub(r"\.mixer\.(A_log|D|dt_bias)$", r".mixer._fp32_params.\1", name)


def _pack_experts(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Turn (expert, out, in) expert matrices into the file's (expert, in, out)."""
    for old, new in (("up_proj", "gate_and_up_projs"), ("down_proj", "down_projs")):
        if name.endswith(".mixer.experts." + old):
            return name[: -len(old)] + new, tensor.transpose(1, 2)
    return name, tensor


def _add_unused(
    add: Any,
    config: Nemotron3_5TranscribeConfig,
    nemo_config: dict[str, Any],
    sentencepiece_proto: bytes,
    with_mtp: bool,
) -> None:
    """Add the tensors of the release that the reference itself does not hold."""
    extractor = feature_extractor(nemo_config)
    window = torch.hann_window(extractor.win_length, periodic=False)
    for prefix in ("perception.", DIARIZER_PREFIX):
        add(prefix + "preprocessor.featurizer.window", window.clone())
        add(prefix + "preprocessor.featurizer.fb", extractor.mel_filters[None].clone())

    head = config.audio_config.diarization_config.head_config
    unused = DIARIZER_PREFIX + "sortformer_modules.hidden_to_spks."
    # Any values do: readers skip this layer. A pattern keeps the bytes repeatable.
    shape = (head.num_speakers, 2 * head.hidden_size)
    add(unused + "weight", torch.linspace(-0.1, 0.1, math.prod(shape)).view(shape))
    add(unused + "bias", torch.zeros(head.num_speakers))

    word_head = config.word_timestamp_config
    add(
        "ctc_timestamp.decoder.upsample_factor",
        torch.tensor(word_head.upsampling_factor),
    )
    add(
        "ctc_timestamp.decoder.residual_scale",
        torch.tensor(float(word_head.residual_scale)),
    )
    add(
        "ctc_timestamp.tokenizer.model_proto",
        torch.frombuffer(bytearray(sentencepiece_proto), dtype=torch.uint8),
    )

    for index, kind in enumerate(config.text_config.hybrid_override_pattern):
        if kind == "M":
            add(f"llm.model.layers.{index}.mixer.in_proj._extra_state", torch.empty(0))
    if with_mtp:
        for projection in "qkvo":
            name = f"{MTP_PREFIX}0.mixer.{projection}_proj._extra_state"
            add(name, torch.empty(0))


def write_safetensors(
    path: str | Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    """Write a safetensors file whose bytes depend on its content alone.

    The library's own writer orders the metadata by a randomly seeded hash.

    Raises:
        KeyError: A tensor has a dtype the layout does not use.
    """
    # Widest dtype first, so that every tensor is aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = _compact_json(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            flat = tensors[name].contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().tobytes())


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _copy_tokenizer(source: Path, out_dir: Path) -> None:
    (out_dir / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    template = source / "chat_template.jinja"
    if template.exists():
        config["chat_template"] = template.read_text("utf-8")
    _write_json(out_dir / "tokenizer_config.json", config)


# --------------------------------------------------------------------------------------
# Loading
# --------------------------------------------------------------------------------------


def read_metadata(checkpoint: str | Path) -> dict[str, str]:
    """Return the safetensors metadata of a checkpoint folder."""
    with safe_open(Path(checkpoint) / "model.safetensors", "pt") as file:
        return file.metadata() or {}


def feature_extractor(
    nemo_config: dict[str, Any],
    kind: type[NemotronAsrStreamingFeatureExtractor] = (
        NemotronAsrStreamingFeatureExtractor
    ),
) -> NemotronAsrStreamingFeatureExtractor:
    """Build the reference's log-mel front end for a NeMo configuration."""
    values = nemo_config.get("perception", {}).get("preprocessor", {})
    rate = values.get("sample_rate", 16000)
    return kind(
        feature_size=values.get("features", 128),
        sampling_rate=rate,
        hop_length=round(values.get("window_stride", 0.01) * rate),
        win_length=round(values.get("window_size", 0.025) * rate),
        n_fft=values.get("n_fft", 512),
        mel_filters_dtype="bfloat16",
    )


def clip_features(
    extractor: NemotronAsrStreamingFeatureExtractor,
    audio: np.ndarray,
    subsampling_factor: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transform one clip as the reference's processor does.

    A clip without a whole frame is zero-padded to one first, as serving does; the
    reference itself would give it no embedding.

    Args:
        extractor: See :func:`feature_extractor`.
        audio: (samples,) floats at the extractor's rate.
        subsampling_factor: The spectrogram is padded to a multiple of it.

    Returns:
        (1, frames, mels) log-mels and the (1, frames) int64 mask of the valid ones.
    """
    audio = np.asarray(audio, dtype=np.float32)
    audio = np.pad(audio, (0, max(0, extractor.hop_length - len(audio))))
    output = extractor(
        [audio], sampling_rate=extractor.sampling_rate, return_tensors="pt"
    )
    features = output["input_features"]
    padding = -features.shape[1] % subsampling_factor
    return (
        torch.nn.functional.pad(features, (0, 0, 0, padding)),
        torch.nn.functional.pad(output["attention_mask"].long(), (0, padding)),
    )


def load_reference(
    checkpoint: str | Path, dtype: torch.dtype = torch.float32
) -> tuple[
    Nemotron3_5TranscribeForConditionalGeneration,
    NemotronAsrStreamingFeatureExtractor,
    Any,
]:
    """Load a checkpoint folder in the NeMo layout into the reference.

    Args:
        checkpoint: Folder written by :func:`export_checkpoint`.
        dtype: Dtype of the decoder and of the CTC head; the reference always runs the
            audio tower in float32. The float32 set stays float32 in any case.

    Returns:
        The model in evaluation mode, its log-mel front end and its tokenizer (None
        when the folder has none).

    Raises:
        ValueError: Tensors are missing, unexpected or of another shape.
    """
    checkpoint = Path(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    ctc = read_metadata(checkpoint).get("ctc_timestamp_decoder_config")
    model, report = Nemotron3_5TranscribeForConditionalGeneration.from_pretrained(
        checkpoint,
        config=reference_config(config, json.loads(ctc) if ctc else None),
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(key):
            raise ValueError(f"{checkpoint}: {key}: {sorted(map(str, report[key]))}")
    _restore_float32(model, checkpoint)
    tokenizer = None
    if (checkpoint / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, config=model.config)
    return model.eval(), feature_extractor(config), tokenizer


def _restore_float32(model: torch.nn.Module, checkpoint: Path) -> None:
    """Put back the Mamba values that a bfloat16 load narrows."""
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name, parameter in model.named_parameters():
            stored = _stored_name(name)
            if "._fp32_params." in stored:
                parameter.data = file.get_tensor(stored)
