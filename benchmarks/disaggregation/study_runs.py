"""One run of the twin for the study of disaggregation: results by cell, system, rate and seed.

A cell is a prompt length, a share of cached prompt tokens, and a number of workers. Prompts start with a prefix
shared by one of a few groups; arrivals are random at a mean rate; answers have lognormal lengths. The first part of a
run fills the caches and is not measured.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import numpy as np
from benchmarks.studies import samples_of

from kvolt.bench.load.sample import Sample
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.twin.cluster import TwinSettings

AGGREGATED, SPLIT, CONDITIONAL = "aggregated", "P/D", "conditional"
BLOCK_SIZE, NUM_BLOCKS = 64, 8192
ITL_S = 0.020
TTFT_S = {512: 0.2, 4096: 0.6, 16384: 2.5}
KEPT = 0.9
"""Share of requests within the limits from which on a system sustains a rate."""
_NUM_GROUPS = 8
_ANSWER_MEDIAN, _ANSWER_SIGMA = 167.0, 0.6
"""Tokens; 200 on average."""


class Cell(msgspec.Struct, frozen=True, order=True):
    num_workers: int
    prompt_tokens: int
    hits: float
    """The share of a prompt that its group has."""

    @property
    def splits(self) -> tuple[int, ...]:
        """Possible numbers of prefill workers."""
        return tuple(range(1, self.num_workers))


class Lasting(msgspec.Struct, frozen=True):
    """Length of a run: seconds of arrivals, with a minimum and a maximum of requests."""

    seconds: float
    least: int
    most: int


class Point(msgspec.Struct, frozen=True):
    """All that decides a run."""

    cell: Cell
    system: str
    num_prefill: int
    seed: int
    rate_per_s: float
    lasting: Lasting

    @property
    def num_requests(self) -> int:
        lasting = self.lasting
        return max(lasting.least, min(lasting.most, round(self.rate_per_s * lasting.seconds)))

    @property
    def num_warm(self) -> int:
        """The first so many are not measured: until as many are being answered as come, which takes some seconds."""
        return max(
            self.num_requests // 4, min(self.num_requests, round(self.rate_per_s * self.lasting.seconds)) // 2
        )


class Figures(msgspec.Struct, frozen=True):
    """Results of the measured requests."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float
    """99th percentile of the mean time between two tokens, over answers."""
    gap_p99_ms: float
    """99th percentile of the longest time between two tokens, over answers."""
    tokens_per_s: float
    """Tokens per second of all answers between the first and the last measured arrival."""
    kept: float
    """The share of requests that kept both limits."""
    goodput_per_s: float
    """Those, of the requests that came in a second."""
    hit_rate: float
    num_failed: int


class Row(msgspec.Struct, frozen=True):
    point: Point
    figures: Figures


def records_of(point: Point) -> list[TraceRecord]:
    """The same for every system."""
    cell = point.cell
    rng = random.Random(f"{cell}/{point.rate_per_s}/{point.seed}")
    num_blocks = cell.prompt_tokens // BLOCK_SIZE
    num_shared = int(num_blocks * cell.hits)
    now_s, own, records = 0.0, _NUM_GROUPS * num_blocks, []
    for _ in range(point.num_requests):
        now_s += rng.expovariate(point.rate_per_s)
        start = rng.randrange(_NUM_GROUPS) * num_blocks
        num_own = num_blocks - num_shared
        hashes = (*range(start, start + num_shared), *range(own, own + num_own))
        own += num_own
        answer = max(2, int(rng.lognormvariate(math.log(_ANSWER_MEDIAN), _ANSWER_SIGMA)))
        records.append(
            TraceRecord(
                timestamp=1e3 * now_s,
                input_length=cell.prompt_tokens,
                output_length=answer,
                hash_ids=hashes,
                block_size=BLOCK_SIZE,
            )
        )
    return records


def solve(point: Point) -> Row:
    cell = point.cell
    is_conditional = point.system == CONDITIONAL
    settings = TwinSettings(
        num_workers=cell.num_workers - point.num_prefill,
        num_prefill=point.num_prefill,
        prefill_choice="predicted" if is_conditional else "threshold",
        target_ttft_s=TTFT_S[cell.prompt_tokens] if is_conditional else None,
        target_itl_s=ITL_S if is_conditional else None,
        engine=SimArguments(preset="h200-llama-8b", block_size=BLOCK_SIZE, kv_blocks=NUM_BLOCKS),
        seed=point.seed,
    )
    return Row(point, _figures(point, samples_of(settings, records_of(point))))


