# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Loading checkpoints of every layout, and refusing damaged ones by name."""

import pytest
import torch

from tests.models.multimodal.edited_checkpoints import (
    CHECKPOINT,
    add,
    copy_checkpoint,
    drop,
    read_tensors,
    reshape,
    split_into_shards,
    to_hugging_face_layout,
)
from tests.models.multimodal.loading import loaded_model
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.models.nemotron3_5_transcribe import (
    _DRAFT_MAPPER,
    _TARGET_MAPPER,
    checked_weights,
    decoder_tensor_shapes,
    mtp_tensor_shapes,
)
from vllm.transformers_utils.configs.nemotron3_5_transcribe import (
    Nemotron3_5TranscribeConfig,
)


@pytest.fixture(scope="module")
def state():
    """Parameters as loaded from the checkpoint itself."""
    with loaded_model(CHECKPOINT) as model:
        yield {name: p.detach().clone() for name, p in model.named_parameters()}


def test_every_value_is_where_it_belongs(state):
    """Spot checks against the file: padding, transposes, fusions, float32."""
    tensors, _ = read_tensors()
    embedding = state["language_model.model.embed_tokens.weight"]
    stored = tensors["llm.model.embed_tokens.weight"].float()
    assert torch.equal(embedding[: len(stored)], stored)
    assert not embedding[len(stored) :].any()
    qkv = state["audio_tower.encoder.asr_encoder.layers.0.attn.w_qkv.weight"]
    fused = tensors["perception.encoder.asr_encoder.layers.0.attn.w_qkv.weight"]
    assert torch.equal(qkv, fused.float())
    for name, tensor in tensors.items():
        if "mixer.experts.gate_and_up_projs" in name and ".mtp." not in name:
            layer = name.removeprefix("llm.").split(".mixer")[0]
            loaded = state[
                f"language_model.{layer}.mixer.experts.routed_experts.w13_weight"
            ]
            width = tensor.shape[2]
            assert torch.equal(loaded[:, :width], tensor.float().mT)
        if name.endswith("._fp32_params.A_log") and ".mtp." not in name:
            layer = name.removeprefix("llm.").split(".mixer")[0]
            loaded = state[f"language_model.{layer}.mixer.A"]
            torch.testing.assert_close(loaded, -tensor.exp())


def test_all_layouts_load_the_same_values(state, tmp_path):
    folder = copy_checkpoint(tmp_path / "hf", to_hugging_face_layout)
    with loaded_model(folder) as model:
        for name, param in model.named_parameters():
            assert torch.equal(param, state[name]), name


def test_shards_in_any_order_load_the_same_values(state, tmp_path):
    """Each tensor comes once, decoder and tower mixed, over three files."""
    folder = copy_checkpoint(tmp_path / "sharded")
    split_into_shards(folder)
    with loaded_model(folder) as model:
        for name, param in model.named_parameters():
            assert torch.equal(param, state[name]), name


def test_bfloat16_keeps_the_float32_set():
    with loaded_model(CHECKPOINT, dtype="bfloat16") as model:
        mixers = [m for m in model.modules() if isinstance(m, MambaMixer2)]
        assert mixers
        for mixer in mixers:
            for param in (mixer.A, mixer.D, mixer.dt_bias):
                assert param.dtype == torch.float32
        params = dict(model.named_parameters())
        biases = [n for n in params if n.endswith("e_score_correction_bias")]
        assert biases and all(params[n].dtype == torch.float32 for n in biases)
        assert params["audio_tower.proj.weight"].dtype == torch.bfloat16
        diarizer = "audio_tower.encoder.diarization_model."
        assert all(
            p.dtype == torch.float32
            for n, p in params.items()
            if n.startswith(diarizer)
        )


def test_text_only_serving_skips_the_tower():
    with loaded_model(CHECKPOINT, limit_mm_per_prompt={"audio": 0}) as model:
        names = [name for name, _ in model.named_parameters()]
        assert names and not any(name.startswith("audio_tower.") for name in names)


def drop_head(tensors):
    for name in [name for name in tensors if name.startswith("ctc_timestamp.")]:
        del tensors[name]


def test_checkpoint_without_a_word_timing_head_loads(tmp_path):
    with loaded_model(copy_checkpoint(tmp_path / "headless", drop_head)) as model:
        assert model.ctc_timestamp is None


def test_word_timing_head_can_be_left_on_disk():
    overrides = {"ctc_timestamps": {"enabled": False}}
    with loaded_model(CHECKPOINT, hf_overrides=overrides) as model:
        assert model.ctc_timestamp is None
        assert not any("ctc" in name for name, _ in model.named_parameters())


def test_word_timing_head_brings_its_sizes_and_pieces():
    """Its sizes are in the file's metadata, not in config.json."""
    tensors, _ = read_tensors()
    with loaded_model(CHECKPOINT) as model:
        head = model.ctc_timestamp
        assert head.config.upsampling_factor == 3
        assert head.tokenizer_proto == bytes(tensors[PIECES].tolist())
        weight = head.decoder.decoder_layers[0].weight
        assert torch.equal(
            weight, tensors["ctc_timestamp.decoder.decoder_layers.0.weight"].float()
        )


def test_mapping_names_tower_connector_and_decoder():
    with loaded_model(CHECKPOINT) as model:
        mapping = model.get_mm_mapping()
        parts = (*mapping.language_model, *mapping.connector, *mapping.tower_model)
        for name, _ in model.named_parameters():
            assert sum(name.startswith(part) for part in parts) == 1, name


