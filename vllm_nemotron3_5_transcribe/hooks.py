# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every touch of a vLLM private, one function each.

Each function says why it is needed, how it works, which edit an upstream merge
would make in its place, and when it can go. All are idempotent. Imports of vLLM
sit inside the functions: importing this module must cost nothing.
"""

MODEL_MODULE = "vllm.model_executor.models.nemotron3_5_transcribe"
TARGET_CLASS = "Nemotron3_5TranscribeForConditionalGeneration"
TARGET_ARCHITECTURES = ("NeMoSpeechLMForConditionalGeneration", TARGET_CLASS)
DRAFT_ARCHITECTURE = "Nemotron3_5TranscribeMTP"
MODEL_TYPE = "nemo_speechlm"


def register_models() -> None:
    """Make the target and the drafter known by their architecture names.

    Why: vLLM resolves ``architectures`` of config.json through its registry.
    How: public API, by string, so that nothing is imported before it is used.
    Upstream edit: entries in ``models/registry.py``.
    Goes when: vLLM ships the model.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in TARGET_ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{MODEL_MODULE}:{TARGET_CLASS}")
    ModelRegistry.register_model(
        DRAFT_ARCHITECTURE, f"{MODEL_MODULE}:{DRAFT_ARCHITECTURE}"
    )


def register_config() -> None:
    """Make ``model_type: nemo_speechlm`` readable without remote code.

    Why: neither vLLM nor the transformers it pins knows the model type.
    How: an entry in vLLM's private table, which comes before remote code, and
        transformers' own registration for the tokenizer and processor loaders.
    Upstream edit: an entry in ``_CONFIG_REGISTRY`` and in ``configs/__init__.py``.
    Goes when: vLLM ships the model.
    """
    from transformers import AutoConfig

    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.transformers_utils.configs.nemotron3_5_transcribe import (
        Nemotron3_5TranscribeConfig,
    )

    _CONFIG_REGISTRY[MODEL_TYPE] = Nemotron3_5TranscribeConfig
    AutoConfig.register(MODEL_TYPE, Nemotron3_5TranscribeConfig, exist_ok=True)


def register_config_defaults() -> None:
    """Give our architectures NemotronH's defaults (float32 Mamba state).

    Why: vLLM keys these defaults by architecture, and ours is a wrapper.
    How: an entry in the private ``MODELS_CONFIG_MAP`` that asks NemotronH's rule
        about the text config.
    Upstream edit: the same entry in ``models/config.py``.
    Goes when: vLLM ships the model.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm_nemotron3_5_transcribe.config_defaults import TranscribeConfigDefaults

    for architecture in TARGET_ARCHITECTURES:
        MODELS_CONFIG_MAP[architecture] = TranscribeConfigDefaults


def route_mtp() -> None:
    """Resolve ``method: mtp`` on a ``nemo_speechlm`` target to our drafter.

    Why: vLLM's rule knows the model types that it ships, by an if-chain.
    How: a static method of ``SpeculativeConfig`` is replaced by a plain function
        that asks vLLM's own rule about every other model.
    Upstream edit: a branch in ``SpeculativeConfig.hf_config_override``.
    Goes when: vLLM ships the model.
    """
    from vllm_nemotron3_5_transcribe import mtp_routing

    mtp_routing.install()


def refuse_placeholders_without_audio() -> None:
    """Answer a prompt with ``<|audio|>`` but no clip with an error.

    Why: vLLM calls a model's processor for prompts with clips only, so nobody counts
        the placeholders of the others, and the decoder would read a padding row.
    How: the check that every prompt passes in the front end is wrapped; models of
        other types reach it unchanged.
    Upstream edit: let a model check prompts without multimodal data.
    Goes when: vLLM does.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    check_input = InputProcessor._validate_model_input
    if getattr(check_input, "refuses_placeholders", False):
        return

    def _validate_model_input(self, prompt_input, *args, **kwargs) -> None:
        config = self.model_config.hf_config
        if config.model_type == MODEL_TYPE and prompt_input["type"] == "token":
            count = prompt_input["prompt_token_ids"].count(config.audio_token_id)
            if count:
                raise VLLMValidationError(
                    f"The prompt has {count} <|audio|> placeholders, but no audio "
                    "clip came with it.",
                    parameter="prompt",
                )
        check_input(self, prompt_input, *args, **kwargs)

    _validate_model_input.refuses_placeholders = True
    InputProcessor._validate_model_input = _validate_model_input


