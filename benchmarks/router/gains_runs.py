"""One run of the twin for a study of routers: which workload, at which rate, with which router and seed, to figures.

Two workloads. `mooncake` is a stretch of the conversation trace: the seed says where it begins. `agents` are long chats
with quick turns that add whole files, in which most of a prompt repeats; the seed makes all of it.
Both come as fast as the rate says (agents once the first of them have come to their later turns). The first part of a
run fills the caches and is not measured.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from kvolt.bench.load.sample import Sample
from kvolt.bench.traces import (
    Lognormal,
    Recipe,
    ReuseMeter,
    find_public,
    make_trace,
    read_trace,
    scale_time,
    start_at_zero,
)
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.replay import TwinRun, new_tally

MOONCAKE, AGENTS = "mooncake", "agents"
ROUND_ROBIN, LEAST_LOADED, CLASSIC, LATENCY = "round-robin", "least-loaded", "classic", "latency"
NUM_WORKERS, BLOCK_SIZE, NUM_BLOCKS = 8, 64, 16_384
_LONGEST_CONTEXT = 262_144
_TRACE = "mooncake-conversation"

_AGENTS = Recipe(
    system_prompts=8,
    system=Lognormal(median=4096, sigma=0.3, max=8192),
    turns=8.0,
    question=Lognormal(median=3072, sigma=0.8, max=16_384),
    answer=Lognormal(median=64, sigma=0.6, max=512),
    think_s=1.0,
    token_s=0.02,
    max_context=65_536,
    block_size=BLOCK_SIZE,
)


class Point(msgspec.Struct, frozen=True):
    """All that decides a run."""

    workload: str
    router: str
    weight: float
    """Of `classic`, for what is to be computed (1 is the default, and Dynamo's); the others have none, and 0 here."""
    seed: int
    rate_per_s: float
    """Requests. 0: as the trace has them."""
    num_requests: int
    """0: all of the trace."""
    num_warm: int
    """The first so many are not measured."""

    @property
    def key(self) -> str:
        return " ".join(map(str, msgspec.structs.astuple(self)))

    @property
    def name(self) -> str:
        return f"{self.router} {self.weight:g}" if self.weight not in (0.0, 1.0) else self.router


class Figures(msgspec.Struct, frozen=True):
    """Of the requests that are measured."""

    ttft_mean_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    """Of each answer the mean time between two tokens; the mean of those."""
    e2e_mean_ms: float
    e2e_p99_ms: float
    requests_per_s: float
    """From the first one's arrival to the last one's end."""
    tokens_per_s: float
    """Of answers, the same way."""
    hit_rate: float
    """Prompt tokens that were found in a cache, of all prompt tokens."""
    num_failed: int
    offered_per_s: float
    """Requests, from the first arrival to the last."""
    followed: float
    """From the first arrival to the last, over: to the last first token. Far below 1 where more comes than goes."""


class Row(msgspec.Struct, frozen=True):
    point: Point
    figures: Figures
    wall_s: float


num_own_requests = 12_000
"""Length of the trace that replaces Mooncake's where that is absent."""


@lru_cache(maxsize=1)
def mooncake() -> tuple[TraceRecord, ...] | None:
    """From the folder that KVOLT_TRACES names; None without."""
    folder = os.environ.get("KVOLT_TRACES")
    paths = [each.path for each in find_public(folder) if each.trace.name == _TRACE] if folder else []
    return tuple(read_trace(Path(paths[0]))) if paths and paths[0] is not None else None


@lru_cache(maxsize=1)
def base_trace() -> tuple[TraceRecord, ...]:
    """Mooncake's, or what stands in for it: as many requests of chats, made by the project's own recipe."""
    return mooncake() or tuple(make_trace(Recipe(requests=num_own_requests, seed=1)))


def base_rate() -> float:
    records = base_trace()
    return 1e3 * len(records) / (records[-1].timestamp - records[0].timestamp)


def records_of(point: Point) -> list[TraceRecord]:
    if point.workload == AGENTS:
        recipe = msgspec.structs.replace(
            _AGENTS, requests=point.num_requests, seed=point.seed, rate_per_s=point.rate_per_s
        )
        return list(make_trace(recipe))
    records = base_trace()
    num = min(point.num_requests or len(records), len(records))
    start = random.Random(f"{point.seed}/stretch").randrange(len(records) - num + 1)
    stretch = start_at_zero(records[start : start + num])
    return list(scale_time(stretch, point.rate_per_s / base_rate()) if point.rate_per_s else stretch)


def seen_before(point: Point) -> float:
    """The share of what is measured that a single cache without bound would have: no router can find more."""
    records = records_of(point)
    warm, whole = (_seen(records[:num]) for num in (point.num_warm, len(records)))
    return (whole[0] - warm[0]) / (whole[1] - warm[1])


def _seen(records: Sequence[TraceRecord]) -> tuple[float, int]:
    """Prompt tokens that came again, and all."""
    meter = ReuseMeter()
    for record in records:
        meter.add(record)
    num_tokens = sum(record.input_length for record in records)
    reuse = meter.result()
    return (0.0 if reuse is None else reuse.token_hit_rate * num_tokens), num_tokens


def solve(point: Point) -> Row:
    started = time.perf_counter()
    settings = TwinSettings(
        num_workers=NUM_WORKERS,
        router=point.router,
        routing=RouterSettings(overlap_weight=point.weight) if point.weight else RouterSettings(),
        engine=SimArguments(
            preset="dynamo-mocker",
            block_size=BLOCK_SIZE,
            kv_blocks=NUM_BLOCKS,
            context_length=_LONGEST_CONTEXT,
        ),
        seed=point.seed,
    )
    samples: list[Sample] = []
    TwinRun(settings, new_tally(settings)).run(records_of(point), samples.append)
    figures = figures_of([each for each in samples if each.number >= point.num_warm])
    return Row(point, figures, time.perf_counter() - started)


def figures_of(samples: Sequence[Sample]) -> Figures:
    whole = [each for each in samples if each.error is None and each.first_s is not None]
    waits_ms = [1e3 * (each.first_s - each.due_s) for each in whole if each.first_s is not None]
    whole_ms = [1e3 * (each.end_s - each.due_s) for each in whole]
    first_s, last_s = min(each.due_s for each in samples), max(each.due_s for each in samples)
    took_s = max(each.end_s for each in samples) - first_s
    return Figures(
        ttft_mean_ms=float(np.mean(waits_ms)),
        ttft_p99_ms=float(np.percentile(waits_ms, 99)),
        itl_mean_ms=float(np.mean([1e3 * each.tpot_s for each in whole if each.tpot_s is not None])),
        e2e_mean_ms=float(np.mean(whole_ms)),
        e2e_p99_ms=float(np.percentile(whole_ms, 99)),
        requests_per_s=len(whole) / took_s,
        tokens_per_s=sum(each.output_tokens for each in whole) / took_s,
        hit_rate=sum(each.cached_tokens or 0 for each in whole) / sum(each.input_tokens for each in whole),
        num_failed=len(samples) - len(whole),
        offered_per_s=len(samples) / (last_s - first_s),
        followed=(last_s - first_s) / (max(each.first_s or 0.0 for each in whole) - first_s),
    )


# --- where round-robin stops following


class Search(msgspec.Struct, frozen=True):
    """For the highest rate that round-robin keeps up with."""

    workload: str
    num_requests: int
    low_per_s: float
    high_per_s: float
    precision: float = 0.03
    followed: float = 0.95
    """Keeping up: first tokens come at so much of the rate at which requests do."""


class Found(msgspec.Struct, frozen=True):
    """Of a search: the rate, and the runs by which it was found."""

    search: Search
    rate_per_s: float
    tried: tuple[tuple[float, float], ...]
    """Rate and the share of it that was served, in the order in which they were tried."""

    @property
    def key(self) -> str:
        return str(msgspec.structs.astuple(self.search))


def saturation(search: Search) -> Found:
    tried: list[tuple[float, float]] = []

    def follows(rate: float) -> bool:
        point = Point(search.workload, ROUND_ROBIN, 0.0, 0, rate, search.num_requests, 0)
        tried.append((rate, solve(point).figures.followed))
        return tried[-1][1] >= search.followed

    low, high = search.low_per_s, search.high_per_s
    if follows(low):
        while follows(high):
            low, high = high, high * 1.5
    else:
        low, high = low / 2, low
        while not follows(low):
            low, high = low / 2, low
    while high > low * (1 + search.precision):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if follows(middle) else (low, middle)
    return Found(search, low, tuple(tried))