NAMES = sorted(read_tensors()[0])
ATTENTION = next(n for n in NAMES if n.endswith(".mixer.k_proj.weight"))
EXPERT = next(n for n in NAMES if n.endswith("gate_and_up_projs") and "mtp" not in n)
MAMBA = next(n for n in NAMES if n.endswith("_fp32_params.dt_bias"))
HEAD = "ctc_timestamp.decoder.transformer.layers.0.attn.w_qkv.weight"
PIECES = "ctc_timestamp.tokenizer.model_proto"
TOWER = "perception.encoder.diarization_model.sortformer_modules.encoder_proj.weight"


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (drop(ATTENTION), ATTENTION),
        (drop(EXPERT), EXPERT),
        (drop(MAMBA), MAMBA),
        (drop("llm.lm_head.weight"), "llm.lm_head.weight"),
        (drop("llm.model.norm.weight"), "llm.model.norm.weight"),
        (drop(TOWER), TOWER),
        (drop(HEAD), HEAD),
        (drop(PIECES), PIECES),
        (reshape(HEAD), HEAD),
        (add("ctc_timestamp.decoder.surprise"), "ctc_timestamp.decoder.surprise"),
        (reshape(ATTENTION), ATTENTION),
        (reshape(EXPERT), EXPERT),
        (reshape(MAMBA), MAMBA),
        (reshape("llm.model.embed_tokens.weight"), "llm.model.embed_tokens.weight"),
        (reshape(TOWER), TOWER),
        (add("llm.model.layers.0.mixer.surprise"), "llm.model.layers.0.mixer.surprise"),
        (add("llm.model.layers.99.norm.weight"), "llm.model.layers.99.norm.weight"),
        (add("perception.encoder.surprise"), "perception.encoder.surprise"),
        (add("surprise.weight"), "surprise.weight"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, edit, name):
    folder = copy_checkpoint(tmp_path / "wrong", edit)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):  # noqa: SIM117
        with loaded_model(folder):
            pass


def test_missing_shard_is_named(tmp_path):
    folder = copy_checkpoint(tmp_path / "missing")
    split_into_shards(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):  # noqa: SIM117
        with loaded_model(folder):
            pass


def test_truncated_file_is_named(tmp_path):
    folder = copy_checkpoint(tmp_path / "truncated")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="model.safetensors.*truncated"):  # noqa: SIM117
        with loaded_model(folder):
            pass


# --- Pure functions ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        ("llm.model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
        ("backbone.embeddings.weight", "language_model.model.embed_tokens.weight"),
        ("llm.model.norm.weight", "language_model.model.norm_f.weight"),
        ("backbone.norm_f.weight", "language_model.model.norm_f.weight"),
        ("llm.lm_head.weight", "language_model.lm_head.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        (
            "llm.model.layers.3.mixer._fp32_params.A_log",
            "language_model.model.layers.3.mixer.A_log",
        ),
        (
            "backbone.layers.3.mixer.A_log",
            "language_model.model.layers.3.mixer.A_log",
        ),
        ("perception.proj.bias", "audio_tower.proj.bias"),
        ("llm.model.layers.0.mixer.in_proj._extra_state", None),
        ("llm.mtp.layers.0.enorm.weight", None),
        (
            "ctc_timestamp.decoder.upsample.weight",
            "ctc_timestamp.decoder.upsample.weight",
        ),
    ],
)
def test_target_names(name, mapped):
    assert _TARGET_MAPPER.map_name(name) == mapped


def test_drafter_names():
    name = "llm.mtp.layers.0.enorm.weight"
    assert _DRAFT_MAPPER.map_name(name) == "mtp.layers.0.enorm.weight"


def test_shape_tables_cover_the_file_exactly():
    """Every decoder and head tensor of the file is expected, and no other one."""
    config = Nemotron3_5TranscribeConfig.from_pretrained(CHECKPOINT)
    text_config = config.text_config
    text_config.vocab_size = config.output_vocab_size
    tensors, _ = read_tensors()
    weights = list(tensors.items())
    decoder = {
        name.removeprefix("language_model.")
        for name, _ in checked_weights(
            weights,
            _TARGET_MAPPER,
            "language_model.",
            decoder_tensor_shapes(text_config),
        )
        if name.startswith("language_model.")
    }
    assert decoder == set(decoder_tensor_shapes(text_config))
    head = [(n, t) for n, t in weights if n.startswith("llm.mtp.")]
    assert {
        name
        for name, _ in checked_weights(
            head, _DRAFT_MAPPER, "", mtp_tensor_shapes(text_config)
        )
    } == set(mtp_tensor_shapes(text_config))


def test_quantized_layers_may_bring_scales():
    shapes = {"model.layers.0.mixer.q_proj.weight": (2, 4)}
    weights = [
        ("llm.model.layers.0.mixer.q_proj.weight", torch.zeros(2, 4)),
        ("llm.model.layers.0.mixer.q_proj.weight_scale", torch.zeros(())),
    ]
    arguments = (weights, _TARGET_MAPPER, "language_model.", shapes)
    assert len(list(checked_weights(*arguments, quantized=True))) == 2
    with pytest.raises(ValueError, match="q_proj.weight_scale"):
        list(checked_weights(*arguments))
