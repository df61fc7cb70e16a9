"""Sleep and wake of the vllm engine: whatever fails on the way, vLLM is woken as deep as it may sleep."""

from __future__ import annotations

import asyncio

import pytest

from kvolt.core.errors import InvalidRequest
from kvolt.engines.vllm.engine import SleepState

WOKEN = [None]
WOKEN_WITH_WEIGHTS = [["weights"], "reload_weights", None]


class Core:
    def __init__(self) -> None:
        self.calls: list[int | str | list[str] | None] = []
        self.fails = False
        self.is_sleeping: bool | None = True
        """None: it does not say."""
        self.may_sleep = asyncio.Event()
        self.may_sleep.set()

    async def sleep_async(self, level: int) -> None:
        self.calls.append(level)
        await self.may_sleep.wait()
        if self.fails:
            raise RuntimeError("a worker is stuck")

    async def is_sleeping_async(self) -> bool:
        if self.is_sleeping is None:
            raise TimeoutError
        return self.is_sleeping

    async def wake_up_async(self, tags: list[str] | None = None) -> None:
        self.calls.append(tags)

    async def collective_rpc_async(self, method: str) -> None:
        self.calls.append(method)


@pytest.mark.parametrize("level", [1, 2])
async def test_one_that_sleeps_as_deep_is_let_sleep(level: int) -> None:
    core, rest = Core(), SleepState()
    await rest.sleep(core, 2, 0)
    await rest.sleep(core, level, 0)
    await rest.wake(core)
    assert core.calls == [2, *WOKEN_WITH_WEIGHTS]
    assert not rest.is_asleep


async def test_one_that_sleeps_is_woken_before_it_sleeps_deeper() -> None:
    core, rest = Core(), SleepState()
    await rest.sleep(core, 1, 0)
    with pytest.raises(InvalidRequest, match="woken first") as caught:
        await rest.sleep(core, 2, 0)
    assert caught.value.fields["param"] == "level"
    assert rest.is_asleep
    await rest.wake(core)
    await rest.sleep(core, 2, 0)
    assert core.calls == [1, *WOKEN, 2]


async def test_failed_sleep_of_an_awake_engine_is_reset() -> None:
    core, rest = Core(), SleepState()
    core.fails, core.is_sleeping = True, False
    with pytest.raises(RuntimeError, match="stuck"):
        await rest.sleep(core, 2, 0)
    assert not rest.is_asleep
    core.fails = False
    await rest.sleep(core, 1, 0)
    await rest.wake(core)
    assert core.calls == [2, 1, *WOKEN]


@pytest.mark.parametrize("said", [True, None])
async def test_one_that_sleeps_halfway_has_to_be_woken(said: bool | None) -> None:
    """vLLM schedules nothing from the first moment on."""
    core, rest = Core(), SleepState()
    core.fails, core.is_sleeping = True, said
    with pytest.raises(RuntimeError if said else TimeoutError):
        await rest.sleep(core, 2, 0)
    assert rest.is_asleep
    core.fails = False
    await rest.sleep(core, 1, 0)
    assert core.calls == [2, 1], "it is asked again: it may be awake"
    await rest.sleep(core, 1, 0)
    await rest.wake(core)
    assert core.calls[2:] == WOKEN_WITH_WEIGHTS, "nor is it known that the first did nothing"
    assert not rest.is_asleep


async def test_interrupted_sleep_counts_as_asleep() -> None:
    core, rest = Core(), SleepState()
    core.may_sleep.clear()
    sleeping = asyncio.ensure_future(rest.sleep(core, 1, 0))
    await asyncio.sleep(0)
    sleeping.cancel()
    await asyncio.wait([sleeping])
    assert core.calls == [1]
    assert rest.is_asleep
    await rest.wake(core)
    assert not rest.is_asleep


async def test_one_that_is_woken_on_its_way_is_asked_again_the_next_time() -> None:
    core, rest = Core(), SleepState()
    core.may_sleep.clear()
    sleeping = asyncio.ensure_future(rest.sleep(core, 1, 0))
    await asyncio.sleep(0)
    await rest.wake(core)
    core.may_sleep.set()
    await sleeping
    core.fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError):
            await rest.sleep(core, 1, 0)
    assert core.calls == [1, *WOKEN, 1, 1]
