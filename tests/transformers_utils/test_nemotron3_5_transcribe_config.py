# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Config: NeMo's keys in, resolved sizes out, or an error that names the key."""

import copy
import json
import multiprocessing
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm.transformers_utils.configs.nemotron3_5_transcribe import (
    Nemotron3_5TranscribeConfig,
)
from vllm.transformers_utils.configs.nemotron3_5_transcribe_audio import (
    Nemotron3_5TranscribeCTCConfig,
)

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).resolve().parents[2]
ODD_CHECKPOINT = ROOT / "tests" / "data" / "odd_checkpoint"
OLD_LAYER_TYPES = ["mamba", "moe", "attention", "moe", "mlp"]
RELEASE_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

# A small checkpoint, in the keys of NeMo's export.
SMALL: dict[str, Any] = {
    "model_type": "nemo_speechlm",
    "architectures": ["NeMoSpeechLMForConditionalGeneration"],
    "pretrained_llm": "llm_backbone",
    "pretrained_asr": "asr",
    "prompt_format": "nemotron-nano-v3",
    "audio_locator_tag": "<|audio|>",
    "dtype": "bfloat16",
    "perception": {
        "output_dim": 48,
        "preprocessor": {
            "sample_rate": 8000,
            "features": 40,
            "n_fft": 256,
            "window_size": 0.025,
            "window_stride": 0.0125,
            "normalize": "NA",
        },
        "modality_adapter": {"d_model": 24},
    },
    "pe_encoder_config": {
        "online_inference_length": 20,
        "chunk_left_context": 4,
        "chunk_right_context": 3,
        "diar_fifo_len": 5,
        "diar_spkcache_len": 17,
        "diar_spkcache_update_period": 9,
        "speaker_activity_threshold": 0.4,
        "speaker_feature_mode": "thresholded",
        "asr_encoder_cfg": {
            "feat_in": 40,
            "d_model": 24,
            "n_layers": 3,
            "n_heads": 2,
            "ff_expansion": 2.5,
            "subsampling_factor": 4,
            "rotary_fraction": 0.5,
            "rope_base": 5000,
        },
        "diarization_model_cfg": {
            "encoder": {
                "feat_in": 40,
                "d_model": 16,
                "n_layers": 2,
                "n_heads": 4,
                "subsampling_factor": 4,
            },
            "sortformer_modules": {
                "num_spks": 4,
                "fc_d_model": 16,
                "tf_d_model": 12,
                "fifo_len": 264,
                "spkcache_len": 200,
                "spkcache_update_period": 222,
                "spkcache_sil_frames_per_spk": 2,
                "pred_score_threshold": 0.3,
            },
        },
    },
    "llm_config": {
        "model_type": "nemotron_h",
        "vocab_size": 64,
        "hidden_size": 48,
        "hybrid_override_pattern": "ME*E",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 2048,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "mtp": {
        "enabled": True,
        "num_nextn_predict_layers": 3,
        "use_repeated_layer": True,
        "hybrid_override_pattern": "*E",
    },
    "eos_token_id": [7, 2],
    "pad_token_id": 3,
}

MODULES = "pe_encoder_config.diarization_model_cfg.sortformer_modules"

REMOVE = object()


def small(**changes: Any) -> dict[str, Any]:
    """`SMALL` with the values at dotted paths (`a__b__c`) replaced or removed."""
    values = copy.deepcopy(SMALL)
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        block = values
        for key in parents:
            block = block.setdefault(key, {})
        if value is REMOVE:
            block.pop(leaf, None)
        else:
            block[leaf] = value
    return values


def make(**changes: Any) -> Nemotron3_5TranscribeConfig:
    return Nemotron3_5TranscribeConfig(**small(**changes))


def at(path: str, value: Any) -> dict[str, Any]:
    """Keyword of `small` for a dotted path."""
    return {path.replace(".", "__"): value}


def write_checkpoint(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


# -------------------------------------------------------------------- release


def test_bare_config_is_the_release():
    config = Nemotron3_5TranscribeConfig.from_dict({"model_type": "nemo_speechlm"})
    text, audio = config.text_config, config.audio_config

    assert text.hybrid_override_pattern == RELEASE_PATTERN
    assert text.num_hidden_layers == 52
    assert [RELEASE_PATTERN.count(s) for s in "ME*"] == [23, 23, 6]
    assert [i for i, s in enumerate(RELEASE_PATTERN) if s == "*"] == [
        *(5, 12, 19, 26, 33, 42)
    ]
    for key, value in {
        "hidden_size": 2688,
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
        "intermediate_size": 1856,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "moe_latent_size": None,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_ssm_cache_dtype": "float32",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262144,
        "time_step_limit": (0.0, float("inf")),
        "architectures": ["NemotronHForCausalLM"],
    }.items():
        assert getattr(text, key) == value, key
    assert config.output_vocab_size == config.audio_token_id == 131072
    assert text.vocab_size == 131082
    assert config.architectures == ["NeMoSpeechLMForConditionalGeneration"]
    assert str(config.dtype) == str(text.dtype) == "torch.bfloat16"
    assert config.mtp_config is None

    front = audio.preprocessor
    assert (front.sample_rate, front.num_mel_bins, front.n_fft) == (16000, 128, 512)
    assert (front.hop_length, front.win_length) == (160, 400)
    assert (front.preemphasis, front.log_zero_guard) == (0.97, 2**-24)
    assert (front.window, front.mel_norm) == ("hann", "slaney")
    asr, diarizer = audio.asr_encoder, audio.diarizer_encoder
    assert (asr.hidden_size, asr.intermediate_size) == (1280, 5120)
    assert (asr.num_hidden_layers, asr.num_attention_heads) == (32, 10)
    assert (asr.partial_rotary_factor, asr.qk_norm) == (0.5, True)
    assert (diarizer.hidden_size, diarizer.intermediate_size) == (512, 2048)
    assert (diarizer.num_hidden_layers, diarizer.num_attention_heads) == (31, 8)
    assert (diarizer.partial_rotary_factor, diarizer.qk_norm) == (1.0, False)
    for encoder in (asr, diarizer):
        assert (encoder.num_mel_bins, encoder.subsampling_factor) == (128, 8)
        assert (encoder.rope_theta, encoder.layer_norm_eps) == (10000.0, 1e-5)
    head = audio.diarizer
    assert (head.head_hidden_size, head.num_speakers) == (192, 8)
    assert (head.fifo_length, head.speaker_cache_length) == (40, 188)
    assert head.speaker_cache_update_period == 300
    assert head.silence_frames_per_speaker == 1
    assert head.prediction_score_threshold == 0.25
    assert head.latest_frames_score_boost == 0.05
    assert (head.strong_boost_rate, head.weak_boost_rate) == (0.75, 1.5)
    assert head.min_positive_scores_rate == 0.5
    assert (audio.chunk_length, audio.chunk_left_context) == (500, 50)
    assert audio.chunk_right_context == 50
    assert audio.speaker_activity_threshold == 0.5
    assert (audio.hidden_size, audio.output_size) == (1280, 2688)
    assert (audio.num_speakers, audio.subsampling_factor) == (8, 8)

    ctc = config.ctc_config
    assert (ctc.hidden_size, ctc.intermediate_size) == (1280, 640)
    assert (ctc.num_hidden_layers, ctc.num_attention_heads) == (2, 16)
    assert (ctc.num_classes, ctc.blank_token_id) == (23863, 23862)
    assert (ctc.upsampling_factor, ctc.residual_scale) == (2, 0.1)
    assert (ctc.partial_rotary_factor, ctc.qk_norm) == (0.5, True)


def test_no_arguments_are_the_release_too():
    bare = Nemotron3_5TranscribeConfig(model_type="nemo_speechlm")
    assert Nemotron3_5TranscribeConfig() == bare


# ------------------------------------------------------------------ NeMo keys


def test_sizes_come_from_the_file():
    config = make()
    audio = config.audio_config
    front = audio.preprocessor
    assert (front.sample_rate, front.num_mel_bins, front.n_fft) == (8000, 40, 256)
    assert (front.hop_length, front.win_length) == (100, 200)
    asr = audio.asr_encoder
    assert (asr.hidden_size, asr.intermediate_size, asr.rope_theta) == (24, 60, 5000.0)
    assert (asr.num_hidden_layers, asr.num_attention_heads) == (3, 2)
    assert isinstance(asr.rope_theta, float)
    encoder = audio.diarizer_encoder
    assert (encoder.hidden_size, encoder.intermediate_size) == (16, 64)
    assert (encoder.partial_rotary_factor, encoder.qk_norm) == (1.0, False)
    assert audio.diarizer.num_speakers == audio.num_speakers == 4
    assert audio.diarizer.head_hidden_size == 12
    assert audio.diarizer.prediction_score_threshold == 0.3
    assert (audio.chunk_length, audio.chunk_left_context) == (20, 4)
    assert audio.chunk_right_context == 3
    assert audio.subsampling_factor == encoder.subsampling_factor == 4
    assert (audio.hidden_size, audio.output_size) == (24, 48)
    assert config.text_config.hybrid_override_pattern == "ME*E"
    assert config.text_config.layer_norm_epsilon == 1e-6


def test_bundle_wins_over_the_diarizers_own_numbers():
    """A diarizer carries the streaming numbers that it was trained with."""
    head = make().audio_config.diarizer
    assert (head.fifo_length, head.speaker_cache_length) == (5, 17)
    assert head.speaker_cache_update_period == 9
    own = make(
        pe_encoder_config__diar_fifo_len=REMOVE,
        pe_encoder_config__diar_spkcache_len=None,
        pe_encoder_config__diar_spkcache_update_period=REMOVE,
    ).audio_config.diarizer
    assert (own.fifo_length, own.speaker_cache_length) == (264, 200)
    assert own.speaker_cache_update_period == 222


def test_absent_blocks_have_release_values():
    config = Nemotron3_5TranscribeConfig(
        perception={}, pe_encoder_config={"diarization_model_cfg": None}, llm_config={}
    )
    assert config.to_dict() == Nemotron3_5TranscribeConfig().to_dict()


def test_training_leftovers_are_ignored():
    leftovers = {
        "use_nemo_automodel": True,
        "automodel_backend": {"attn": "te"},
        "packed_sequences": False,
        "freeze_params": ["^llm"],
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
        "lora": None,
        "speaker_encoder": None,
        "pe_encoder_path": None,
        "encoder_chunk_size_seconds": None,
        "audio_token_index": 99,
        "image_token_index": 99,
        "trust_remote_code": True,
        "vocab_size": 5,
        "hidden_size": 6,
        "num_attention_heads": 7,
    }
    config = make(
        **leftovers,
        perception__spec_augment={"freq_masks": 2},
        perception__preprocessor__dither=1e-5,
        perception__preprocessor__pad_to=16,
        pe_encoder_config__freeze_diar=True,
        pe_encoder_config__asr_encoder_cfg__dropout=0.1,
        mtp__loss_scale=0.1,
    )
    assert config == make()
    assert not hasattr(config, "optimizer")
    assert config.audio_token_id == 64


def test_preprocessor_lengths_follow_the_rate():
    config = make(
        perception__preprocessor__window_stride=REMOVE,
        perception__preprocessor__window_size=REMOVE,
    )
    front = config.audio_config.preprocessor
    assert (front.hop_length, front.win_length) == (80, 200)


@pytest.mark.parametrize(
    "seconds, rate, samples", [(0.01, 16000, 160), (0.0125, 22050, 276), (0.1, 48, 5)]
)
def test_seconds_round_to_samples(seconds, rate, samples):
    front = make(
        perception__preprocessor__sample_rate=rate,
        perception__preprocessor__window_stride=seconds,
        perception__preprocessor__n_fft=2048,
    ).audio_config.preprocessor
    assert front.hop_length == samples


def test_lengths_in_samples():
    front = make(
        perception__preprocessor__window_stride=REMOVE,
        perception__preprocessor__n_window_stride=90,
    ).audio_config.preprocessor
    assert front.hop_length == 90


def test_null_preemphasis_is_none():
    config = make(perception__preprocessor__preemph=None)
    assert config.audio_config.preprocessor.preemphasis == 0.0


# ------------------------------------------------------------------- backbone


@pytest.mark.parametrize(
    "changes",
    [
        {"llm_config__hybrid_override_pattern": "ME*E-"},
        {
            "llm_config__hybrid_override_pattern": REMOVE,
            "llm_config__layers_block_type": [
                "mamba",
                "moe",
                "attention",
                "moe",
                "mlp",
            ],
        },
        {
            "llm_config__hybrid_override_pattern": REMOVE,
            "llm_config__layer_types": [
                "linear_attention",
                "moe",
                "full_attention",
                "moe",
                "mlp",
            ],
        },
        {
            "llm_config__hybrid_override_pattern": "ME*E-",
            "llm_config__layers_block_type": [
                "mamba",
                "moe",
                "attention",
                "moe",
                "mlp",
            ],
            "llm_config__num_hidden_layers": 5,
        },
    ],
    ids=["symbols", "old list", "new list", "both"],
)
def test_layer_pattern_spellings(changes):
    text = make(**changes).text_config
    assert text.hybrid_override_pattern == "ME*E-"
    assert text.num_hidden_layers == 5
    assert text.layers_block_type[:3] == ["linear_attention", "moe", "full_attention"]


@pytest.mark.parametrize("key", ["layer_norm_epsilon", "norm_eps", "rms_norm_eps"])
def test_epsilon_spellings(key):
    changes = {"llm_config__layer_norm_epsilon": REMOVE, f"llm_config__{key}": 1e-4}
    assert make(**changes).text_config.layer_norm_epsilon == 1e-4


@pytest.mark.parametrize(
    "old, name, value",
    [
        ("mamba_n_groups", "n_groups", 4),
        ("mamba_d_conv", "conv_kernel", 3),
        ("mamba_chunk_size", "chunk_size", 64),
        ("mamba_dt_limit", "time_step_limit", [0.0, 1.0]),
        ("num_local_experts", "n_routed_experts", 8),
    ],
)
def test_old_decoder_names(old, name, value):
    config = make(**at(f"llm_config.{name}", REMOVE), **at(f"llm_config.{old}", value))
    assert getattr(config.text_config, name) == value


def test_padded_vocabulary():
    config = make()
    assert config.output_vocab_size == 64
    assert config.text_config.vocab_size == 74
    assert config.audio_token_id == config.image_token_index == 64
    assert "image_token_index" not in config.to_dict()


def test_placeholder_id_may_be_any_extra_row():
    config = make(audio_token_id=66)
    assert config.audio_token_id == config.image_token_index == 66
    assert Nemotron3_5TranscribeConfig(**config.to_dict()).audio_token_id == 66


def test_proposer_may_set_its_placeholder_name():
    config = make()
    config.image_token_index = 65
    assert config.audio_token_id == 65


def test_text_config_is_found_by_transformers():
    config = make()
    assert config.get_text_config() is config.text_config
    assert config.get_text_config(decoder=True) is config.text_config
    assert "text_config" in config.sub_configs


def test_token_ids_of_the_root_win():
    config = make()
    assert (config.eos_token_id, config.pad_token_id) == ([7, 2], 3)
    config = make(eos_token_id=REMOVE, pad_token_id=REMOVE)
    assert (config.eos_token_id, config.pad_token_id) == (2, 0)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype(key, dtype):
    config = make(**{"dtype": REMOVE, key: dtype})
    assert str(config.dtype) == str(config.text_config.dtype) == f"torch.{dtype}"


def test_quantization_config_is_untouched():
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head", "mtp.layers.1.mixer.gate"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    values = small(quantization_config=quantization)
    config = Nemotron3_5TranscribeConfig(**values)
    assert config.quantization_config is values["quantization_config"]
    assert config.quantization_config == quantization
    assert config.to_dict()["quantization_config"] == quantization
    assert not hasattr(make(), "quantization_config")


def test_arguments_are_not_changed():
    values = small()
    Nemotron3_5TranscribeConfig(**values)
    assert values == SMALL


# ----------------------------------------------------------- backbone's folder


@pytest.mark.parametrize(
    "pretrained_llm", ["llm_backbone", "backbone", "some/hub-name", "/no/such/path"]
)
def test_backbone_folder(tmp_path, pretrained_llm):
    values = small(llm_config=REMOVE, pretrained_llm=pretrained_llm)
    folder = write_checkpoint(tmp_path / "checkpoint", values)
    name = "backbone" if pretrained_llm == "backbone" else "llm_backbone"
    write_checkpoint(folder / name, SMALL["llm_config"])
    for source in (folder, folder / "config.json"):
        config = Nemotron3_5TranscribeConfig.from_pretrained(source)
        assert config.text_config == make().text_config
    # As transformers' and vLLM's loaders make it, from a parsed file.
    config = Nemotron3_5TranscribeConfig.from_dict(values, name_or_path=str(folder))
    assert config.text_config == make().text_config
    assert config.to_dict()["llm_config"]["hidden_size"] == 48


def test_embedded_backbone_wins_over_the_folder(tmp_path):
    folder = write_checkpoint(tmp_path, small())
    write_checkpoint(folder / "llm_backbone", {"hidden_size": 96})
    config = Nemotron3_5TranscribeConfig.from_pretrained(folder)
    assert config.text_config.hidden_size == 48


def test_backbone_that_leads_nowhere_is_the_release(tmp_path):
    values = {"model_type": "nemo_speechlm", "pretrained_llm": "/no/such/path"}
    config = Nemotron3_5TranscribeConfig.from_pretrained(
        write_checkpoint(tmp_path, values)
    )
    assert config.text_config.hidden_size == 2688


def test_backbone_folder_errors_name_the_file(tmp_path):
    folder = write_checkpoint(tmp_path, small(llm_config=REMOVE))
    backbone = folder / "llm_backbone"
    write_checkpoint(backbone, SMALL["llm_config"] | {"hidden_size": "48"})
    with pytest.raises(TypeError, match=re.escape("`llm_backbone.hidden_size`")):
        Nemotron3_5TranscribeConfig.from_pretrained(folder)
    (backbone / "config.json").write_text("{")
    with pytest.raises(ValueError, match=re.escape("`llm_backbone/config.json`")):
        Nemotron3_5TranscribeConfig.from_pretrained(folder)
    (backbone / "config.json").write_text("[]")
    with pytest.raises(TypeError, match="`llm_backbone`"):
        Nemotron3_5TranscribeConfig.from_pretrained(folder)


# ------------------------------------------------------------------------ MTP


def mtp_of(**changes: Any) -> tuple[int, bool, str, str] | None:
    mtp = make(**changes).mtp_config
    return mtp and (
        mtp.num_nextn_predict_layers,
        mtp.use_repeated_layer,
        mtp.hybrid_override_pattern,
        mtp.source,
    )


def test_explicit_mtp():
    config = make()
    assert mtp_of() == (3, True, "*E", "mtp")
    assert config.require_repeated_mtp() is config.mtp_config
    assert config.text_config.num_nextn_predict_layers == 1
    assert config.text_config.mtp_hybrid_override_pattern == "*E"


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"mtp__enabled": REMOVE}, (3, True, "*E", "mtp")),
        ({"mtp__hybrid_override_pattern": REMOVE}, (3, True, "*E", "mtp")),
        ({"mtp__num_nextn_predict_layers": REMOVE}, (1, True, "*E", "mtp")),
        # The decoder stores one block, so three depths repeat it.
        ({"mtp__use_repeated_layer": REMOVE}, (3, True, "*E", "mtp")),
        (
            {
                "mtp__hybrid_override_pattern": "*EE",
                "llm_config__mtp_hybrid_override_pattern": REMOVE,
            },
            (3, True, "*EE", "mtp"),
        ),
        (
            {
                "mtp__hybrid_override_pattern": ["attention", "moe"],
                "llm_config__mtp_hybrid_override_pattern": REMOVE,
            },
            (3, True, "*E", "mtp"),
        ),
        ({"compute_mtp": True}, (3, True, "*E", "mtp")),
        ({"compute_mtp": False}, (3, True, "*E", "mtp")),
        ({"mtp": {"enabled": False}, "compute_mtp": True}, None),
        ({"mtp": {"num_nextn_predict_layers": 0}}, None),
        ({"mtp": REMOVE}, None),
        ({"mtp": None, "compute_mtp": False}, None),
        ({"mtp": {}, "compute_mtp": None}, None),
        ({"mtp": REMOVE, "compute_mtp": True}, (1, False, "*E", "compute_mtp")),
    ],
)
def test_mtp_resolution(changes, expected):
    assert mtp_of(**changes) == expected


