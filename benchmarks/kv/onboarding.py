"""A long prompt whose KV lies in a slow store: computed, onboarded first, or both at once.

    python -m benchmarks.kv.onboarding              SmolLM2-135M on the CPU; some five minutes

The native engine in this process and a disk tier whose reads are throttled, so that onboarding the prompt's blocks
takes a quarter, half, as long, and twice as long as computing them. For each speed, interleaved: `computed` (nothing is
onboarded), `before` (everything is onboarded, then the rest is computed) and `concurrent` (onboarded from the end while
the engine computes from the start). Time to the first token at the engine, median of the rounds; `best` is the time of
a split without loss, from the other two. All first tokens must be equal. Ratios are of one run."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import BrokenRun, parser_for, report, run, say
from benchmarks.processes import small_model

from kvolt.core.card import EngineInfo
from kvolt.core.hashing import SequenceHasher
from kvolt.core.ids import BlockKey, RequestId
from kvolt.core.kv_events import Tier
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.shell.engine import NativeEngine
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.runtime.tasks import Scope
from kvolt.scheduler.fetch_or_compute import FetchDecision, FetchOrCompute
from kvolt.transfer.memory.slabs import Numbers
from kvolt.worker.kv.tiering import Tiering

MODES = ("computed", "before", "concurrent")
SLOWNESS = (0.25, 0.5, 1.0, 2.0)
"""Time to onboard the prompt over the time to compute it."""


Rows = list[dict[str, float]]


class SlowDisk(DiskTier):
    """A disk that takes a given time per block, for all readers together."""

    block_s = 0.0

    def __init__(self, files: DiskFiles) -> None:
        super().__init__(files)
        self._turn = asyncio.Lock()

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        async with self._turn:
            until = time.perf_counter() + self.block_s * len(blocks)
            result = await super().read(blocks, memory, slots)
            await asyncio.sleep(until - time.perf_counter())
            self.stats.block_s = self.block_s
            return result


class FixedChoice(FetchOrCompute):
    """Does what `mode` says."""

    mode = "concurrent"

    def decide(self, num_tokens: int, num_present: int, tiers: Sequence[Tier]) -> FetchDecision:
        if self.mode == "computed":
            return FetchDecision(0)
        return FetchDecision(len(tiers), is_concurrent=self.mode == "concurrent")


class Bench:
    def __init__(self, engine: NativeEngine, info: EngineInfo, folder: Path, num_blocks: int) -> None:
        slabs = engine.kv_slabs()
        self.engine = engine
        self.info = info
        self.disk = SlowDisk(DiskFiles(folder, BlockShape.of(slabs), 2 * num_blocks))
        self.cache = TieredCache.for_slabs(slabs, 2 * num_blocks, [(self.disk, 1)])
        self.choice = FixedChoice(
            lambda: info.step_model, info.block_size, info.capacity.max_batch_tokens, self.cache.host.block_s
        )
        self.tiering = Tiering(
            engine, self.cache, time.monotonic, lambda changes: None, None, info.block_size, 1
        )
        self.tiering._choice = self.choice
        self.first: dict[RequestId, tuple[float, int]] = {}
        self._number = 0

    async def listen(self) -> None:
        async for step in self.engine.steps():
            now = time.perf_counter()
            for request_id, delta in step.deltas:
                self.first.setdefault(request_id, (now, delta.token_ids[0]))
            self.tiering.on_engine_changes(step.kv_changes)

    def request(self, tokens: tuple[int, ...]) -> Request:
        self._number += 1
        hasher = SequenceHasher(self.info.block_size)
        hasher.extend(tokens)
        return Request(
            request_id=RequestId(f"r{self._number}"),
            model="m",
            token_ids=tokens,
            sequence_hashes=tuple(hasher.sequence),
            sampling=Sampling(temperature=0.0),
            stop=StopConditions(max_tokens=1, ignore_eos=True),
        )

    async def answer(self, tokens: tuple[int, ...]) -> tuple[float, int]:
        """Seconds to the first token, and the token."""
        request = self.request(tokens)
        started = time.perf_counter()
        if keys := self.tiering.find_offloaded(request):
            await self.tiering.onboard(request, keys)
        self.engine.submit(request)
        async with Scope("answer") as scope:
            scope.start(self.tiering.onboard_concurrently(request.request_id), "onboard")
            await until(lambda: request.request_id in self.first)
            scope.cancel()
        at, token = self.first[request.request_id]
        return at - started, token

    async def clear(self) -> None:
        """Clear the caches of device and host; the disk keeps its blocks."""
        await until(lambda: not self.tiering._num_onboarding)
        await self.engine.clear_kv()
        slots = self.cache.host.slot_table
        slots.forget(list(slots))

    async def until_written(self, keys: Sequence[BlockKey]) -> None:
        await until(lambda: all(self.disk.has(key) for key in keys))


async def until(is_done: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not is_done():  # noqa: ASYNC110 (there is no event)
            await asyncio.sleep(0.001)


async def measure(
    model: str, num_tokens: int, step_tokens: int, rounds: int, slowness: Sequence[float]
) -> Rows:
    draw = random.Random(5)
    arguments = NativeArguments(
        dtype="float32",
        kv_blocks=4 * (num_tokens // 16 + 4),
        context_length=num_tokens + 8,
        max_batch_tokens=step_tokens,
        max_num_seqs=8,
    )
    engine = NativeEngine(EngineSpec(model=model, role=Role.AGGREGATED, has_tiers=True), arguments)
    info = await engine.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(engine, info, Path(folder), num_tokens // 16 + 4)
            await bench.tiering.start()
            async with Scope("bench") as scope:
                scope.start(bench.listen(), "listen")
                try:
                    return await _rows(
                        bench, tuple(draw.randrange(3, 200) for _ in range(num_tokens)), rounds, slowness
                    )
                finally:
                    await bench.tiering.close()
                    scope.cancel()
    finally:
        await engine.close()
    raise AssertionError("a scope ends with its block")


async def _rows(bench: Bench, tokens: tuple[int, ...], rounds: int, slowness: Sequence[float]) -> Rows:
    bench.choice.mode = "computed"
    keys = bench.engine.kv_keys(bench.request(tokens))
    computed, expected = [], 0
    for _ in range(min(rounds, 2) + 1):
        await bench.clear()
        took_s, expected = await bench.answer(tokens)
        computed.append(took_s)
        await bench.until_written(keys)
    compute_s = statistics.median(computed[1:])
    rows: Rows = []
    for slow in slowness:
        bench.disk.block_s = slow * compute_s / len(keys)
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(rounds):
            for mode in MODES:
                await bench.clear()
                bench.choice.mode = mode
                took_s, token = await bench.answer(tokens)
                if token != expected:
                    raise BrokenRun(f"{mode}: token {token} instead of {expected}")
                times[mode].append(took_s)
        median = {mode: statistics.median(each) for mode, each in times.items()}
        best = 1 / (1 / median["computed"] + 1 / median["before"])
        rows.append(
            {
                "onboard_of_compute": slow,
                **{f"{mode}_ms": round(1e3 * each, 1) for mode, each in median.items()},
                "best_ms": round(1e3 * best, 1),
                "of_better": round(median["concurrent"] / min(median["computed"], median["before"]), 2),
                "of_best": round(median["concurrent"] / best, 2),
            }
        )
        say(_line(rows[-1]))
    return rows


def _line(row: dict[str, float]) -> str:
    return "  ".join(f"{name} {value}" for name, value in row.items())


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    num_tokens, step_tokens, rounds = (65, 16, 1) if options.smoke else (513, 64, 3)
    slowness = SLOWNESS[2:3] if options.smoke else SLOWNESS
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder), options.smoke)
        rows = asyncio.run(measure(model, num_tokens, step_tokens, rounds, slowness))
    plan = {"prompt_tokens": num_tokens, "step_tokens": step_tokens, "rounds": rounds}
    report(options, "\n".join(map(_line, rows)), {**plan, "rows": rows})


if __name__ == "__main__":
    run(main)
