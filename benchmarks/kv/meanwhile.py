"""A long prompt whose KV lies in a slow store: computed, brought and then gone on with, or both until they meet.

    python -m benchmarks.kv.meanwhile                          SmolLM2-135M on the CPU; some five minutes

The native engine in a process of its own and a disk tier whose reads are held back to a given speed, so that to bring
the prompt's blocks takes a quarter, half, as long, and twice as long as to compute them. For each speed, in turn:
`computed` (nothing is brought), `before` (all is brought, then the rest is computed) and `meanwhile` (as `Tiering`
does it when its guess is in favour). Time to the first token at the engine, median of the rounds; `best` is what a
split without any loss would take, by the other two. Every first token must be the same. Ratios are of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
from kvolt.scheduler.fetch_or_compute import FetchOrCompute, Verdict
from kvolt.transfer.memory.slabs import Numbers
from kvolt.worker.tiering import Tiering

RESULTS = Path(__file__).parent / "results" / "meanwhile_cpu.json"
WAYS = ("computed", "before", "meanwhile")
SLOWNESS = (0.25, 0.5, 1.0, 2.0)
"""Time to bring the prompt, of that to compute it."""


class SlowDisk(DiskTier):
    """Gives so many blocks a second, whoever asks."""

    block_s = 0.0

    def __init__(self, files: DiskFiles) -> None:
        super().__init__(files)
        self._turn = asyncio.Lock()

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        async with self._turn:
            until = time.perf_counter() + self.block_s * len(blocks)
            found = await super().read(blocks, memory, slots)
            await asyncio.sleep(until - time.perf_counter())
            self.stats.block_s = self.block_s
            return found


class Told(FetchOrCompute):
    """What is to be done is said from outside."""

    way = "meanwhile"

    def judge(self, num_tokens: int, num_present: int, tiers: Sequence[Tier]) -> Verdict:
        if self.way == "computed":
            return Verdict(0)
        return Verdict(len(tiers), is_meanwhile=self.way == "meanwhile")


class Bench:
    def __init__(self, engine: NativeEngine, info: EngineInfo, folder: Path, num_blocks: int) -> None:
        slabs = engine.kv_slabs()
        self.engine = engine
        self.info = info
        self.disk = SlowDisk(DiskFiles(folder, BlockShape.of(slabs), 2 * num_blocks))
        self.cache = TieredCache.over(slabs, 2 * num_blocks, [(self.disk, 1)])
        self.choice = Told(
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
            self.tiering.saw(step.kv_changes)

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

    async def ask(self, tokens: tuple[int, ...]) -> tuple[float, int]:
        """Seconds to the first token, and it."""
        request = self.request(tokens)
        began = time.perf_counter()
        if keys := self.tiering.names_below(request):
            await self.tiering.onboard(request, keys)
        self.engine.submit(request)
        async with Scope("ask") as scope:
            scope.start(self.tiering.bring_ahead(request.request_id), "bring ahead")
            await until(lambda: request.request_id in self.first)
            scope.cancel()
        at, token = self.first[request.request_id]
        return at - began, token

    async def forget(self) -> None:
        """What the device and the host's memory have; the disk keeps its."""
        await until(lambda: not self.tiering._num_onboarding)
        await self.engine.clear_kv()
        books = self.cache.host.books
        books.forget(list(books))

    async def until_written(self, keys: Sequence[BlockKey]) -> None:
        await until(lambda: all(self.disk.has(key) for key in keys))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not is_so():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.001)


async def measure(num_tokens: int, step_tokens: int, rounds: int) -> dict[str, object]:
    draw = random.Random(5)
    tokens = tuple(draw.randrange(3, 4000) for _ in range(num_tokens))
    arguments = NativeArguments(
        dtype="float32",
        kv_blocks=4 * (num_tokens // 16 + 4),
        context_length=num_tokens + 8,
        max_batch_tokens=step_tokens,
        max_num_seqs=8,
    )
    engine = NativeEngine(EngineSpec(model="smollm2-135m", role=Role.AGGREGATED, has_tiers=True), arguments)
    info = await engine.start()
    rows: list[dict[str, object]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(engine, info, Path(folder), num_tokens // 16 + 4)
            await bench.tiering.start()
            async with Scope("bench") as scope:
                scope.start(bench.listen(), "listen")
                try:
                    rows = await _rows(bench, tokens, rounds)
                finally:
                    await bench.tiering.close()
                    scope.cancel()
    finally:
        await engine.close()
    return {"prompt_tokens": num_tokens, "step_tokens": step_tokens, "rounds": rounds, "rows": rows}


async def _rows(bench: Bench, tokens: tuple[int, ...], rounds: int) -> list[dict[str, object]]:
    bench.choice.way = "computed"
    keys = bench.engine.kv_keys(bench.request(tokens))
    computed, token = [], 0
    for _ in range(3):
        await bench.forget()
        took_s, token = await bench.ask(tokens)
        computed.append(took_s)
        await bench.until_written(keys)
    compute_s = statistics.median(computed[1:])
    rows: list[dict[str, object]] = []
    for slowness in SLOWNESS:
        bench.disk.block_s = slowness * compute_s / len(keys)
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                await bench.forget()
                bench.choice.way = way
                took_s, said = await bench.ask(tokens)
                assert said == token, f"{way}: token {said} in place of {token}"
                found[way].append(took_s)
        median = {way: statistics.median(times) for way, times in found.items()}
        best = 1 / (1 / median["computed"] + 1 / median["before"])
        row = {
            "bring_of_compute": slowness,
            **{f"{way}_ms": round(1e3 * each, 1) for way, each in median.items()},
            "best_ms": round(1e3 * best, 1),
            "meanwhile_of_better": round(median["meanwhile"] / min(median["computed"], median["before"]), 2),
            "meanwhile_of_best": round(median["meanwhile"] / best, 2),
        }
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=513, help="of the prompt")
    parser.add_argument(
        "--step-tokens", type=int, default=64, help="that the engine computes in a step, at most"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    result = asyncio.run(measure(given.tokens, given.step_tokens, given.rounds))
    result["command"] = "python -m benchmarks.kv.meanwhile"
    given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