def _figures(point: Point, everyone: Sequence[Sample]) -> Figures:
    samples = [each for each in everyone if each.number >= point.num_warm]
    whole = [each for each in samples if each.error is None and each.ttft_s is not None]
    ttft_s = [each.ttft_s or 0.0 for each in whole]
    itl_s = [each.tpot_s or 0.0 for each in whole]
    first_s, last_s = min(each.due_s for each in samples), max(each.due_s for each in samples)
    limit_s = TTFT_S[point.cell.prompt_tokens]
    took_s = max(last_s - first_s, 1e-9)
    num_kept = sum(wait <= limit_s and itl <= ITL_S for wait, itl in zip(ttft_s, itl_s, strict=True))
    return Figures(
        ttft_p50_ms=1e3 * float(np.percentile(ttft_s, 50)),
        ttft_p99_ms=1e3 * float(np.percentile(ttft_s, 99)),
        itl_p99_ms=1e3 * float(np.percentile(itl_s, 99)),
        gap_p99_ms=1e3 * float(np.percentile([each.max_gap_s for each in whole], 99)),
        tokens_per_s=sum(_tokens_between(each, first_s, last_s) for each in everyone) / took_s,
        kept=num_kept / len(samples),
        goodput_per_s=num_kept / took_s,
        hit_rate=sum(each.cached_tokens or 0 for each in whole) / sum(each.input_tokens for each in whole),
        num_failed=len(samples) - len(whole),
    )


def _tokens_between(sample: Sample, start_s: float, end_s: float) -> float:
    """Tokens of the answer in an interval, if they arrived evenly."""
    if sample.first_s is None or sample.last_s is None:
        return 0.0
    took_s = max(sample.last_s - sample.first_s, 1e-9)
    within_s = min(sample.last_s, end_s) - max(sample.first_s, start_s)
    return sample.output_tokens * max(within_s, 0.0) / took_s


# --- highest rate at which a system keeps its limits


class Search(msgspec.Struct, frozen=True):
    """Search for the highest rates at which a cell keeps the limits."""

    cell: Cell
    lasting: Lasting
    num_seeds: int = 2
    precision: float = 0.05


class Rates(msgspec.Struct, frozen=True):
    """Result of a search: requests per second, and the runs of the search."""

    search: Search
    aggregated: float
    split: float
    """Rate with the best split."""
    num_prefill: int
    """Prefill workers of the best split."""
    tried: tuple[tuple[int, float, float], ...]
    """Prefill workers, rate and the share of requests that kept the limits, in the order in which they were tried."""

    @property
    def full(self) -> float:
        return max(self.aggregated, self.split)


def highest_rates(search: Search) -> Rates:
    tried: list[tuple[int, float, float]] = []

    def keeps(num_prefill: int, rate: float) -> bool:
        tried.append((num_prefill, rate, _kept(search, num_prefill, rate)))
        return tried[-1][2] >= KEPT

    def highest(num_prefill: int, low: float) -> float:
        """About where the search begins, or wherever the limits are kept."""
        high = low
        if keeps(num_prefill, low):
            while keeps(num_prefill, high := high * _STRIDE):
                low = high
        else:
            while not keeps(num_prefill, low := low / _STRIDE):
                high = low
        while high > low * (1 + search.precision):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if keeps(num_prefill, middle) else (low, middle)
        return low

    cell = search.cell
    aggregated = highest(0, _guess(cell))
    most_even, *others = sorted(cell.splits, key=lambda num_prefill: abs(2 * num_prefill - cell.num_workers))
    split, best = highest(most_even, aggregated), most_even
    for other in others:
        above = split * (1 + search.precision)
        if keeps(other, above):
            split, best = highest(other, above), other
    return Rates(search, aggregated, split, best, tuple(tried))


def _kept(search: Search, num_prefill: int, rate: float) -> float:
    system = SPLIT if num_prefill else AGGREGATED
    points = [
        # Seeds of its own: a rate is not measured by what it was chosen by.
        Point(search.cell, system, num_prefill, 1000 + seed, rate, search.lasting)
        for seed in range(search.num_seeds)
    ]
    return float(np.mean([solve(point).figures.kept for point in points]))


def _guess(cell: Cell) -> float:
    """Start of the search: the rate of one worker of the preset, from earlier runs."""
    context = cell.prompt_tokens
    new = context * (1 - cell.hits)
    return cell.num_workers / (0.015 + 3e-5 * new + 1.2e-5 * context + 2.8e-9 * new * context)


_STRIDE = 1.2
