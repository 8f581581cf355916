# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Our routes for our model, vLLM's for every other one."""

import importlib.metadata
from argparse import Namespace
from types import SimpleNamespace

import anyio
import pytest
from fastapi import FastAPI

import vllm.plugins
import vllm_nemotron3_5_transcribe
from vllm.entrypoints.speech_to_text import factories
from vllm.plugins.endpoint_plugins.interface import (
    EndpointPlugin,
    attach_endpoint_plugins,
    init_endpoint_plugins_state,
)
from vllm_nemotron3_5_transcribe.speech_api.plugin import SpeechEndpointPlugin

TASKS = ("generate", "transcription")
PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")


@pytest.fixture(autouse=True)
def registered():
    vllm_nemotron3_5_transcribe.register()


def engine(model_type):
    hf_config = SimpleNamespace(model_type=model_type)
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config))


def start(model_type, tasks=TASKS):
    """The part of vLLM's start-up that has to do with audio routes."""
    app = FastAPI()
    factories.register_speech_to_text_api_routers(app, tasks)
    before = list(app.router.routes)
    attach_endpoint_plugins(app, tasks)
    client = None if model_type is None else engine(model_type)
    anyio.run(init_endpoint_plugins_state, client, app.state, Namespace())
    return app, before


def handlers(app):
    return {
        route.path: route.endpoint.__module__
        for route in app.routes
        if getattr(route, "path", None) in PATHS
    }


@pytest.fixture(params=[None, "nemotron3_5_transcribe", "other,nemotron3_5_transcribe"])
def allowed(request, monkeypatch):
    """What `VLLM_PLUGINS` says."""
    if request.param is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", request.param)


def test_entry_point_fulfils_vllms_contract():
    entries = importlib.metadata.entry_points(
        group="vllm.endpoint_plugins", name="nemotron3_5_transcribe"
    )
    assert {entry.load() for entry in entries} == {SpeechEndpointPlugin}
    assert isinstance(SpeechEndpointPlugin(), EndpointPlugin)


def test_our_model_gets_our_routes(allowed):
    app, before = start("nemo_speechlm")
    ours = "vllm_nemotron3_5_transcribe.speech_api.routes"
    assert handlers(app) == dict.fromkeys(PATHS, ours)
    others = [route for route in before if route.path not in PATHS]
    assert [route for route in app.routes if route in before] == others
    schema = app.openapi()["paths"]
    assert set(PATHS) <= set(schema)


def test_other_models_keep_vllms_routes(allowed):
    app, before = start("whisper")
    assert list(app.router.routes) == before
    assert all(name.startswith("vllm.entrypoints.") for name in handlers(app).values())


def test_a_server_without_an_engine_keeps_vllms_routes(allowed):
    app, before = start(None)
    assert list(app.router.routes) == before


def test_servers_without_transcription_load_no_plugin(allowed):
    app, _ = start("llama", tasks=("generate",))
    assert app.state.endpoint_plugins == []


def test_an_allow_list_without_us_is_respected(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    app, before = start("nemo_speechlm")
    assert list(app.router.routes) == before


def test_unset_allow_list_loads_no_other_plugin(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    loaded = vllm.plugins.load_endpoint_plugins(TASKS)
    assert [type(plugin) for plugin in loaded] == [SpeechEndpointPlugin]


def test_other_models_get_vllms_servings(monkeypatch):
    made = []
    monkeypatch.setattr(
        "vllm.entrypoints.speech_to_text.transcription.serving."
        "OpenAIServingTranscription",
        lambda *args, **kwargs: made.append("transcription"),
    )
    monkeypatch.setattr(
        "vllm.entrypoints.speech_to_text.translation.serving.OpenAIServingTranslation",
        lambda *args, **kwargs: made.append("translation"),
    )
    state = SimpleNamespace(openai_serving_models=None)
    factories.init_speech_to_text_state(
        engine("whisper"),
        state,
        Namespace(enable_force_include_usage=False),
        request_logger=None,
        supported_tasks=TASKS,
    )
    assert made == ["transcription", "translation"]


def test_registering_twice_wraps_once():
    loader, init = (
        vllm.plugins.load_endpoint_plugins,
        (factories.init_speech_to_text_state),
    )
    vllm_nemotron3_5_transcribe.register()
    assert vllm.plugins.load_endpoint_plugins is loader
    assert factories.init_speech_to_text_state is init
