# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which draft model `method: mtp` means, in this process and in spawned ones."""

import functools
import multiprocessing
import pickle

import pytest
from transformers import NemotronHConfig

from tests.engine import CHECKPOINTS
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils.configs.nemotron3_5_transcribe import (
    Nemotron3_5TranscribeConfig,
)
from vllm_nemotron3_5_transcribe import mtp_routing, register

HEAD = {"enabled": True, "num_nextn_predict_layers": 3, "use_repeated_layer": True}


@pytest.fixture(autouse=True)
def installed():
    register()
    yield
    mtp_routing.install()


def transcribe_config(**keys):
    return Nemotron3_5TranscribeConfig(**{"mtp": HEAD, **keys})


def nemotron_h(depths=1):
    return NemotronHConfig(
        num_nextn_predict_layers=depths, architectures=["NemotronHForCausalLM"]
    )


def test_head_resolves_to_our_drafter():
    draft = SpeculativeConfig.hf_config_override(transcribe_config())
    assert draft.architectures == ["Nemotron3_5TranscribeMTP"]
    assert draft.model_type == "mtp"
    # One stored block: any number of draft tokens is a multiple of 1.
    assert (draft.n_predict, draft.num_nextn_predict_layers) == (1, 1)
    assert draft.text_config.hidden_size == 2688


def test_our_drafter_is_an_mtp_type_to_vllm():
    from typing import get_args

    from vllm.config.speculative import MTPModelTypes

    draft = SpeculativeConfig.hf_config_override(transcribe_config())
    assert draft.model_type in get_args(MTPModelTypes)


def test_routing_twice_changes_nothing():
    """A config that was routed already is an MTP type like vLLM's own."""
    once = SpeculativeConfig.hf_config_override(transcribe_config())
    twice = SpeculativeConfig.hf_config_override(once)
    assert twice.architectures == ["Nemotron3_5TranscribeMTP"]


@pytest.mark.parametrize(
    "mtp", [None, {"enabled": False}, {"num_nextn_predict_layers": 0}]
)
def test_checkpoint_without_a_head_is_an_error(mtp):
    with pytest.raises(ValueError, match="no draft head"):
        SpeculativeConfig.hf_config_override(transcribe_config(mtp=mtp))


def test_distinct_blocks_are_an_error_that_names_the_key():
    config = transcribe_config(
        mtp={"num_nextn_predict_layers": 2, "use_repeated_layer": False},
        llm_config={"num_nextn_predict_layers": 2, "hidden_size": 2688},
    )
    with pytest.raises(ValueError, match="use_repeated_layer"):
        SpeculativeConfig.hf_config_override(config)


# --- Other models ----------------------------------------------------------------


def test_other_models_get_vllms_rule():
    draft = SpeculativeConfig.hf_config_override(nemotron_h())
    assert draft.model_type == "nemotron_h_mtp"
    assert draft.architectures == ["NemotronHMTPModel"]


@pytest.mark.parametrize("by_name", [False, True])
def test_arguments_reach_vllms_rule_untouched(monkeypatch, by_name):
    """0.33 hands over a second argument, bound by ``functools.partial``."""
    seen = []

    def rule(*args, **kwargs):
        seen.append((args, kwargs))
        return "answer"

    monkeypatch.setattr(mtp_routing, "_vllm_rule", rule)
    config, overrides = nemotron_h(), {"architectures": ["TransformersForMTP"]}
    override = functools.partial(
        SpeculativeConfig.hf_config_override, transformers_mtp_overrides=overrides
    )
    if by_name:
        assert override(hf_config=config) == "answer"
        assert seen == [
            ((), {"hf_config": config, "transformers_mtp_overrides": overrides})
        ]
    else:
        assert override(config) == "answer"
        assert seen == [((config,), {"transformers_mtp_overrides": overrides})]


@pytest.mark.parametrize("by_name", [False, True])
def test_our_config_is_routed_in_033s_calling_form_too(by_name):
    override = functools.partial(
        SpeculativeConfig.hf_config_override, transformers_mtp_overrides=None
    )
    config = transcribe_config()
    draft = override(hf_config=config) if by_name else override(config)
    assert draft.architectures == ["Nemotron3_5TranscribeMTP"]


def test_composed_override_of_a_target_goes_through_ours():
    """vLLM calls the rule by name again when the target has overrides of its own."""

    composed = SpeculativeConfig.compose_draft_hf_overrides(_shrink)
    draft = composed(transcribe_config())
    assert draft.architectures == ["Nemotron3_5TranscribeMTP"]
    assert draft.shrunk


def _shrink(config):
    config.shrunk = True
    return config


# --- Installing ------------------------------------------------------------------


def test_installing_twice_keeps_vllms_rule():
    rule = mtp_routing._vllm_rule
    mtp_routing.install()
    register()
    assert mtp_routing._vllm_rule is rule
    assert SpeculativeConfig.hf_config_override is mtp_routing.hf_config_override


