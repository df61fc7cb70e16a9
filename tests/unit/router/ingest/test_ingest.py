"""KvIngest with real workers on virtual time: the index matches the workers, whatever the event plane loses."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.unit.engines.lab import (
    ARGUMENTS,
    MODEL,
    Lab,
    RunningWorker,
    ScriptedEngine,
    sim,
    until,
)

from kvolt.core.card import EngineInfo
from kvolt.core.delta import StepOutput
from kvolt.core.endpoints import KV_TOPIC
from kvolt.core.errors import KvoltError, Unavailable
from kvolt.core.hashing import SequenceHasher
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.kv_events import Cleared, KvChange, KvEvent, KvEventBatch, Removed, Stored
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, StopConditions
from kvolt.engines.sim.engine import SimEngine
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.ingest import ingest as ingest_module
from kvolt.router.ingest.feed import FeedState
from kvolt.router.ingest.ingest import IngestOptions, KvIngest
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.testing import run_virtual
from kvolt.worker.kv.held_blocks import HeldBlocks
from kvolt.worker.worker import WorkerOptions

BLOCK = ARGUMENTS.block_size
SMALL = msgspec.structs.replace(ARGUMENTS, kv_blocks=40, context_length=400)
"""So few blocks that they are evicted all the time."""
OPTIONS = IngestOptions(quiet_s=1.0)


def stored(*hashes: int) -> Stored:
    return Stored.from_hashes(hashes)


class Telling(ScriptedEngine):
    """Tells what a test puts."""

    def __init__(self, **info: Any) -> None:
        super().__init__()
        self._info = info

    async def start(self) -> EngineInfo:
        return msgspec.structs.replace(await super().start(), **self._info)

    async def clear_kv(self) -> int:
        return 0

    def tell(self, *changes: KvChange, dp_rank: int = 0) -> None:
        self.put(StepOutput(load=WorkerLoad(dp_rank=dp_rank) if dp_rank else None, kv_changes=changes))


class Router:
    """A router's half, in a process of its own."""

    def __init__(self, client: EndpointClient, ingest: KvIngest, index: BlockIndex) -> None:
        self.client = client
        self.ingest = ingest
        self.index = index

    @classmethod
    async def of(
        cls, lab: Lab, running: RunningWorker, options: IngestOptions = OPTIONS, name: str = "router"
    ) -> Router:
        runtime = await lab.runtime(name)
        client = await runtime.client(running.endpoint)
        index = BlockIndex()
        router = cls(client, KvIngest(client, runtime, index, BLOCK, options), index)
        lab._closing.append(router.ingest.close)
        router.ingest.start()
        return router

    def blocks(self, running: RunningWorker, dp_rank: int = 0) -> set[int] | None:
        slot = self.ingest.slot_of(running.worker._instance, dp_rank)
        return None if slot is None else set(self.index.contents(slot))

    def state(self, running: RunningWorker) -> FeedState:
        return self.ingest.state_of(running.worker._instance)

    async def exact(self, *workers: RunningWorker) -> None:
        await until(lambda: all(self.state(each) is FeedState.EXACT for each in workers))


async def held(running: RunningWorker) -> set[int]:
    assert isinstance(running.engine, SimEngine)
    return {each for stored in await running.engine.kv_contents() for each in stored.sequence_hashes}


async def ask(client: EndpointClient, name: str, tokens: Sequence[int], running: RunningWorker) -> None:
    request = Request(
        request_id=RequestId(name), model=MODEL, token_ids=tuple(tokens), stop=StopConditions(max_tokens=4)
    )
    instance = client.get_instance(running.worker._instance)
    async with await client.stream(request, instance) as stream:
        async for _ in stream:
            pass


async def load(router: Router, workers: Sequence[RunningWorker], seed: int = 1, number: int = 40) -> None:
    """Prompts that share starts, some of which push others out."""
    rng = random.Random(seed)
    for count in range(number):
        start = [rng.randrange(3, 6)] * (BLOCK * rng.randrange(1, 6))
        end = [rng.randrange(3, 200) for _ in range(rng.randrange(1, 100))]
        await ask(router.client, f"{seed}-{count}", start + end, workers[count % len(workers)])


