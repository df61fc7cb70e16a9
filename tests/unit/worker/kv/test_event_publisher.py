"""KV events: numbered from 0 within an epoch, published once per step, the latest kept up to a bound."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from tests.unit.engines.lab import Lab, ScriptedEngine

from kvolt.core.delta import StepOutput
from kvolt.core.endpoints import KV_TOPIC
from kvolt.core.errors import Unsupported
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import (
    HASHES_DTYPE,
    Cleared,
    KvChange,
    KvDigest,
    KvEventBatch,
    Removed,
    Stored,
    digest_of,
)
from kvolt.core.kv_recovery import (
    PART_BYTES,
    KvContents,
    KvEventsSince,
    KvRecoveryRequest,
    KvRecoveryResponse,
    KvReplay,
    KvSnapshot,
    KvSnapshotPart,
)
from kvolt.core.load import WorkerLoad
from kvolt.testing import run_virtual
from kvolt.worker.kv.event_publisher import KvJournal
from kvolt.worker.kv.held_blocks import HeldBlocks

decode = msgspec.msgpack.Decoder(KvEventBatch).decode


def stored(*hashes: int) -> Stored:
    return Stored.from_hashes(hashes)


def removed(*hashes: int) -> Removed:
    return Removed.from_hashes(hashes)


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
        again = [decode(payload) for payload in made.batches_since(event_id) or ()]
        ids = [event.event_id for batch in again for event in batch.events]
        assert ids == list(range(event_id - event_id % 2, 10)), "from the batch that has it on"
    assert made.batches_since(10) == []
    assert made.batches_since(11) == []


def test_the_past_is_bounded_and_says_so() -> None:
    made, published = journal(max_bytes=600)
    for step in range(100):
        made.record((stored(step),))
        assert made.num_bytes <= 600
    assert len(published) == 100
    kept = made.batches_since(99)
    assert kept is not None
    assert len(kept) == 1
    assert made.batches_since(0) is None
    oldest = next(event_id for event_id in range(100) if made.batches_since(event_id) is not None)
    whole = made.batches_since(oldest)
    assert whole is not None
    assert sum(map(len, whole)) == made.num_bytes
    assert 3 < len(whole) < 20


def test_a_batch_larger_than_the_bound_is_published_and_not_kept() -> None:
    made, published = journal(max_bytes=300)
    made.record((stored(*range(1000)),))
    assert len(published) == 1
    assert (made.num_bytes, made.batches_since(0)) == (0, None)


def test_worker_publishes_its_engines_events() -> None:
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


# --- what a router is answered


def answers(made: KvJournal, question: KvRecoveryRequest) -> list[KvRecoveryResponse]:
    """As they arrive."""
    read = msgspec.msgpack.Decoder(KvRecoveryResponse).decode
    return [read(msgspec.msgpack.encode(part)) for part in made.recover(question)]


def test_events_are_replayed() -> None:
    made, published = journal()
    for step in range(5):
        made.record((stored(2 * step), stored(2 * step + 1)))
    [replay] = answers(made, KvEventsSince(7, 5))
    assert isinstance(replay, KvReplay)
    assert (replay.instance, replay.epoch, replay.next_id, replay.is_unavailable) == ("i", 7, 10, False)
    assert [decode(payload) for payload in replay.batches] == published[2:]
    assert replay.digests == (KvDigest(10, digest_of(range(10))),)
    [nothing] = answers(made, KvEventsSince(7, 10))
    assert nothing == KvReplay(InstanceId("i"), 7, 10, digests=replay.digests)


@pytest.mark.parametrize(("epoch", "event_id"), [(6, 99), (6, 0), (7, 0)])
def test_events_that_are_gone_are_said_to_be(epoch: int, event_id: int) -> None:
    made, _ = journal(max_bytes=300)
    for step in range(100):
        made.record((stored(step),))
    [replay] = answers(made, KvEventsSince(epoch, event_id))
    assert isinstance(replay, KvReplay)
    assert (replay.is_unavailable, replay.epoch, replay.batches, replay.next_id) == (True, 7, (), 100)


def test_a_long_replay_comes_in_parts() -> None:
    made, published = journal(max_bytes=10_000_000)
    for step in range(12):
        made.record((stored(*range(step * 10_000, step * 10_000 + 10_000)),))
    parts = answers(made, KvEventsSince(7, 0))
    assert len(parts) > 1
    assert all(isinstance(part, KvReplay) and part.next_id == 12 for part in parts)
    batches = [payload for part in parts if isinstance(part, KvReplay) for payload in part.batches]
    assert [decode(payload) for payload in batches] == published


def test_all_that_is_held_comes_in_parts_with_its_digests() -> None:
    made, _ = journal(max_bytes=0)
    made.record((stored(*range(100_000)), removed(*range(50))))
    made.record((stored(1, 2),), dp_rank=1)
    parts = made.recover(KvContents())
    made.record((stored(3),), dp_rank=1)  # after it was asked: none of it may show
    head, *rest = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=KvRecoveryResponse) for part in parts
    ]
    assert isinstance(head, KvSnapshot)
    assert (head.instance, head.epoch, head.next_id) == ("i", 7, 3)
    held: dict[int, set[int]] = {}
    for part in rest:
        assert isinstance(part, KvSnapshotPart)
        assert len(part.hashes) <= PART_BYTES
        held.setdefault(part.dp_rank, set()).update(np.frombuffer(part.hashes, HASHES_DTYPE).tolist())
    assert held == {0: set(range(50, 100_000)), 1: {1, 2}}
    assert head.digests == tuple(
        KvDigest(len(blocks), digest_of(blocks), dp_rank) for dp_rank, blocks in held.items()
    )


def test_now_and_then_a_batch_says_what_is_held() -> None:
    made, published = journal()
    for step in range(64):
        made.record((stored(step),), dp_rank=step % 2)
    carrying = [batch for batch in published if batch.digests]
    assert len(carrying) == 4
    for batch in carrying:
        [event] = batch.events
        held = range(event.dp_rank, event.event_id + 1, 2)
        assert batch.digests == (KvDigest(len(held), digest_of(held), event.dp_rank),)


def test_a_worker_that_lost_count_says_so(caplog: pytest.LogCaptureFixture) -> None:
    published: list[bytes] = []
    made = KvJournal(7, InstanceId("i"), published.append, held_blocks=HeldBlocks(max_blocks=20))
    for step in range(100):
        made.record((stored(step),))
    with pytest.raises(Unsupported, match="are unknown"):
        made.recover(KvContents())
    [replay] = answers(made, KvEventsSince(7, 98))
    assert isinstance(replay, KvReplay)
    assert len(replay.batches) == 2, "events go on"
    assert not replay.digests
    assert [record.message for record in caplog.records if "more blocks" in record.message] != []
    assert len(caplog.records) == 1
