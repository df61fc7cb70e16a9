"""One request's record: what the metrics hear of it, however it ends."""

from __future__ import annotations

import asyncio

import pytest

from kvolt.core.errors import DeadlineExceeded, InvalidRequest, KvoltError, NotFound, Overloaded, WorkerLost
from kvolt.frontend.metrics import edge_metrics as metrics_module
from kvolt.frontend.metrics import request_log
from kvolt.frontend.metrics.edge_metrics import FrontendMetrics
from kvolt.frontend.metrics.request_record import RequestRecord


class Time:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def metrics() -> FrontendMetrics:
    return FrontendMetrics()


def record(metrics: FrontendMetrics, time: Time | None = None) -> RequestRecord:
    return RequestRecord(metrics, "r-1", "chat_completions", time or Time())


LABELS = ("m", "chat_completions", "unary")


def test_a_good_request(metrics: FrontendMetrics) -> None:
    time = Time()
    with record(metrics, time) as made:
        time.now += 0.25
        made.stage("parse")
        made.of_model("m")
        assert metrics.model("m").active == 1
        made.prompt_tokens(7)
        time.now += 0.5
        made.stage("route")
        time.now += 1.0
        made.on_first_token()
        made.on_first_token()
        made.on_token_gap(0.1, 3)
        made.output_tokens, made.cached_tokens = 4, 2
        time.now += 1.0
        assert made.timing() == {"total_time_ms": 2750.0, "ttft_ms": 1750.0}
        assert made.timing_headers() == {"server-timing": "total;dur=2750.00, ttft;dur=1750.00"}
    series = metrics.model("m")
    assert series.active == 0
    assert metrics.requests == {(*LABELS, "success", ""): 1}
    assert metrics.started == {LABELS: 1}
    assert (series.request_duration.total, series.time_to_first_token.total) == (2.75, 1.75)
    assert series.gap.total == pytest.approx(0.3)
    assert (series.input_tokens.total, series.output_tokens.total, series.cached_tokens.total) == (7, 4, 2)
    assert series.output_tokens_total == 4
    stages = {name: histogram.total for name, histogram in metrics.stages.items()}
    assert stages == {"parse": 0.25, "route": 0.5, "first_delta": 1.0}


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (InvalidRequest("i"), "validation"),
        (DeadlineExceeded("d"), "response_timeout"),
        (WorkerLost("w"), "unavailable"),
        (RuntimeError("r"), "internal"),
        (KvoltError("k"), "internal"),
    ],
)
def test_an_error(metrics: FrontendMetrics, error: Exception, label: str) -> None:
    with pytest.raises(type(error)), record(metrics) as made:
        made.of_model("m")
        raise error
    assert metrics.requests == {(*LABELS, "error", label): 1}
    assert metrics.model("m").active == 0
    assert not metrics.cancelled
    assert not metrics.rejected


def test_a_rejection(metrics: FrontendMetrics) -> None:
    with pytest.raises(Overloaded), record(metrics) as made:
        made.of_model("m")
        raise Overloaded("full")
    assert metrics.requests == {(*LABELS, "error", "overload"): 1}
    assert metrics.rejected == {LABELS[:2]: 1}


def test_a_client_that_left(metrics: FrontendMetrics) -> None:
    with pytest.raises(asyncio.CancelledError), record(metrics) as made:
        made.of_model("m")
        raise asyncio.CancelledError
    assert metrics.requests == {(*LABELS, "error", "cancelled"): 1}
    assert metrics.cancelled == {LABELS: 1}
    assert metrics.disconnected == 1


def test_an_unknown_model_name_is_no_label(metrics: FrontendMetrics) -> None:
    with pytest.raises(NotFound), record(metrics):
        raise NotFound("made up")
    assert metrics.requests == {("other", "chat_completions", "unary", "error", "not_found"): 1}
    assert metrics.started == {("other", "chat_completions", "unary"): 1}
    with record(metrics) as made:
        made.on_first_token()
        made.on_token_gap(1.0, 1)
        made.prompt_tokens(3)  # all without a model: nothing to tell them to


def test_too_many_models_share_a_label(metrics: FrontendMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_MODELS", 2)
    for name in ("a", "b", "c", "d", "a"):
        with record(metrics) as made:
            made.of_model(name)
            made.output_tokens = 1
    assert {labels[0] for labels in metrics.requests} == {"a", "b", "other"}
    assert metrics.model("other").output_tokens_total == 2
    assert metrics.model("a").output_tokens_total == 2
    assert metrics.model("e") is metrics.model("other")


def test_a_stream_is_counted_once_when_it_is_written(metrics: FrontendMetrics) -> None:
    time = Time()
    with record(metrics, time) as made:
        made.streams = True
        made.of_model("m")
        made.hand_over()
    assert not metrics.requests
    assert metrics.model("m").active == 1
    with made:
        time.now += 2.0
    assert metrics.requests == {("m", "chat_completions", "stream", "success", ""): 1}
    assert metrics.model("m").active == 0
    assert metrics.model("m").request_duration.total == 2.0


def test_an_error_inside_a_stream_counts_as_one(metrics: FrontendMetrics) -> None:
    with record(metrics) as made:
        made.of_model("m")
        made.hand_over()
    with made:
        made.failure = WorkerLost("gone")
    assert metrics.requests == {(*LABELS, "error", "unavailable"): 1}


def test_timing_before_the_first_token(metrics: FrontendMetrics) -> None:
    made = record(metrics)
    assert made.timing() == {"total_time_ms": 0.0}
    assert made.timing_headers() == {"server-timing": "total;dur=0.00"}


# --- the log


def test_each_request_is_one_line_of_the_log(
    metrics: FrontendMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=request_log.__name__)
    time = Time()
    with record(metrics, time) as made:
        made.of_model("m")
        made.prompt_tokens(7)
        time.now += 0.5
        made.on_first_token()
        made.output_tokens, made.cached_tokens = 4, 2
        made.journey_fields = lambda: {"worker": "worker-0", "queue_s": 0.25}
        time.now += 1.0
    with pytest.raises(NotFound), record(metrics, time):
        raise NotFound("no model 'x'", param="model")
    assert caplog.messages == [
        "request finished: request_id=r-1 endpoint=chat_completions status=200 model=m prompt_tokens=7 "
        "cached_tokens=2 output_tokens=4 worker=worker-0 queue_s=0.25 ttft_s=0.5 time_s=1.5",
        "request finished: request_id=r-1 endpoint=chat_completions status=404 model=other time_s=0.0 "
        "error=\"no model 'x'\"",
    ]


def test_a_flood_of_requests_is_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=request_log.__name__)
    requests = request_log.RequestLog()
    for _ in range(1000):
        requests.write(5.0, lambda: {"x": 1})
    num_lines = len(caplog.messages)
    assert num_lines < 50
    requests.write(6.0, lambda: {"x": 1})
    assert caplog.messages[num_lines:] == [f"request finished: x=1 not_logged_before={1000 - num_lines}"]
