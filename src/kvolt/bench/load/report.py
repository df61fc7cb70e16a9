"""Report of a run, also the format of the JSON file. Pure.

Contains the histograms and a sample of single responses, so that runs can be merged and compared.
"""

from __future__ import annotations

import msgspec

from kvolt.bench.load.histogram import HistogramData, Summary
from kvolt.bench.load.tally import SampledResponse, Tally, TimelineData
from kvolt.core.errors import ConfigError

FORMAT = "kvolt-bench/1"

_LATE_S = 0.010
"""Maximum p99 lateness of the generator; above it, latencies include the generator's delays."""
_FEW_FOR_P99 = 100

Setting = str | int | float | bool | None


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of complete responses over the measured time."""

    window_s: float
    requests_per_s: float
    offered_requests_per_s: float | None = None
    """Rate of the arrivals, without the time of the last answers; None if each user waits for its answer."""
    input_tokens_per_s: float
    output_tokens_per_s: float
    good_requests_per_s: float | None
    """Goodput: requests within the SLA; None without an SLA."""
    good_share: float | None
    """Fraction of complete and failed requests within the SLA."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and tokens, without warm-up requests, except in `warmup`."""

    complete: int = msgspec.field(name="whole")
    failed: int
    interrupted: int = msgspec.field(name="cut")
    """Requests that were running when the run was ended."""
    warmup: int
    input_tokens: int
    output_tokens: int
    events: int
    """Stream events with tokens; fewer than tokens if a server sends several per event."""
    cached_tokens: int | None


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in seconds."""

    format: str = FORMAT
    url: str
    model: str
    started_at: float
    """Seconds since 1970."""
    settings: dict[str, Setting]
    is_interrupted: bool = msgspec.field(name="was_cut")
    """Whether the run was ended early."""
    counts: Counts
    throughput: Throughput
    latencies: dict[str, Summary]
    user_tokens_per_s: Summary
    lateness: Summary
    connecting: Summary
    sla: dict[str, float] | None
    errors: dict[str, int]
    messages: dict[str, str]
    warnings: list[str]
    histograms: dict[str, HistogramData]
    timeline: TimelineData
    sampled: list[SampledResponse] = msgspec.field(name="kept")
    """Uniform sample of the complete responses."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a run that are not in its tally."""

    url: str
    model: str
    started_at: float
    settings: dict[str, Setting]
    is_interrupted: bool
    open_loop: bool


def make_report(facts: RunFacts, tally: Tally) -> BenchReport:
    window_s = tally.window_s

    def per_s(number: float) -> float:
        return number / window_s if window_s else 0.0

    num_judged = tally.num_complete + tally.num_failed
    has_sla = tally.sla is not None
    return BenchReport(
        url=facts.url,
        model=facts.model,
        started_at=facts.started_at,
        settings=facts.settings,
        is_interrupted=facts.is_interrupted,
        counts=Counts(
            complete=tally.num_complete,
            failed=tally.num_failed,
            interrupted=tally.num_interrupted,
            warmup=tally.num_warmup,
            input_tokens=tally.input_tokens,
            output_tokens=tally.output_tokens,
            events=tally.num_events,
            cached_tokens=tally.cached_tokens if tally.reports_cached else None,
        ),
        throughput=Throughput(
            window_s=window_s,
            requests_per_s=per_s(tally.num_complete),
            offered_requests_per_s=tally.offered_per_s if facts.open_loop else None,
            input_tokens_per_s=per_s(tally.input_tokens),
            output_tokens_per_s=per_s(tally.output_tokens),
            good_requests_per_s=per_s(tally.num_good) if has_sla else None,
            good_share=tally.num_good / num_judged if has_sla and num_judged else None,
        ),
        latencies=tally.summaries(),
        user_tokens_per_s=tally.user_rate.summary(),
        lateness=tally.lateness.summary(),
        connecting=tally.connecting.summary(),
        sla=tally.sla.limits if tally.sla is not None else None,
        errors=dict(sorted(tally.errors.items())),
        messages=dict(sorted(tally.messages.items())),
        warnings=_warnings(facts, tally),
        histograms=tally.histograms(),
        timeline=tally.timeline.data(),
        sampled=tally.sampled,
    )


def _warnings(facts: RunFacts, tally: Tally) -> list[str]:
    warnings = []
    if facts.is_interrupted:
        warnings.append(f"the run was interrupted: {tally.num_interrupted} running requests are not counted")
    late_s = tally.lateness.percentile(99.0)
    if facts.open_loop and late_s > _LATE_S:
        warnings.append(
            f"the generator could not keep the schedule: 1 request in 100 was sent {late_s * 1e3:.0f} ms late or "
            "later (included in the latencies, which count from the schedule); reduce the load or use several machines"
        )
    if tally.num_failed:
        share = 100.0 * tally.num_failed / max(1, tally.num_ended)
        warnings.append(f"{share:.1f} % of the requests failed: latencies except ITL exclude them")
    if 0 < tally.num_complete < _FEW_FOR_P99:
        warnings.append(f"only {tally.num_complete} responses: p99 and above are the slowest response")
    if tally.output_tokens > 1.05 * tally.num_events:
        per_event = tally.output_tokens / max(1, tally.num_events)
        warnings.append(
            f"an event carries {per_event:.1f} tokens: ITL is the gap between events, TPOT is per token"
        )
    return warnings


def encode_report(report: BenchReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=0) + b"\n"


def decode_report(data: bytes, name: str) -> BenchReport:
    """Decode a report. Raises ConfigError with the file name if it is invalid."""
    try:
        report = msgspec.json.decode(data, type=BenchReport)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{name} is not a kvolt bench report: {error}",
            key="report",
            remedy="use a report.json of `kvolt bench`",
        ) from error
    if report.format != FORMAT:
        raise ConfigError(
            f"{name} has the format {report.format}, not {FORMAT}",
            key="report",
            remedy="use the kvolt version that wrote it",
        )
    return report