@pytest.mark.parametrize(
    "key, value",
    [
        ("mtp_hybrid_override_pattern", "*E"),
        ("mtp_layers_block_type", ["attention", "moe"]),
        ("mtp_layers_block_type", ["full_attention", "moe"]),
    ],
)
def test_legacy_mtp_spellings(key, value):
    changes = {"mtp": REMOVE, "compute_mtp": True}
    changes["llm_config__mtp_hybrid_override_pattern"] = REMOVE
    changes[f"llm_config__{key}"] = value
    assert mtp_of(**changes) == (1, False, "*E", "compute_mtp")
    # One block is served at any depth.
    assert make(**changes).require_repeated_mtp()


def test_no_draft_head():
    config = make(mtp__enabled=False)
    assert config.mtp_config is None
    assert config.text_config.num_nextn_predict_layers == 0
    with pytest.raises(ValueError, match="`mtp`"):
        config.require_repeated_mtp()


@pytest.mark.parametrize(
    "changes, key",
    [
        (
            {
                "mtp__use_repeated_layer": False,
                "llm_config__num_nextn_predict_layers": 3,
            },
            "mtp.use_repeated_layer",
        ),
        (
            {
                "mtp": REMOVE,
                "compute_mtp": True,
                "llm_config__num_nextn_predict_layers": 3,
            },
            "llm_config.num_nextn_predict_layers",
        ),
    ],
    ids=["explicit", "legacy"],
)
def test_distinct_draft_blocks_serve_but_do_not_draft(changes, key):
    config = make(**changes)
    assert config.mtp_config.num_nextn_predict_layers == 3
    assert config.text_config.num_nextn_predict_layers == 3
    with pytest.raises(ValueError, match=re.escape(f"`{key}`")):
        config.require_repeated_mtp()


