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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.harness import Figure, goal, parser_for, row_table, run, say
from benchmarks.harness import report as write_report
from benchmarks.router.load_publisher import BLOCK_SIZE, ENDPOINT, REQUESTS_PER_STEP, LoadPublisher

from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.ingest.feed import IngestStats
from kvolt.router.ingest.ingest import IngestOptions, KvIngest
from kvolt.runtime.clock import new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.events.mem import MemEvents
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.loop import run_virtual
from kvolt.testing.virtual.network import VirtualNetwork
from kvolt.testing.virtual.ports import VirtualProcess
from kvolt.twin.faults import LossyBus

_CONNECTIONS = ConnectionOptions(heartbeat_s=3600.0, dead_after_s=3 * 3600.0)
_STEP_S = 0.02
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
    """Results of a run."""

    plan: Plan
    wall_s: float
    num_blocks: int
    """Blocks of all events, stored or removed."""
    num_events: int
    looks: list[Look]
    most_bytes: int
    num_lost: int
    stats: dict[str, int]
    """Sum over all ingests."""
    states: dict[str, int]
    """Workers by the state of their feed in the end."""
    num_wrong: int
    """Workers whose indexed blocks differ from those that they hold; checked where the index has room for all."""


class Soak:
    """One run; on a virtual loop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
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
        client = await runtime.client(ENDPOINT)
        await client.wait_synced(30.0)
        index, ingest = self._new_ingest(client, runtime)
        per_round = plan.num_workers * REQUESTS_PER_STEP
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
        self._bus.stop_losing()
        await asyncio.sleep(_SETTLE_S)  # publishers that are quiet for a while are asked
        result = self._result(index, ingest, time.perf_counter() - started)
        await ingest.close()
        return result

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
        ingest = KvIngest(client, runtime, index, BLOCK_SIZE, IngestOptions(quiet_s=5.0))
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
        teller = LoadPublisher(
            await self._process(), self._plan.worker_blocks, random.Random(self._rng.getrandbits(64))
        )
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
            say(
                f"{self._plan.name}: {num_requests:,} requests, index {index.num_bytes / _MIB:.1f} MiB, "
                f"process {self._looks[-1].resident_bytes / _MIB:.0f} MiB"
            )


def soak(plan: Plan) -> Soaked:
    gc.collect()
    return run_virtual(lambda: Soak(plan).run(), until_s=10**8, max_iterations=10**10)


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


# --- the report


def growth(values: Sequence[float]) -> float:
    """The most in the last third over the most in the second."""
    third = len(values) // 3
    return max(values[2 * third :]) / max(values[third : 2 * third])


def flat_goals(name: str, looks: Sequence[Any]) -> list[str]:
    index, resident = (
        growth([getattr(look, each) for look in looks]) for each in ("index_bytes", "resident_bytes")
    )
    return [
        goal(f"{name}: index flat", index <= GOAL_FLAT, f"x{index:.3f}"),
        goal(f"{name}: process flat", resident <= GOAL_RESIDENT, f"x{resident:.3f}"),
    ]


INDEX_GROWTH = Figure("index growth", lambda run: growth([look.index_bytes for look in run.looks]), ".3f")
PROCESS_GROWTH = Figure(
    "process growth", lambda run: growth([look.resident_bytes for look in run.looks]), ".3f"
)
FIGURES = (
    Figure("run", "plan.name", ""),
    Figure("requests", lambda run: f"{run.plan.num_requests / 1e6:g} M", ""),
    Figure("blocks reported", lambda run: f"{run.num_blocks / 1e6:.1f} M", ""),
    Figure("speed", lambda run: f"{run.num_blocks / run.wall_s / 1e6:.2f} M/s", ""),
    Figure("cap MiB", lambda run: run.plan.cap_bytes / _MIB, "g"),
    Figure("most MiB", lambda run: run.most_bytes / _MIB, ".1f"),
    INDEX_GROWTH,
    PROCESS_GROWTH,
    Figure("batches lost", "num_lost", ""),
    Figure("replays", lambda run: run.stats["num_replays"], ""),
    Figure("snapshots", lambda run: run.stats["num_snapshots"], ""),
    Figure(
        "feeds at the end", lambda run: ", ".join(f"{num} {state}" for state, num in run.states.items()), ""
    ),
)


def report(runs: Sequence[Soaked]) -> str:
    goals = []
    for soaked in runs:
        plan = soaked.plan
        is_under = soaked.most_bytes <= plan.cap_bytes
        goals.append(goal(f"{plan.name}: bytes never above the cap", is_under, f"{soaked.most_bytes:,}"))
        goals += flat_goals(plan.name, soaked.looks)
        if plan.is_roomy:
            name = f"{plan.name}: in the end the index has exactly what each worker holds"
            goals.append(
                goal(name, soaked.num_wrong == 0, f"{soaked.num_wrong} of {plan.num_workers} differ")
            )
    return "\n".join([row_table(FIGURES, runs), *goals])


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    runs = [soak(plan) for plan in (_SMOKE if options.smoke else _FULL)]
    write_report(options, report(runs), {"runs": runs})


if __name__ == "__main__":
    run(main)
