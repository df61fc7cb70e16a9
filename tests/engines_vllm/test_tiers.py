"""kvolt's tiers behind a real vLLM: a prefix that left its memory comes back, and is right or is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kept import SMALL, Kept, VllmHarness

from kvolt.core.request import Role
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.tier_settings import VllmTiers
from kvolt.testing.engine_harness import Answer, Run, engine_run

NUM_BLOCKS = 25
"""In vLLM's memory: three prompts, no more."""
TOKENS = 7 * 32 + 5


@asynccontextmanager
async def tiered(tiny: Path, tiers: VllmTiers) -> AsyncIterator[Run]:
    engine_args = SMALL | {"num_gpu_blocks_override": NUM_BLOCKS}
    kept = Kept(
        Role.AGGREGATED, VllmArguments(served_name="tiny", engine_args=engine_args, tiers=tiers), tiny
    )
    await kept.make_ready()
    try:
        async with engine_run(VllmHarness(kept)) as run:
            yield run
    finally:
        await kept.close()


async def ask(run: Run, name: str, variant: int) -> Answer:
    return await run.answer(run.request(name, prompt=TOKENS, variant=variant, tokens=8, seed=5))


async def fill(run: Run, what: str) -> None:
    """More than vLLM holds, so that what was there before has gone."""
    for number in range(6):
        await ask(run, f"{what}{number}", 20 + 5 * number + hash(what) % 5)
    await asyncio.sleep(0.5)  # the last blocks are copied beside the steps


async def test_what_left_the_device_comes_back_from_host_and_disk_and_is_right(
    tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    tiers = VllmTiers(host="24blocks", disk="400blocks", disk_dir=str(folder))
    async with tiered(tiny, tiers) as run:
        first = await ask(run, "first", 1)
        assert first.cached == 0
        second = await ask(run, "second", 2)
        await fill(run, "x")
        again = await ask(run, "again", 1)
        assert again.cached == 7 * 32, "nothing came back"
        assert again.tokens == first.tokens
        await run.assert_empty()
    # Another vLLM, another process: the disk is found again, and one block of it is spoiled.
    async with tiered(tiny, tiers) as run:
        restarted = await ask(run, "restarted", 1)
        assert restarted.tokens == first.tokens
        assert restarted.cached == 7 * 32, "nothing was found on the disk"
        await fill(run, "y")
        files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
        assert files, list(folder.rglob("*"))
        for path in files:
            with path.open("r+b") as file:
                for start in range(0, path.stat().st_size, 4096):
                    file.seek(start + 100)
                    file.write(b"\xff\x00\xff\x00")
        spoiled = await ask(run, "spoiled", 2)
        assert spoiled.tokens == second.tokens, "a spoiled block was used"
        assert (spoiled.cached or 0) < 7 * 32, "it was not looked at"
        await run.assert_empty()