def test_a_prompt_is_found_where_it_was_computed() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}") for number in range(2)]
            router = await Router.of(lab, workers[0])
            await router.exact(*workers)
            assert router.blocks(workers[0]) == set()
            prompt = list(range(3, 3 + 5 * BLOCK))
            await ask(router.client, "a", prompt, workers[1])
            hasher = SequenceHasher(BLOCK)
            hasher.extend(prompt)
            found = router.ingest.find(tuple(hasher.sequence))
            slots = [router.ingest.slot_of(worker.worker._instance) for worker in workers]
            assert [found[slot] for slot in slots] == [0, 5]
            assert router.ingest.stats.num_gaps == router.ingest.stats.num_failures == 0

    run_virtual(scenario)


def test_a_late_router_gets_a_snapshot() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", sim(SMALL)) for number in range(3)]
            early = await Router.of(lab, workers[0])
            await early.exact(*workers)
            await load(early, workers)
            late = await Router.of(lab, workers[0], name="late")
            await late.exact(*workers)
            for worker in workers:
                blocks = await held(worker)
                assert blocks
                assert late.blocks(worker) == early.blocks(worker) == blocks
            assert late.ingest.stats.num_snapshots == 3
            assert late.ingest.num_in_state(FeedState.EXACT) == 3
            await load(late, workers, seed=2)
            assert late.ingest.stats.num_events > 0
            for worker in workers:
                assert late.blocks(worker) == await held(worker)

    run_virtual(scenario)


@pytest.mark.parametrize("history_bytes", [0, 2000, 4_000_000], ids=["no history", "little", "enough"])
@pytest.mark.parametrize("lost", [0.1, 0.6])
def test_what_the_plane_loses_is_found_again(history_bytes: int, lost: float) -> None:
    async def scenario() -> None:
        rng = random.Random(5)

        def way(publisher: str, subscriber: str) -> float | None:
            return None if rng.random() < lost else rng.uniform(0.0, 0.02)

        async with Lab() as lab:
            lab.bus = MemBus(way)
            options = WorkerOptions(kv_history_bytes=history_bytes)
            workers = [await lab.worker(f"w{each}", sim(SMALL), options=options) for each in range(2)]
            router = await Router.of(lab, workers[0])
            await router.exact(*workers)
            await load(router, workers)
            await asyncio.sleep(5 * OPTIONS.quiet_s)
            for worker in workers:
                assert router.blocks(worker) == await held(worker)
                assert router.state(worker) is FeedState.EXACT
            stats = router.ingest.stats
            assert stats.num_gaps > 0
            assert stats.num_mismatches == stats.num_failures == 0
            if history_bytes > 1_000_000:
                assert stats.num_snapshots == 2, "those of the beginning"
                assert stats.num_replayed_events > 0
            if history_bytes == 0:
                assert stats.num_snapshots > 2

    run_virtual(scenario)


def test_the_last_event_may_be_lost_with_none_after_it() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling())
            router = await Router.of(lab, running)
            await router.exact(running)
            lab.bus.drop_next(running.runtime.events.publisher, 1)
            engine.tell(stored(1, 2))
            await asyncio.sleep(0.1)
            assert router.blocks(running) == set()
            assert router.state(running) is FeedState.EXACT, "the loss is not visible yet"
            await asyncio.sleep(3 * OPTIONS.quiet_s)
            assert router.blocks(running) == {1, 2}

    run_virtual(scenario)


