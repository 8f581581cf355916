# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Registration: light, repeatable, in every process, and harmless elsewhere."""

import importlib.metadata
import logging
import multiprocessing
import pickle
import subprocess
import sys

import pytest
import torch

import vllm
import vllm_nemotron3_5_transcribe as plugin
from vllm.model_executor.models.config import (
    MODELS_CONFIG_MAP,
    NemotronHForCausalLMConfig,
)
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm_nemotron3_5_transcribe import compat, hooks

MODULE = "vllm.model_executor.models.nemotron3_5_transcribe"
TARGET = "Nemotron3_5TranscribeForConditionalGeneration"
REGISTERED = {
    "NeMoSpeechLMForConditionalGeneration": TARGET,
    TARGET: TARGET,
    "Nemotron3_5TranscribeMTP": "Nemotron3_5TranscribeMTP",
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    plugin.register()


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_importing_the_plugin_does_not_import_torch():
    code = (
        "import sys, vllm_nemotron3_5_transcribe, vllm_nemotron3_5_transcribe.hooks\n"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_entry_point_is_register():
    entries = importlib.metadata.entry_points(
        group="vllm.general_plugins", name="nemotron3_5_transcribe"
    )
    assert {entry.load() for entry in entries} == {plugin.register}


@pytest.mark.parametrize("architecture", REGISTERED)
def test_architecture_is_registered_lazily(architecture):
    """By string: the class is not imported, and CUDA not touched, before its use."""
    entry = ModelRegistry.models[architecture]
    assert (entry.module_name, entry.class_name) == (MODULE, REGISTERED[architecture])


@pytest.mark.parametrize("architecture", REGISTERED)
def test_architecture_resolves_to_its_class(architecture):
    cls = ModelRegistry._try_load_model_cls(architecture)
    assert cls is not None
    assert (cls.__module__, cls.__name__) == (MODULE, REGISTERED[architecture])


def test_config_class_is_known_to_vllm_and_transformers():
    from transformers import AutoConfig

    config_class = _CONFIG_REGISTRY["nemo_speechlm"]
    assert config_class.__module__ == (
        "vllm.transformers_utils.configs.nemotron3_5_transcribe"
    )
    assert type(AutoConfig.for_model("nemo_speechlm")) is config_class


def state():
    """Everything that registration touches."""
    from vllm.config.speculative import SpeculativeConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.platforms import current_platform

    return [
        {name: repr(entry) for name, entry in ModelRegistry.models.items()},
        dict(_CONFIG_REGISTRY),
        dict(MODELS_CONFIG_MAP),
        SpeculativeConfig.hf_config_override,
        FusedMoEConfig.__post_init__,
        unquantized.backend_to_kernel_cls,
        type(current_platform).__dict__["register_triton_kernel_overrides"],
    ]


def test_registering_again_changes_nothing():
    before = state()
    for _ in range(2):
        plugin.register()
    assert state() == before


def test_registers_in_a_fresh_process_through_vllm():
    code = (
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.model_executor.models.registry import ModelRegistry\n"
        f"print(sorted(set({sorted(REGISTERED)}) & set(ModelRegistry.models)))"
    )
    assert run(code).splitlines()[-1] == str(sorted(REGISTERED))


def test_an_allow_list_without_the_plugin_keeps_it_out():
    code = (
        "import os; os.environ['VLLM_PLUGINS'] = 'another'\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.model_executor.models.registry import ModelRegistry\n"
        f"print(sorted(set({sorted(REGISTERED)}) & set(ModelRegistry.models)))"
    )
    assert run(code).splitlines()[-1] == "[]"


# --- Versions --------------------------------------------------------------------


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.1.dev3+gabcdef", "0.33.0rc1", "0.33.2+cu129"]
)
def test_supported_versions(version):
    assert compat.is_supported_vllm(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "dev", "", "0.3.3"])
def test_unsupported_versions(version):
    assert not compat.is_supported_vllm(version)


def test_unsupported_version_warns_once_and_registers_nothing(monkeypatch, caplog):
    def fail():
        raise AssertionError("a hook ran")

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(hooks, "ALL_HOOKS", (fail,))
    monkeypatch.setattr(plugin, "_warned_about_version", False)
    with caplog.at_level(logging.WARNING, logger=plugin.logger.name):
        plugin.register()
        plugin.register()
    (record,) = [r for r in caplog.records if r.name == plugin.logger.name]
    assert record.levelno == logging.WARNING
    assert "0.99.0" in record.getMessage()
    assert "0.32 to 0.33" in record.getMessage()


def test_failing_hook_is_logged_and_the_others_run(monkeypatch, caplog):
    """An exception out of a plugin would stop vLLM for every model."""
    calls = []

    def broken_hook():
        raise AttributeError("gone in this version")

    def sound_hook():
        calls.append(1)

    monkeypatch.setattr(hooks, "ALL_HOOKS", (broken_hook, sound_hook))
    with caplog.at_level(logging.ERROR, logger=plugin.logger.name):
        plugin.register()
    assert calls == [1]
    assert any("broken_hook" in r.getMessage() for r in caplog.records)


def test_every_hook_says_why_and_until_when():
    for hook in hooks.ALL_HOOKS:
        for heading in ("Why:", "How:", "Upstream edit:", "Goes when:"):
            assert heading in hook.__doc__, hook.__name__


# --- Spawn -----------------------------------------------------------------------


def _describe(config, results):
    results.put((type(config).__module__, config.to_dict()))


