"""Load of a server, from its Prometheus metrics and the local counts of this worker's requests. Pure.

Metrics are read once a second and cover all clients; local counts are exact at any time. The load of other clients is
the difference at the time of reading, and is assumed constant until the next one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import msgspec

from kvolt.core.load import WorkerLoad

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


class MetricSample(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> Iterator[MetricSample]:
    """Parse Prometheus' text format; invalid lines are skipped."""
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if isfinite(value):  # NaN: unknown
            yield MetricSample(match[1], dict(_LABEL.findall(match[2] or "")), value)


class CacheFacts(msgspec.Struct, frozen=True):
    """Content of vLLM's `cache_config_info`."""

    block_size: int | None = None
    num_blocks: int | None = None
    num_ranks: int = 1


class ServerStats(msgspec.Struct, frozen=True):
    """Statistics of a server over all clients."""

    running: int = 0
    waiting: int = 0
    usage: float | None = None
    """Fraction of KV blocks held by requests."""
    num_tokens: float = 0.0
    """Tokens computed since the start; grows while the server makes progress."""


_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
_TOKENS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_sum",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
)


def read_stats(text: str) -> ServerStats | None:
    """None if the response contains no engine metrics."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples(text):
        if sample.name in _RUNNING + _WAITING + _USAGE + _TOKENS:
            values[sample.name].append(sample.value)
    if not any(values[name] for name in _RUNNING):
        return None
    usages = [value for name in _USAGE for value in values[name]]
    return ServerStats(
        int(sum(value for name in _RUNNING for value in values[name])),
        int(sum(value for name in _WAITING for value in values[name])),
        sum(usages) / len(usages) if usages else None,
        sum(value for name in _TOKENS for value in values[name]),
    )


def read_cache_facts(text: str) -> CacheFacts:
    ranks: dict[str, None] = {}
    block_size = num_blocks = None
    for sample in samples(text):
        if sample.name == "vllm:num_requests_running":
            ranks[sample.labels.get("engine", "")] = None
        if sample.name == "vllm:cache_config_info":
            block_size = _number(sample.labels.get("block_size")) or block_size
            num_blocks = _number(sample.labels.get("num_gpu_blocks")) or num_blocks
    return CacheFacts(block_size, num_blocks, max(len(ranks), 1))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) else None


@dataclass(slots=True)
class OwnLoad:
    """Requests of this worker on the server."""

    running: int = 0
    """Choices with a token."""
    waiting: int = 0
    """Choices without a token; some are being computed."""
    tokens: int = 0
    """Tokens of the choices with a token, including prompts. For others the server's KV use is unknown."""

    @property
    def total(self) -> int:
        return self.running + self.waiting

    def copy(self) -> OwnLoad:
        return OwnLoad(self.running, self.waiting, self.tokens)


class LoadEstimator:
    """Estimates the server's load from its latest statistics and the change of the local counts since."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._stats = ServerStats()
        self._own_at_update = OwnLoad()

    def update(self, stats: ServerStats, own: OwnLoad) -> bool:
        """Set new statistics and the local counts at that time. Returns whether the server has made progress."""
        has_moved = stats.num_tokens != self._stats.num_tokens
        self._stats, self._own_at_update = stats, own.copy()
        return has_moved

    def reset(self) -> None:
        """Forget everything about a lost server."""
        self._stats, self._own_at_update = ServerStats(), OwnLoad()

    def load(self, own: OwnLoad) -> WorkerLoad:
        stats, own_then = self._stats, self._own_at_update
        others = max(stats.running + stats.waiting - own_then.total, 0)
        total = own.total + others
        waiting = min(stats.waiting, own.waiting + others)
        return WorkerLoad(
            running=total - waiting,
            waiting=waiting,
            kv_used_blocks=self._used(own, others),
            kv_total_blocks=self._num_blocks,
        )

    def _used(self, own: OwnLoad, others: int) -> int:
        if not own.total and not others:
            return 0
        at_update = round((self._stats.usage or 0.0) * self._num_blocks)
        since = -(-own.tokens // self._block_size) - -(-self._own_at_update.tokens // self._block_size)
        return min(max(at_update + since, 0), self._num_blocks)