def test_the_old_state_serves_until_the_new_one_is_there() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            options = WorkerOptions(kv_history_bytes=0)
            running = await lab.worker("w0", engine := Telling(), options=options)
            router = await Router.of(lab, running)
            await router.exact(running)
            engine.tell(stored(1, 2, 3))
            await asyncio.sleep(0.1)
            lab.network.partition("router", "w0")
            lab.bus.drop_next(running.runtime.events.publisher, 1)
            engine.tell(Removed.from_hashes([1]))
            await asyncio.sleep(0.1)
            engine.tell(stored(4))
            await asyncio.sleep(1.0)
            assert router.state(running) is FeedState.RECOVERING
            assert router.blocks(running) == {1, 2, 3}
            assert router.ingest.num_unapplied == 2
            await asyncio.sleep(6.0)
            assert router.ingest.stats.num_failures > 0
            if router.blocks(running) is not None:  # its lease may be over
                assert router.blocks(running) == {1, 2, 3}
            lab.network.heal("router", "w0")
            await router.exact(running)
            assert router.blocks(running) == {2, 3, 4}
            assert router.ingest.num_unapplied == 0

    run_virtual(scenario)


def test_a_deregistered_worker_loses_its_blocks() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", Telling()) for number in range(2)]
            router = await Router.of(lab, workers[0])
            await router.exact(*workers)
            for worker in workers:
                worker.engine.tell(stored(1, 2))
            await until(lambda: router.index.num_pairs == 4)
            slot = router.ingest.slot_of(workers[0].worker._instance)
            await workers[0].runtime.close()
            await until(lambda: router.blocks(workers[0]) is None)
            assert router.state(workers[0]) is FeedState.NO_EVENTS
            assert router.blocks(workers[1]) == {1, 2}
            assert router.index.num_pairs == 2
            again = await lab.worker("w2", Telling())
            await router.exact(again)
            assert router.ingest.slot_of(again.worker._instance) == slot, "its place is used again"
            assert router.blocks(again) == set()
            await router.ingest.close()
            assert router.index.num_pairs == 0
            await workers[1].runtime.close()  # no listener is left

    run_virtual(scenario)


def test_a_worker_whose_engine_starts_anew_has_another_epoch() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling())
            engine.tell(stored(1, 2))
            router = await Router.of(lab, running)
            await router.exact(running)
            worker = running.worker
            assert worker.info is not None
            worker._start_metrics(worker.info, "component", 0.0)  # a new journal
            engine.tell(stored(9))
            await until(lambda: router.blocks(running) == {9})
            assert router.ingest.stats.num_epochs == 1
            assert router.state(running) is FeedState.EXACT

    run_virtual(scenario)


def test_ranks_have_slots_of_their_own() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling(dp_ranks=(0, 1)))
            router = await Router.of(lab, running)
            await router.exact(running)
            engine.tell(stored(1))
            engine.tell(stored(2, 3), dp_rank=1)
            engine.tell(stored(4), dp_rank=5)
            await asyncio.sleep(0.1)
            assert (router.blocks(running), router.blocks(running, 1)) == ({1}, {2, 3})
            assert router.blocks(running, 5) is None
            engine.tell(Cleared(), dp_rank=1)
            await asyncio.sleep(0.1)
            assert (router.blocks(running), router.blocks(running, 1)) == ({1}, set())
            assert router.ingest.stats.num_unknown_ranks == 1
            late = await Router.of(lab, running, name="late")
            await late.exact(running)
            assert (late.blocks(running), late.blocks(running, 1)) == ({1}, set())

    run_virtual(scenario)


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"block_size": BLOCK * 2}, f"its blocks have {BLOCK * 2} tokens, this router's {BLOCK}"),
        ({"hash_scheme": "sha256"}, "it hashes blocks by 'sha256'"),
        ({"features": ("Lora",)}, "publishes none"),
        ({"kv_events": False}, "publishes none"),
        ({"dp_ranks": tuple(range(10_000))}, "room"),
    ],
    ids=["block size", "hash scheme", "no events", "events off", "too many ranks"],
)
def test_what_cannot_be_compared_is_refused_aloud(
    info: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling(**info))
            router = await Router.of(lab, running)
            instance = running.worker._instance
            await until(lambda: router.ingest.rejection_reason(instance) is not None)
            assert why in (router.ingest.rejection_reason(instance) or "")
            engine.tell(stored(1))
            await running.runtime.cordon()  # registers anew: no second word about it
            await running.runtime.resume()
            await asyncio.sleep(3 * OPTIONS.quiet_s)
            assert router.state(running) is FeedState.NO_EVENTS
            assert router.ingest.num_in_state(FeedState.NO_EVENTS) == 1
            assert router.ingest.slot_of(instance) is None
            assert router.index.num_pairs == 0
            warnings = [
                record.getMessage() for record in caplog.records if "KV events" in record.getMessage()
            ]
            assert len(warnings) == 1
            assert "w0" in warnings[0]
            assert why in warnings[0]
            await running.runtime.close()
            await until(lambda: router.ingest.rejection_reason(instance) is None)

    caplog.set_level(logging.WARNING)
    run_virtual(scenario)


