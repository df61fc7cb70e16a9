"""Requests that missed the SLA, each with its main reason, from a breakdown of its time. Pure.

The time of a request is divided into parts:

    due          start            first token                  last token
     |  queued    |  own prompt, others  |  decode, others, preempted  |

The reason is the largest part of the metric that exceeds its limit most (first token, gaps or total).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvolt.bench.load.sample import Failure, Sample
from kvolt.bench.load.sla import Sla
from kvolt.twin.engine_watch import Visit

NUM_WORST = 20
_BARELY = 0.999


class Reason(StrEnum):
    QUEUED = "queued"
    PROMPT = "prompt"
    OTHERS = "others"
    PREEMPTED = "preempted"
    DECODE = "decode"
    FAILED = "failed"


MEANINGS = {
    Reason.QUEUED: "waited at a worker before its prefill started",
    Reason.PROMPT: "long prefill of its own prompt, without the cached part",
    Reason.OTHERS: "steps were longer because of other requests, mostly prefills",
    Reason.PREEMPTED: "preempted and recomputed",
    Reason.DECODE: "slow decoding: large batches, long contexts, or a long output",
    Reason.FAILED: "no complete response",
}


class Parts(NamedTuple):
    """Breakdown of the time of a request before and after its first token, in seconds."""

    queued: float
    prompt: float
    others_before: float
    preempted_before: float
    decode: float
    others_after: float
    preempted_after: float

    def before_first(self) -> dict[Reason, float]:
        return {
            Reason.QUEUED: self.queued,
            Reason.PROMPT: self.prompt,
            Reason.OTHERS: self.others_before,
            Reason.PREEMPTED: self.preempted_before,
        }

    def after_first(self) -> dict[Reason, float]:
        return {
            Reason.DECODE: self.decode,
            Reason.OTHERS: self.others_after,
            Reason.PREEMPTED: self.preempted_after,
        }

    def one_gap(self, gap_s: float, num_gaps: int, is_longest: bool) -> dict[Reason, float]:
        """Breakdown of a single gap: decode time, and the rest, attributed to preemption for the longest gap."""
        decode = min(gap_s, self.decode / max(1, num_gaps))
        cause = Reason.PREEMPTED if self.preempted_after and is_longest else Reason.OTHERS
        return {Reason.DECODE: decode, cause: gap_s - decode}

    def whole(self) -> dict[Reason, float]:
        parts = self.before_first()
        for reason, time_s in self.after_first().items():
            parts[reason] = parts.get(reason, 0.0) + time_s
        return parts


def parts_of(sample: Sample, visit: Visit, alone_s: float) -> Parts:
    """Breakdown of a complete request. `alone_s` is the prefill time on an idle worker."""
    assert sample.first_s is not None
    assert sample.last_s is not None
    until_first = max(0.0, sample.first_s - visit.started_s)
    prompt = min(alone_s, until_first)
    lost = until_first - prompt
    after = sample.last_s - sample.first_s
    # A preemption after the first token is the longest gap.
    is_later = visit.num_preemptions > visit.num_preemptions_before_first
    preempted = min(sample.max_gap_s, after) if is_later else 0.0
    others = min(visit.prompts_since_s, after - preempted)
    return Parts(
        queued=max(0.0, visit.started_s - sample.from_s),
        prompt=prompt,
        others_before=0.0 if visit.num_preemptions_before_first else lost,
        preempted_before=lost if visit.num_preemptions_before_first else 0.0,
        decode=after - preempted - others,
        others_after=others,
        preempted_after=preempted,
    )


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """One request that missed the SLA; seconds."""

    number: int
    at_s: float
    worker: str
    figure: str
    """Metric that exceeds its limit most."""
    value_s: float
    limit_s: float
    reason: Reason
    parts: dict[Reason, float]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int


class MissesData(msgspec.Struct, frozen=True, kw_only=True):
    missed: int
    reasons: dict[Reason, int]
    """Number of missed requests by main reason."""
    worst: list[Miss]
    """Requests that exceed their limits most, worst first. Failed requests are in `errors`."""


class Misses:
    """Classifies samples and keeps the worst ones."""

    def __init__(self, sla: Sla | None, alone_s: Callable[[int, int], float]) -> None:
        """`alone_s` returns the prefill time of a prompt from its total and cached tokens."""
        self._limits = sla.limits if sla is not None else {}
        self._alone_s = alone_s
        self._reasons = dict.fromkeys(Reason, 0)
        self._worst: list[tuple[float, int, Miss]] = []
        """Heap with the least bad entry on top."""

    def add(self, sample: Sample, visit: Visit | None) -> None:
        if sample.error == Failure.INTERRUPTED:
            return
        if sample.error is not None:
            self._reasons[Reason.FAILED] += 1
            return
        if not self._limits or visit is None:
            return
        latency, over = self._furthest_over(sample)
        if latency is not None:
            miss = self._miss(sample, visit, latency)
            self._reasons[miss.reason] += 1
            entry = (over, -sample.number, miss)
            if len(self._worst) < NUM_WORST:
                heapq.heappush(self._worst, entry)
            else:
                heapq.heappushpop(self._worst, entry)

    def data(self) -> MissesData:
        worst = sorted(self._worst, key=lambda entry: (-entry[0], -entry[1]))
        return MissesData(
            missed=sum(self._reasons.values()),
            reasons={reason: number for reason, number in self._reasons.items() if number},
            worst=[miss for _, _, miss in worst],
        )

    def _furthest_over(self, sample: Sample) -> tuple[str | None, float]:
        """Metric with the highest ratio to its limit, and the ratio; None if all limits are met."""
        latencies = sample.latencies()
        worst, most = None, 1.0
        for name, limit_s in self._limits.items():
            value = latencies[name]
            if value is None or value <= limit_s:
                continue
            over = value / limit_s if limit_s else float("inf")
            if worst is None or over > most:
                worst, most = name, over
        return worst, most

    def _miss(self, sample: Sample, visit: Visit, latency: str) -> Miss:
        cached = sample.cached_tokens or 0
        parts = parts_of(sample, visit, self._alone_s(sample.input_tokens, cached))
        value = sample.latencies()[latency]
        assert value is not None
        match latency:
            case "ttft":
                judged = parts.before_first()
            case "e2e":
                judged = parts.whole()
            case "max_gap" | "ttst":
                is_longest = value >= _BARELY * sample.max_gap_s
                judged = parts.one_gap(value, sample.output_tokens - 1, is_longest)
            case _:
                judged = parts.after_first()
        return Miss(
            number=sample.number,
            at_s=sample.from_s,
            worker=visit.worker.name,
            figure=latency,
            value_s=value,
            limit_s=self._limits[latency],
            reason=max(judged, key=judged.__getitem__),
            parts=parts.whole(),
            input_tokens=sample.input_tokens,
            cached_tokens=cached,
            output_tokens=sample.output_tokens,
            preemptions=visit.num_preemptions,
        )
