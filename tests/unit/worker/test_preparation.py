"""A request that goes into an engine, or to others, by way of the tiers: what is under way beside it, what is left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvolt.core.ids import BlockKey, RequestId
from kvolt.core.request import Request, StopConditions
from kvolt.runtime.tasks import TaskGroup
from kvolt.worker.kv.tiering import Tiering
from kvolt.worker.preparation import onboard_then_submit

REQUEST = Request(request_id=RequestId("r"), model="m", token_ids=(1, 2), stop=StopConditions(max_tokens=1))
KEYS = (BlockKey(b"k" * 16),)


class Tiers:
    """Stands where Tiering does. `coming`: whether something comes while the prompt is computed."""

    def __init__(self, coming: bool = False) -> None:
        self.coming = coming
        self.story: list[str] = []

    async def onboard(self, request: Request, keys: tuple[BlockKey, ...]) -> None:
        self.story.append("onboard")

    def has_concurrent(self, request_id: RequestId) -> bool:
        return self.coming

    async def onboard_concurrently(self, request_id: RequestId) -> None:
        self.story.append("ahead")
        try:
            await asyncio.sleep(60)
        finally:
            self.story.append("ahead is over")

    def release_kept(self, request_id: RequestId) -> None:
        self.story.append("let go")


class Others:
    """What is done in the place of the engine."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.go_on = asyncio.Event()

    async def work(self) -> None:
        self.tiers.story.append("work")
        await self.go_on.wait()
        self.tiers.story.append("done")


def begin(task_group: TaskGroup, tiers: Tiers, others: Others) -> asyncio.Task[None]:
    unused: Any = None
    requests: Any = SimpleNamespace(get=lambda request_id: None)
    return task_group.start(
        onboard_then_submit(cast(Tiering, tiers), REQUEST, KEYS, requests, unused, others.work), "onboard"
    )


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_cancelled_before_its_first_step_nothing_was_begun() -> None:
    """A coroutine that nobody awaits would be a warning, and warnings are errors here."""
    task_group, tiers = TaskGroup("test"), Tiers()
    task = begin(task_group, tiers, Others(tiers))
    task.cancel()
    await asyncio.wait([task])
    assert tiers.story == []
    await task_group.close()


@pytest.mark.parametrize("coming", [False, True])
async def test_only_what_comes_has_a_task(coming: bool) -> None:
    task_group, tiers = TaskGroup("test"), Tiers(coming)
    others = Others(tiers)
    task = begin(task_group, tiers, others)
    before = len(asyncio.all_tasks())
    await settled()
    assert len(asyncio.all_tasks()) - before == int(coming)
    others.go_on.set()
    await task
    beside, after = (["ahead"], ["ahead is over"]) if coming else ([], [])
    assert tiers.story == ["onboard", "work", *beside, "done", *after]
    await task_group.close()


@pytest.mark.parametrize("coming", [False, True])
async def test_cancelling_releases_the_blocks(coming: bool) -> None:
    task_group, tiers = TaskGroup("test"), Tiers(coming)
    task = begin(task_group, tiers, Others(tiers))
    await settled()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert tiers.story[-1] == "let go"
    await task_group.close()