def attach_speech_routes() -> None:
    """Load our endpoint plugin also where ``VLLM_PLUGINS`` is not set.

    Why: vLLM loads endpoint plugins only if that variable names them, and the model's
        own routes should not need it.
    How: vLLM's loader is replaced by a function that asks it, then adds ours. The
        plugin itself does nothing for other models.
    Upstream edit: the routes of ``speech_to_text/*/api_router.py`` do what ours do.
    Goes when: they do.
    """
    from vllm import plugins
    from vllm_nemotron3_5_transcribe.speech_api import plugin

    load = plugins.load_endpoint_plugins
    if getattr(load, "attaches_speech_routes", False):
        return

    def load_endpoint_plugins(supported_tasks=None):
        return plugin.load_endpoint_plugins(load, supported_tasks)

    load_endpoint_plugins.attaches_speech_routes = True
    plugins.load_endpoint_plugins = load_endpoint_plugins


def serve_speech() -> None:
    """Serve our model's audio routes by our subclasses of vLLM's servings.

    Why: vLLM has one serving class for all models, and its batch runner, which has no
        endpoint plugins, makes it by the same function as the server.
    How: that function is wrapped; other models pass through.
    Upstream edit: in ``speech_to_text/factories.py``, a serving class by model.
    Goes when: vLLM's servings write times, speakers and subtitles.
    """
    from vllm.entrypoints.speech_to_text import factories
    from vllm_nemotron3_5_transcribe.speech_api import plugin

    init = factories.init_speech_to_text_state
    if getattr(init, "serves_speech", False):
        return

    def init_speech_to_text_state(*args, **kwargs) -> None:
        plugin.init_speech_state(init, *args, **kwargs)

    init_speech_to_text_state.serves_speech = True
    factories.init_speech_to_text_state = init_speech_to_text_state


