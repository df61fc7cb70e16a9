"""Adapters that a real vLLM loads and unloads while it runs."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kept import SMALL, Kept, VllmHarness
from msgspec.structs import replace
from own_answers import own_answers

from kvolt.core.errors import InvalidRequest, NotFound
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.engine import VllmEngine
from kvolt.testing.engines.harness import Run, block_hashes, engine_run

TARGETS = {"q_proj": 128, "v_proj": 64}
RANK = 4
BLOCK = SMALL["block_size"]


def adapter(folder: Path, seed: int, rank: int = RANK) -> str:
    """Of the tiny model, in PEFT's layout, with weights that change its answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 64,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, width in TARGETS.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            weights[f"{stem}A.weight"] = torch.randn(rank, 64, generator=generator)
            weights[f"{stem}B.weight"] = torch.randn(width, rank, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
async def adapting(tiny: Path) -> AsyncIterator[Kept]:
    engine_args = SMALL | {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}
    kept = Kept(Role.AGGREGATED, VllmArguments(served_name="tiny", engine_args=engine_args), tiny)
    await kept.make_ready()
    yield kept
    await kept.close()


def asked(run: Run, name: str, lora: str | None = None, tokens: int = 12) -> Request:
    return Request(
        request_id=RequestId(name),
        model=run.info.model,
        token_ids=tuple(range(20, 90)),
        stop=StopConditions(max_tokens=tokens, ignore_eos=True),
        sampling=Sampling(temperature=0.0),
        lora=lora,
    )


def engine_of(run: Run) -> VllmEngine:
    assert isinstance(run.engine, VllmEngine)
    return run.engine


async def test_adapters_come_and_go(adapting: Kept, tmp_path: Path) -> None:
    await adapting.make_ready()
    async with engine_run(VllmHarness(adapting)) as run:
        engine = engine_of(run)
        assert "Lora" in run.info.features
        base = await run.answer(asked(run, "base"))
        with pytest.raises(InvalidRequest, match="no adapter 'poet'"):
            engine.submit(asked(run, "none", "poet"))
        await engine.load_lora("poet", adapter(tmp_path / "poet", 1))
        poet = await run.answer(asked(run, "poet", "poet"))
        assert poet.tokens != base.tokens
        await engine.load_lora("clerk", adapter(tmp_path / "clerk", 2))
        assert engine.loras() == ("poet", "clerk")
        together = [run.submit(asked(run, f"{name}-2", name)) for name in ("poet", "clerk")]
        together.append(run.submit(asked(run, "base-2")))
        await run.finish(*together)
        clerk = together[1]
        assert [each.tokens for each in together] == [poet.tokens, clerk.tokens, base.tokens]
        assert clerk.tokens not in (poet.tokens, base.tokens)
        await engine.unload_lora("poet")
        assert engine.loras() == ("clerk",)
        with pytest.raises(NotFound):
            await engine.unload_lora("poet")
        with pytest.raises(InvalidRequest, match="no adapter 'poet'"):
            engine.submit(asked(run, "gone", "poet"))
        await engine.unload_lora("clerk")
        await run.assert_empty()


async def test_answers_are_vllms_own(adapting: Kept, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    path = adapter(tmp_path / "equal", 3)
    await adapting.make_ready()
    async with engine_run(VllmHarness(adapting)) as run:
        engine = engine_of(run)
        await engine.load_lora("equal", path)
        requests = [asked(run, "with", "equal"), asked(run, "without")]
        ours = [(await run.answer(request)).tokens[0] for request in requests]
        await engine.unload_lora("equal")
    async with own_answers(adapting) as own:
        theirs = [
            await own.tokens(requests[0].token_ids, lora, temperature=0.0, max_tokens=12, ignore_eos=True)
            for lora in (LoRARequest("theirs", 900, path), None)
        ]
    assert ours == theirs
    assert ours[0] != ours[1]


async def test_blocks_are_an_adapters_own(adapting: Kept, tmp_path: Path) -> None:
    await adapting.make_ready()
    async with engine_run(VllmHarness(adapting)) as run:
        engine = engine_of(run)
        await engine.load_lora("own", adapter(tmp_path / "own", 4))
        await engine.load_lora("other", adapter(tmp_path / "other", 5))
        plain, own, other = asked(run, "p"), asked(run, "a", "own"), asked(run, "b", "other")
        salted = replace(own, request_id=RequestId("s"), salt="tenant")
        names = [block_hashes(each, BLOCK) for each in (plain, own, other, salted)]
        assert len({block for each in names for block in each}) == 8, "they are all named otherwise"
        for number, request in enumerate((plain, own, other, salted)):
            answer = await run.answer(request)
            assert answer.cached == 0, f"{request.request_id} was given blocks of others"
            await run.settle()
            told = [run.replica.num_leading(each) for each in names]
            assert told == [2 if index <= number else 0 for index in range(4)]
        for request in (plain, own, other, salted):
            again = await run.answer(replace(request, request_id=RequestId(f"{request.request_id}2")))
            assert again.cached == 2 * BLOCK
        for name in ("own", "other"):
            await engine.unload_lora(name)


async def test_one_that_cannot_be_loaded_does_no_harm(adapting: Kept, tmp_path: Path) -> None:
    await adapting.make_ready()
    async with engine_run(VllmHarness(adapting)) as run:
        engine = engine_of(run)
        base = await run.answer(asked(run, "before"))
        with pytest.raises(InvalidRequest, match="cannot load"):
            await engine.load_lora("nowhere", str(tmp_path / "nowhere"))
        with pytest.raises(InvalidRequest, match="rank"):
            await engine.load_lora("large", adapter(tmp_path / "large", 6, rank=16))
        broken = adapter(tmp_path / "broken", 6)
        (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"no tensors")
        with pytest.raises(InvalidRequest, match="cannot load"):
            await engine.load_lora("broken", broken)
        assert engine.loras() == ()
        assert (await run.answer(asked(run, "after"))).tokens == base.tokens


async def test_one_that_comes_again_with_other_weights_is_another_one(adapting: Kept, tmp_path: Path) -> None:
    """By the same name and from the same folder: vLLM would find the KV of the one before."""
    await adapting.make_ready()
    async with engine_run(VllmHarness(adapting)) as run:
        engine = engine_of(run)
        answers = []
        for seed in (7, 8):
            await engine.load_lora("tuned", adapter(tmp_path / "tuned", seed))
            answers.append(await run.answer(asked(run, f"tuned-{seed}", "tuned")))
            await run.settle()
            await engine.unload_lora("tuned")
        await engine.load_lora("fresh", adapter(tmp_path / "fresh", 8))
        fresh = await run.answer(asked(run, "fresh", "fresh"))
        await engine.unload_lora("fresh")
    assert answers[0].tokens != answers[1].tokens
    assert (answers[1].tokens, answers[1].cached) == (fresh.tokens, 0)


async def test_who_runs_ends_with_it(adapting: Kept, tmp_path: Path) -> None:
    """Also where its files go with it: vLLM would read them again."""
    await adapting.make_ready()
    async with engine_run(VllmHarness(adapting)) as run:
        engine = engine_of(run)
        await engine.load_lora("leaving", adapter(tmp_path / "leaving", 9))
        whole = await run.answer(asked(run, "whole", "leaving", tokens=120))
        running = run.submit(asked(run, "running", "leaving", tokens=120))
        await run.until(lambda: bool(running.tokens))
        unloading = asyncio.ensure_future(engine.unload_lora("leaving"))
        await asyncio.sleep(0)
        assert engine.loras() == ()
        assert not running.done
        await unloading
        assert running.done
        shutil.rmtree(tmp_path / "leaving")
        assert running.tokens == whole.tokens
        await run.assert_empty()
