# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The MTP drafter alone: what it loads, refuses, shares, merges and masks."""

import json
import types

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
from tests.models.multimodal.loading import loaded_drafter
from vllm.model_executor.model_loader.weight_utils import (
    filter_safetensors_files_by_weight_name,
)
from vllm.model_executor.models import nemotron3_5_transcribe as module

EMBEDDING = "llm.model.embed_tokens.weight"


@pytest.fixture(scope="module")
def drafter():
    with loaded_drafter(CHECKPOINT) as model:
        yield model


@pytest.fixture(scope="module")
def state(drafter):
    return {name: param.detach().clone() for name, param in drafter.named_parameters()}


def head_tensors():
    tensors, _ = read_tensors()
    return {name: t for name, t in tensors.items() if name.startswith("llm.mtp.")}


# --- What it loads ---------------------------------------------------------------


def test_values_of_the_head_are_where_they_belong(state):
    stored = head_tensors()
    for name in ("enorm", "hnorm", "eh_proj"):
        loaded = state[f"model.layers.0.{name}.weight"]
        assert torch.equal(loaded, stored[f"llm.mtp.layers.0.{name}.weight"].float())
    fused = [
        stored[f"llm.mtp.layers.0.mixer.{part}_proj.weight"].float() for part in "qkv"
    ]
    assert torch.equal(state["model.layers.0.mixer.qkv_proj.weight"], torch.cat(fused))
    packed = stored["llm.mtp.layers.1.mixer.experts.gate_and_up_projs"].float()
    loaded = state["model.layers.1.mixer.experts.routed_experts.w13_weight"]
    assert torch.equal(loaded[:, : packed.shape[2]], packed.mT)


def test_other_layouts_of_the_head_load_the_same_values(state, tmp_path):
    folder = copy_checkpoint(tmp_path / "hf", to_hugging_face_layout)
    with loaded_drafter(folder) as model:
        for name, param in model.named_parameters():
            assert torch.equal(param, state[name]), name


def test_extra_state_of_the_head_is_skipped(tmp_path):
    name = "llm.mtp.layers.0.eh_proj._extra_state"
    with loaded_drafter(copy_checkpoint(tmp_path / "extra", add(name))):
        pass


def test_what_is_shared_takes_no_memory(drafter):
    """The proposer puts the target's embedding and output head here."""
    assert not drafter.has_own_embed_tokens
    assert not drafter.has_own_lm_head
    assert not hasattr(drafter, "lm_head")
    assert drafter.model.embed_tokens.weight.numel() == 0
    # The proposer compares the widths before it shares.
    hidden_size = drafter.config.hidden_size
    assert drafter.model.embed_tokens.weight.shape[-1] == hidden_size


def test_only_shards_of_the_head_are_opened(drafter, tmp_path):
    folder = copy_checkpoint(tmp_path / "sharded")
    split_into_shards(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weight_map = index["weight_map"]
    wanted = {file for name, file in weight_map.items() if name in head_tensors()}
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    opened = filter_safetensors_files_by_weight_name(
        files, drafter.is_unused_checkpoint_weight
    )
    assert {file.rpartition("/")[2] for file in opened} == wanted


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("llm.mtp.layers.0.enorm.weight", False),
        ("mtp.layers.1.mixer.experts.3.up_proj.weight", False),
        ("llm.model.layers.0.norm.weight", True),
        ("backbone.layers.0.norm.weight", True),
        (EMBEDDING, True),
        ("backbone.embeddings.weight", True),
        ("llm.lm_head.weight", True),
        ("perception.proj.weight", True),
        ("ctc_timestamp.decoder.upsample.weight", True),
    ],
)
def test_selected_tensors(drafter, name, unused):
    assert drafter.is_unused_checkpoint_weight(name) == unused


# --- What it refuses -------------------------------------------------------------

PROJECTION = "llm.mtp.layers.0.eh_proj.weight"
QUERY = "llm.mtp.layers.0.mixer.q_proj.weight"
NORM = "llm.mtp.layers.1.final_layernorm.weight"
UP = "llm.mtp.layers.1.mixer.experts.gate_and_up_projs"


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        *((drop(name), name) for name in (PROJECTION, QUERY, NORM, UP)),
        *((reshape(name), name) for name in (PROJECTION, QUERY, NORM, UP)),
        (add("llm.mtp.surprise"), "llm.mtp.surprise"),
        (add("llm.mtp.layers.0.surprise"), "llm.mtp.layers.0.surprise"),
        # A second block: index past the pattern `*E`.
        (add("llm.mtp.layers.2.enorm.weight"), "llm.mtp.layers.2.enorm.weight"),
        (add("llm.mtp.layers.1.enorm.weight"), "llm.mtp.layers.1.enorm.weight"),
        # A Mamba layer's tensor in an attention layer.
        (add("llm.mtp.layers.0.mixer.A_log"), "llm.mtp.layers.0.mixer.A_log"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, edit, name):
    folder = copy_checkpoint(tmp_path / "wrong", edit)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):  # noqa: SIM117
        with loaded_drafter(folder):
            pass


def test_head_that_is_promised_but_absent_is_named(tmp_path):
    def without_head(tensors):
        for name in head_tensors():
            tensors.pop(name)

    folder = copy_checkpoint(tmp_path / "absent", without_head)
    with pytest.raises(ValueError, match=r"llm\.mtp\.layers\.0"):  # noqa: SIM117
        with loaded_drafter(folder):
            pass