# --------------------------------------------------------------------- errors

# (dotted key, wrong value); the message holds the key in full, and the value.
WRONG_TYPES = [
    ("perception", []),
    ("perception.preprocessor", "log-mel"),
    ("perception.preprocessor.sample_rate", "16000"),
    ("perception.preprocessor.features", True),
    ("perception.preprocessor.features", 40.0),
    ("perception.preprocessor.window_stride", "0.01"),
    ("pe_encoder_config", ["asr"]),
    ("pe_encoder_config.asr_encoder_cfg", [1]),
    ("pe_encoder_config.asr_encoder_cfg.d_model", "24"),
    ("pe_encoder_config.asr_encoder_cfg.n_layers", True),
    ("pe_encoder_config.asr_encoder_cfg.qk_norm", 1),
    ("pe_encoder_config.asr_encoder_cfg.ff_expansion", [4]),
    ("pe_encoder_config.asr_encoder_cfg._target_", 1),
    ("pe_encoder_config.diarization_model_cfg", 3),
    ("pe_encoder_config.diarization_model_cfg.encoder", 3),
    (MODULES, []),
    (f"{MODULES}.num_spks", "4"),
    ("pe_encoder_config.diar_fifo_len", 5.5),
    ("pe_encoder_config.online_inference_length", {}),
    ("pe_encoder_config.speaker_activity_threshold", "0.5"),
    ("llm_config", "nemotron_h"),
    ("llm_config.vocab_size", "64"),
    ("llm_config.hidden_size", 48.0),
    ("llm_config.num_attention_heads", True),
    ("llm_config.use_conv_bias", 1),
    ("llm_config.layer_norm_epsilon", "1e-5"),
    ("llm_config.hybrid_override_pattern", 4),
    ("llm_config.num_hidden_layers", "4"),
    ("mtp", True),
    ("mtp", [3]),
    ("mtp.enabled", "true"),
    ("mtp.num_nextn_predict_layers", "3"),
    ("mtp.num_nextn_predict_layers", True),
    ("mtp.use_repeated_layer", 1),
    ("mtp.hybrid_override_pattern", 2),
    ("compute_mtp", "yes"),
    ("prompt_format", 1),
    ("pretrained_llm", {}),
    ("architectures", "NeMoSpeechLMForConditionalGeneration"),
    ("eos_token_id", "2"),
    ("pad_token_id", [0]),
    ("quantization_config", "fp8"),
    ("ctc_timestamp_decoder_config", []),
    ("ctc_timestamps", True),
    ("ctc_timestamps.enabled", "no"),
]
WRONG_VALUES = [
    ("audio_locator_tag", "<audio>"),
    ("dtype", "int8"),
    ("audio_token_id", 63),
    ("audio_token_id", 74),
    ("speaker_encoder", {"target": "x"}),
    ("perception.output_dim", 47),
    ("perception.modality_adapter.d_model", 25),
    ("perception.preprocessor.sample_rate", 0),
    ("perception.preprocessor.features", -1),
    ("perception.preprocessor.n_fft", 128),
    ("perception.preprocessor.window_size", 0.0),
    ("perception.preprocessor.window_stride", -0.01),
    ("perception.preprocessor.window_stride", float("inf")),
    ("perception.preprocessor.n_window_stride", 7),
    ("perception.preprocessor.window", "hamming"),
    ("perception.preprocessor.log", False),
    ("perception.preprocessor.normalize", "all_features"),
    ("perception.preprocessor.frame_splicing", 2),
    ("perception.preprocessor.mag_power", 1.0),
    ("perception.preprocessor.highfreq", 3000),
    ("perception.preprocessor.log_zero_guard_type", "clamp"),
    ("perception.preprocessor.log_zero_guard_value", 0),
    ("pe_encoder_config.target", "nemo.ConformerEncoder"),
    ("pe_encoder_config.asr_normalize_type", "NA"),
    ("pe_encoder_config.asr_normalize_type", None),
    ("pe_encoder_config.diar_normalize_type", "per_feature"),
    ("pe_encoder_config.speaker_feature_mode", "continuous"),
    ("pe_encoder_config.speaker_feature_config_version", 2),
    ("pe_encoder_config.speaker_activity_threshold", None),
    ("pe_encoder_config.speaker_activity_threshold", 1.5),
    ("pe_encoder_config.spk_kernel_scale", 0.5),
    ("pe_encoder_config.spk_kernel_calibrate", True),
    ("pe_encoder_config.online_inference_length", 0),
    ("pe_encoder_config.chunk_left_context", -1),
    ("pe_encoder_config.chunk_right_context", 20),
    ("pe_encoder_config.diar_fifo_len", -1),
    ("pe_encoder_config.diar_spkcache_len", 11),
    ("pe_encoder_config.diar_spkcache_update_period", 0),
    ("pe_encoder_config.asr_encoder_cfg._target_", "nemo.ConformerEncoder"),
    ("pe_encoder_config.asr_encoder_cfg.feat_in", 80),
    ("pe_encoder_config.asr_encoder_cfg.d_model", 25),
    ("pe_encoder_config.asr_encoder_cfg.n_heads", 5),
    ("pe_encoder_config.asr_encoder_cfg.n_heads", 8),
    ("pe_encoder_config.asr_encoder_cfg.n_layers", 0),
    ("pe_encoder_config.asr_encoder_cfg.ff_expansion", 0.0),
    ("pe_encoder_config.asr_encoder_cfg.rotary_fraction", 1.5),
    ("pe_encoder_config.asr_encoder_cfg.rotary_fraction", 0.25),
    ("pe_encoder_config.asr_encoder_cfg.rotary_fraction", 0.0),
    ("pe_encoder_config.asr_encoder_cfg.rope_base", float("nan")),
    ("pe_encoder_config.asr_encoder_cfg.self_attention_model", "rel_pos"),
    ("pe_encoder_config.asr_encoder_cfg.subsampling", "dw_striding"),
    ("pe_encoder_config.asr_encoder_cfg.attn_mode", "causal"),
    ("pe_encoder_config.asr_encoder_cfg.qkv_bias", True),
    ("pe_encoder_config.asr_encoder_cfg.pre_block_norm", False),
    ("pe_encoder_config.diarization_model_cfg.high_resolution", False),
    ("pe_encoder_config.diarization_model_cfg.encoder.feat_in", 80),
    ("pe_encoder_config.diarization_model_cfg.encoder.n_heads", 3),
    ("pe_encoder_config.diarization_model_cfg.encoder.subsampling_factor", 8),
    (
        f"{MODULES}.subsampling_factor",
        8,
    ),
    (f"{MODULES}.fc_d_model", 512),
    (f"{MODULES}.num_spks", 0),
    (f"{MODULES}.spkcache_sil_frames_per_spk", 4),
    (f"{MODULES}.pred_score_threshold", 0.0),
    (f"{MODULES}.use_learnable_sil_emb", False),
    ("llm_config.model_type", "llama"),
    ("llm_config.vocab_size", 0),
    ("llm_config.hidden_size", -48),
    ("llm_config.num_key_value_heads", 3),
    ("llm_config.mamba_num_heads", 3),
    ("llm_config.n_groups", 3),
    ("llm_config.num_experts_per_tok", 5),
    ("llm_config.n_group", 3),
    ("llm_config.topk_group", 2),
    ("llm_config.tie_word_embeddings", True),
    ("llm_config.attention_bias", True),
    ("llm_config.hybrid_override_pattern", "MX*E"),
    ("llm_config.hybrid_override_pattern", ""),
    ("llm_config.layers_block_type", ["mamba", "dense"]),
    ("llm_config.layers_block_type", []),
    ("llm_config.num_hidden_layers", 5),
    ("llm_config.mlp_hidden_act", 3),
    ("llm_config.time_step_limit", "none"),
    ("mtp.num_nextn_predict_layers", 0),
    ("mtp.hybrid_override_pattern", "*M"),
    ("mtp.hybrid_override_pattern", "*-"),
    ("mtp.hybrid_override_pattern", ["attention", "mlp"]),
    ("mtp.hybrid_override_pattern", ""),
    ("llm_config.mtp_hybrid_override_pattern", "ME"),
    ("llm_config.num_nextn_predict_layers", -1),
]


