"""What the edge exports: names and shapes, and each name driven by real work."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.engines.lab import ARGUMENTS, MODEL, Frontend, Lab, sim, until
from tests.unit.frontend.serving import WHOLE, Answering

from kvolt.frontend.metrics.edge_metrics import FrontendMetrics
from kvolt.runtime.histogram import Histogram
from kvolt.runtime.tasks import Scope
from kvolt.testing import run_virtual


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


# --- shapes


@given(st.lists(st.tuples(st.floats(0, 12), st.integers(1, 5)), max_size=30))
def test_a_histogram_counts_as_prometheus_does(values: list[tuple[float, int]]) -> None:
    histogram = Histogram((1, 2.5, 10))
    for value, count in values:
        histogram.observe(value, count)
    expanded = [value for value, count in values for _ in range(count)]
    assert histogram.buckets() == [
        (name, float(sum(value <= bound for value in expanded)))
        for name, bound in (("1.0", 1), ("2.5", 2.5), ("10.0", 10), ("+Inf", float("inf")))
    ]
    assert histogram.total == pytest.approx(sum(expanded))


def test_the_text_that_prometheus_reads() -> None:
    metrics = FrontendMetrics()
    registry = CollectorRegistry()
    registry.register(metrics)
    metrics.requests["m", "chat_completions", "unary", "success", ""] += 2
    metrics.model("m").time_to_first_token.observe(0.003)
    text = generate_latest(registry).decode()
    assert (
        'kvolt_frontend_requests_total{endpoint="chat_completions",error_type="",model="m",request_type="unary",'
        'status="success"} 2.0' in text
    )
    assert 'kvolt_frontend_time_to_first_token_seconds_bucket{le="0.005",model="m"} 1.0' in text
    assert 'kvolt_frontend_time_to_first_token_seconds_bucket{le="0.002",model="m"} 0.0' in text
    assert 'kvolt_frontend_time_to_first_token_seconds_count{model="m"} 1.0' in text
    families = {family.name for family in text_string_to_metric_families(text)}
    assert all(name.startswith("kvolt_frontend_") for name in families)


def test_the_names_that_dashboards_read() -> None:
    """Dynamo's, as of 1.x; a panel of theirs that finds nothing here is a broken promise."""
    names = {family.name for family in FrontendMetrics().collect()}
    assert {
        "kvolt_frontend_requests",
        "kvolt_frontend_active_requests",
        "kvolt_frontend_disconnected_clients",
        "kvolt_frontend_request_duration_seconds",
        "kvolt_frontend_time_to_first_token_seconds",
        "kvolt_frontend_inter_token_latency_seconds",
        "kvolt_frontend_input_sequence_tokens",
        "kvolt_frontend_output_sequence_tokens",
        "kvolt_frontend_output_tokens",
    } <= names


# --- every name, by real work


async def _serve_well(edge: Frontend) -> None:
    turn = [{"role": "user", "content": "the water and the land"}]
    for stream in (False, True):
        for _ in range(2):  # the second time the tokenization cache knows it
            assert (await edge.chat(messages=turn, stream=stream)).status == 200
    assert (await edge.complete(stream=True)).status == 200


async def _fail(edge: Frontend) -> None:
    assert (await edge.chat(model="nobody")).status == 404
    assert (await edge.chat(max_tokens=10**5)).status == 400


async def _leave(edge: Frontend, engine: Answering) -> None:
    engine.deltas = ()
    before = len(engine.submitted)
    raw = json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()
    async with edge.send("POST", "/v1/completions", raw):
        await until(lambda: len(engine.submitted) > before)
        active = edge.exported()
    await until(lambda: edge.sample("kvolt_frontend_active_requests") == 0)
    edge.seen |= {name for name, value in active.items() if value}


async def _be_refused(edge: Frontend, engine: Answering) -> None:
    before = len(engine.submitted)
    async with Scope("ask") as scope:
        task = scope.start(edge.complete(headers={"x-kvolt-timeout-ms": "500"}), "fills the place")
        await until(lambda: len(engine.submitted) > before)
        assert (await edge.complete()).status == 429
    assert task.result().status == 504


