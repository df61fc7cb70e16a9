"""A server's figures, out of its metrics and ours."""

from __future__ import annotations

import pytest
from tests.unit.engines.remote.fake_server import recorded

from kvolt.engines.remote.figures import CacheFacts, Figures, LoadBook, Own, read_cache_facts, read_figures


def metrics(kind: str) -> str:
    return recorded(kind, "metrics").decode()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_recorded_metrics(kind: str) -> None:
    figures = read_figures(metrics(kind))
    assert figures is not None
    assert (figures.running, figures.waiting, figures.usage) == (0, 0, 0.0)
    assert figures.num_tokens > 0


def test_how_vllm_cuts_its_cache() -> None:
    assert read_cache_facts(metrics("vllm")) == CacheFacts(block_size=32, num_blocks=256, num_ranks=1)


def test_a_server_without_figures() -> None:
    assert read_figures("python_info 1.0\nnonsense\nx{ 3\n") is None


def test_what_nobody_knows_is_passed_over() -> None:
    """NaN is how Prometheus' clients say so."""
    told = "vllm:num_requests_running 3\nvllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n"
    assert read_figures(told) == Figures(running=3)
    assert read_figures("vllm:num_requests_running NaN\n") is None


def test_what_others_do_is_what_is_not_ours() -> None:
    book = LoadBook(block_size=16, num_blocks=100)
    own = Own(running=2, tokens=160)
    assert book.look(Figures(running=5, waiting=1, usage=0.3, num_tokens=7.0), own)
    load = book.load(own)
    assert (load.running, load.waiting, load.kv_used_blocks) == (5, 1, 30)
    load = book.load(Own(running=1, tokens=80))  # one of ours has ended since
    assert (load.running, load.waiting, load.kv_used_blocks) == (4, 1, 25)
    assert not book.look(Figures(running=2, num_tokens=7.0), own)  # nothing was computed since
    load = book.load(Own())
    assert (load.running, load.waiting, load.kv_used_blocks) == (0, 0, 0)
    book.forget()
    assert book.load(Own()).running == 0