@pytest.mark.parametrize("key, value", WRONG_TYPES)
def test_wrong_type_names_the_key(key, value):
    with pytest.raises(TypeError) as error:
        make(**at(key, value))
    assert f"`{key}`" in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("key, value", WRONG_VALUES)
def test_wrong_value_names_the_key(key, value):
    with pytest.raises(ValueError) as error:
        make(**at(key, value))
    message = str(error.value)
    parent, _, leaf = key.rpartition(".")
    # A field that transformers checks is named under the block's name.
    by_block = f"`{parent}`" in message and f"'{leaf}'" in message
    assert f"`{key}`" in message or by_block
    if isinstance(value, (int, float, str)) and value != "":
        assert str(value) in message


@pytest.mark.parametrize(
    "changes, keys",
    [
        (
            {"llm_config__layers_block_type": ["mamba", "moe"]},
            ("llm_config.hybrid_override_pattern", "llm_config.layers_block_type"),
        ),
        (
            {"llm_config__norm_eps": 1e-3},
            ("llm_config.layer_norm_epsilon", "llm_config.norm_eps"),
        ),
        (
            {"llm_config__mamba_n_groups": 4},
            ("llm_config.n_groups", "llm_config.mamba_n_groups"),
        ),
        ({"torch_dtype": "float32"}, ("dtype", "torch_dtype")),
        (
            {
                "perception__preprocessor__window_size": 0.02,
                "perception__preprocessor__n_window_size": 161,
            },
            (
                "perception.preprocessor.window_size",
                "perception.preprocessor.n_window_size",
            ),
        ),
        (
            {"mtp__hybrid_override_pattern": "*EE"},
            ("mtp.hybrid_override_pattern", "llm_config.mtp_hybrid_override_pattern"),
        ),
        (
            {"llm_config__num_nextn_predict_layers": 2},
            ("mtp.use_repeated_layer", "llm_config.num_nextn_predict_layers"),
        ),
        (
            {"mtp__use_repeated_layer": False},
            ("mtp.num_nextn_predict_layers", "llm_config.num_nextn_predict_layers"),
        ),
        (
            {"llm_config__mtp_layers_block_type": ["moe", "attention"]},
            (
                "llm_config.mtp_hybrid_override_pattern",
                "llm_config.mtp_layers_block_type",
            ),
        ),
        (
            {
                "mtp": REMOVE,
                "compute_mtp": True,
                "llm_config__num_nextn_predict_layers": 0,
            },
            ("compute_mtp", "llm_config.num_nextn_predict_layers"),
        ),
        (
            {
                "mtp": REMOVE,
                "compute_mtp": True,
                "llm_config__mtp_hybrid_override_pattern": REMOVE,
            },
            (
                "compute_mtp",
                "llm_config.mtp_hybrid_override_pattern",
                "llm_config.mtp_layers_block_type",
            ),
        ),
        (
            {"pe_encoder_config__diar_spkcache_len": 11},
            (
                "pe_encoder_config.diar_spkcache_len",
                f"{MODULES}.num_spks",
            ),
        ),
    ],
)
def test_contradictions_name_both_keys(changes, keys):
    with pytest.raises(ValueError) as error:
        make(**changes)
    for key in keys:
        assert f"`{key}`" in str(error.value)