def admit_non_gated_experts_on_cpu() -> None:
    """Let NemotronH's relu-squared experts run on a CPU.

    Why: the MoE config raises for non-gated experts off the GPU, and no CPU
        experts class takes them.
    How: the config's last check is skipped on a CPU, and the list of CPU classes
        gets ours at its end, which refuses whatever is gated.
    Upstream edit: drop the check, add the class to ``oracle/unquantized.py``.
    Goes when: vLLM has a CPU kernel for non-gated experts.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm_nemotron3_5_transcribe.cpu_experts import CPUNonGatedExperts

    if getattr(unquantized.backend_to_kernel_cls, "admits_non_gated", False):
        return
    listed_classes = unquantized.backend_to_kernel_cls
    check_config = FusedMoEConfig.__post_init__

    def backend_to_kernel_cls(backend):
        classes = listed_classes(backend)
        if backend == unquantized.UnquantizedMoeBackend.CPU:
            return [*classes, CPUNonGatedExperts]
        return classes

    def post_init(self) -> None:
        try:
            check_config(self)
        except NotImplementedError as error:
            # The check comes last, so every field is set by now.
            if "is_act_and_mul=False" not in str(error):
                raise

    backend_to_kernel_cls.admits_non_gated = True
    unquantized.backend_to_kernel_cls = backend_to_kernel_cls
    FusedMoEConfig.__post_init__ = post_init


def complete_mamba_on_cpu() -> None:
    """Make prefix caching (vLLM's default) and drafts work with Mamba on a CPU.

    Why: a prompt that leaves a Mamba checkpoint crashes the CPU scan, the copies
        between blocks exist in Triton only, and the CPU decode kernels take no heed
        of accepted drafts, so that the output is wrong.
    How: where vLLM registers its own CPU replacements of Triton kernels, in the
        worker, ours follow, by the same registry; scan, convolution and state
        update are wrapped.
    Upstream edit: the same entries in ``platforms/cpu.py``, and the missing
        arguments in ``mamba/ops/cpu/``.
    Goes when: vLLM has them.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform = type(current_platform)
    register_vllm_kernels = platform.register_triton_kernel_overrides
    if getattr(register_vllm_kernels, "completes_mamba", False):
        return

    def register_triton_kernel_overrides(cls) -> None:
        register_vllm_kernels()
        _register_mamba_kernels()
        _wrap_mamba_scan()
        _wrap_mamba_decode()

    register_triton_kernel_overrides.completes_mamba = True
    platform.register_triton_kernel_overrides = classmethod(
        register_triton_kernel_overrides
    )


def repair_sampling_with_drafts_on_cpu() -> None:
    """Make temperature, top-k and top-p work together with drafts on a CPU.

    Why: vLLM's CPU stand-in for one of its Triton kernels writes into a copy, so that
        those settings are whatever the memory held; top-k then ends the engine.
    How: the stand-in is replaced before vLLM registers it in the worker.
    Upstream edit: copy the result back in ``utils/cpu_triton_utils.py``.
    Goes when: vLLM does.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    from vllm.utils import cpu_triton_utils
    from vllm_nemotron3_5_transcribe.cpu_sampling import expand_to_tokens

    cpu_triton_utils._expand_kernel_impl = expand_to_tokens


def _register_mamba_kernels() -> None:
    from vllm.triton_utils import HAS_TRITON, dispatcher
    from vllm_nemotron3_5_transcribe import cpu_mamba

    if HAS_TRITON:
        return
    utils = "vllm.v1.worker.mamba_utils"
    checkpoint = "vllm.model_executor.layers.mamba.ops.ssd_checkpoint"
    replacements = {
        f"{utils}.precopy_mamba_align_fused_kernel": cpu_mamba.copy_states_before_step,
        f"{utils}.postprocess_mamba_fused_kernel": cpu_mamba.copy_states_after_step,
        f"{checkpoint}._store_prefill_checkpoint_kernel": (
            cpu_mamba.store_prefill_checkpoint
        ),
    }
    # A replacement that vLLM brings itself comes first.
    dispatcher.register_kernels(
        {
            name: replacement
            for name, replacement in replacements.items()
            if name not in dispatcher._registry
        }
    )


def _wrap_mamba_scan() -> None:
    from vllm.model_executor.layers.mamba.ops import ssd_combined
    from vllm_nemotron3_5_transcribe.cpu_mamba import scan_with_chunk_states

    scan = ssd_combined._mamba_chunk_scan_combined_fwd
    if getattr(scan, "returns_chunk_states", False):
        return

    def scan_on_cpu(*args, return_intermediate_states: bool = False, **kwargs):
        if return_intermediate_states:
            return scan_with_chunk_states(scan, *args, **kwargs)
        return scan(*args, **kwargs)

    scan_on_cpu.returns_chunk_states = True
    ssd_combined._mamba_chunk_scan_combined_fwd = scan_on_cpu


def _wrap_mamba_decode() -> None:
    from functools import partial

    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import CPUSSUBackend
    from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
    from vllm_nemotron3_5_transcribe.cpu_mamba import (
        convolve_with_drafts,
        update_state_with_drafts,
    )

    convolve = mamba_mixer2.causal_conv1d_update
    update = CPUSSUBackend.__call__
    if getattr(convolve, "knows_drafts", False):
        return

    def causal_conv1d_update(
        *args,
        num_accepted_tokens=None,
        query_start_loc=None,
        null_block_id: int = NULL_BLOCK_ID,
        **kwargs,
    ):
        if num_accepted_tokens is None:
            return convolve(
                *args,
                query_start_loc=query_start_loc,
                null_block_id=null_block_id,
                **kwargs,
            )
        return convolve_with_drafts(
            convolve,
            *args,
            num_accepted_tokens=num_accepted_tokens,
            query_start_loc=query_start_loc,
            null_block_id=null_block_id,
            conv_state_indices=kwargs["conv_state_indices"],
        )

    def selective_state_update(
        self, *args, num_accepted_tokens=None, cu_seqlens=None, **kwargs
    ) -> None:
        if num_accepted_tokens is None:
            update(self, *args, cu_seqlens=cu_seqlens, **kwargs)
            return
        kwargs.setdefault("null_block_id", NULL_BLOCK_ID)
        update_state_with_drafts(
            partial(update, self),
            *args,
            num_accepted_tokens=num_accepted_tokens,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )

    causal_conv1d_update.knows_drafts = True
    mamba_mixer2.causal_conv1d_update = causal_conv1d_update
    CPUSSUBackend.__call__ = selective_state_update


# In the order of registration.
ALL_HOOKS = (
    register_models,
    register_config,
    register_config_defaults,
    route_mtp,
    refuse_placeholders_without_audio,
    attach_speech_routes,
    serve_speech,
    admit_non_gated_experts_on_cpu,
    complete_mamba_on_cpu,
    repair_sampling_with_drafts_on_cpu,
)
