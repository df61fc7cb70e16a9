"""What a virtual cluster is made of besides real code: its KV links, tier executors, and the checks of routers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

import kvolt.testing.cluster.leftovers as leftovers_module
from kvolt.core.block_key import BlockKeyChain
from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import DeadlineExceeded, NotFound, TransferFailed
from kvolt.core.ids import BlockKey, InstanceId, RequestId
from kvolt.core.kv_events import Cleared, KvChange, KvEvent, KvEventBatch, Removed, Stored, Tier, digest_of
from kvolt.core.request import Request, StopConditions, reader_proof
from kvolt.engines.sim.kv import BLOCK_BYTES, ExpectedKv, SimMemory, key_context
from kvolt.kv import BlockId
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.router.breaker import Outcome
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.ingest.feed import (
    BatchReceived,
    Comparison,
    DigestsCompared,
    EventFeed,
    IngestStats,
    SnapshotReceived,
)
from kvolt.router.ingest.slots import InstanceSlots
from kvolt.router.port import Decision
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.testing.cluster.checked_router import CheckedRouter
from kvolt.testing.cluster.kv_check import BlockContents, EventReplicas, KvCheck
from kvolt.testing.cluster.kv_mover import KvBoard, VirtualMover
from kvolt.testing.cluster.leftovers import lasting_leftovers
from kvolt.testing.cluster.shape import Flow, draw_shape
from kvolt.testing.virtual.loop import run_virtual
from kvolt.testing.virtual.tier_executor import without_threads

KEYS = [BlockKey(bytes([number]) * 16) for number in range(3)]


class Pair:
    """Two workers with three blocks each; those of the first hold something."""

    def __init__(self) -> None:
        self.is_linked = True
        self.violations: list[str] = []
        self.board = KvBoard(lambda first, second: self.is_linked, random.Random(1), self.violations.append)
        self.ours, self.theirs = SimMemory(), SimMemory()
        for number in range(3):
            self.ours.compute(BlockId(number), bytes([number + 1]) * 16)
            self.theirs.write(BlockId(number), bytes(BLOCK_BYTES))
        self.owner = VirtualMover(self.board, "w0", self.ours, BLOCK_BYTES)
        self.reader = VirtualMover(self.board, "w1", self.theirs, BLOCK_BYTES)

    def came(self) -> list[bool]:
        return [self.theirs.read(BlockId(number)) == self.ours.read(BlockId(number)) for number in range(3)]


def test_blocks_are_pulled_once_and_end_the_offer() -> None:
    async def main() -> None:
        pair = Pair()
        offer = pair.owner.offer([0, 1, 2], KEYS, 10.0)
        await pair.reader.pull(offer.ticket, 1, KEYS, [1, 2], 5.0)
        assert pair.came() == [False, True, True]
        await offer.wait_done()
        assert pair.board.num_open == 0
        with pytest.raises(NotFound):
            await pair.reader.pull(offer.ticket, 0, KEYS, [0], 5.0)

    run_virtual(main)


def test_pulls_that_fail_say_so() -> None:
    async def main() -> None:
        pair = Pair()
        pair.board.damaged_share = 1.0
        offer = pair.owner.offer([0], KEYS[:1], 10.0)
        with pytest.raises(TransferFailed, match="checksum"):
            await pair.reader.pull(offer.ticket, 0, KEYS, [0], 5.0)
        pair.board.damaged_share = 0.0
        pair.is_linked = False
        with pytest.raises(DeadlineExceeded):
            await pair.reader.pull(offer.ticket, 0, KEYS, [0], 5.0)
        pair.is_linked = True
        pair.board.crash("w0")
        with pytest.raises(NotFound):
            await pair.reader.pull(offer.ticket, 0, KEYS, [0], 5.0)
        assert pair.came()[0] is False

    run_virtual(main)


def test_messages_are_read_before_or_after_they_are_posted() -> None:
    async def main() -> None:
        pair = Pair()
        pair.owner.post(5, b"early", 60.0)
        assert await pair.reader.receive("w0", 5, 1.0) == b"early"
        asyncio.get_running_loop().call_later(0.5, pair.owner.post, 6, b"late", 60.0)
        assert await pair.reader.receive("w0", 6, 1.0) == b"late"
        with pytest.raises(DeadlineExceeded):
            await pair.reader.receive("w0", 7, 1.0)

    run_virtual(main)  # and no timer of a message that was read is left


def test_tier_calls_take_virtual_time_and_run_in_order() -> None:
    async def main() -> None:
        without_threads()
        thread, order = TierThread("test"), []
        loop = asyncio.get_running_loop()
        calls = [thread.run(order.append, number) for number in range(3)]
        took = [took_s for _, took_s in await asyncio.gather(*calls)]
        assert order == [0, 1, 2]
        assert loop.time() == pytest.approx(0.006)
        assert took == pytest.approx([0.002] * 3)
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
        await thread.close()

    run_virtual(main)


# --- the checks of routers

W0, W1 = (
    Instance(id=InstanceId(name), endpoint=EndpointAddress("n", "c", "generate"), address=f"{name}:1")
    for name in ("w0", "w1")
)
REQUEST = Request(request_id=RequestId("r"), model="m", token_ids=(1,), stop=StopConditions(max_tokens=1))


class OneAnswer:
    """A router that always says the same, and a client that reaches the second worker only."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        return Decision(self.instance)

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None: ...

    def release(self, decision: Decision, usage: object, outcome: Outcome = Outcome.UNKNOWN) -> None: ...

    async def close(self) -> None: ...

    def candidates(self) -> list[Instance]:
        return [W1]


