"""Objectives of a sweep: metrics of a report and their directions. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.twin.report import TwinReport

PointStats = dict[str, float | None]


class Objective(msgspec.Struct, frozen=True):
    """A metric of a report, and whether more is better. Times in seconds."""

    read: Callable[[TwinReport], float | None]
    more_is_better: bool = False


def _percentile(latency: str, percentile: str) -> Callable[[TwinReport], float | None]:
    def read(report: TwinReport) -> float | None:
        summary = report.latencies[latency]
        return float(getattr(summary, percentile)) if summary.count else None

    return read


def _good_per_gpu_second(report: TwinReport) -> float | None:
    good = report.throughput.good_requests_per_s
    if good is None or not report.twin.gpu_seconds:
        return None
    return good * report.throughput.window_s / report.twin.gpu_seconds


OBJECTIVES: dict[str, Objective] = {
    "goodput": Objective(lambda report: report.throughput.good_requests_per_s, more_is_better=True),
    "good_share": Objective(lambda report: report.throughput.good_share, more_is_better=True),
    "good_per_gpu_second": Objective(_good_per_gpu_second, more_is_better=True),
    "gpu_seconds": Objective(lambda report: report.twin.gpu_seconds),
    "gpus": Objective(lambda report: report.twin.gpus_per_worker * len(report.twin.workers)),
    **{
        f"{latency}_{percentile}": Objective(_percentile(latency, percentile))
        for latency in ("ttft", "itl", "tpot", "e2e")
        for percentile in ("p50", "p90", "p99")
    },
    "requests_per_s": Objective(lambda report: report.throughput.requests_per_s, more_is_better=True),
    "output_tokens_per_s": Objective(
        lambda report: report.throughput.output_tokens_per_s, more_is_better=True
    ),
    "hit_rate": Objective(
        lambda report: sum(hits.share for hits in report.twin.hits.values()), more_is_better=True
    ),
    "busy_share": Objective(lambda report: report.twin.busy_share, more_is_better=True),
    "preemptions": Objective(lambda report: report.twin.preemptions),
    "failed": Objective(lambda report: report.counts.failed),
}


def stats_of(report: TwinReport) -> PointStats:
    return {name: objective.read(report) for name, objective in OBJECTIVES.items()}


def default_objectives(has_sla: bool) -> list[str]:
    """Share of good requests and cost. The share, since all clusters get the same requests but take different times."""
    return ["good_share", "gpu_seconds"] if has_sla else ["ttft_p90", "itl_p90", "gpu_seconds"]


def check_objectives(names: Sequence[str], has_sla: bool) -> None:
    for name in names:
        if name not in OBJECTIVES:
            raise ConfigError(
                f"unknown objective {name!r}", key="objective", remedy=f"known: {', '.join(OBJECTIVES)}"
            )
        if name.startswith("good") and not has_sla:
            raise ConfigError(
                f"{name} requires an SLA",
                key="objective",
                remedy="for example --sla ttft=2s,itl=50ms",
            )


def pareto(points: Sequence[PointStats], objectives: Sequence[str]) -> list[int]:
    """Indexes of the Pareto-optimal points.

    Points without an objective are excluded; points with equal values are all included.
    """
    costs: list[tuple[tuple[float, ...], int]] = []
    for place, stats in enumerate(points):
        values = [stats.get(name) for name in objectives]
        known = [value for value in values if value is not None]
        if len(known) == len(objectives):
            signs = [-1.0 if OBJECTIVES[name].more_is_better else 1.0 for name in objectives]
            costs.append((tuple(sign * value for sign, value in zip(signs, known, strict=True)), place))
    front: list[tuple[tuple[float, ...], int]] = []
    for cost, place in sorted(costs):  # dominating points come first in this order
        if not any(other != cost and _is_within(other, cost) for other, _ in front):
            front.append((cost, place))
    return sorted(place for _, place in front)


def _is_within(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
