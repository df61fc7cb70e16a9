"""Adapters as PEFT writes them, and what transformers makes of the same weights merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.unit.engines.native.equality_lab import Reference

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Reference,
    seed: int = 0,
    modules: tuple[str, ...] = MODULES,
    *,
    rank: int = 4,
    **config: Any,
) -> Path:
    """Random pairs for `modules` of every layer. `config` are fields of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in base.model.named_modules():
        if name.split(".")[-1] in modules:
            rows, columns = module.weight.shape
            stem = f"base_model.model.{name}.lora_"
            tensors[f"{stem}A.weight"] = torch.randn((rank, columns), generator=generator) * 0.2
            tensors[f"{stem}B.weight"] = torch.randn((rows, rank), generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "bias": "none",
        "target_modules": list(modules),
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    return folder


def merged(base: Reference, folder: Path, scale: float = 2.0) -> Reference:
    """The base with `scale * B A` added to its weights."""
    from safetensors.torch import load_file

    model = copy.deepcopy(base.model)
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                up = tensors[name.replace(".lora_A.", ".lora_B.")]
                module = model.get_submodule(
                    name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                )
                module.weight += scale * (up @ down)
    return Reference(model)
