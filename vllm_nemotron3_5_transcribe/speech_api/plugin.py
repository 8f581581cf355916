# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How vLLM finds the speech API: an endpoint plugin, and the batch runner's state.

vLLM attaches a plugin's routes before it tells which model is served, and what is
attached replaces vLLM's own at once. The routes are therefore put in place a step
later, when the model is known, so that the servers of other models keep theirs.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

NAME = "nemotron3_5_transcribe"


class SpeechEndpointPlugin:
    """Implements `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = NAME
    required_tasks = ("transcription",)

    def __init__(self) -> None:
        self._app: Any = None

    def attach_router(self, app: Any) -> None:
        """Remember the app."""
        self._app = app

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Put our routes in place of vLLM's if the model is ours."""
        if engine_client is not None and serves_our_model(engine_client):
            replace_routes(self._app)


def serves_our_model(engine_client: Any) -> bool:
    """Whether the engine's model is Nemotron 3.5 Transcribe."""
    from vllm_nemotron3_5_transcribe.hooks import MODEL_TYPE

    return engine_client.model_config.hf_config.model_type == MODEL_TYPE


def replace_routes(app: Any) -> None:
    """Put our audio routes where vLLM's are, ahead of any mounts behind them."""
    from .routes import router

    existing = list(app.router.routes)
    app.include_router(router)
    ours = [route for route in app.router.routes if route not in existing]
    paths = {route.path for route in ours}
    replaced = [getattr(route, "path", None) in paths for route in existing]
    position = replaced.index(True) if any(replaced) else len(existing)
    kept = [route for route, gone in zip(existing, replaced) if not gone]
    app.router.routes[:] = [*kept[:position], *ours, *kept[position:]]
    app.openapi_schema = None


def load_endpoint_plugins(
    load: Callable[..., list[Any]], supported_tasks: tuple[str, ...] | None
) -> list[Any]:
    """Load endpoint plugins, ours also where `VLLM_PLUGINS` is not set.

    Args:
        load: vLLM's own function. Without `VLLM_PLUGINS` it loads none, and warns
            about those that it finds.
        supported_tasks: of the server.
    """
    from importlib.metadata import entry_points

    import vllm.envs as envs
    from vllm.plugins import ENDPOINT_PLUGINS_GROUP

    allowed = envs.VLLM_PLUGINS
    found = {entry.name for entry in entry_points(group=ENDPOINT_PLUGINS_GROUP)}
    # Without anything else to warn about, vLLM need not look.
    loaded = load(supported_tasks) if allowed is not None or found - {NAME} else []
    if (
        (allowed is None or NAME in allowed)
        and set(SpeechEndpointPlugin.required_tasks) & set(supported_tasks or ())
        # Found by vLLM where its metadata are up to date.
        and not any(isinstance(plugin, SpeechEndpointPlugin) for plugin in loaded)
    ):
        loaded = [*loaded, SpeechEndpointPlugin()]
    return loaded


def init_speech_state(
    init: Callable[..., None],
    engine_client: Any,
    state: Any,
    args: Namespace,
    request_logger: Any,
    supported_tasks: tuple[str, ...],
) -> None:
    """Make the serving objects of the audio routes, ours for our model.

    The API server and the batch runner both take them from `state`.

    Args:
        init: vLLM's own function.
    """
    if "transcription" not in supported_tasks or not serves_our_model(engine_client):
        init(engine_client, state, args, request_logger, supported_tasks)
        return

    from .limits import admit_an_hour
    from .serving import TranscribeServing, TranslateServing

    # Before anything reads them.
    admit_an_hour()
    others = tuple(task for task in supported_tasks if task != "transcription")
    init(engine_client, state, args, request_logger, others)
    options = {
        "request_logger": request_logger,
        "enable_force_include_usage": args.enable_force_include_usage,
    }
    models = state.openai_serving_models
    state.openai_serving_transcription = TranscribeServing(
        engine_client, models, **options
    )
    state.openai_serving_translation = TranslateServing(
        engine_client, models, **options
    )
