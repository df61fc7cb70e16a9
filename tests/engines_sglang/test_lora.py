"""Adapters that a real SGLang loads and unloads while it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kept import SMALL, spec_of
from msgspec.structs import replace

from kvolt.core.errors import InvalidRequest, NotFound
from kvolt.core.request import Sampling
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.engine import SglangEngine
from kvolt.testing.engines.harness import block_hashes, engine_run

_TARGETS = {"q_proj": 64, "v_proj": 32}
_RANK = 4
_LORA = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(_TARGETS)}


def _adapter(folder: Path) -> str:
    """Of the tiny model, in PEFT's layout, with weights that change its answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": 64,
        "target_modules": list(_TARGETS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(3):
        for name, width in _TARGETS.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            weights[f"{stem}A.weight"] = torch.randn(_RANK, 64, generator=generator)
            weights[f"{stem}B.weight"] = torch.randn(width, _RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


class _Harness:
    deadline_s = 120.0

    def __init__(self, model: Path) -> None:
        self._model = model

    def engine(self) -> SglangEngine:
        arguments = SglangArguments(engine_args={**SMALL, **_LORA, "lora_backend": "torch_native"})
        return SglangEngine(spec_of(self._model), arguments)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(20, 20 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        raise NotImplementedError


async def test_adapters_come_and_go(tiny: Path, tmp_path: Path) -> None:
    async with engine_run(_Harness(tiny)) as run:
        engine = run.engine
        assert isinstance(engine, SglangEngine)
        asked = replace(run.request("base", prompt=40), sampling=Sampling(temperature=0.0))
        base = await run.answer(asked)
        with pytest.raises(InvalidRequest):
            engine.submit(replace(asked, lora="a"))
        await engine.load_lora("a", _adapter(tmp_path / "a"))
        adapted = replace(asked, lora="a")
        first = await run.answer(replace(adapted, request_id="first"))
        assert first.tokens != base.tokens
        assert first.cached == 0, "blocks of the base model were taken for the adapter's"
        assert run.replica.num_leading(block_hashes(adapted, 16)) == 2
        second = await run.answer(replace(adapted, request_id="second"))
        assert (second.tokens, second.cached) == (first.tokens, 32)
        assert (await run.answer(replace(asked, request_id="base2"))).tokens == base.tokens
        with pytest.raises(InvalidRequest):
            await engine.load_lora("b", str(tmp_path / "nowhere"))
        await engine.unload_lora("a")
        assert engine.loras() == ()
        with pytest.raises(NotFound):
            await engine.unload_lora("a")