async def release_twice(router: CheckedRouter) -> None:
    decision = await router.route(REQUEST)
    router.release(decision, None)
    router.release(decision, None)


async def begin_after_end(router: CheckedRouter) -> None:
    decision = await router.route(REQUEST)
    router.release(decision, None)
    router.mark_first_token(decision, None)


async def retry_the_same(router: CheckedRouter) -> None:
    router.release(await router.route(REQUEST), None)
    router.release(await router.route(REQUEST), None)


async def ignore_exclusion(router: CheckedRouter) -> None:
    router.release(await router.route(REQUEST, frozenset({W1.id})), None)


@pytest.mark.parametrize(
    ("body", "instance", "found"),
    [
        (release_twice, W1, "released twice"),
        (begin_after_end, W1, "first token twice or after its release"),
        (retry_the_same, W1, "without excluding"),
        (ignore_exclusion, W1, "which has failed it"),
        (ignore_exclusion, W0, "is unreachable"),
    ],
)
def test_what_breaks_the_routers_port_is_noticed(
    body: Callable[[CheckedRouter], object], instance: Instance, found: str
) -> None:
    failures: list[str] = []
    inner = OneAnswer(instance)
    router = CheckedRouter(inner, inner, failures.append)  # type: ignore[arg-type]
    run_virtual(lambda: body(router))  # type: ignore[arg-type, return-value]
    assert len(failures) == 1
    assert found in failures[0]


# --- the checks at rest


def test_a_call_under_way_is_no_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [
        ["r0 still has 3 calls open", "w0 still has 1 block"],
        ["w0 still has 1 block", "w1 still has 2"],
    ]

    async def look(processes: object) -> list[str]:
        return looks.pop(0)

    monkeypatch.setattr(leftovers_module, "leftovers", look)
    assert run_virtual(lambda: lasting_leftovers({}, 0.5)) == ["w0 still has 1 block"]


# --- the checks of KV


def published(*changes: KvChange, first: int = 0) -> bytes:
    events = tuple(KvEvent(first + index, 7, change) for index, change in enumerate(changes))
    return msgspec.msgpack.encode(KvEventBatch(events, W0.id))


