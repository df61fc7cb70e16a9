"""What is told of the models themselves: their limits, their tokenization caches, their retries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvolt.core.request import Role
from kvolt.frontend.models import Model, Models
from kvolt.frontend.roles import workers_of
from kvolt.frontend.tokenization.token_cache import EncoderStats
from kvolt.journey.prefill_mode import Chooser
from kvolt.router.breaker_report import breaker_families
from kvolt.router.port import Router
from kvolt.router.queue.metrics import queue_families

_GAUGES: tuple[tuple[str, str, Callable[[Model], int]], ...] = (
    ("model_context_length", "Tokens of prompt and answer together", lambda model: model.card.context_length),
    ("model_kv_cache_block_size", "Tokens of a block", lambda model: model.card.block_size),
    (
        "model_total_kv_blocks",
        "Blocks of all workers that can be reached",
        lambda model: model.capacity.kv_total_blocks * len(model.client.candidates()),
    ),
    ("model_max_num_seqs", "Sequences of one worker", lambda model: model.capacity.max_num_seqs),
    (
        "model_max_num_batched_tokens",
        "Tokens of one worker's step",
        lambda model: model.capacity.max_batch_tokens,
    ),
    ("model_workers", "Workers that can be reached now", lambda model: len(model.client.candidates())),
    (
        "model_migration_limit",
        "Migrations to another worker that a request may make",
        lambda model: model.road.migration_limit,
    ),
)

_CACHE: tuple[tuple[str, str, Callable[[EncoderStats], int]], ...] = (
    ("tokenizer_cache_hits", "Pieces of text found tokenized", lambda stats: stats.hits),
    ("tokenizer_cache_misses", "Pieces of text tokenized anew", lambda stats: stats.misses),
    ("tokenizer_cache_cached_tokens", "Tokens taken from the cache", lambda stats: stats.cached_tokens),
    ("tokenizer_cache_uncached_tokens", "Tokens made anew", lambda stats: stats.uncached_tokens),
)


_MIGRATION_TYPES = {False: "new_request", True: "ongoing_request"}
"""Dynamo's words for whether anything of the answer had been told."""


class ModelsCollector:
    """Reads the models when Prometheus asks."""

    def __init__(self, models: Models, prefix: str) -> None:
        self._models = models
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        models = self._models.all()
        for name, help_text, figure in _GAUGES:
            gauge = GaugeMetricFamily(f"{self._prefix}_{name}", help_text, labels=("model",))
            for model in models:
                gauge.add_metric((model.card.name,), figure(model))
            yield gauge
        for name, help_text, count in _CACHE:
            counter = CounterMetricFamily(f"{self._prefix}_{name}", help_text, labels=("model",))
            for model in models:
                counter.add_metric((model.card.name,), count(model.processor.stats))
            yield counter
        held = GaugeMetricFamily(
            f"{self._prefix}_tokenizer_cache_bytes", "Memory of the tokenization cache", labels=("model",)
        )
        for model in models:
            held.add_metric((model.card.name,), model.processor.stats.bytes)
        yield held
        yield from self._elsewhere(models)
        moves = CounterMetricFamily(
            "kvolt_journey_moves", "Requests moved to another worker before they had begun", labels=("model",)
        )
        for model in models:
            moves.add_metric((model.card.name,), model.road.stats.num_moves)
        yield moves
        yield from self._prefills(models)
        routers = list(_routers(models))
        yield from queue_families(routers)
        yield from breaker_families(routers)

    def _prefills(self, models: list[Model]) -> Iterator[Metric]:
        """Prompts that others compute than answer; nothing where every worker computes its own."""
        workers = GaugeMetricFamily(
            "kvolt_model_workers", "Workers that can be reached now, by role", labels=("model", "role")
        )
        done = CounterMetricFamily(
            "kvolt_journey_prefills", "Prompts that prefill workers have computed", labels=("model",)
        )
        failures = CounterMetricFamily(
            "kvolt_journey_prefill_failures",
            "Prompts that a prefill worker was asked for and has not computed, by why",
            labels=("model", "reason"),
        )
        unfit = GaugeMetricFamily(
            "kvolt_model_unfit_prefill_workers",
            "Prefill workers that are asked for no prompts: they cannot exchange KV with the decode workers",
            labels=("model",),
        )
        ways = CounterMetricFamily(
            "kvolt_journey_ways",
            "Requests by where their prompt and their answer were to be computed",
            labels=("model", "way"),
        )
        for model in models:
            name, stats = model.card.name, model.road.stats
            for role, number in workers_of(model).items():
                workers.add_metric((name, role), number)
            if model.role is not Role.DECODE:
                continue
            leg = model.prefill()
            unfit.add_metric((name,), 0 if leg is None else len(leg.unfit()))
            done.add_metric((name,), stats.num_prefills)
            for code, number in stats.prefill_failures.items():
                failures.add_metric((name, code), number)
            if isinstance(model.road.ways, Chooser):
                for way, number in model.road.ways.counts.items():
                    ways.add_metric((name, way.value), number)
        yield from (workers, unfit, done, failures, ways)

    def _elsewhere(self, models: list[Model]) -> Iterator[Metric]:
        """Requests that another worker was asked for, from the beginning or amid the answer."""
        total = CounterMetricFamily(
            f"{self._prefix}_model_migration",
            "Requests tried, and answers gone on with, on another worker",
            labels=("model", "migration_type"),
        )
        took = HistogramMetricFamily(
            f"{self._prefix}_model_migration_duration_seconds",
            "From a failure to the next token, or to the end",
            labels=("model", "migration_type", "outcome"),
        )
        retries, migrations = (
            CounterMetricFamily(f"kvolt_journey_{name}", help_text, labels=("model", "reason"))
            for name, help_text in (
                ("retries", "Requests tried on another worker, by why"),
                ("migrations", "Answers that another worker has gone on with, by why"),
            )
        )
        for model in models:
            name, stats = model.card.name, model.road.stats
            for kind, by_code, family in (
                (_MIGRATION_TYPES[False], stats.retries, retries),
                (_MIGRATION_TYPES[True], stats.migrations, migrations),
            ):
                if by_code:
                    total.add_metric((name, kind), sum(by_code.values()))
                for code, number in by_code.items():
                    family.add_metric((name, code), number)
            for each, histogram in stats.elsewhere_s.items():
                labels = (name, _MIGRATION_TYPES[each.is_amid], each.outcome.value)
                took.add_metric(labels, histogram.buckets(), histogram.total)
        yield from (total, took, retries, migrations)


def _routers(models: list[Model]) -> Iterator[tuple[str, Router]]:
    """With the endpoint that each decides for."""
    for model in models:
        yield str(model.client.endpoint), model.road.router
        leg = model.prefill()
        if leg is not None:
            yield str(leg.client.endpoint), leg.router
