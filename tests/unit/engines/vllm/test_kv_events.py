"""What ranks say of their blocks, as steps: each of the rank that its load names."""

from __future__ import annotations

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.delta import StepOutput
from kvolt.core.ids import CardHash
from kvolt.core.kv_events import Cleared
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Role
from kvolt.engines.step_queue import StepQueue
from kvolt.engines.vllm.kv_events import KvEventForwarder
from kvolt.runtime.tasks import TaskGroup

INFO = EngineInfo(
    engine="vllm",
    role=Role.AGGREGATED,
    model="m",
    card=CardHash(""),
    block_size=32,
    capacity=Capacity(max_num_seqs=4, max_batch_tokens=64, kv_total_blocks=9),
    dp_ranks=(0, 1, 2),
)


async def told(unread: StepQueue, number: int) -> list[StepOutput]:
    steps = unread.read()
    return [await anext(steps) for _ in range(number)]


async def test_all_ranks_are_cleared_each_by_its_load() -> None:
    unread, task_group = StepQueue(), TaskGroup("test")
    forwarder = KvEventForwarder(unread, lambda number: None)
    forwarder.start(INFO, {}, task_group, has_disk=False)
    busy = WorkerLoad(running=3, kv_total_blocks=9, dp_rank=2)
    forwarder.is_load_changed(busy)
    forwarder.clear()
    steps = await told(unread, 3)
    assert [step.kv_changes for step in steps] == [(Cleared(),)] * 3
    silent = WorkerLoad(kv_total_blocks=9, dp_rank=1)
    assert [step.load for step in steps] == [None, silent, busy], "of the first no load need say so"
    forwarder.close()
    await task_group.close()


def test_a_load_is_news_when_it_is_another() -> None:
    forwarder = KvEventForwarder(StepQueue(), lambda number: None)
    idle, busy, other = WorkerLoad(), WorkerLoad(running=1), WorkerLoad(dp_rank=1)
    assert [forwarder.is_load_changed(each) for each in (idle, idle, busy, other, busy, idle)] == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]
