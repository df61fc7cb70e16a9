"""What is told of the models themselves: their limits, their tokenization caches, their retries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvolt.core.request import Role
from kvolt.frontend.models import Model, Models
from kvolt.frontend.roles import count_workers
from kvolt.frontend.tokenization.token_cache import EncoderStats
from kvolt.journey.prefill_mode import PrefillModeSelector
from kvolt.router.metrics import breaker_families, queue_families
from kvolt.router.port import Router

_PREFIX = "kvolt_frontend"

_GAUGES: tuple[tuple[str, str, Callable[[Model], int]], ...] = (
    ("model_context_length", "Context length in tokens", lambda model: model.card.context_length),
    ("model_kv_cache_block_size", "KV block size in tokens", lambda model: model.card.block_size),
    (
        "model_total_kv_blocks",
        "KV blocks of all reachable workers",
        lambda model: model.capacity.kv_total_blocks * len(model.client.candidates()),
    ),
    (
        "model_max_num_seqs",
        "Maximum concurrent sequences per worker",
        lambda model: model.capacity.max_num_seqs,
    ),
    (
        "model_max_num_batched_tokens",
        "Maximum tokens per engine step",
        lambda model: model.capacity.max_batch_tokens,
    ),
    ("model_workers", "Reachable workers", lambda model: len(model.client.candidates())),
    (
        "model_migration_limit",
        "Maximum migrations per request",
        lambda model: model.journey_context.migration_limit,
    ),
)

_CACHE: tuple[tuple[str, str, Callable[[EncoderStats], int]], ...] = (
    ("tokenizer_cache_hits", "Tokenizer cache hits", lambda stats: stats.hits),
    ("tokenizer_cache_misses", "Tokenizer cache misses", lambda stats: stats.misses),
    (
        "tokenizer_cache_cached_tokens",
        "Tokens taken from the tokenizer cache",
        lambda stats: stats.cached_tokens,
    ),
    (
        "tokenizer_cache_uncached_tokens",
        "Tokens tokenized without the cache",
        lambda stats: stats.uncached_tokens,
    ),
)


_MIGRATION_TYPES = {False: "new_request", True: "ongoing_request"}
"""Dynamo's words for whether anything of the answer had been told."""


class ModelsCollector:
    """Reads the models when Prometheus asks."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        models = self._models.all()
        for name, help_text, figure in _GAUGES:
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, labels=("model",))
            for model in models:
                gauge.add_metric((model.card.name,), figure(model))
            yield gauge
        for name, help_text, count in _CACHE:
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", help_text, labels=("model",))
            for model in models:
                counter.add_metric((model.card.name,), count(model.processor.stats))
            yield counter
        held = GaugeMetricFamily(
            f"{_PREFIX}_tokenizer_cache_bytes", "Memory of the tokenizer cache", labels=("model",)
        )
        for model in models:
            held.add_metric((model.card.name,), model.processor.stats.bytes)
        yield held
        yield from self._elsewhere(models)
        moves = CounterMetricFamily(
            "kvolt_journey_moves", "Requests moved to another worker before they started", labels=("model",)
        )
        for model in models:
            moves.add_metric((model.card.name,), model.journey_context.stats.num_moves)
        yield moves
        yield from self._prefills(models)
        routers = list(_routers(models))
        yield from queue_families(routers)
        yield from breaker_families(routers)

    def _prefills(self, models: list[Model]) -> Iterator[Metric]:
        """Prompts that others compute than answer; nothing where every worker computes its own."""
        workers = GaugeMetricFamily(
            "kvolt_model_workers", "Reachable workers by role", labels=("model", "role")
        )
        done = CounterMetricFamily(
            "kvolt_journey_prefills", "Prompts computed by prefill workers", labels=("model",)
        )
        failures = CounterMetricFamily(
            "kvolt_journey_prefill_failures",
            "Prompts that a prefill worker failed to compute, by reason",
            labels=("model", "reason"),
        )
        unfit = GaugeMetricFamily(
            "kvolt_model_incompatible_prefill_workers",
            "Prefill workers that cannot exchange KV with the decode workers and get no prompts",
            labels=("model",),
        )
        modes = CounterMetricFamily(
            "kvolt_journey_prefill_modes",
            "Requests by prefill mode",
            labels=("model", "mode"),
        )
        for model in models:
            name, stats = model.card.name, model.journey_context.stats
            for role, number in count_workers(model).items():
                workers.add_metric((name, role), number)
            if model.role is not Role.DECODE:
                continue
            prefill_target = model.get_prefill_target()
            unfit.add_metric((name,), 0 if prefill_target is None else len(prefill_target.incompatible()))
            done.add_metric((name,), stats.num_prefills)
            for code, number in stats.prefill_failures.items():
                failures.add_metric((name, code), number)
            if isinstance(model.journey_context.prefill_modes, PrefillModeSelector):
                for mode, number in model.journey_context.prefill_modes.counts.items():
                    modes.add_metric((name, mode.value), number)
        yield from (workers, unfit, done, failures, modes)

    def _elsewhere(self, models: list[Model]) -> Iterator[Metric]:
        """Requests that another worker was asked for, from the beginning or amid the answer."""
        total = CounterMetricFamily(
            f"{_PREFIX}_model_migration",
            "Requests retried on or migrated to another worker",
            labels=("model", "migration_type"),
        )
        took = HistogramMetricFamily(
            f"{_PREFIX}_model_migration_duration_seconds",
            "Time from a failure to the next token or the end of the request",
            labels=("model", "migration_type", "outcome"),
        )
        retries, migrations = (
            CounterMetricFamily(f"kvolt_journey_{name}", help_text, labels=("model", "reason"))
            for name, help_text in (
                ("retries", "Requests retried on another worker, by reason"),
                ("migrations", "Requests migrated to another worker, by reason"),
            )
        )
        for model in models:
            name, stats = model.card.name, model.journey_context.stats
            for kind, by_code, family in (
                (_MIGRATION_TYPES[False], stats.retries, retries),
                (_MIGRATION_TYPES[True], stats.migrations, migrations),
            ):
                if by_code:
                    total.add_metric((name, kind), sum(by_code.values()))
                for code, number in by_code.items():
                    family.add_metric((name, code), number)
            for each, histogram in stats.reroute_s.items():
                labels = (name, _MIGRATION_TYPES[each.is_migration], each.outcome.value)
                took.add_metric(labels, histogram.buckets(), histogram.total)
        yield from (total, took, retries, migrations)


def _routers(models: list[Model]) -> Iterator[tuple[str, Router]]:
    """With the endpoint that each decides for."""
    for model in models:
        yield str(model.client.endpoint), model.journey_context.router
        prefill_target = model.get_prefill_target()
        if prefill_target is not None:
            yield str(prefill_target.client.endpoint), prefill_target.router