def test_restoring_gives_vllm_its_rule_back():
    rule = mtp_routing._vllm_rule
    mtp_routing.restore()
    assert SpeculativeConfig.hf_config_override is rule
    mtp_routing.restore()
    assert SpeculativeConfig.hf_config_override is rule


def test_our_rule_works_before_it_is_installed():
    """As in a spawned process, which unpickles it before it registers."""
    mtp_routing.restore()
    draft = mtp_routing.hf_config_override(nemotron_h())
    assert draft.model_type == "nemotron_h_mtp"


def test_lost_rule_is_an_error_and_no_endless_call(monkeypatch):
    monkeypatch.setattr(mtp_routing, "_vllm_rule", None)
    with pytest.raises(RuntimeError, match="loaded twice"):
        mtp_routing.hf_config_override(nemotron_h())


def test_override_is_a_plain_function_of_its_module():
    """Pickle must find it here: a wrapped one would come back as vLLM's own."""
    override = SpeculativeConfig.hf_config_override
    assert override.__module__ == "vllm_nemotron3_5_transcribe.mtp_routing"
    assert override.__qualname__ == "hf_config_override"
    assert not hasattr(override, "__wrapped__")
    assert pickle.loads(pickle.dumps(override)) is override


def _resolve(override, config, results):
    results.put((override.__module__, override(config).architectures))


@pytest.mark.parametrize("bound", [False, True])
def test_override_survives_spawn(bound):
    override = SpeculativeConfig.hf_config_override
    if bound:
        override = SpeculativeConfig.compose_draft_hf_overrides(_keep)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(
        target=_resolve_bound if bound else _resolve,
        args=(override, transcribe_config(), results),
    )
    child.start()
    module, architectures = results.get(timeout=300)
    child.join()
    assert module == "vllm_nemotron3_5_transcribe.mtp_routing"
    assert architectures == ["Nemotron3_5TranscribeMTP"]


def _keep(config):
    return config


def _resolve_bound(override, config, results):
    """The composed form looks the rule up by name, so the child registers first."""
    register()
    results.put(
        (
            SpeculativeConfig.hf_config_override.__module__,
            override(config).architectures,
        )
    )


# --- From the flag to the engine's config ----------------------------------------


def engine_config(speculative, **options):
    args = EngineArgs(
        model=str(CHECKPOINTS["odd"]),
        speculative_config={"method": "mtp", **speculative},
        **options,
    )
    return args.create_engine_config()


@pytest.mark.parametrize("path_given", [False, True], ids=["implied", "given"])
@pytest.mark.parametrize("drafts", [1, 2, 6])
def test_flag_resolves_to_our_drafter(drafts, path_given):
    """The odd checkpoint's head was made for 2 depths; 6 is past them."""
    speculative = {"num_speculative_tokens": drafts}
    if path_given:
        speculative["model"] = str(CHECKPOINTS["odd"])
    config = engine_config(speculative)
    draft = config.speculative_config.draft_model_config
    assert draft.architecture == "Nemotron3_5TranscribeMTP"
    assert draft.hf_config.model_type == "mtp"
    assert config.speculative_config.num_speculative_tokens == drafts
    assert config.speculative_config.use_eagle()
    # The target's own config is not the one that was changed.
    assert config.model_config.hf_config.model_type == "nemo_speechlm"
    assert config.model_config.architecture == "NeMoSpeechLMForConditionalGeneration"


@pytest.mark.parametrize(("prefix_caching", "mode"), [(True, "align"), (False, "none")])
def test_cache_mode_follows_prefix_caching(prefix_caching, mode):
    """The two modes that `tests/v1` finds exact, and vLLM 0.32 has no third."""
    config = engine_config(
        {"num_speculative_tokens": 2}, enable_prefix_caching=prefix_caching
    )
    assert config.cache_config.mamba_cache_mode == mode


def test_replayed_states_are_refused():
    with pytest.raises(ValueError, match="use-replayssm"):
        engine_config({"num_speculative_tokens": 2}, use_replayssm=True)


def test_pipeline_stages_of_the_v1_runner_are_refused():
    """It would crash at start: all stages ask for a drafter that only one has."""
    with pytest.raises(ValueError, match="pipeline parallelism.*V1 model runner"):
        engine_config({"num_speculative_tokens": 2}, pipeline_parallel_size=2)


def test_config_of_the_engine_survives_pickling():
    """It travels to the engine core and to every worker."""
    config = engine_config({"num_speculative_tokens": 3})
    copied = pickle.loads(pickle.dumps(config))
    draft = copied.speculative_config.draft_model_config
    assert draft.architecture == "Nemotron3_5TranscribeMTP"
    assert draft.hf_config.require_repeated_mtp().num_nextn_predict_layers == 2
