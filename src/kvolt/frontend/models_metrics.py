"""What is told of the models themselves: their limits, their tokenization caches, their retries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvolt.frontend.models import Model, Models
from kvolt.frontend.token_cache import EncoderStats
from kvolt.router.queue_metrics import queue_families

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
)

_CACHE: tuple[tuple[str, str, Callable[[EncoderStats], int]], ...] = (
    ("tokenizer_cache_hits", "Pieces of text found tokenized", lambda stats: stats.hits),
    ("tokenizer_cache_misses", "Pieces of text tokenized anew", lambda stats: stats.misses),
    ("tokenizer_cache_cached_tokens", "Tokens taken from the cache", lambda stats: stats.cached_tokens),
    ("tokenizer_cache_uncached_tokens", "Tokens made anew", lambda stats: stats.uncached_tokens),
)


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
        retries = CounterMetricFamily(
            f"{self._prefix}_model_migration",
            "Requests tried on another worker",
            labels=("model", "migration_type"),
        )
        for model in models:
            number = sum(model.road.stats.retries.values())
            if number:
                retries.add_metric((model.card.name, "new_request"), number)
        yield retries
        reasons = CounterMetricFamily(
            "kvolt_journey_retries", "Requests tried on another worker, by why", labels=("model", "reason")
        )
        for model in models:
            for code, number in model.road.stats.retries.items():
                reasons.add_metric((model.card.name, code), number)
        yield reasons
        moves = CounterMetricFamily(
            "kvolt_journey_moves", "Requests moved to another worker before they had begun", labels=("model",)
        )
        for model in models:
            moves.add_metric((model.card.name,), model.road.stats.num_moves)
        yield moves
        yield from queue_families((str(model.client.endpoint), model.road.router) for model in models)
