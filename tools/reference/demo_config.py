# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sizes of the demo checkpoint, as the reference's configuration."""

from transformers import Nemotron3_5TranscribeConfig

PATTERN = "M*EM*EM*EM*E"
HIDDEN = 192
ASR_HIDDEN = 192
DIARIZER_HIDDEN = 96
MTP_DEPTHS = 3


def _rope(fraction: float) -> dict:
    return {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": fraction,
    }


def demo_config(
    vocab_size: int,
    pieces: int,
    eos_token_id: int,
    pad_token_id: int,
    layers: int = len(PATTERN),
) -> Nemotron3_5TranscribeConfig:
    """Returns the demo model's configuration.

    Chunks, caches and speakers are the release's; widths and depths are small.

    Args:
        vocab_size: Rows of the embedding; ``<|audio|>`` is the id after the last.
        pieces: Size of the alignment tokenizer; the blank is the id after the last.
        eos_token_id: Id of ``<|im_end|>``.
        pad_token_id: Id of the padding token.
        layers: How many of the decoder's layers there are, from the first one.
    """
    return Nemotron3_5TranscribeConfig(
        audio_config={
            "asr_config": {
                "hidden_size": ASR_HIDDEN,
                "intermediate_size": 4 * ASR_HIDDEN,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "rope_parameters": _rope(0.5),
            },
            "diarization_config": {
                "model_type": "nemotron3_diarization",
                "audio_config": {
                    "hidden_size": DIARIZER_HIDDEN,
                    "intermediate_size": 4 * DIARIZER_HIDDEN,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 4,
                    "rope_parameters": _rope(1.0),
                },
                "head_config": {
                    "hidden_size": 48,
                    "audio_hidden_size": DIARIZER_HIDDEN,
                },
                "streaming_config": {"speaker_cache_length": 188},
                "chunk_length": 500,
                "chunk_left_context": 50,
                "chunk_right_context": 50,
                "fifo_length": 40,
                "speaker_cache_update_period": 300,
            },
        },
        text_config={
            "model_type": "nemotron_h",
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN,
            "hybrid_override_pattern": PATTERN[:layers],
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 192,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 2.5,
            # The reference clamps the time step of every token to this; Mamba-2 only
            # means it for the initialisation, and vLLM clamps at 0.
            "time_step_min": 1e-9,
            "max_position_embeddings": 131072,
            "num_nextn_predict_layers": 1,
            "bos_token_id": 1,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        },
        word_timestamp_config={
            "hidden_size": ASR_HIDDEN,
            "intermediate_size": ASR_HIDDEN // 2,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "vocab_size": pieces + 1,
            "blank_token_id": pieces,
        },
        audio_token_id=vocab_size,
    )