def change_config(folder, **keys):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in keys.items():
        section, _, key = key.rpartition("__")
        (config[section] if section else config)[key] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mtp": None, "compute_mtp": False}, "no draft head: `mtp`"),
        ({"mtp__enabled": False}, "no draft head: `mtp`"),
        ({"mtp__use_repeated_layer": False}, "mtp.use_repeated_layer"),
        ({"mtp__hybrid_override_pattern": "*M"}, "mtp.hybrid_override_pattern"),
        ({"mtp__hybrid_override_pattern": "*EE"}, "mtp.hybrid_override_pattern"),
        ({"mtp__hybrid_override_pattern": "E*"}, "mtp.hybrid_override_pattern"),
    ],
)
def test_wrong_settings_are_named(tmp_path, keys, message):
    folder = copy_checkpoint(tmp_path / "settings")
    change_config(folder, **keys)
    with pytest.raises(ValueError, match=message):  # noqa: SIM117
        with loaded_drafter(folder):
            pass


# --- Pipeline parallelism --------------------------------------------------------


@pytest.fixture
def last_pipeline_rank(monkeypatch):
    """The drafter's rank does not have the target's embedding."""
    monkeypatch.setattr(
        module, "get_pp_group", lambda: types.SimpleNamespace(world_size=2)
    )


@pytest.mark.usefixtures("last_pipeline_rank")
@pytest.mark.parametrize("edit", [lambda tensors: None, to_hugging_face_layout])
def test_embedding_is_loaded_where_it_cannot_be_shared(tmp_path, edit):
    folder = copy_checkpoint(tmp_path / "pipeline", edit)
    stored = read_tensors()[0][EMBEDDING].float()
    with loaded_drafter(folder) as model:
        assert model.has_own_embed_tokens
        loaded = model.model.embed_tokens.weight
        assert len(loaded) >= model.config.vocab_size > len(stored)
        assert torch.equal(loaded[: len(stored)], stored)
        assert not loaded[len(stored) :].any()


@pytest.mark.usefixtures("last_pipeline_rank")
@pytest.mark.parametrize("edit", [drop(EMBEDDING), reshape(EMBEDDING)])
def test_wrong_embedding_is_named(tmp_path, edit):
    folder = copy_checkpoint(tmp_path / "pipeline", edit)
    with pytest.raises(ValueError, match=r"llm\.model\.embed_tokens"):  # noqa: SIM117
        with loaded_drafter(folder):
            pass


# --- Embeddings and logits -------------------------------------------------------


@pytest.fixture
def sharing(drafter):
    """The drafter with an embedding as the proposer would share it."""
    own = drafter.model.embed_tokens
    torch.manual_seed(0)
    table = torch.nn.Embedding(drafter.config.vocab_size, drafter.config.hidden_size)
    drafter.model.embed_tokens = table
    yield drafter, table
    drafter.model.embed_tokens = own


def test_audio_embeddings_take_the_placeholders_places(sharing):
    drafter, table = sharing
    ids = torch.tensor([3, 7, 7, 7, 4])
    places = torch.tensor([False, True, True, True, False])
    clips = [torch.randn(2, table.embedding_dim), torch.randn(1, table.embedding_dim)]
    with torch.no_grad():
        merged = drafter.embed_input_ids(ids, clips, is_multimodal=places)
        assert torch.equal(merged[1:4], torch.cat(clips))
        assert torch.equal(merged[[0, 4]], table(ids[[0, 4]]))


@pytest.mark.parametrize("embeddings", [None, []])
def test_text_is_embedded_as_it_is(sharing, embeddings):
    drafter, table = sharing
    ids = torch.tensor([3, 7, 4])
    assert torch.equal(drafter.embed_input_ids(ids, embeddings), table(ids))


def test_embeddings_without_a_mask_are_an_error(sharing):
    drafter, table = sharing
    clip = torch.randn(1, table.embedding_dim)
    with pytest.raises(ValueError, match="is_multimodal"):
        drafter.embed_input_ids(torch.tensor([7]), [clip])


def test_untrained_tokens_are_never_drafted(drafter, monkeypatch):
    trained = drafter.draft_hf_config.output_vocab_size
    padded = drafter.config.vocab_size
    assert trained < padded
    monkeypatch.setattr(
        module.NemotronHMTP, "compute_logits", lambda self, h: torch.ones(2, padded)
    )
    logits = drafter.compute_logits(torch.zeros(2, drafter.config.hidden_size))
    assert torch.isinf(logits[:, trained:]).all()
    assert (logits[:, :trained] == 1).all()


def test_ranks_without_logits_have_nothing_to_mask(drafter, monkeypatch):
    monkeypatch.setattr(module.NemotronHMTP, "compute_logits", lambda self, h: None)
    assert drafter.compute_logits(torch.zeros(1, drafter.config.hidden_size)) is None


def test_target_and_drafter_share_their_functions(drafter, monkeypatch):
    """One merge and one mask: no second copy that could differ."""
    monkeypatch.setattr(module, "merge_audio_embeddings", lambda *_: "merged")
    monkeypatch.setattr(module, "mask_untrained_logits", lambda *_: "masked")
    monkeypatch.setattr(module.NemotronHMTP, "compute_logits", lambda self, h: h)
    target = module.Nemotron3_5TranscribeForConditionalGeneration
    decoder = types.SimpleNamespace(embed_input_ids=None, compute_logits=lambda h: h)
    itself = types.SimpleNamespace(
        language_model=decoder, config=types.SimpleNamespace(output_vocab_size=1)
    )
    assert target.embed_input_ids(itself, None) == "merged"
    assert drafter.embed_input_ids(None) == "merged"
    assert target.compute_logits(itself, None) == "masked"
    assert drafter.compute_logits(None) == "masked"