def test_huge_wrong_values_are_shortened():
    with pytest.raises(TypeError) as error:
        make(perception=list(range(10_000)))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "key",
    [
        "perception",
        "pe_encoder_config",
        "llm_config",
        "mtp",
        "compute_mtp",
        "audio_config",
        "ctc_config",
    ],
)
def test_source_blocks_cannot_be_set_later(key):
    """An override that nothing would read must not pass in silence."""
    with pytest.raises(ValueError, match=f"`{key}`"):
        make().update({key: {}})


# ---------------------------------------------------------------- round trips

CONFIGS = {
    "release": {},
    "small": SMALL,
    "no draft head": small(mtp=REMOVE),
    "legacy draft head": small(mtp=REMOVE, compute_mtp=True),
    "distinct draft blocks": small(
        mtp__use_repeated_layer=False, llm_config__num_nextn_predict_layers=3
    ),
    "quantised": small(quantization_config={"quant_method": "modelopt"}),
    "float32": small(dtype="float32"),
    "own word timing head": small(
        ctc_timestamp_decoder_config={"feat_in": 24, "n_heads": 2, "num_classes": 30}
    ),
}


@pytest.fixture(params=CONFIGS, ids=[name.replace(" ", "-") for name in CONFIGS])
def config(request) -> Nemotron3_5TranscribeConfig:
    return Nemotron3_5TranscribeConfig(**copy.deepcopy(CONFIGS[request.param]))


