"""The KV events of ten million requests through the router's ingest and index alone: do bytes stay flat, is it right?

    python -m benchmarks.router.event_soak             some ten minutes on one core; results/event_soak.{json,txt}

64 workers of which only the events are there (`LoadPublisher`: a real journal, a real process on virtual time that
answers questions) and one router's KvIngest. A request stores some new blocks at its worker and, where that is full,
removes the oldest; a step of a worker reports four requests. The plane loses 1 % of all batches. Forty times in a run
a worker goes and another comes, ten times the router begins anew with an empty index.

Twice: with a cap that the workers' blocks do not reach, where in the end the index must hold exactly what each worker
does; and with one that they exceed twice over, under which its bytes must stay. Flat: the most that the index, and the
process, had in the last third over the most they had in the second.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
from benchmarks.harness import goal, parser_for, run, say, table
from benchmarks.harness import report as write_report

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.endpoints import CONTROL, GENERATE, KV_TOPIC
from kvolt.core.ids import CardHash, InstanceId, SequenceHash
from kvolt.core.kv_events import KvChange, Removed, Stored
from kvolt.core.kv_recovery import KvRecoveryRequest, KvRecoveryResponse
from kvolt.core.request import Role
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.ingest.feed import IngestStats
from kvolt.router.ingest.ingest import IngestOptions, KvIngest
from kvolt.runtime.clock import new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.endpoint.address import EndpointAddress
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.endpoint.server import msgpack_decoder
from kvolt.runtime.events.mem import MemEvents
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.loop import run_virtual
from kvolt.testing.virtual.network import VirtualNetwork
from kvolt.testing.virtual.ports import VirtualProcess
from kvolt.twin.faults import LossyBus
from kvolt.worker.kv_event_publisher import KvJournal

_ENDPOINT = EndpointAddress("soak", "tellers", GENERATE)
_CONNECTIONS = ConnectionOptions(heartbeat_s=3600.0, dead_after_s=3 * 3600.0)
_BLOCK_SIZE = 64
_REQUESTS_PER_STEP = 4
_STEP_S = 0.02
_MOST_BLOCKS = 12
"""That a request stores, and 2 at least; and what every worker stores first, the same everywhere."""
_SHARED_BLOCKS = 64
_HASH_BYTES = 8
_CHUNK = 1 << 14
"""Names made at a time."""
_HISTORY_BYTES = 1 << 18
"""Of batches that a worker keeps: less than usual, so that all are full soon."""
_LOOKS = 300
_SETTLE_S = 120.0
GOAL_FLAT = 1.05
GOAL_RESIDENT = 1.15


class Plan(msgspec.Struct, frozen=True):
    name: str
    num_requests: int
    num_workers: int
    worker_blocks: int
    cap_bytes: int
    is_roomy: bool
    """The cap is never reached."""
    loss: float = 0.01
    num_churns: int = 40
    num_restarts: int = 10
    seed: int = 1


_MIB = 1 << 20
_FULL = (
    Plan("roomy cap", 1_000_000, 64, 16_384, 256 * _MIB, True),
    Plan("tight cap", 10_000_000, 64, 16_384, 16 * _MIB, False),
)
_SMOKE = (
    Plan("roomy cap", 1200, 4, 256, 8 * _MIB, True, num_churns=2, num_restarts=1),
    Plan("tight cap", 1200, 4, 512, _MIB // 8, False, num_churns=2, num_restarts=1),
)


class Look(msgspec.Struct, frozen=True):
    num_requests: int
    index_bytes: int
    resident_bytes: int


class Soaked(msgspec.Struct, frozen=True):
    """What came of a run."""

    plan: Plan
    wall_s: float
    num_blocks: int
    """That were told, stored or removed."""
    num_events: int
    looks: list[Look]
    most_bytes: int
    num_lost: int
    stats: dict[str, int]
    """Of all ingests together."""
    states: dict[str, int]
    """Workers by the state of their feed in the end."""
    num_wrong: int
    """Workers whose blocks in the index are not those that they hold; where there is room for all."""


class LoadPublisher:
    """A worker of which only the KV events are there."""

    def __init__(self, runtime: Runtime, plan: Plan, rng: random.Random) -> None:
        self.runtime = runtime
        self.instance_id = InstanceId("")
        self._room = plan.worker_blocks
        self._rng = rng
        self._journal: KvJournal | None = None
        self._stored: deque[bytes] = deque()
        self._num_stored = 0
        self._names = b""
        self._at = 0

    async def start(self) -> None:
        info = EngineInfo(
            engine="teller",
            role=Role.AGGREGATED,
            model="soak",
            card=CardHash(""),
            block_size=_BLOCK_SIZE,
            capacity=Capacity(max_num_seqs=256, max_batch_tokens=8192, kv_total_blocks=self._room),
            features=("KvEvents",),
        )
        instance = await self.runtime.serve_streams(_ENDPOINT, _refuse, info=info)
        self.instance_id = instance.id
        publish = self.runtime.events.publish
        self._journal = KvJournal(
            self._rng.getrandbits(62),
            instance.id,
            lambda payload: publish(KV_TOPIC, payload),
            _HISTORY_BYTES,
        )
        control = EndpointAddress(_ENDPOINT.namespace, _ENDPOINT.component, CONTROL)
        server = self.runtime.server
        server.register(
            str(control),
            InstanceId(""),
            server.wrap_generator(self._answer, msgpack_decoder(KvRecoveryRequest)),
        )
        self._tell(self._store(np.arange(1, _SHARED_BLOCKS + 1, dtype="<u8").tobytes(), None))

    @property
    def journal(self) -> KvJournal:
        assert self._journal is not None
        return self._journal

    async def _answer(self, question: KvRecoveryRequest) -> AsyncIterator[KvRecoveryResponse]:
        for part in self.journal.recover(question):
            yield part

    def step(self) -> None:
        changes: list[KvChange] = []
        for _ in range(_REQUESTS_PER_STEP):
            changes += self._store(self._new_names(2 + int(self._rng.random() * (_MOST_BLOCKS - 1))), None)
        self._tell(changes)

    def held(self) -> set[int]:
        """Every block, as its journal says."""
        return {each for _, _, blocks in self.journal._held_blocks.contents() for each in blocks}

    def _store(self, hashes: bytes, parent: SequenceHash | None) -> list[KvChange]:
        """With what has to go for it: the oldest, and of those the last first."""
        changes: list[KvChange] = [Stored(hashes, parent)]
        self._stored.append(hashes)
        self._num_stored += len(hashes) // _HASH_BYTES
        while self._num_stored > self._room:
            gone = self._stored.popleft()
            self._num_stored -= len(gone) // _HASH_BYTES
            changes.append(Removed(gone))
        return changes

    def _tell(self, changes: list[KvChange]) -> None:
        self.journal.record(tuple(changes))

    def _new_names(self, num: int) -> bytes:
        start, stop = self._at, self._at + num * _HASH_BYTES
        if stop > len(self._names):
            first = np.uint64(self._rng.getrandbits(63))
            self._names = (np.arange(_CHUNK, dtype="<u8") * np.uint64(0x9E3779B97F4A7C15) + first).tobytes()
            start, stop = 0, num * _HASH_BYTES
        self._at = stop
        return self._names[start:stop]


def _refuse(stream: IncomingStream) -> None:
    raise AssertionError("a load publisher answers no requests")


class Soak:
    """One run; on a virtual loop."""

    def __init__(self, plan: Plan, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._report = tell
        self._rng = random.Random(f"{plan.seed}/soak")
        self._network = VirtualNetwork(self._rng, profile=LinkProfile(latency_s=0.0005))
        self._store = MemStore()
        self._bus = LossyBus(plan.loss, random.Random(f"{plan.seed}/losses"))
        self._runtimes: list[Runtime] = []
        self._tellers: list[LoadPublisher] = []
        self._num_processes = 0
        self._num_blocks = 0
        self._num_events = 0
        self._looks: list[Look] = []
        self._most_bytes = 0
        self._stats: dict[str, int] = {}

    async def run(self) -> Soaked:
        try:
            return await self._run()
        finally:
            for runtime in reversed(self._runtimes):
                await runtime.close()
            self._network.close()

    async def _run(self) -> Soaked:
        plan, started = self._plan, time.perf_counter()
        for _ in range(plan.num_workers):
            await self._add_teller()
        runtime = await self._process()
        client = await runtime.client(_ENDPOINT)
        await client.wait_synced(30.0)
        index, ingest = self._new_ingest(client, runtime)
        per_round = plan.num_workers * _REQUESTS_PER_STEP
        num_rounds = -(-plan.num_requests // per_round)
        turns = {
            name: {num_rounds * (at + 1) // (number + 1) for at in range(number)}
            for name, number in (("churn", plan.num_churns), ("restart", plan.num_restarts), ("look", _LOOKS))
        }
        for number in range(1, num_rounds + 1):
            for teller in self._tellers:
                teller.step()
            await asyncio.sleep(_STEP_S)
            if number in turns["churn"]:
                await self._churn()
            if number in turns["restart"]:
                self._count_stats(ingest)
                await ingest.close()
                index, ingest = self._new_ingest(client, runtime)
            self._most_bytes = max(self._most_bytes, index.num_bytes)
            if number in turns["look"]:
                self._look(number * per_round, index)
        await self._settle()
        result = self._result(index, ingest, time.perf_counter() - started)
        await ingest.close()
        return result

    async def _settle(self) -> None:
        """Nothing is lost any more, and who is quiet for a while is asked."""
        self._bus.stop_losing()
        await asyncio.sleep(_SETTLE_S)

    def _result(self, index: BlockIndex, ingest: KvIngest, wall_s: float) -> Soaked:
        num_wrong, states = 0, dict[str, int]()
        for teller in self._tellers:
            slot = ingest.slot_of(teller.instance_id)
            assert slot is not None
            num_wrong += set(index.contents(slot)) != teller.held()
            state = ingest.state_of(teller.instance_id)
            states[str(state)] = states.get(str(state), 0) + 1
        self._count_stats(ingest)
        for teller in self._tellers:
            self._count(teller)
        return Soaked(
            plan=self._plan,
            wall_s=wall_s,
            num_blocks=self._num_blocks,
            num_events=self._num_events,
            looks=self._looks,
            most_bytes=self._most_bytes,
            num_lost=self._bus.num_lost,
            stats=self._stats,
            states=states,
            num_wrong=num_wrong if self._plan.is_roomy else 0,
        )

    # --- what there is

    def _new_ingest(self, client: EndpointClient, runtime: Runtime) -> tuple[BlockIndex, KvIngest]:
        index = BlockIndex(self._plan.cap_bytes)
        ingest = KvIngest(client, runtime, index, _BLOCK_SIZE, IngestOptions(quiet_s=5.0))
        ingest.start()
        return index, ingest

    def _count_stats(self, ingest: KvIngest) -> None:
        for name in IngestStats.__slots__:
            self._stats[name] = self._stats.get(name, 0) + getattr(ingest.stats, name)

    async def _churn(self) -> None:
        await self._add_teller()
        going = self._tellers.pop(self._rng.randrange(len(self._tellers) - 1))
        self._count(going)
        await going.runtime.close()
        self._runtimes.remove(going.runtime)

    def _count(self, teller: LoadPublisher) -> None:
        self._num_blocks += teller.journal.counts["stored"] + teller.journal.counts["removed"]
        self._num_events += teller.journal.next_id

    async def _add_teller(self) -> None:
        teller = LoadPublisher(await self._process(), self._plan, random.Random(self._rng.getrandbits(64)))
        await teller.start()
        self._tellers.append(teller)

    async def _process(self) -> Runtime:
        name = f"p{self._num_processes}"
        self._num_processes += 1
        process = VirtualProcess.on(self._network, name, self._plan.seed)
        ports = Ports(
            process.clock,
            process.rng,
            process.network,
            process.blocking,
            tcp_plane(process.network, _CONNECTIONS),
            lambda plane: MemDiscovery(self._store, process.clock, process.rng),
            lambda discovery: MemEvents(self._bus, new_id(process.rng)),
        )
        runtime = Runtime(ports, ProcessOptions(name=name, listen=f"{name}:0"))
        self._runtimes.append(runtime)
        await runtime.start()
        return runtime

    def _look(self, num_requests: int, index: BlockIndex) -> None:
        self._looks.append(Look(num_requests, index.num_bytes, resident_bytes()))
        if len(self._looks) % (_LOOKS // 20) == 0:
            self._report(
                f"{self._plan.name}: {num_requests:,} requests, index {index.num_bytes / _MIB:.1f} MiB, "
                f"process {self._looks[-1].resident_bytes / _MIB:.0f} MiB"
            )


def soak(plan: Plan, tell: Callable[[str], None] = lambda line: None) -> Soaked:
    gc.collect()
    return run_virtual(lambda: Soak(plan, tell).run(), until_s=10**8, max_iterations=10**10)


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


# --- the report


def growth(looks: list[Look], of: Callable[[Look], int]) -> float:
    """The most in the last third over the most in the second."""
    third = len(looks) // 3
    return max(of(look) for look in looks[2 * third :]) / max(of(look) for look in looks[third : 2 * third])


def report(runs: list[Soaked]) -> str:
    body, goals = [], []
    for soaked in runs:
        plan = soaked.plan
        index_growth = growth(soaked.looks, lambda look: look.index_bytes)
        resident_growth = growth(soaked.looks, lambda look: look.resident_bytes)
        body.append(
            (
                plan.name,
                f"{plan.num_requests / 1e6:g} M",
                f"{soaked.num_blocks / 1e6:.1f} M",
                f"{soaked.num_blocks / soaked.wall_s / 1e6:.2f} M/s",
                f"{plan.cap_bytes / _MIB:g}",
                f"{soaked.most_bytes / _MIB:.1f}",
                f"{index_growth:.3f}",
                f"{resident_growth:.3f}",
                str(soaked.num_lost),
                f"{soaked.stats['num_replays']} / {soaked.stats['num_snapshots']}",
                ", ".join(f"{number} {state}" for state, number in soaked.states.items()),
            )
        )
        goals += [
            goal(
                f"{plan.name}: bytes never above the cap",
                soaked.most_bytes <= plan.cap_bytes,
                f"{soaked.most_bytes:,}",
            ),
            goal(f"{plan.name}: index flat", index_growth <= GOAL_FLAT, f"x{index_growth:.3f}"),
            goal(f"{plan.name}: process flat", resident_growth <= GOAL_RESIDENT, f"x{resident_growth:.3f}"),
        ]
        if plan.is_roomy:
            goals.append(
                goal(
                    f"{plan.name}: in the end the index has exactly what each worker holds",
                    soaked.num_wrong == 0,
                    f"{soaked.num_wrong} of {plan.num_workers} differ",
                )
            )
    head = (
        "run | requests | blocks told | speed | cap MiB | "
        "most MiB | index growth | process growth | batches lost | replays / snapshots | feeds in the end"
    )
    return "\n".join([table(head, body), *goals])


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    runs = [soak(plan, say) for plan in (_SMOKE if options.smoke else _FULL)]
    write_report(options, report(runs), {"runs": runs})


if __name__ == "__main__":
    run(main)