def test_an_instance_without_metadata_is_rejected() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", Telling())
            runtime = await lab.runtime("router")
            address = running.runtime.plane.address
            assert address is not None
            client = await runtime.client(running.endpoint, static=[address])
            ingest = KvIngest(client, runtime, BlockIndex(), BLOCK)
            ingest.start()
            assert "cannot be decoded" in (ingest.rejection_reason(client.instances()[0].id) or "")
            await ingest.close()
            await ingest.close()

    run_virtual(scenario)


def test_a_wrong_index_is_noticed_and_put_right() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling())
            router = await Router.of(lab, running)
            await router.exact(running)
            engine.tell(stored(1, 2))
            await asyncio.sleep(0.1)
            slot = router.ingest.slot_of(running.worker._instance)
            assert slot is not None
            router.index.store(slot, (99,))
            await asyncio.sleep(3 * OPTIONS.quiet_s)
            assert router.blocks(running) == {1, 2}, "a quiet worker says what it holds"
            router.index.remove(slot, (1,))
            for number in range(100, 120):
                engine.tell(stored(number))
            await asyncio.sleep(0.1)
            assert router.blocks(running) == {1, 2, *range(100, 120)}, "and a busy one now and then"
            assert router.ingest.stats.num_mismatches == 2
            assert router.state(running) is FeedState.EXACT

    run_virtual(scenario)


def test_resync_requests_a_snapshot() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling())
            router = await Router.of(lab, running)
            await router.exact(running)
            engine.tell(stored(1, 2))
            await asyncio.sleep(0.1)
            slot = router.ingest.slot_of(running.worker._instance)
            assert slot is not None
            router.index.store(slot, (99,))
            router.ingest.resync(running.worker._instance)
            await asyncio.sleep(0.1)
            assert router.blocks(running) == {1, 2}
            router.ingest.resync(InstanceId("nobody"))

    run_virtual(scenario)


def test_without_snapshots_only_new_blocks_are_indexed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling())
            assert running.worker.journal is not None
            running.worker.journal._held_blocks = HeldBlocks(max_blocks=1)
            engine.tell(stored(1, 2))
            await asyncio.sleep(0.1)
            router = await Router.of(lab, running)
            await until(lambda: router.state(running) is FeedState.PARTIAL)
            engine.tell(stored(3))
            await asyncio.sleep(3 * OPTIONS.quiet_s)
            assert router.blocks(running) == {3}
            assert router.state(running) is FeedState.PARTIAL
            lab.bus.drop_next(running.runtime.events.publisher, 1)
            engine.tell(stored(4))
            engine.tell(Removed.from_hashes([3]))
            await asyncio.sleep(0.1)
            assert router.blocks(running) == {4}, "missed events are still replayed"

    caplog.set_level(logging.WARNING)
    run_virtual(scenario)
    assert len([each for each in caplog.records if "KV snapshot not supported" in each.getMessage()]) == 1