async def _be_moved(lab: Lab, edge: Frontend, engine: Answering) -> None:
    before = len(engine.submitted)
    async with Scope("ask") as scope:
        task = scope.start(edge.complete(max_tokens=3), "moves")
        await until(lambda: len(engine.submitted) > before)
        await lab.worker("w1", sim(replace(ARGUMENTS)))
        client = edge.models.get(MODEL).client
        await until(lambda: len(client.candidates()) == 2)
        lab.network.crash("w0", silent=False)
    assert task.result().status == 200


def test_every_exported_name_is_driven_by_real_work() -> None:
    """Not zero at some moment: a gauge of what runs now is back at zero when nothing does.

    The names are read off the process: a new one for which nothing here does any work fails.
    """

    async def scenario() -> None:
        async with Lab() as lab:
            engine = Answering(*WHOLE)
            await lab.worker("w0", engine)
            edge = await lab.frontend(max_requests=1)
            await edge.ready()
            await _serve_well(edge)
            await _fail(edge)
            await _leave(edge, engine)
            await _be_refused(edge, engine)
            await _be_moved(lab, edge, engine)
            await asyncio.sleep(0.1)
            exported = edge.exported()
            assert len(exported) > 20
            assert {name for name, value in exported.items() if not value} - edge.seen == set()
            for status, error in (("success", ""), ("error", "validation"), ("error", "cancelled")):
                assert edge.sample("kvolt_frontend_requests_total", status=status, error_type=error) >= 1
            assert edge.sample("kvolt_frontend_model_rejection_total", model=MODEL) == 1
            assert edge.sample("kvolt_frontend_model_cancellation_total", model=MODEL) == 1
            for stage in ("parse", "template", "tokenize", "route", "first_delta", "detokenize", "write"):
                assert edge.sample("kvolt_frontend_stage_duration_seconds_count", stage=stage) > 0
            started = edge.sample("kvolt_frontend_requests_started_total")
            assert started == edge.sample("kvolt_frontend_requests_total")
            assert edge.sample("kvolt_frontend_active_requests") == 0

    run_virtual(scenario)


def test_tokens_of_a_stream_are_counted_whichever_way_they_went() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0")
            edge = await lab.frontend()
            await edge.ready()
            await edge.complete(max_tokens=20, stream=True)
            await edge.complete(max_tokens=20)
            assert edge.sample("kvolt_frontend_output_tokens_total") == 40
            assert edge.sample("kvolt_frontend_inter_token_latency_seconds_count") == 38
            assert edge.sample("kvolt_frontend_time_to_first_token_seconds_count") == 2
            raw = json.dumps({"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 400}).encode()
            async with edge.send("POST", "/v1/completions", raw) as browser:
                await until(lambda: browser.received.count(b"data: ") >= 10)
            await until(lambda: edge.sample("kvolt_frontend_active_requests") == 0)
            assert edge.sample("kvolt_frontend_output_tokens_total") >= 50  # of one that left, too

    run_virtual(scenario)


def test_figures_of_models() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            first = await lab.worker("w0")
            await lab.worker("w1")
            edge = await lab.frontend()
            await edge.ready()
            await until(lambda: edge.sample("kvolt_frontend_model_workers", model=MODEL) == 2)
            assert edge.sample("kvolt_frontend_model_context_length", model=MODEL) == 512
            assert edge.sample("kvolt_frontend_model_kv_cache_block_size", model=MODEL) == 16
            assert edge.sample("kvolt_frontend_model_total_kv_blocks", model=MODEL) == 2 * 16_384
            assert edge.sample("kvolt_frontend_model_max_num_seqs", model=MODEL) == 256
            await first.runtime.close()
            await until(lambda: edge.sample("kvolt_frontend_model_workers", model=MODEL) == 1)
            messages = [{"role": "user", "content": "the water"}]
            await edge.chat(messages=messages, max_tokens=1)
            assert edge.sample("kvolt_frontend_tokenizer_cache_misses_total", model=MODEL) > 0
            assert edge.sample("kvolt_frontend_tokenizer_cache_bytes", model=MODEL) > 0
            hits = edge.sample("kvolt_frontend_tokenizer_cache_hits_total", model=MODEL)
            await edge.chat(messages=messages, max_tokens=1)
            assert edge.sample("kvolt_frontend_tokenizer_cache_hits_total", model=MODEL) > hits
            assert edge.sample("kvolt_frontend_tokenizer_cache_cached_tokens_total", model=MODEL) > 0

    run_virtual(scenario)
