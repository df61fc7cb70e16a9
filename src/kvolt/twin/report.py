"""Report of a twin: the report of `kvolt bench` plus details of the cluster. Pure.

Also the format of the JSON file. Readers of `kvolt bench` reports can read it and ignore the additional fields.
"""

from __future__ import annotations

import msgspec

from kvolt.bench.load.report import BenchReport, RunFacts, make_report
from kvolt.core.kv_events import Tier
from kvolt.twin.activity import ActivityData
from kvolt.twin.engine_watch import ClusterWatch, EngineWatch
from kvolt.twin.misses import MissesData
from kvolt.twin.replay import TwinRun


class TierHits(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens found in one tier."""

    tokens: int
    share: float
    """Fraction of all prompt tokens of complete requests."""


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    requests: int
    prompt_tokens: int
    """Computed prompt tokens, without cached ones."""
    busy_s: float
    busy_share: float


class TwinFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the cluster."""

    router: str
    gpus_per_worker: int
    gpu_seconds: float
    """GPU time of all workers during their lifetime, busy or idle."""
    busy_gpu_seconds: float
    hits: dict[str, TierHits]
    """Cache hits by tier, fastest first."""
    preemptions: int
    activity: ActivityData
    workers: list[WorkerFacts]
    misses: MissesData

    @property
    def busy_share(self) -> float:
        return self.busy_gpu_seconds / self.gpu_seconds if self.gpu_seconds else 0.0


class TwinReport(BenchReport, frozen=True, kw_only=True):
    """Report of one twin run."""

    twin: TwinFacts


def make_twin_report(facts: RunFacts, run: TwinRun) -> TwinReport:
    report = make_report(facts, run.tally)
    fields = {name: getattr(report, name) for name in report.__struct_fields__}
    return TwinReport(**fields, twin=_twin_facts(run))


def _twin_facts(run: TwinRun) -> TwinFacts:
    settings, watch, tally = run.settings, run.watch, run.tally
    lifetime_s = watch.ended_s or 0.0
    gpus = settings.gpus_per_worker
    return TwinFacts(
        router=settings.router,
        gpus_per_worker=gpus,
        gpu_seconds=gpus * sum(worker.lifetime_s(lifetime_s) for worker in watch.workers),
        busy_gpu_seconds=gpus * sum(worker.busy_s for worker in watch.workers),
        hits=_hits(tally.cached_tokens, tally.input_tokens, watch),
        preemptions=watch.num_preemptions,
        activity=watch.activity.data(
            lifetime_s, settings.num_workers + settings.num_prefill, settings.engine.kv_blocks
        ),
        workers=[_worker_facts(worker, worker.lifetime_s(lifetime_s)) for worker in watch.workers],
        misses=run.misses.data(),
    )


def _hits(num_cached: int, num_input: int, watch: ClusterWatch) -> dict[str, TierHits]:
    """Hits by tier. Cached tokens that were not onboarded were on the device."""
    tokens = {tier: count for tier in Tier if (count := watch.onboarded_tokens[tier])}
    tokens = {Tier.DEVICE: max(num_cached - sum(tokens.values()), 0)} | tokens
    return {
        tier: TierHits(tokens=count, share=count / num_input if num_input else 0.0)
        for tier, count in tokens.items()
    }


def _worker_facts(worker: EngineWatch, lifetime_s: float) -> WorkerFacts:
    return WorkerFacts(
        name=worker.name,
        requests=worker.num_requests,
        prompt_tokens=worker.prompt_tokens,
        busy_s=worker.busy_s,
        busy_share=worker.busy_s / lifetime_s if lifetime_s else 0.0,
    )
