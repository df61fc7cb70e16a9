"""Figures: how busy a server is, as its Prometheus metrics say; and what we make of them and of our own counts.

Pure. Metrics come once a second and are of all clients; ours are known at every step. So what others do is what the
metrics say beyond ours at that time, and stays so until the next look.
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


class Sample(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """The lines of Prometheus' text format; what is none is passed over."""
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if isfinite(value):  # NaN is how Prometheus says that nobody knows
            yield Sample(found[1], dict(_LABEL.findall(found[2] or "")), value)


class CacheFacts(msgspec.Struct, frozen=True):
    """Of vLLM's `cache_config_info`."""

    block_size: int | None = None
    num_blocks: int | None = None
    num_ranks: int = 1


class Figures(msgspec.Struct, frozen=True):
    """At one moment, of all clients together."""

    running: int = 0
    waiting: int = 0
    usage: float | None = None
    """Of its blocks, the share that requests hold."""
    num_tokens: float = 0.0
    """Computed since it started: while it grows the server makes progress."""


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


def read_figures(text: str) -> Figures | None:
    """None where the server has no figures of its engine."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples(text):
        if sample.name in _RUNNING + _WAITING + _USAGE + _TOKENS:
            found[sample.name].append(sample.value)
    if not any(found[name] for name in _RUNNING):
        return None
    usages = [value for name in _USAGE for value in found[name]]
    return Figures(
        int(sum(value for name in _RUNNING for value in found[name])),
        int(sum(value for name in _WAITING for value in found[name])),
        sum(usages) / len(usages) if usages else None,
        sum(value for name in _TOKENS for value in found[name]),
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
class Own:
    """What we have at the server now."""

    running: int = 0
    """Choices that have a token."""
    waiting: int = 0
    """Choices that have none yet; some are being computed."""
    tokens: int = 0
    """Of those that have a token, prompts included: of the others nobody knows what the server holds."""

    @property
    def total(self) -> int:
        return self.running + self.waiting

    def copy(self) -> Own:
        return Own(self.running, self.waiting, self.tokens)


class LoadBook:
    """The load of a server: its figures, and what has changed of ours since."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._figures = Figures()
        self._own_then = Own()

    def look(self, figures: Figures, own: Own) -> bool:
        """New figures, and what was ours then; whether the server has computed something since the last."""
        has_moved = figures.num_tokens != self._figures.num_tokens
        self._figures, self._own_then = figures, own.copy()
        return has_moved

    def forget(self) -> None:
        """The server is gone, and all that it did with it."""
        self._figures, self._own_then = Figures(), Own()

    def load(self, own: Own) -> WorkerLoad:
        figures, then = self._figures, self._own_then
        others = max(figures.running + figures.waiting - then.total, 0)
        total = own.total + others
        waiting = min(figures.waiting, own.waiting + others)
        return WorkerLoad(
            running=total - waiting,
            waiting=waiting,
            kv_used_blocks=self._used(own, others),
            kv_total_blocks=self._num_blocks,
        )

    def _used(self, own: Own, others: int) -> int:
        if not own.total and not others:
            return 0
        at_look = round((self._figures.usage or 0.0) * self._num_blocks)
        since = -(-own.tokens // self._block_size) - -(-self._own_then.tokens // self._block_size)
        return min(max(at_look + since, 0), self._num_blocks)
