"""KV events: numbered from 0 within an epoch, published once per step, the latest kept up to a bound."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.unit.engines.lab import Lab, ScriptedEngine

from kvolt.core.delta import StepOutput
from kvolt.core.endpoints import KV_TOPIC
from kvolt.core.ids import InstanceId, LocalBlockHash, SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, KvEventBatch, Removed, Stored
from kvolt.core.load import WorkerLoad
from kvolt.engines.worker_kv import KvJournal
from kvolt.testing import run_virtual

decode = msgspec.msgpack.Decoder(KvEventBatch).decode


def stored(*hashes: int) -> Stored:
    return Stored(tuple(map(SequenceHash, hashes)), tuple(map(LocalBlockHash, hashes)))


def removed(*hashes: int) -> Removed:
    return Removed(tuple(SequenceHash(each) for each in hashes))


def journal(max_bytes: int = 10_000) -> tuple[KvJournal, list[KvEventBatch]]:
    published: list[KvEventBatch] = []
    made = KvJournal(7, InstanceId("i"), lambda payload: published.append(decode(payload)), max_bytes)
    return made, published


def test_changes_leave_numbered_one_batch_per_step() -> None:
    made, published = journal()
    steps: list[tuple[KvChange, ...]] = [(stored(1, 2), removed(1)), (Cleared(),), (stored(3),)]
    for index, changes in enumerate(steps):
        made.record(changes, dp_rank=index)
    assert [[event.event_id for event in batch.events] for batch in published] == [[0, 1], [2], [3]]
    assert [tuple(event.change for event in batch.events) for batch in published] == steps
    assert {(batch.instance, event.epoch) for batch in published for event in batch.events} == {("i", 7)}
    assert [batch.events[0].dp_rank for batch in published] == [0, 1, 2]
    assert made.counts == {"stored": 3, "removed": 1, "cleared": 1}


def test_recent_batches_can_be_had_again() -> None:
    made, _ = journal()
    for step in range(5):
        made.record((stored(2 * step), stored(2 * step + 1)))
    for event_id in range(10):
        again = [decode(payload) for payload in made.since(event_id) or ()]
        ids = [event.event_id for batch in again for event in batch.events]
        assert ids == list(range(event_id - event_id % 2, 10)), "from the batch that has it on"
    assert made.since(10) == []
    assert made.since(11) == []


def test_the_past_is_bounded_and_says_so() -> None:
    made, published = journal(max_bytes=300)
    for step in range(100):
        made.record((stored(step),))
        assert made.num_bytes <= 300
    assert len(published) == 100
    kept = made.since(99)
    assert kept is not None
    assert len(kept) == 1
    assert made.since(0) is None
    oldest = next(event_id for event_id in range(100) if made.since(event_id) is not None)
    whole = made.since(oldest)
    assert whole is not None
    assert sum(map(len, whole)) == made.num_bytes
    assert 1 < len(whole) < 20


def test_a_batch_larger_than_the_bound_is_published_and_not_kept() -> None:
    made, published = journal(max_bytes=300)
    made.record((stored(*range(1000)),))
    assert len(published) == 1
    assert (made.num_bytes, made.since(0)) == (0, None)


def test_a_worker_publishes_what_its_engine_tells() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engines = [ScriptedEngine(), ScriptedEngine()]
            workers = [await lab.worker(f"w{index}", engine) for index, engine in enumerate(engines)]
            listener = await lab.runtime("listener")
            news = listener.events.subscribe(KV_TOPIC)
            engines[0].put(StepOutput(kv_changes=(stored(1), stored(2))), StepOutput(), StepOutput())
            engines[0].put(StepOutput(load=WorkerLoad(dp_rank=3), kv_changes=(removed(2),)))
            engines[1].put(StepOutput(kv_changes=(stored(1),)))
            await asyncio.sleep(0.1)
            await listener.events.close()
            batches = [decode(event.payload) async for event in news]
            by_instance = {worker.worker._instance: worker for worker in workers}
            assert {batch.instance for batch in batches} == set(by_instance)
            first = workers[0].worker._instance
            told = [event for batch in batches if batch.instance == first for event in batch.events]
            assert [(event.event_id, event.dp_rank) for event in told] == [(0, 0), (1, 0), (2, 3)]
            epochs = {event.epoch for batch in batches for event in batch.events}
            assert len(epochs) == 2, "each start has an epoch of its own"
            assert len([batch for batch in batches if batch.instance == first]) == 2, "nothing for nothing"

    run_virtual(scenario)


@pytest.mark.parametrize("batch", [KvEventBatch(()), KvEventBatch((), InstanceId("i"))])
def test_a_batch_of_an_older_worker_can_be_read(batch: KvEventBatch) -> None:
    assert decode(msgspec.msgpack.encode({"events": []})) == KvEventBatch(())
    assert decode(msgspec.msgpack.encode(batch)) == batch
