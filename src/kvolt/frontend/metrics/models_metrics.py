"""Metrics of models: limits, tokenization caches, retries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import Metric

from kvolt.core.request import Role
from kvolt.frontend.model import Model, count_workers
from kvolt.frontend.models import Models
from kvolt.journey.context import JourneyStats
from kvolt.journey.prefill_mode import PrefillModeSelector
from kvolt.router.metrics import breaker_families, queue_families
from kvolt.router.port import Router
from kvolt.runtime.metric_families import Labels, counter, gauge, histogram

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
    (
        "tokenizer_cache_bytes",
        "Memory of the tokenizer cache",
        lambda model: model.processor.stats.bytes,
    ),
)

_CACHE = (
    ("hits", "Tokenizer cache hits"),
    ("misses", "Tokenizer cache misses"),
    ("cached_tokens", "Tokens taken from the tokenizer cache"),
    ("uncached_tokens", "Tokens tokenized without the cache"),
)
"""Fields of EncoderStats."""

_MIGRATION_TYPES = {False: "new_request", True: "ongoing_request"}
"""Dynamo's labels for whether a part of the answer had been sent."""
_REROUTES = (
    ("retries", _MIGRATION_TYPES[False], "Requests retried on another worker, by reason"),
    ("migrations", _MIGRATION_TYPES[True], "Requests migrated to another worker, by reason"),
)
"""Fields of JourneyStats."""


class ModelsCollector:
    """Reads the models when Prometheus asks."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        models = [((model.card.name,), model) for model in self._models.all()]
        labels = ("model",)
        for name, help_text, value in _GAUGES:
            yield gauge(f"{_PREFIX}_{name}", help_text, labels, ((at, value(model)) for at, model in models))
        for name, help_text in _CACHE:
            values = ((at, getattr(model.processor.stats, name)) for at, model in models)
            yield counter(f"{_PREFIX}_tokenizer_cache_{name}", help_text, labels, values)
        stats = [(at, model.journey_context.stats) for at, model in models]
        yield from _reroutes(stats)
        yield counter(
            "kvolt_journey_moves",
            "Requests moved to another worker before they started",
            labels,
            ((at, each.num_moves) for at, each in stats),
        )
        yield from _prefills(models)
        routers = list(_routers(model for _, model in models))
        yield from queue_families(routers)
        yield from breaker_families(routers)


def _prefills(models: Sequence[tuple[Labels, Model]]) -> Iterator[Metric]:
    """Prompts that others compute than answer; nothing where every worker computes its own."""
    yield gauge(
        "kvolt_model_workers",
        "Reachable workers by role",
        ("model", "role"),
        (((*at, role), number) for at, model in models for role, number in count_workers(model).items()),
    )
    decoding = [(at, model) for at, model in models if model.role is Role.DECODE]
    targets = [(at, model.get_prefill_target()) for at, model in decoding]
    yield gauge(
        "kvolt_model_incompatible_prefill_workers",
        "Prefill workers that cannot exchange KV with the decode workers and get no prompts",
        ("model",),
        ((at, 0 if target is None else len(target.incompatible())) for at, target in targets),
    )
    stats = [(at, model.journey_context.stats) for at, model in decoding]
    yield counter(
        "kvolt_journey_prefills",
        "Prompts computed by prefill workers",
        ("model",),
        ((at, each.num_prefills) for at, each in stats),
    )
    yield counter(
        "kvolt_journey_prefill_failures",
        "Prompts that a prefill worker failed to compute, by reason",
        ("model", "reason"),
        (((*at, code), number) for at, each in stats for code, number in each.prefill_failures.items()),
    )
    modes = [(at, model.journey_context.prefill_modes) for at, model in decoding]
    yield counter(
        "kvolt_journey_prefill_modes",
        "Requests by prefill mode",
        ("model", "mode"),
        (
            ((*at, mode.value), number)
            for at, selector in modes
            if isinstance(selector, PrefillModeSelector)
            for mode, number in selector.counts.items()
        ),
    )


def _reroutes(stats: Sequence[tuple[Labels, JourneyStats]]) -> Iterator[Metric]:
    """Requests retried on or migrated to another worker, before or after their first token."""
    yield counter(
        f"{_PREFIX}_model_migration",
        "Requests retried on or migrated to another worker",
        ("model", "migration_type"),
        (
            ((*at, kind), sum(by_code.values()))
            for at, each in stats
            for name, kind, _ in _REROUTES
            if (by_code := getattr(each, name))
        ),
    )
    yield histogram(
        f"{_PREFIX}_model_migration_duration_seconds",
        "Time from a failure to the next token or the end of the request",
        ("model", "migration_type", "outcome"),
        (
            ((*at, _MIGRATION_TYPES[key.is_migration], key.outcome.value), took)
            for at, each in stats
            for key, took in each.reroute_s.items()
        ),
    )
    for name, _, help_text in _REROUTES:
        counts = (((*at, code), num) for at, each in stats for code, num in getattr(each, name).items())
        yield counter(f"kvolt_journey_{name}", help_text, ("model", "reason"), counts)


def _routers(models: Iterable[Model]) -> Iterator[tuple[str, Router]]:
    """With the endpoint that each decides for."""
    for model in models:
        yield str(model.client.endpoint), model.journey_context.router
        prefill_target = model.get_prefill_target()
        if prefill_target is not None:
            yield str(prefill_target.client.endpoint), prefill_target.router
