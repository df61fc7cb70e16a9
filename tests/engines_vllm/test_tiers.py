"""kvolt's tiers behind a real vLLM: a prefix that left its memory comes back, and is right or is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kept import SMALL, Kept, VllmHarness

from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Tier
from kvolt.core.request import Request, Role
from kvolt.engines.vllm.arguments import VllmArguments, VllmTiers
from kvolt.testing.engines.block_copies import prefill_of
from kvolt.testing.engines.handoff_cases import prefill_and_move, whole_answer
from kvolt.testing.engines.harness import Answer, Run, block_hashes, engine_run

NUM_BLOCKS = 25
"""In vLLM's memory: three prompts, no more."""
TOKENS = 7 * 32 + 5


@asynccontextmanager
async def tiered(tiny: Path, tiers: VllmTiers, role: Role = Role.AGGREGATED) -> AsyncIterator[Run]:
    engine_args = SMALL | {"num_gpu_blocks_override": NUM_BLOCKS}
    kept = Kept(role, VllmArguments(served_name="tiny", engine_args=engine_args, tiers=tiers), tiny)
    await kept.make_ready()
    try:
        async with engine_run(VllmHarness(kept)) as run:
            yield run
    finally:
        await kept.close()


def request_of(run: Run, name: str, variant: int) -> Request:
    return run.request(name, prompt=TOKENS, variant=variant, tokens=8, seed=5)


async def ask(run: Run, name: str, variant: int) -> Answer:
    return await run.answer(request_of(run, name, variant))


async def fill(run: Run, what: str) -> None:
    """More than vLLM holds, so that what was there before has gone. So few that it does not know how long prompts take:
    what can be brought is."""
    for number in range(5):
        last = await ask(run, f"{what}{number}", 20 + 5 * number + ord(what) % 5)
    await eventually(
        lambda: blocks_of(last) <= told(run, Tier.HOST), "the last blocks are copied beside the steps"
    )


def told(run: Run, tier: Tier) -> set[SequenceHash]:
    """What a router believes to be there. (The run checks that nothing is told twice, or goes that was not there.)"""
    return run.replica._tiers.get(tier, set())


def blocks_of(answer: Answer) -> set[SequenceHash]:
    return set(block_hashes(answer.request, 32))


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Events come by a socket of their own."""
    for _ in range(50):
        if condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(what)


def figures(run: Run) -> dict[tuple[str, str], float]:
    """Of the tiers, as they are at a worker's /metrics."""
    return {
        (sample.name.removeprefix("kvolt_tier_"), sample.labels.get("tier", "")): sample.value
        for family in run.engine.metrics({})  # type: ignore[attr-defined]
        for sample in family.samples
        if sample.name.startswith("kvolt_tier_")
    }


async def test_what_left_the_device_comes_back_from_host_and_disk_and_is_right(
    tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    tiers = VllmTiers(host="24blocks", disk="400blocks", disk_dir=str(folder))
    async with tiered(tiny, tiers) as run:
        first = await ask(run, "first", 1)
        assert first.cached == 0
        await eventually(lambda: blocks_of(first) <= told(run, Tier.HOST), "routers are not told of the host")
        second = await ask(run, "second", 2)
        await fill(run, "x")
        await eventually(lambda: blocks_of(first) <= told(run, Tier.DISK), "routers are not told of the disk")
        assert not blocks_of(first) & told(run, Tier.DEVICE), "it has not left the device"
        assert not blocks_of(first) & told(run, Tier.HOST), "routers are not told what left the host"
        assert len(told(run, Tier.HOST)) <= 24
        again = await ask(run, "again", 1)
        assert again.cached == 7 * 32, "nothing came back"
        assert again.tokens == first.tokens
        await eventually(lambda: blocks_of(first) <= told(run, Tier.HOST), "it came by way of the host")
        assert blocks_of(first) <= told(run, Tier.DEVICE)
        said = figures(run)
        assert said["stored_blocks_total", "host"] >= 7 * 7
        assert said["stored_blocks_total", "disk"] >= 4 * 7
        assert said["loaded_blocks_total", "disk"] == said["loaded_blocks_total", "host"] == 7
        assert said["hit_rate", "disk"] == 7 / (8 * 7)
        assert said["capacity_blocks", "host"] == 24
        assert said["blocks", "disk"] == len(told(run, Tier.DISK))
        await run.assert_empty()
    # Another vLLM, another process: the disk is found again, and one block of it is spoiled.
    async with tiered(tiny, tiers) as run:
        await eventually(
            lambda: blocks_of(first) | blocks_of(second) <= told(run, Tier.DISK),
            "routers are not told of what was found on the disk",
        )
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


async def test_prefill_and_decode_workers_have_tiers_too(tiny: Path) -> None:
    """A prefill worker brings back what it has lost before it hands over; a decode worker what nobody hands over."""
    tiers = VllmTiers(host="100blocks")
    async with AsyncExitStack() as stack:
        runs: list[Run] = []
        for role in (Role.PREFILL, Role.DECODE):
            runs.append(await stack.enter_async_context(tiered(tiny, tiers, role)))
        source, target = runs
        alone = await ask(target, "alone", 1)
        await fill(target, "x")
        again = await ask(target, "again", 1)
        assert again.tokens == alone.tokens
        assert again.cached == 7 * 32, "a decode worker brings nothing"
        for number, variant in enumerate((1, 30, 31, 32, 33, 34, 1)):
            request = request_of(source, f"handed{number}", variant)
            moved = await prefill_and_move(source, target, request)
            assert moved.handoff is not None
            cached = moved.handoff.cached_tokens
            assert cached == (7 * 32 if number == 6 else 0), "a prefill worker brings nothing"
            answer = await target.answer(moved)
            await prefill_of(source).release_prefill(request.request_id)
            if variant == 1:
                assert whole_answer(answer) == alone.tokens
        assert figures(source)["loaded_blocks_total", "host"] == 7
        await eventually(
            lambda: len(told(source, Tier.HOST)) == 6 * 7, "routers are not told of a prefill worker's"
        )
        await source.assert_empty()
        await target.assert_empty()