def test_a_large_worker_is_learned_in_parts() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling())
            engine.tell(stored(*range(300_000)))
            await asyncio.sleep(0.1)
            router = await Router.of(lab, running)
            await router.exact(running)
            assert router.blocks(running) == set(range(300_000))

    run_virtual(scenario)


def test_what_is_not_ours_or_cannot_be_read_is_left_alone() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling())
            router = await Router.of(lab, running)
            await router.exact(running)
            stranger = await lab.runtime("stranger")
            instance = running.worker._instance
            for payload in (
                b"",
                b"\xc1",
                msgspec.msgpack.encode({"events": 3, "instance": instance}),
                msgspec.msgpack.encode(KvEventBatch(())),
                msgspec.msgpack.encode(KvEventBatch((), InstanceId("other"))),
                msgspec.msgpack.encode({"events": "what is this", "instance": "other"}),
            ):
                stranger.events.publish(KV_TOPIC, payload)
            engine.tell(stored(1))
            await asyncio.sleep(0.1)
            assert router.blocks(running) == {1}
            assert router.ingest.stats.num_malformed == 3

    run_virtual(scenario)


def test_events_in_the_name_of_a_worker_are_taken_from_its_process_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a cluster key, another worker's certificate is no right to say what this one holds."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling())
            router = await Router.of(lab, running)
            await router.exact(running)
            rogue = MemEvents(lab.bus, "rogue", identity="kvolt://worker/rogue")
            await rogue.start()
            instance = running.worker._instance
            for number in range(3):
                change = Stored.from_hashes([number])
                batch = KvEventBatch((KvEvent(number + 1, 1, change),), instance)
                rogue.publish(KV_TOPIC, msgspec.msgpack.encode(batch))
            engine.tell(stored(1))
            await asyncio.sleep(0.1)
            assert router.blocks(running) == {1}
            assert router.ingest.forged.num_events == 3
            await rogue.close()

    run_virtual(scenario)
    assert len([each for each in caplog.records if "event refused" in each.message]) == 2, "the 1st and 2nd"


def test_recoveries_are_bounded_and_retried_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, str]] = []
    now_open = most_open = num_failed = 0
    real = ingest_module.request_recovery

    async def slow(plane: Any, instance: Any, question: Any, deadlines: Any) -> Any:
        nonlocal now_open, most_open, num_failed
        loop = asyncio.get_running_loop()
        asked.append((loop.time(), instance.process))
        now_open += 1
        most_open = max(most_open, now_open)
        try:
            await asyncio.sleep(0.05)
            if loop.time() < asked[0][0] + 20.0:
                num_failed += 1
                raise Unavailable("not now")
            return await real(plane, instance, question, deadlines)
        finally:
            now_open -= 1

    monkeypatch.setattr(ingest_module, "request_recovery", slow)

    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", Telling()) for number in range(8)]
            router = await Router.of(
                lab, workers[0], IngestOptions(max_recoveries=3, first_pause_s=0.2, max_pause_s=2.0)
            )
            await router.exact(*workers)
            assert most_open == 3
            assert router.ingest.stats.num_failures == num_failed
            times = [at for at, name in asked if name == "w3"]
            pauses = [later - earlier for earlier, later in pairwise(times)]
            assert 8 < len(times) < 40
            assert max(pauses) < 3.0
            assert pauses[0] < pauses[3]

    run_virtual(scenario)


def test_an_answer_of_another_instance_does_not_count() -> None:
    """The process at an address was started anew, and discovery does not know yet."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Telling())
            engine.tell(stored(1))
            runtime = await lab.runtime("router")
            client = await runtime.client(running.endpoint)
            await until(lambda: bool(client.candidates()))
            [instance] = client.instances()
            other = msgspec.structs.replace(instance, id=InstanceId("other"))
            question = ingest_module.EventFeed(ingest_module.IngestStats()).recovery_request
            assert question is not None
            with pytest.raises(KvoltError, match="gone"):
                await ingest_module.request_recovery(runtime.plane, other, question, OPTIONS.deadlines)

    run_virtual(scenario)
