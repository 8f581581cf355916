# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A small NemotronH on the CPU with vLLM's default flags, against transformers."""

import random

import pytest
import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

from tests.engine import offline_engine

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Untrained weights with every kind of layer, saved by transformers."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=257,
        hidden_size=96,
        hybrid_override_pattern="ME*EM-E",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=24,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.5,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=80,
        max_position_embeddings=2048,
        # Transformers clamps the time step here; vLLM does not.
        time_step_min=1e-9,
    )
    model = NemotronHForCausalLM(config).eval()
    with torch.no_grad():
        # Large enough that no token is chosen by a hair.
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(0, 0.5)
            elif parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    folder = tmp_path_factory.mktemp("nemotron_h")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts():
    """Around chunks of 16 and blocks of 128 tokens; the last three share prefixes."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(1, 250) for _ in range(length)]
        for length in (1, 5, 16, 17, 127, 128, 129, 300, 600)
    ]
    long = prompts[-1]
    return [*prompts, [*prompts[-2], 5, 6, 7], [*long[:520], *([9] * 50)], [*long, 3]]


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    model = NemotronHForCausalLM.from_pretrained(checkpoint).eval()
    tokens = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens.append(output[0, len(prompt) :].tolist())
    return tokens


@pytest.fixture(scope="module")
def engine(checkpoint):
    """Compiled, with prefix caching and chunked prefill: nothing is switched off."""
    with offline_engine(checkpoint, skip_tokenizer_init=True) as engine:
        yield engine


def generate(engine, prompts):
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, [output.num_cached_tokens for output in outputs]


def test_batch_equals_transformers(engine, prompts, expected):
    tokens, _ = generate(engine, prompts)
    assert tokens == expected


def test_one_by_one_equals_transformers(engine, prompts, expected):
    assert [generate(engine, [prompt])[0][0] for prompt in prompts] == expected


def test_cached_prefixes_change_nothing(engine, prompts, expected):
    """Restored Mamba checkpoints give the tokens that a full prefill gives."""
    generate(engine, prompts)
    tokens, cached = generate(engine, prompts)
    assert tokens == expected
    long = [n for n, prompt in zip(cached, prompts) if len(prompt) > 256]
    assert all(n >= 128 for n in long)


def test_defaults_were_kept(engine):
    config = engine.llm_engine.vllm_config
    assert config.cache_config.enable_prefix_caching
    assert config.cache_config.mamba_cache_mode == "align"
    assert config.cache_config.mamba_ssm_cache_dtype == "float32"
    assert config.scheduler_config.enable_chunked_prefill


def test_small_prefill_budget_equals_transformers(checkpoint, prompts, expected):
    with offline_engine(
        checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_batched_tokens=48,
        max_num_seqs=4,
    ) as engine:
        for _ in range(2):
            assert generate(engine, prompts)[0] == expected
