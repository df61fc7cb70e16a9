"""A server's stats, out of its metrics and ours."""

from __future__ import annotations

import pytest
from tests.unit.engines.remote.fake_server import recorded

from kvolt.engines.remote.server_load import (
    CacheFacts,
    LoadEstimator,
    OwnLoad,
    ServerStats,
    read_cache_facts,
    read_stats,
)


def metrics(kind: str) -> str:
    return recorded(kind, "metrics").decode()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_recorded_metrics(kind: str) -> None:
    stats = read_stats(metrics(kind))
    assert stats is not None
    assert (stats.running, stats.waiting, stats.usage) == (0, 0, 0.0)
    assert stats.num_tokens > 0


def test_how_vllm_cuts_its_cache() -> None:
    assert read_cache_facts(metrics("vllm")) == CacheFacts(block_size=32, num_blocks=256, num_ranks=1)


def test_a_server_without_figures() -> None:
    assert read_stats("python_info 1.0\nnonsense\nx{ 3\n") is None


def test_unknown_values_are_skipped() -> None:
    """NaN is how Prometheus' clients say so."""
    told = "vllm:num_requests_running 3\nvllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n"
    assert read_stats(told) == ServerStats(running=3)
    assert read_stats("vllm:num_requests_running NaN\n") is None


def test_what_others_do_is_what_is_not_ours() -> None:
    book = LoadEstimator(block_size=16, num_blocks=100)
    own = OwnLoad(running=2, tokens=160)
    assert book.update(ServerStats(running=5, waiting=1, usage=0.3, num_tokens=7.0), own)
    load = book.load(own)
    assert (load.running, load.waiting, load.kv_used_blocks) == (5, 1, 30)
    load = book.load(OwnLoad(running=1, tokens=80))  # one of ours has ended since
    assert (load.running, load.waiting, load.kv_used_blocks) == (4, 1, 25)
    assert not book.update(ServerStats(running=2, num_tokens=7.0), own)  # nothing was computed since
    load = book.load(OwnLoad())
    assert (load.running, load.waiting, load.kv_used_blocks) == (0, 0, 0)
    book.reset()
    assert book.load(OwnLoad()).running == 0