def test_a_replica_knows_what_was_published_before_each_event() -> None:
    replicas = EventReplicas()
    replicas.add_batch(published(Stored.from_hashes([1, 2]), Stored.from_hashes([3], tier=Tier.HOST)))
    replicas.add_batch(
        published(Removed.from_hashes([1]), Stored.from_hashes([2]), Cleared(Tier.HOST), first=2)
    )
    assert replicas.digests(W0.id, 7, 0) == {}
    assert replicas.digests(W0.id, 7, 2) == {
        Tier.DEVICE: (2, digest_of([1, 2])),
        Tier.HOST: (1, digest_of([3])),
    }
    assert replicas.digests(W0.id, 7, 5) == {Tier.DEVICE: (1, digest_of([2])), Tier.HOST: (0, 0)}
    assert replicas.digests(W0.id, 7, 1) is None  # within a batch
    assert replicas.digests(W0.id, 8, 2) is None  # of another life


def test_contents_of_blocks_follow_from_requests() -> None:
    contents = BlockContents(block_size=2)
    request = msgspec.structs.replace(REQUEST, token_ids=(5, 6, 7))
    contents.add_request(request, [8, 9])
    keys = BlockKeyChain(key_context("m", 2, request)).extend([5, 6, 7, 8])
    expected = ExpectedKv("m", 2, request)
    expected.reach([5, 6, 7, 8], 2)
    memory = SimMemory()
    for number, fingerprint in enumerate(expected.fingerprints):
        memory.compute(BlockId(number), fingerprint)
    first, second = (memory.read(BlockId(number)) for number in range(2))
    assert contents.is_right(keys[0], first)
    assert contents.is_right(keys[1], second)
    assert not contents.is_right(keys[0], second)
    assert not contents.is_right(KEYS[0], first)  # of no request


def test_an_exact_index_must_equal_what_was_published() -> None:
    failures: list[str] = []
    check, index, stats = KvCheck(failures.append, 2), BlockIndex(), IngestStats()
    feed, slots = EventFeed(stats), InstanceSlots(index, [0], stats)
    followed = SimpleNamespace(feed=feed, slots=slots)
    router = SimpleNamespace(block_index=index, ingest=SimpleNamespace(_sources={W0.id: followed}))
    feed.handle(SnapshotReceived(epoch=7, next_id=0, blocks={}))
    feed.handle(DigestsCompared(Comparison.AGREE))
    check.check_feeds("f0", router)  # type: ignore[arg-type]
    assert failures == []
    payload = published(Stored.from_hashes([1, 2]))
    check.events.add_batch(payload)
    check.check_feeds("f0", router)  # type: ignore[arg-type]
    assert failures == []  # on its way
    batch = msgspec.msgpack.decode(payload, type=KvEventBatch)
    feed.handle(BatchReceived(batch, len(payload)))
    check.check_feeds("f0", router)  # type: ignore[arg-type]
    assert failures == ["f0: device index of w0 is marked exact but differs"]
    slots.apply(batch.events)
    check.check_feeds("f0", router)  # type: ignore[arg-type]
    assert len(failures) == 1


def test_seeds_draw_every_kind_of_cluster() -> None:
    shapes = [draw_shape(seed) for seed in range(200)]
    assert {shape.flow for shape in shapes} == set(Flow)
    assert {shape.routers[0] for shape in shapes} == {"latency", "round-robin"}
    for feature in ("has_router_process", "host_blocks", "disk_blocks", "only_stalls"):
        assert 10 < sum(bool(getattr(shape, feature)) for shape in shapes) < 190
    assert {shape.num_frontends for shape in shapes} == {1, 2}


def test_a_ticket_of_another_worker_is_a_violation() -> None:
    async def main() -> None:
        pair = Pair()
        reader = Identity.of(ProcessRole.WORKER, "d0")
        offer = pair.owner.offer([0], KEYS, 5.0, b"k" * 16)
        pair.board.check_reader(offer, reader_proof(b"k" * 16, reader.uri), reader)
        assert not pair.violations
        pair.board.check_reader(offer, reader_proof(b"k" * 16, "kvolt://worker/d1"), reader)
        assert len(pair.violations) == 1
        offer.cancel()

    run_virtual(main)
