"""KV that was read after its hold had ended is never used, and a reader that waits keeps its hold: two real vLLMs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from kept import SMALL, Kept, VllmHarness
from late_reader import CHECK, FOLDER, READ, close_gate, is_reached, open_gate
from msgspec.structs import replace

from kvolt.core.request import Role
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.launch import NIXL
from kvolt.testing.engines.block_copies import prefill_of, prefilled
from kvolt.testing.engines.handoff_cases import prefill_and_move, whole_answer
from kvolt.testing.engines.harness import Run, engine_run

HOLD_S = 3.0
NUM_OTHERS = 16
"""Prompts that overwrite all that the owner had."""
MOVING = {"kv_transfer_config": {"kv_connector": NIXL, "kv_role": "kv_both"}}
LATE = {"kv_transfer_config": MOVING["kv_transfer_config"] | {"kv_connector_module_path": "late_reader"}}


class Pair(NamedTuple):
    owner: Run
    reader: Run
    folder: Path


@pytest.fixture(scope="module")
async def kept_pair(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Kept, Kept, Path]]:
    folder = tmp_path_factory.mktemp("gate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        kept = []
        for more in (MOVING, LATE):
            arguments = VllmArguments(served_name="tiny", engine_args=SMALL | more, hold_s=HOLD_S)
            kept.append(Kept(Role.AGGREGATED, arguments, tiny))
            await kept[-1].make_ready()
        yield kept[0], kept[1], folder
        for each in kept:
            await each.close()


@pytest.fixture
async def pair(kept_pair: tuple[Kept, Kept, Path]) -> AsyncIterator[Pair]:
    *both, folder = kept_pair
    async with AsyncExitStack() as stack:
        runs = []
        for kept in both:
            await kept.make_ready()
            runs.append(await stack.enter_async_context(engine_run(VllmHarness(kept))))
        yield Pair(runs[0], runs[1], folder)
        open_gate(folder)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not is_so():
            await asyncio.sleep(0.02)


async def overwrite(owner: Run) -> None:
    """All blocks that the owner does not hold."""
    answers = [
        owner.submit(owner.request(f"other-{number}", prompt=240, tokens=2, variant=number + 5))
        for number in range(NUM_OTHERS)
    ]
    for each in answers:
        await owner.finish(each)


@pytest.mark.parametrize("gate", [READ, CHECK])
async def test_kv_read_after_its_hold_is_computed_again(pair: Pair, gate: str) -> None:
    """The request's time ends while its reader stands still before the read, or between the read and the check."""
    owner, reader, folder = pair
    request = owner.request(f"late-{gate}", prompt=200, tokens=24)
    expected = await owner.answer(request)
    handoff = await prefilled(owner, replace(request, deadline_s=1.0))
    close_gate(folder, gate)
    answer = reader.submit(replace(request, handoff=handoff))
    await until(lambda: is_reached(folder))
    await until(lambda: owner.load.kv_used_blocks == 0)  # its hold has expired
    await overwrite(owner)
    open_gate(folder)
    await reader.finish(answer)
    assert whole_answer(answer) == expected.tokens
    assert answer.stages is None, "what was read late was used"
    await owner.assert_empty()
    await reader.assert_empty()


async def test_a_reader_that_stands_still_keeps_its_hold(pair: Pair) -> None:
    """For longer than the hold lasts without a renewal, as in a long step of the reader."""
    owner, reader, folder = pair
    request = owner.request("slow", prompt=200, tokens=24)
    expected = await owner.answer(request)
    moved = await prefill_and_move(owner, reader, request)
    close_gate(folder, READ)
    answer = reader.submit(moved)
    await until(lambda: is_reached(folder))
    await asyncio.sleep(HOLD_S * 1.5)
    await overwrite(owner)
    open_gate(folder)
    await reader.finish(answer)
    assert whole_answer(answer) == expected.tokens
    assert answer.stages is not None, "its KV was not used"
    assert answer.stages.transfer_bytes
    assert answer.stages.transfer_path == "nixl"
    await until(lambda: owner.load.kv_used_blocks == 0)  # released after the check
    await owner.assert_empty()


async def test_a_released_hold_is_gone_at_once(pair: Pair) -> None:
    owner, reader, folder = pair
    request = owner.request("released", prompt=200, tokens=24)
    expected = await owner.answer(request)
    moved = await prefill_and_move(owner, reader, request)
    close_gate(folder, READ)
    answer = reader.submit(moved)
    await until(lambda: is_reached(folder))
    await prefill_of(owner).release_prefill(request.request_id)
    await until(lambda: owner.load.kv_used_blocks == 0)
    await overwrite(owner)
    open_gate(folder)
    await reader.finish(answer)
    assert whole_answer(answer) == expected.tokens
    assert answer.stages is None


async def test_an_owner_that_waits_for_its_reader_leaves_the_cores_to_others(pair: Pair) -> None:
    owner, reader, folder = pair
    processes = [each for each in psutil.Process().children(recursive=True) if "VLLM" in each.name()]
    assert len(processes) >= 4
    for process in processes:
        for thread in process.threads():
            assert os.sched_getaffinity(thread.id) == os.sched_getaffinity(0), "pinned to a core"
    request = owner.request("waits", prompt=200, tokens=24)
    moved = await prefill_and_move(owner, reader, request)
    close_gate(folder, READ)
    answer = reader.submit(moved)
    await until(lambda: is_reached(folder))
    clock = asyncio.get_running_loop().time
    began_at, used_s = clock(), sum(map(cpu_s, processes))
    await asyncio.sleep(HOLD_S)
    share = (sum(map(cpu_s, processes)) - used_s) / (clock() - began_at)
    open_gate(folder)
    await reader.finish(answer)
    assert share < 0.6, f"{share:.2f} cores are busy with waiting"


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
