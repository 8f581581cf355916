# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Copies of the odd checkpoint in other layouts, or damaged."""

import json
import shutil
from collections.abc import Callable

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.engine import CHECKPOINTS

CHECKPOINT = CHECKPOINTS["odd"]
EXPERTS = {"gate_and_up_projs": "up_proj", "down_projs": "down_proj"}


def read_tensors() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata()


def copy_checkpoint(folder, edit: Callable[[dict], None] = lambda tensors: None):
    """Copy the checkpoint, its tensors changed by `edit`."""
    shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
    tensors, metadata = read_tensors()
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata)
    return folder


def to_hugging_face_layout(tensors: dict[str, torch.Tensor]) -> None:
    """Rename the decoder as the FP8 and NVFP4 releases do, experts unpacked."""
    for name in [name for name in tensors if name.startswith("llm.")]:
        tensor = tensors.pop(name)
        new = name.replace("._fp32_params.", ".")
        if not new.startswith("llm.mtp."):
            new = new.removeprefix("llm.").replace("model.", "backbone.", 1)
            new = new.replace("backbone.embed_tokens", "backbone.embeddings")
            new = new.replace("backbone.norm.", "backbone.norm_f.")
        parent, _, leaf = new.rpartition(".")
        if leaf not in EXPERTS:
            tensors[new] = tensor
            continue
        for expert, weight in enumerate(tensor):
            tensors[f"{parent}.{expert}.{EXPERTS[leaf]}.weight"] = weight.T.contiguous()


def split_into_shards(folder) -> None:
    """Spread the tensors over three files, decoder, head and tower mixed."""
    tensors, metadata = read_tensors()
    names = sorted(tensors, key=lambda name: name[::-1])
    weight_map = {}
    for shard in range(3):
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[shard::3]}
        save_file(part, folder / file, metadata)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


# Edits for `copy_checkpoint`.


def drop(name):
    return lambda tensors: tensors.pop(name)


def reshape(name):
    def edit(tensors):
        tensors[name] = tensors[name][:-1].contiguous()

    return edit


def add(name):
    def edit(tensors):
        tensors[name] = torch.zeros(2, dtype=torch.bfloat16)

    return edit