def assert_same(
    copied: Nemotron3_5TranscribeConfig, config: Nemotron3_5TranscribeConfig
) -> None:
    assert type(copied) is type(config)
    assert copied == config
    for name in ("audio_config", "ctc_config", "mtp_config", "output_vocab_size"):
        assert getattr(copied, name) == getattr(config, name)
    assert copied.text_config.to_dict() == config.text_config.to_dict()
    assert copied.audio_token_id == config.audio_token_id
    assert copied.dtype == config.dtype


def test_dict_round_trip(config):
    values = config.to_dict()
    assert not {"text_config", "audio_config", "mtp_config"} & set(values)
    assert_same(Nemotron3_5TranscribeConfig(**values), config)
    assert_same(Nemotron3_5TranscribeConfig.from_dict(config.to_dict()), config)
    assert config.to_dict() == values


@pytest.mark.parametrize("use_diff", [True, False])
def test_json_round_trip(config, use_diff):
    text = config.to_json_string(use_diff=use_diff)
    # Strict JSON: no Infinity.
    values = json.loads(text, parse_constant=pytest.fail)
    assert values["model_type"] == "nemo_speechlm"
    assert_same(Nemotron3_5TranscribeConfig(**values), config)


def test_save_round_trip(config, tmp_path):
    config.save_pretrained(tmp_path)
    loaded = Nemotron3_5TranscribeConfig.from_pretrained(tmp_path)
    assert loaded.name_or_path == str(tmp_path)
    loaded.name_or_path = ""
    assert_same(loaded, config)


def test_pickle_round_trip(config):
    assert_same(pickle.loads(pickle.dumps(config)), config)


def test_deepcopy(config):
    copied = copy.deepcopy(config)
    assert_same(copied, config)
    copied.text_config.hidden_size = 1
    copied.audio_config.asr_encoder.hidden_size = 2
    assert config.text_config.hidden_size != 1
    assert config.audio_config.asr_encoder.hidden_size != 2
    assert copied != config


def test_later_changes_are_saved():
    config = make()
    config.text_config.max_position_embeddings = 77
    config.audio_config.chunk_length = 30
    copied = Nemotron3_5TranscribeConfig(**config.to_dict())
    assert copied.text_config.max_position_embeddings == 77
    assert copied.audio_config.chunk_length == 30


def test_configs_do_not_share_parts():
    first, second = Nemotron3_5TranscribeConfig(), Nemotron3_5TranscribeConfig()
    first.audio_config.asr_encoder.hidden_size = 2
    first.audio_config.diarizer_encoder.hidden_size = 2
    assert second.audio_config.asr_encoder.hidden_size == 1280
    assert second.audio_config.diarizer_encoder.hidden_size == 512


def _describe(config: Nemotron3_5TranscribeConfig, queue: Any) -> None:
    heavy = {"vllm_nemotron3_5_transcribe", "vllm.model_executor.models"}
    queue.put((config, sorted(heavy & set(sys.modules))))


def test_spawned_process_gets_the_config():
    """A worker that has loaded no plugin yet can read the config."""
    config = make()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_describe, args=(config, queue))
    process.start()
    copied, heavy = queue.get(timeout=600)
    process.join(timeout=60)
    assert process.exitcode == 0
    assert_same(copied, config)
    assert not heavy


# --------------------------------------------------------- word timing's sizes


@pytest.mark.parametrize(
    ("values", "wanted"),
    [({}, True), ({"adapter_path": "x"}, True), ({"enabled": False}, False)],
)
def test_word_timing_head_is_wanted_unless_told_otherwise(values, wanted):
    assert Nemotron3_5TranscribeConfig(ctc_timestamps=values).wants_ctc_head == wanted
    config = Nemotron3_5TranscribeConfig()
    # As `--hf-overrides` does.
    config.update({"ctc_timestamps": values})
    assert config.wants_ctc_head == wanted
    config.update({"ctc_timestamps": {"enabled": 1}})
    with pytest.raises(TypeError, match="`ctc_timestamps.enabled`"):
        _ = config.wants_ctc_head


def test_ctc_sizes_from_metadata():
    pieces = [f"▁{i}" for i in range(29)]
    metadata = {
        "feat_in": 24,
        "num_classes": 29,
        "vocabulary": pieces,
        "use_transformer": True,
        "n_layers": 1,
        "n_heads": 3,
        "ff_expansion": 1.5,
        "rotary_fraction": 0.25,
        "rope_base": 3000.0,
        "upsample_factor": 3,
        "residual": True,
        "residual_scale": 0.3,
        "qk_norm": True,
        "dropout": 0.1,
    }
    ctc = Nemotron3_5TranscribeCTCConfig.from_decoder_config(json.dumps(metadata))
    assert ctc == Nemotron3_5TranscribeCTCConfig.from_decoder_config(metadata)
    assert (ctc.hidden_size, ctc.intermediate_size) == (24, 36)
    assert (ctc.num_hidden_layers, ctc.num_attention_heads) == (1, 3)
    assert (ctc.num_classes, ctc.blank_token_id) == (30, 29)
    assert (ctc.upsampling_factor, ctc.residual_scale) == (3, 0.3)
    assert (ctc.partial_rotary_factor, ctc.rope_theta) == (0.25, 3000.0)
    again = Nemotron3_5TranscribeCTCConfig.from_decoder_config(ctc.to_decoder_config())
    assert again == ctc


