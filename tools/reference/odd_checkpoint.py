#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make the small untrained checkpoint with odd sizes.

    python tools/reference/odd_checkpoint.py --out tests/data/odd_checkpoint

No size in it equals the release's or the demo's, and few are round, so a number
that is written into the code instead of read from the configuration shows. Short
audio already goes through many chunks and compresses the speaker cache over and
over. The weights are random but scaled so that the states stay well spread, every
speaker comes and goes, and greedy decoding is decided by clear margins.

The script checks itself: the file is loaded back, and the logits of the loaded
model equal those of the model in memory.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import layout
import torch
from demo_tokenizer import (
    AUDIO_TOKEN,
    CHAT_TEMPLATE,
    DEFAULT_PROMPT,
    SPEAKER_PROMPT,
    train_pieces,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Nemotron3_5TranscribeConfig,
    Nemotron3_5TranscribeForConditionalGeneration,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.goldens import synthetic  # noqa: E402

SEED = 20
VOCAB_SIZE = 331
PIECES = 61
MTP_DEPTHS = 2
MELS = 48
FACTOR = 6  # log-mel frames in an encoder frame
IM_END = 11

_SPECIAL = [
    *("<unk>", "<s>", "</s>", "<pad>", "<reserved_4>", "<reserved_5>"),
    *("<reserved_6>", "<reserved_7>", "<think>", "</think>", "<|im_start|>"),
    *("<|im_end|>", "<spk:0>", "<spk:1>", "<spk:2>", "<spk:3>", "<spk:4>"),
]


def odd_config() -> Nemotron3_5TranscribeConfig:
    """Return the odd sizes as the reference's configuration."""
    return Nemotron3_5TranscribeConfig(
        audio_config={
            "asr_config": {
                "hidden_size": 40,
                "intermediate_size": 100,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": MELS,
                "subsampling_factor": FACTOR,
                "max_position_embeddings": 700,
                "rope_parameters": _rope(5000.0, 0.5),
            },
            "diarization_config": {
                "model_type": "nemotron3_diarization",
                "audio_config": {
                    "hidden_size": 24,
                    "intermediate_size": 36,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 3,
                    "num_mel_bins": MELS,
                    "subsampling_factor": FACTOR,
                    "max_position_embeddings": 700,
                    "rope_parameters": _rope(2000.0, 1.0),
                },
                "head_config": {
                    "hidden_size": 20,
                    "num_speakers": 5,
                    "audio_hidden_size": 24,
                    "subsampling_factor": FACTOR,
                },
                # Two uncompressed steps, then a compression about once a chunk.
                "streaming_config": {
                    "fifo_length": 27,
                    "speaker_cache_update_period": 24,
                    "speaker_cache_length": 31,
                    "speaker_cache_silence_frames_per_speaker": 2,
                    "prediction_score_threshold": 0.2,
                    "latest_frames_score_boost": 0.07,
                    "strong_boost_rate": 0.8,
                    "weak_boost_rate": 1.6,
                    "min_positive_scores_rate": 0.6,
                    "num_speakers": 5,
                    "subsampling_factor": FACTOR,
                },
                "chunk_length": 20,
                "chunk_left_context": 5,
                "chunk_right_context": 3,
                "fifo_length": 27,
                "speaker_cache_update_period": 24,
            },
            "speaker_activity_threshold": 0.45,
        },
        text_config={
            "model_type": "nemotron_h",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "hybrid_override_pattern": "EMM*E*ME",
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "chunk_size": 64,
            # The reference clamps a time step at this in prompts but not in steps.
            "time_step_min": 1e-9,
            "intermediate_size": 20,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
            "layer_norm_epsilon": 2e-5,
            "max_position_embeddings": 2048,
            "num_nextn_predict_layers": 1,
            "bos_token_id": 1,
            "eos_token_id": IM_END,
            "pad_token_id": 3,
        },
        word_timestamp_config={
            "hidden_size": 40,
            "intermediate_size": 60,
            "num_hidden_layers": 1,
            "num_attention_heads": 5,
            "rope_parameters": _rope(3000.0, 0.5),
            "vocab_size": PIECES + 1,
            "blank_token_id": PIECES,
            "residual_scale": 0.3,
            "upsampling_factor": 3,
        },
        audio_token_id=VOCAB_SIZE,
    )


def _rope(base: float, fraction: float) -> dict:
    return {
        "rope_type": "default",
        "rope_theta": base,
        "partial_rotary_factor": fraction,
    }


# Standard deviation of a linear's output for inputs of unit variance, by the end of
# the tensor's name; 1 where nothing is said.
_GAINS = {
    "self_attn.q_proj.weight": 1.5,
    "self_attn.k_proj.weight": 1.5,
    "mixer.q_proj.weight": 1.5,
    "mixer.k_proj.weight": 1.5,
    "diarization_model.model.audio_tower.embedder.projection.weight": 0.15,
    "diarization_model.model.upsampler.conv.weight": 1.3,
    "diarization_model.classifier.dense.weight": 1.6,
    "diarization_model.classifier.out_proj.weight": 3.0,
    "diarization_model.silence_embeds": 1.0,
    "gate.weight": 2.0,
    "lm_head.weight": 4.0,
    "word_timestamp_head.weight": 3.0,
}


@torch.no_grad()
def initialise(
    named_tensors: dict[str, torch.Tensor], generator: torch.Generator
) -> None:
    """Fill tensors in place with the scaled random values described above."""
    for name, tensor in named_tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("A_log"):
            tensor.copy_(torch.linspace(0.2, 1.8, len(tensor)) + 0.1 * noise)
        elif name.endswith("dt_bias"):
            tensor.copy_(torch.linspace(-3.0, -0.5, len(tensor)) + 0.1 * noise)
        elif name.endswith((".D", "e_score_correction_bias")):
            tensor.copy_((1.0 if name.endswith(".D") else 0.0) + 0.2 * noise)
        elif "norm" in name.rsplit(".", 2)[-2]:
            offset = 1.0 if name.endswith("weight") else 0.0
            tensor.copy_(offset + 0.15 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.1 * noise)
        elif "embeddings" in name:
            tensor.copy_(noise)
        else:
            gain = next((g for end, g in _GAINS.items() if name.endswith(end)), 1.0)
            fan_in = tensor[0].numel() if tensor.dim() > 1 else 1
            if ".experts." in name:
                fan_in = tensor.shape[-1]
            if name.endswith("embedder.projection.weight"):
                # Log-mels are far from zero: only their shape over a frame group
                # must reach the states, or all frames look alike.
                noise -= noise.mean(1, keepdim=True)
            tensor.copy_(noise * gain / fan_in**0.5)


@torch.no_grad()
def balance_speakers(model: torch.nn.Module, extractor: Callable) -> None:
    """Shift the speakers' logits so that each is active a part of the time.

    Untrained, a speaker is on or off for good, and the speaker cache has no choice
    to make.
    """
    diarizer = model.model.audio_tower.diarization_model
    bias = diarizer.classifier.out_proj.bias
    audio = synthetic(7, 16_000 * 20) / 32768.0
    features, _ = layout.clip_features(extractor, audio, FACTOR)
    # The cache feeds decisions back, so the shifts settle only after some rounds.
    for _ in range(6):
        logits = diarizer(features).logits[0]
        share = torch.linspace(0.75, 0.55, logits.shape[1])
        for speaker, quantile in enumerate(share.tolist()):
            bias[speaker] -= logits[:, speaker].quantile(quantile)
        bias.copy_(bias.to(torch.bfloat16))


def mtp_state(
    config: Nemotron3_5TranscribeConfig, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return a random MTP block, named as `layout.export_checkpoint` takes it."""
    text = config.text_config
    hidden, experts = text.hidden_size, text.n_routed_experts
    query = text.num_attention_heads * text.head_dim
    key = text.num_key_value_heads * text.head_dim
    width, shared = text.moe_intermediate_size, text.moe_shared_expert_intermediate_size
    shapes = {
        "0.enorm.weight": (hidden,),
        "0.hnorm.weight": (hidden,),
        "0.eh_proj.weight": (hidden, 2 * hidden),
        "0.norm.weight": (hidden,),
        "0.mixer.q_proj.weight": (query, hidden),
        "0.mixer.k_proj.weight": (key, hidden),
        "0.mixer.v_proj.weight": (key, hidden),
        "0.mixer.o_proj.weight": (hidden, query),
        "1.norm.weight": (hidden,),
        "1.mixer.gate.weight": (experts, hidden),
        "1.mixer.gate.e_score_correction_bias": (experts,),
        "1.mixer.experts.up_proj": (experts, width, hidden),
        "1.mixer.experts.down_proj": (experts, hidden, width),
        "1.mixer.shared_experts.up_proj.weight": (shared, hidden),
        "1.mixer.shared_experts.down_proj.weight": (hidden, shared),
        "1.final_layernorm.weight": (hidden,),
    }
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    initialise(state, generator)
    return state


def build_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer that fills the odd vocabulary exactly.

    ``<|audio|>`` comes one past the last embedding row.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([DEFAULT_PROMPT, SPEAKER_PROMPT], trainer)
    tokenizer.add_special_tokens([AddedToken(AUDIO_TOKEN, special=True)])
    if tokenizer.token_to_id(AUDIO_TOKEN) != VOCAB_SIZE:
        raise ValueError("the tokenizer does not fill the vocabulary")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "extra_special_tokens": {"audio_token": AUDIO_TOKEN},
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8"
    )


def build_pieces() -> tuple[bytes, list[str]]:
    """Train the alignment SentencePiece model; return its bytes and its pieces."""
    import sentencepiece

    words = (DEFAULT_PROMPT + " " + SPEAKER_PROMPT).lower().split()
    proto = train_pieces(words * 20, PIECES)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=proto)
    return proto, [pieces.id_to_piece(i) for i in range(len(pieces))]


def build(out_dir: Path) -> None:
    """Write the checkpoint and check that it loads back to the same model.

    Raises:
        ValueError: The loaded model is not the written one.
    """
    config = odd_config()
    generator = torch.Generator().manual_seed(SEED)
    model = Nemotron3_5TranscribeForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    state = model.state_dict()
    initialise({name: state[name] for name in sorted(state)}, generator)
    # Some answers end: the turn end wins a step now and then.
    state["lm_head.weight"][IM_END] *= 1.55
    _round_like_file(model)
    nemo_config = layout.nemo_config(
        config, mtp_depths=MTP_DEPTHS, n_fft=400, window_size=0.02
    )
    balance_speakers(model, layout.feature_extractor(nemo_config))
    proto, pieces = build_pieces()
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer(Path(folder))
        layout.export_checkpoint(
            model,
            out_dir,
            nemo_config=nemo_config,
            mtp_state=mtp_state(config, generator),
            sentencepiece_proto=proto,
            ctc_decoder_config=layout.ctc_decoder_config(config, pieces),
            tokenizer_dir=folder,
        )
    check_round_trip(model, out_dir)


def _round_like_file(model: torch.nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if not layout.is_float32(name):
            tensor.copy_(tensor.to(torch.bfloat16))


@torch.no_grad()
def check_round_trip(model: torch.nn.Module, checkpoint: Path) -> None:
    """Compare tensors and logits of a model with those of its exported file.

    Raises:
        ValueError: They differ.
    """
    loaded, extractor, tokenizer = layout.load_reference(checkpoint)
    values = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, values[name]):
            raise ValueError(f"{name} changed on the way through the file")
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, 30 * FACTOR, extractor.feature_size, generator=generator)
    ids = torch.randint(20, VOCAB_SIZE, (1, 40), generator=generator)
    ids[0, 5:35] = VOCAB_SIZE
    inputs = {
        "input_ids": ids,
        "input_features": features,
        "input_features_mask": torch.ones(features.shape[:2], dtype=torch.long),
    }
    if not torch.equal(model(**inputs).logits, loaded(**inputs).logits):
        raise ValueError("the loaded model gives other logits")
    if len(tokenizer) != VOCAB_SIZE + 1:
        raise ValueError("the tokenizer does not match the vocabulary")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args().out
    build(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1000:.0f} kB, loads back to the same logits")