def test_config_survives_spawn():
    """The child unpickles it before any plugin is loaded there."""
    config = _CONFIG_REGISTRY["nemo_speechlm"]()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_describe, args=(config, results))
    child.start()
    module, values = results.get(timeout=300)
    child.join()
    assert module == "vllm.transformers_utils.configs.nemotron3_5_transcribe"
    assert values == config.to_dict()


def test_config_survives_pickle_by_value():
    config = _CONFIG_REGISTRY["nemo_speechlm"]()
    assert pickle.loads(pickle.dumps(config)) == config


# --- Defaults --------------------------------------------------------------------


class Settings:
    """Attributes by keyword, as the engine's configs have them."""

    def __init__(self, **values):
        self.__dict__.update(values)


def apply_defaults(
    model="no-folder", architecture=TARGET, parallel=None, **cache_values
):
    """Run the defaults on a cache config; returns it."""
    from vllm.config import CacheConfig

    cache = CacheConfig(**cache_values)
    config = _CONFIG_REGISTRY["nemo_speechlm"]()
    model = Settings(
        model=str(model),
        hf_text_config=config.text_config,
        max_model_len=65536,
        enforce_eager=False,
    )
    MODELS_CONFIG_MAP[architecture].verify_and_update_config(
        Settings(
            cache_config=cache,
            model_config=model,
            speculative_config=None,
            parallel_config=parallel or Settings(worker_extension_cls=""),
        )
    )
    return cache


@pytest.mark.parametrize("architecture", hooks.TARGET_ARCHITECTURES)
def test_mamba_state_defaults_to_nemotron_hs_float32(architecture):
    assert NemotronHForCausalLMConfig.DEFAULT_MAMBA_SSM_CACHE_DTYPE == "float32"
    cache = apply_defaults(architecture=architecture)
    assert cache.mamba_ssm_cache_dtype == "float32"


def test_mamba_state_dtype_of_the_user_is_kept():
    cache = apply_defaults(mamba_ssm_cache_dtype="bfloat16")
    assert cache.mamba_ssm_cache_dtype == "bfloat16"


GIB = 1 << 30


def test_workers_can_be_asked_for_word_times():
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.worker_base import WorkerBase

    parallel = Settings(worker_extension_cls="")
    apply_defaults(parallel=parallel)
    extension = resolve_obj_by_qualname(parallel.worker_extension_cls)
    assert extension.__name__ == "AlignmentWorkerExtension"
    # vLLM refuses an extension that overrides anything of the worker.
    assert not [
        name
        for name in dir(extension)
        if not name.startswith("__") and hasattr(WorkerBase, name)
    ]


def test_worker_extension_of_the_user_is_kept():
    parallel = Settings(worker_extension_cls="their.Extension")
    apply_defaults(parallel=parallel)
    assert parallel.worker_extension_cls == "their.Extension"


@pytest.fixture
def memory(monkeypatch):
    """Set the memory node's total and available GiB."""
    from vllm.utils import cpu_resource_utils

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)

    def set_memory(total, available):
        monkeypatch.setattr(
            cpu_resource_utils,
            "get_memory_node_info",
            lambda node: cpu_resource_utils.MemoryNodeInfo(
                total_memory=int(total * GIB), available_memory=int(available * GIB)
            ),
        )

    return set_memory


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of 2 GiB that takes no room."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2 * GIB)
    return tmp_path


def test_kv_cache_holds_some_requests_of_full_length(memory, folder):
    memory(512, 500)
    size = apply_defaults(folder).kv_cache_memory_bytes
    # 6 attention layers with 2 heads of 128, 65536 tokens, float32.
    keys_and_values = 6 * 2 * 2 * 128 * 65536 * 4
    assert 8 * keys_and_values < size < 16 * keys_and_values


@pytest.mark.parametrize("available", [1.5, 3, 8, 20])
def test_kv_cache_leaves_room_for_weights_and_others(memory, folder, available):
    memory(24, available)
    size = apply_defaults(folder).kv_cache_memory_bytes
    assert size <= max(available - 2, 0) / 2 * GIB


@pytest.mark.parametrize(
    "values", [{"gpu_memory_utilization": 0.9}, {"kv_cache_memory_bytes": GIB}]
)
def test_memory_that_the_user_chose_is_kept(memory, folder, values):
    memory(24, 20)
    cache = apply_defaults(folder, **values)
    assert cache.gpu_memory_utilization == values.get("gpu_memory_utilization", 0.92)
    assert cache.kv_cache_memory_bytes == values.get("kv_cache_memory_bytes")


def test_kv_cache_space_of_the_environment_is_kept(memory, folder, monkeypatch):
    memory(24, 20)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert apply_defaults(folder).kv_cache_memory_bytes is None


def test_checkpoint_of_unknown_size_keeps_vllms_default(memory):
    memory(24, 20)
    assert apply_defaults("someone/some-model").kv_cache_memory_bytes is None


def compiles(monkeypatch, **environment):
    from vllm_nemotron3_5_transcribe.config_defaults import (
        _run_eagerly_without_compiler,
    )

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = Settings(enforce_eager=False)
    _run_eagerly_without_compiler(model)
    return not model.enforce_eager


def test_without_a_compiler_the_model_runs_eagerly(monkeypatch):
    assert not compiles(monkeypatch, CXX="no-such-compiler")


def test_without_pythons_headers_the_model_runs_eagerly(monkeypatch, tmp_path):
    import sysconfig

    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert not compiles(monkeypatch, CXX=sys.executable)


def test_with_both_it_is_compiled(monkeypatch, tmp_path):
    import sysconfig

    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert compiles(monkeypatch, CXX=sys.executable)


def test_tests_run_on_the_cpu_platform():
    from vllm.platforms import current_platform

    assert current_platform.is_cpu()
    assert not torch.cuda.is_available()