@pytest.mark.parametrize(
    "metadata, classes",
    [
        ({}, 23863),
        ({"num_classes": 23862}, 23863),
        ({"num_classes": 3, "vocabulary": ["a", "b", "c"]}, 4),
        ({"num_classes": 4, "vocabulary": ["a", "b", "c"]}, 4),
        ({"num_classes": -1, "vocabulary": ["a", "b", "c"]}, 4),
        ({"vocabulary": ["a", "b", "c"]}, 4),
    ],
)
def test_ctc_classes(metadata, classes):
    ctc = Nemotron3_5TranscribeCTCConfig.from_decoder_config(metadata)
    assert ctc.num_classes == classes


@pytest.mark.parametrize(
    "metadata, key",
    [
        ({"num_classes": 9, "vocabulary": ["a"]}, "num_classes"),
        ({"num_classes": "9"}, "num_classes"),
        ({"vocabulary": "abc"}, "vocabulary"),
        ({"vocabulary": [1]}, "vocabulary"),
        ({"use_transformer": False}, "use_transformer"),
        ({"residual": False}, "residual"),
        ({"n_heads": 7}, "n_heads"),
        ({"upsample_factor": 0}, "upsample_factor"),
        ({"residual_scale": -1}, "residual_scale"),
    ],
)
def test_ctc_errors_name_the_key(metadata, key):
    name = re.escape(f"`ctc_timestamp_decoder_config.{key}`")
    with pytest.raises((TypeError, ValueError), match=name):
        Nemotron3_5TranscribeCTCConfig.from_decoder_config(metadata)


def test_ctc_metadata_that_is_not_json():
    with pytest.raises(ValueError, match="`ctc_timestamp_decoder_config`"):
        Nemotron3_5TranscribeCTCConfig.from_decoder_config("{")


# ------------------------------------------------------ transformers' spelling

# What transformers 5.24 writes for `SMALL`.
TRANSFORMERS: dict[str, Any] = {
    "audio_config": {
        "model_type": "nemotron3_5_transcribe_audio",
        "speaker_activity_threshold": 0.4,
        "asr_config": {
            "hidden_size": 24,
            "intermediate_size": 60,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_mel_bins": 40,
            "subsampling_factor": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "diarization_config": {
            "chunk_length": 20,
            "chunk_left_context": 4,
            "chunk_right_context": 3,
            "fifo_length": 5,
            "speaker_cache_update_period": 9,
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_mel_bins": 40,
                "subsampling_factor": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "head_config": {"hidden_size": 12, "num_speakers": 4},
            "streaming_config": {
                "fifo_length": 264,
                "speaker_cache_length": 17,
                "speaker_cache_silence_frames_per_speaker": 2,
                "prediction_score_threshold": 0.3,
            },
        },
    },
    "word_timestamp_config": {
        "hidden_size": 24,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 31,
        "blank_token_id": 30,
        "residual_scale": 0.2,
        "upsampling_factor": 3,
    },
    "audio_token_id": 64,
}


def transformers_only() -> dict[str, Any]:
    values = copy.deepcopy(TRANSFORMERS)
    values["text_config"] = copy.deepcopy(SMALL["llm_config"])
    del values["text_config"]["hybrid_override_pattern"]
    values["text_config"]["layers_block_type"] = [
        *("linear_attention", "moe", "full_attention", "moe")
    ]
    values["model_type"] = "nemo_speechlm"
    return values


def test_transformers_sub_configs_alone():
    config = Nemotron3_5TranscribeConfig(**transformers_only())
    expected = make().audio_config
    # The front end is not in transformers' config.
    expected.preprocessor = config.audio_config.preprocessor
    assert config.audio_config.preprocessor.num_mel_bins == 40
    assert config.audio_config == expected
    assert config.text_config.hybrid_override_pattern == "ME*E"
    assert (config.output_vocab_size, config.audio_token_id) == (64, 64)
    ctc = config.ctc_config
    assert (ctc.hidden_size, ctc.intermediate_size, ctc.num_classes) == (24, 12, 31)
    assert (ctc.upsampling_factor, ctc.residual_scale) == (3, 0.2)
    assert_same(Nemotron3_5TranscribeConfig(**config.to_dict()), config)


def test_nemo_keys_win_over_transformers():
    values = transformers_only() | small()
    values["text_config"]["hidden_size"] = 96
    values["audio_config"]["diarization_config"]["chunk_length"] = 99
    values["audio_config"]["asr_config"]["num_hidden_layers"] = 7
    config = Nemotron3_5TranscribeConfig(**values)
    assert config.audio_config == make().audio_config
    assert config.text_config.to_dict() == make().text_config.to_dict()


@pytest.mark.parametrize(
    "key, value",
    [
        ("audio_config", [1]),
        ("audio_config.asr_config", 3),
        ("audio_config.asr_config.hidden_size", "24"),
        ("audio_config.asr_config.num_key_value_heads", 1),
        ("audio_config.diarization_config.head_config", 3),
        ("word_timestamp_config.blank_token_id", 0),
        ("text_config.hidden_size", "48"),
    ],
)
def test_transformers_errors_name_the_key(key, value):
    values = transformers_only()
    *parents, leaf = key.split(".")
    block = values
    for name in parents:
        block = block[name]
    block[leaf] = value
    with pytest.raises((TypeError, ValueError), match=re.escape(f"`{key}`")):
        Nemotron3_5TranscribeConfig(**values)


# ------------------------------------------------------------ other checkpoints


@pytest.fixture(scope="module")
def vllm_config_module():
    """vLLM's config loading, knowing our class."""
    import vllm.transformers_utils.config as module

    missing = object()
    before = dict.get(module._CONFIG_REGISTRY, "nemo_speechlm", missing)
    module._CONFIG_REGISTRY["nemo_speechlm"] = Nemotron3_5TranscribeConfig
    yield module
    if before is missing:
        del module._CONFIG_REGISTRY["nemo_speechlm"]
    else:
        module._CONFIG_REGISTRY["nemo_speechlm"] = before


def test_odd_checkpoint(vllm_config_module):
    config = vllm_config_module.get_config(str(ODD_CHECKPOINT), trust_remote_code=False)
    assert isinstance(config, Nemotron3_5TranscribeConfig)
    values = json.loads((ODD_CHECKPOINT / "config.json").read_text())
    bundle, llm = values["pe_encoder_config"], values["llm_config"]
    for encoder, keys in (
        (config.audio_config.asr_encoder, bundle["asr_encoder_cfg"]),
        (
            config.audio_config.diarizer_encoder,
            bundle["diarization_model_cfg"]["encoder"],
        ),
    ):
        assert encoder.hidden_size == keys["d_model"]
        assert encoder.num_hidden_layers == keys["n_layers"]
        assert encoder.num_attention_heads == keys["n_heads"]
        assert encoder.num_mel_bins == keys["feat_in"]
        assert encoder.intermediate_size == keys["ff_expansion"] * keys["d_model"]
        assert encoder.rope_theta == keys["rope_base"]
        assert encoder.partial_rotary_factor == keys["rotary_fraction"]
        assert encoder.qk_norm == keys["qk_norm"]
        assert encoder.subsampling_factor == keys["subsampling_factor"]
    head = config.audio_config.diarizer
    modules = bundle["diarization_model_cfg"]["sortformer_modules"]
    assert head.num_speakers == modules["num_spks"]
    assert head.head_hidden_size == modules["tf_d_model"]
    assert head.speaker_cache_length == bundle["diar_spkcache_len"]
    assert head.fifo_length == bundle["diar_fifo_len"]
    assert head.strong_boost_rate == modules["strong_boost_rate"]
    assert config.output_vocab_size == llm["vocab_size"]
    assert config.text_config.hybrid_override_pattern == llm["hybrid_override_pattern"]
    assert (
        config.mtp_config.num_nextn_predict_layers
        == (values["mtp"]["num_nextn_predict_layers"])
    )


def test_odd_checkpoint_without_the_embedded_backbone(vllm_config_module, tmp_path):
    values = json.loads((ODD_CHECKPOINT / "config.json").read_text())
    embedded = vllm_config_module.get_config(
        str(ODD_CHECKPOINT), trust_remote_code=False
    )
    del values["llm_config"]
    folder = write_checkpoint(tmp_path, values)
    backbone = json.loads((ODD_CHECKPOINT / "llm_backbone/config.json").read_text())
    write_checkpoint(folder / "llm_backbone", backbone)
    config = vllm_config_module.get_config(str(folder), trust_remote_code=False)
    assert config.text_config.to_dict() == embedded.text_config.to_dict()


def test_odd_checkpoint_matches_its_tensors():
    from safetensors import safe_open

    config = Nemotron3_5TranscribeConfig.from_pretrained(ODD_CHECKPOINT)
    audio, text = config.audio_config, config.text_config
    with safe_open(ODD_CHECKPOINT / "model.safetensors", "pt") as file:
        names = set(file.keys())
        metadata = file.metadata()

        def shape(name: str) -> list[int]:
            return file.get_slice(name).get_shape()

        asr, encoder = audio.asr_encoder, audio.diarizer_encoder
        root = "perception.encoder."
        assert shape(f"{root}asr_encoder.pre_encode.proj.weight") == [
            asr.hidden_size,
            asr.subsampling_factor * asr.num_mel_bins,
        ]
        assert shape(f"{root}asr_encoder.layers.0.ffn.net.0.weight") == [
            asr.intermediate_size,
            asr.hidden_size,
        ]
        assert shape(f"{root}asr_encoder.layers.0.attn.q_norm.weight") == [
            asr.hidden_size // asr.num_attention_heads
        ]
        last = asr.num_hidden_layers - 1
        assert f"{root}asr_encoder.layers.{last}.norm1.weight" in names
        assert f"{root}asr_encoder.layers.{last + 1}.norm1.weight" not in names
        diarizer = f"{root}diarization_model."
        assert shape(f"{diarizer}encoder.layers.0.ffn.net.0.weight") == [
            encoder.intermediate_size,
            encoder.hidden_size,
        ]
        assert shape(f"{diarizer}sortformer_modules.encoder_proj.weight") == [
            audio.diarizer.head_hidden_size,
            encoder.hidden_size,
        ]
        assert shape(f"{root}diar_norm.weight") == [audio.num_speakers]
        assert shape("perception.proj.weight") == [audio.output_size, audio.hidden_size]
        assert shape("llm.model.embed_tokens.weight") == [
            config.output_vocab_size,
            text.hidden_size,
        ]
        for index, symbol in enumerate(text.hybrid_override_pattern):
            layer = f"llm.model.layers.{index}.mixer."
            leaf = {"M": "conv1d.weight", "E": "gate.weight", "*": "q_proj.weight"}
            assert layer + leaf[symbol] in names
        ctc = config.ctc_config.from_decoder_config(
            metadata["ctc_timestamp_decoder_config"]
        )
        assert shape("ctc_timestamp.decoder.decoder_layers.0.weight") == [
            ctc.num_classes,
            ctc.hidden_size,
            1,
        ]
        assert shape("ctc_timestamp.decoder.upsample.weight") == [
            ctc.hidden_size,
            ctc.hidden_size,
            ctc.upsampling_factor,
        ]
        assert shape("ctc_timestamp.decoder.transformer.layers.0.ffn.net.0.weight") == [
            ctc.intermediate_size,
            ctc.hidden_size,
        ]


def test_vllm_reads_the_decoder(vllm_config_module, tmp_path):
    from vllm.transformers_utils.model_arch_config_convertor import (
        ModelArchConfigConvertorBase,
    )

    folder = write_checkpoint(tmp_path, SMALL)
    config = vllm_config_module.get_config(str(folder), trust_remote_code=False)
    text = vllm_config_module.get_hf_text_config(config)
    assert text is config.text_config
    arch = ModelArchConfigConvertorBase(config, text).convert()
    assert arch.architectures == ["NeMoSpeechLMForConditionalGeneration"]
    assert arch.total_num_hidden_layers == 4
    assert (arch.total_num_attention_heads, arch.total_num_kv_heads) == (4, 2)
    assert (arch.head_size, arch.hidden_size) == (8, 48)
    assert (arch.vocab_size, arch.num_experts) == (74, 4)
    assert arch.derived_max_model_len_and_key[0] == 2048


def test_vllm_finds_the_end_of_a_turn(tmp_path):
    """Without generation_config.json vLLM takes the stop tokens from the config."""
    from transformers import GenerationConfig

    generation = GenerationConfig.from_model_config(make())
    assert generation.eos_token_id == [7, 2]
    assert generation.pad_token_id == 3


def test_vllm_overrides(vllm_config_module, tmp_path):
    folder = write_checkpoint(tmp_path, SMALL)

    def load(**overrides: Any) -> Nemotron3_5TranscribeConfig:
        return vllm_config_module.get_config(
            str(folder), trust_remote_code=False, hf_overrides_kw=overrides
        )

    assert load(architectures=["Other"]).architectures == ["Other"]
    with pytest.raises(ValueError, match="`compute_mtp`"):
        load(compute_mtp=True)
