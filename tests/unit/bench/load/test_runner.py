"""Whole loads on virtual time, against a server whose delays are known: what is measured is what happened."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from tests.unit.bench.load.load_lab import Setup, measured
from tests.unit.bench.load.scripted_server import (
    DONE,
    END,
    FINISH,
    HANG_UP,
    ROLE,
    STREAM_HEAD,
    Heard,
    Script,
    ScriptedServer,
    answer,
    chunk,
    event,
    plain,
    token,
    usage,
)

from kvolt.bench.load.runner import LoadRun, Pace
from kvolt.bench.load.schedules import bursts, constant, from_trace, poisson
from kvolt.bench.load.sla import Sla
from kvolt.bench.load.workloads import Chats, FromTrace, Lengths, PromptShape, sessions_of
from kvolt.core.trace import TraceRecord
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.network import VirtualNetwork


def always(script: Script) -> Callable[[int, Heard], Script]:
    return lambda number, heard: script


def one(**more: float) -> Setup:
    return Setup(Pace(concurrency=1, num_requests=1), **more)  # type: ignore[arg-type]


def test_the_times_of_one_answer() -> None:
    outcome = measured(always(answer(5, first_s=0.3, gap_s=0.02)), one())
    [sample] = outcome.samples
    assert sample.error is None
    assert sample.ttft_s == pytest.approx(0.3)  # not when the role came
    assert sample.ttst_s == pytest.approx(0.02)
    assert sample.itl_s == sample.tpot_s == pytest.approx(0.02)
    assert sample.e2e_s == pytest.approx(0.38)
    assert sample.tokens_per_s == pytest.approx(50.0)
    assert (sample.input_tokens, sample.output_tokens, sample.num_events) == (7, 5, 5)
    assert outcome.tally.latencies["itl"].count == 4
    assert outcome.connections_left == 0


def test_gaps_of_failed_answers_are_not_counted() -> None:
    broken: Script = [STREAM_HEAD + chunk(ROLE), 0.1, chunk(token("a")), 5.0, chunk(token("b")), HANG_UP]
    scripts = {0: broken, 1: answer(3, gap_s=0.02)}
    setup = Setup(Pace(concurrency=1, num_requests=2))
    outcome = measured(lambda number, heard: scripts[number], setup)
    gaps = outcome.tally.latencies["itl"]
    assert (outcome.tally.num_failed, outcome.tally.num_complete) == (1, 1)
    assert (gaps.count, gaps.max) == (2, pytest.approx(0.02))


def test_an_open_loop_keeps_its_schedule_whatever_the_server_does() -> None:
    setup = Setup(Pace(schedule=constant(10.0), num_requests=20))
    outcome = measured(always(answer(4, first_s=5.0)), setup)
    assert [heard.at_s for heard in outcome.server.heard] == pytest.approx(
        [number / 10 for number in range(20)]
    )
    assert outcome.tally.num_complete == 20
    assert outcome.tally.lateness.max == pytest.approx(0.0, abs=1e-9)


def test_a_closed_loop_asks_when_it_is_answered() -> None:
    outcome = measured(always(answer(2, first_s=0.5, gap_s=0.5)), Setup(Pace(concurrency=3, num_requests=9)))
    assert [heard.at_s for heard in outcome.server.heard] == pytest.approx([0.0] * 3 + [1.0] * 3 + [2.0] * 3)
    assert {heard.connection for heard in outcome.server.heard} == {0, 1, 2}, "connections are kept alive"


def test_a_stall_shows_in_the_latency_of_all_who_had_to_wait() -> None:
    """The server stands still for 2 s and answers one at a time: a closed loop would have hidden it in one answer."""
    free_at = [0.0]

    def script(number: int, heard: Heard) -> Script:
        begin = max(free_at[0], heard.at_s)
        took_s = 2.0 if number == 10 else 0.01
        free_at[0] = begin + took_s
        return answer(2, first_s=free_at[0] - heard.at_s, gap_s=0.001)

    outcome = measured(script, Setup(Pace(schedule=constant(20.0), num_requests=100)))
    ttft = outcome.tally.latencies["ttft"]
    assert ttft.percentile(5) == pytest.approx(0.01, rel=0.02)
    # 40 requests came during the stall and 10 more before the queue was empty; their waits fall evenly from 2 s to 0.
    assert ttft.percentile(70) == pytest.approx(0.83, rel=0.15)
    assert ttft.percentile(90) == pytest.approx(1.63, rel=0.1)
    assert outcome.tally.lateness.max == pytest.approx(0.0, abs=1e-9)


def test_waiting_for_a_connection_counts_as_latency() -> None:
    """With one connection the second of two requests due together waits; its user does not care why."""
    setup = Setup(Pace(schedule=bursts(1.0, 2), num_requests=2), max_connections=1)
    outcome = measured(always(answer(1, first_s=1.0)), setup)
    assert sorted(sample.ttft_s or 0.0 for sample in outcome.samples) == pytest.approx([1.0, 2.0])
    assert outcome.tally.connecting.max == pytest.approx(1.0)


def test_a_slow_accept_is_in_the_first_token() -> None:
    setup = one()
    setup.profile = LinkProfile(latency_s=0.25)
    [sample] = measured(always(answer(2, first_s=0.1)), setup).samples
    assert sample.ttft_s == pytest.approx(0.1 + 4 * 0.25)  # the handshake, and there and back


def test_warm_up_is_not_counted() -> None:
    def script(number: int, heard: Heard) -> Script:
        return answer(3, first_s=9.0 if number < 2 else 0.1)

    outcome = measured(script, Setup(Pace(concurrency=2, num_requests=6, num_warmup=2)))
    assert outcome.counted.count(True) == outcome.tally.num_complete == 6
    assert outcome.tally.num_warmup == 2
    assert outcome.tally.latencies["ttft"].max == pytest.approx(0.1)
    assert outcome.tally.latencies["itl"].count == 6 * 2
    assert outcome.tally.window_s == pytest.approx(3 * 0.14)


def test_a_duration_ends_the_sending_and_waits_for_answers() -> None:
    outcome = measured(always(answer(2, first_s=3.0)), Setup(Pace(schedule=constant(2.0), duration_s=2.0)))
    assert len(outcome.samples) == 5
    assert outcome.errors == [None] * 5
    assert not outcome.is_interrupted
    closed = measured(always(answer(2, first_s=0.5, gap_s=0.1)), Setup(Pace(concurrency=2, duration_s=2.0)))
    assert closed.tally.num_complete == 2 * 4


def test_the_same_seed_asks_the_same() -> None:
    def heard(seed: int) -> list[tuple[float, object]]:
        pace = Pace(schedule=poisson(5.0, random.Random(seed).random), num_requests=10)
        outcome = measured(always(answer(2)), Setup(pace))
        return [(each.at_s, each.body) for each in outcome.server.heard]

    assert heard(1) == heard(1) != heard(2)


def test_conversations_go_on_after_the_answer_and_a_thought() -> None:
    shape = PromptShape(input=Lengths(6, 6), output=Lengths(2, 2), shared_prefix=2)
    setup = Setup(Pace(concurrency=1, num_requests=6), workload=Chats(shape, 3, 1.0, seed=0))
    outcome = measured(always(answer(2, first_s=0.4, gap_s=0.1)), setup)
    heard = outcome.server.heard
    # Two chats of three turns: half a second of answer, one of thought; the next chat begins at once.
    assert [each.at_s for each in heard] == pytest.approx([0.0, 1.5, 3.0, 3.5, 5.0, 6.5])
    assert [len(each.body["messages"]) for each in heard] == [2, 4, 6, 2, 4, 6]
    assert heard[1].body["messages"][2] == {"role": "assistant", "content": " w0 w1"}
    assert heard[2].body["messages"][:4] == heard[1].body["messages"]
    assert [(sample.session, sample.turn) for sample in outcome.samples] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert all(sample.ttft_s == pytest.approx(0.4) for sample in outcome.samples)


def test_a_trace_is_replayed_at_its_times() -> None:
    records = [TraceRecord(timestamp=at, input_length=5, output_length=3) for at in (1000, 1000, 3000)]
    setup = Setup(Pace(schedule=from_trace(records, 2.0)), workload=FromTrace(records, 0))
    outcome = measured(always(answer(3)), setup)
    assert [heard.at_s for heard in outcome.server.heard] == pytest.approx([0.0, 0.0, 1.0])
    assert [heard.body["max_tokens"] for heard in outcome.server.heard] == [3, 3, 3]


def test_turns_of_a_trace_wait_for_the_answer_before_them() -> None:
    def record(at_ms: float, session: str | None = None, delay: float | None = None) -> TraceRecord:
        return TraceRecord(timestamp=at_ms, input_length=5, output_length=3, session=session, delay=delay)

    records = [
        record(0, "a"),
        record(100, "b"),
        record(200, "a", delay=4000),
        record(300),
        record(400, "b"),
        record(500, "a", delay=0),
    ]
    assert sessions_of(records) == [[0, 2, 5], [1], [3], [4]]
    starts = [records[places[0]] for places in sessions_of(records)]
    setup = Setup(Pace(schedule=from_trace(starts, 2.0)), workload=FromTrace(records, 0, speed=2.0))
    outcome = measured(always(answer(3, first_s=0.5, gap_s=0.25)), setup)
    # At double speed; an answer takes a second, and the thought between the turns of a two.
    assert [heard.at_s for heard in outcome.server.heard] == pytest.approx([0.0, 0.05, 0.15, 0.2, 3.0, 4.0])
    assert [(sample.session, sample.turn) for sample in outcome.samples] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
        (0, 1),
        (0, 2),
    ]


def test_goodput_counts_who_kept_all_limits() -> None:
    def script(number: int, heard: Heard) -> Script:
        return [answer(3, 0.1, 0.01), answer(3, 0.9, 0.01), answer(3, 0.1, 0.2), plain(500, b"no")][
            number % 4
        ]

    setup = Setup(Pace(schedule=constant(1.0), num_requests=8), sla=Sla({"ttft": 0.5, "itl": 0.05}))
    outcome = measured(script, setup)
    assert (outcome.tally.num_good, outcome.tally.num_complete, outcome.tally.num_failed) == (2, 6, 2)


BROKEN = [
    ("http_429", plain(429, b'{"error":{"message":"slow down"}}'), "slow down"),
    ("http_503", plain(503, b"busy", more="Connection: close\r\n"), "busy"),
    ("not_a_stream", plain(200, b"{}"), "stream"),
    ("hang_up", [HANG_UP], "closed the connection"),
    (
        "hang_up",
        [STREAM_HEAD + chunk(ROLE) + chunk(token("a")), 0.1, HANG_UP],
        "before the response was complete",
    ),
    ("broken_stream", [STREAM_HEAD + chunk(token("a")) + END], "neither"),
    (
        "stream_error",
        [STREAM_HEAD + chunk(token("a")) + chunk(event('{"error":{"message":"died"}}')) + END],
        "died",
    ),
    ("stream_error", [STREAM_HEAD + chunk(event('{"error":{"message":"died"}}')), 0.1, HANG_UP], "died"),
    ("protocol", [STREAM_HEAD + chunk(event("nonsense"))], "chunk"),
    ("protocol", [b"SSH-2.0\r\n\r\n"], "HTTP"),
    ("first_token_timeout", [STREAM_HEAD + chunk(ROLE)], "2 s"),
    ("first_token_timeout", [], "2 s"),
    ("total_timeout", [STREAM_HEAD + chunk(token("a"))], "5 s"),
]


@pytest.mark.parametrize(
    ("kind", "script", "said"), BROKEN, ids=[f"{at}-{case[0]}" for at, case in enumerate(BROKEN)]
)
def test_what_goes_wrong_is_counted_by_its_kind(kind: str, script: Script, said: str) -> None:
    def mixed(number: int, heard: Heard) -> Script:
        return script if number == 1 else answer(2)

    pace = Pace(concurrency=1, num_requests=4, first_token_s=2.0, total_s=5.0)
    outcome = measured(mixed, Setup(pace))
    failures = [error for error in outcome.errors if error is not None]
    if kind == "hang_up" and script == [HANG_UP]:
        # On a connection used before: the request was sent again, and answered.
        assert failures == []
        assert len(outcome.server.heard) == 5
        return
    assert failures == [kind]
    assert outcome.tally.errors == {kind: 1}
    assert said in outcome.tally.messages[kind]
    assert outcome.tally.num_complete == 3
    assert outcome.tally.latencies["ttft"].count == 3


def test_a_server_that_answers_nothing_twice_has_hung_up() -> None:
    outcome = measured(always([HANG_UP]), Setup(Pace(concurrency=1, num_requests=2)))
    assert outcome.errors == ["hang_up", "hang_up"]


def test_nobody_there() -> None:
    setup = Setup(Pace(concurrency=2, num_requests=4), listens=False)
    outcome = measured(always([]), setup)
    assert outcome.errors == ["connect_failed"] * 4
    assert outcome.took_s >= 0.1, "a dead server is not asked at full speed"


def test_a_connection_that_does_not_open_in_time() -> None:
    def unplug(load: LoadRun, network: VirtualNetwork, server: ScriptedServer) -> None:
        network.partition("client", "server")

    setup = one(connect_s=1.5)
    setup.meanwhile = unplug
    outcome = measured(always([]), setup)
    assert outcome.errors == ["connect_failed"]
    assert "1.5 s" in outcome.tally.messages["connect_failed"]


def test_an_idle_connection_that_the_server_closed_is_no_error() -> None:
    def script(number: int, heard: Heard) -> Script:
        return [*answer(2), 0.2, HANG_UP]

    outcome = measured(script, Setup(Pace(schedule=constant(1.0), num_requests=3)))
    assert outcome.errors == [None] * 3
    assert {heard.connection for heard in outcome.server.heard} == {0, 1, 2}


def test_bytes_in_other_pieces_change_nothing() -> None:
    setup = Setup(Pace(concurrency=4, num_requests=40), profile=LinkProfile(latency_s=0.001, rechunk=True))
    outcome = measured(always(answer(20, first_s=0.05, gap_s=0.01)), setup)
    assert outcome.errors == [None] * 40
    assert {sample.num_events for sample in outcome.samples} == {20}


def test_several_tokens_in_an_event_are_counted_by_usage() -> None:
    body = [chunk(token("a b")), 0.1, chunk(token("c d")), 0.1, chunk(token("e f"))]
    script = [STREAM_HEAD, *body, chunk(FINISH) + chunk(usage(3, 6, cached=2)) + chunk(DONE) + END]
    [sample] = measured(always(script), one()).samples
    assert (sample.output_tokens, sample.num_events, sample.cached_tokens) == (6, 3, 2)
    assert sample.itl_s == pytest.approx(0.1)
    assert sample.tpot_s == pytest.approx(0.2 / 5)


def ending_at(at_s: float) -> Callable[[LoadRun, VirtualNetwork, ScriptedServer], None]:
    def arrange(load: LoadRun, network: VirtualNetwork, server: ScriptedServer) -> None:
        asyncio.get_running_loop().call_later(at_s, load.end)

    return arrange


def test_a_run_that_is_ended_lets_answers_drain() -> None:
    setup = Setup(Pace(schedule=constant(1.0), drain_s=3.0), meanwhile=ending_at(2.5))
    outcome = measured(always(answer(2, first_s=1.0)), setup)
    assert outcome.is_interrupted
    assert outcome.errors == [None] * 3
    assert outcome.took_s < 3.2


def test_what_does_not_drain_is_cut_and_no_error() -> None:
    setup = Setup(Pace(schedule=constant(1.0), drain_s=0.5), meanwhile=ending_at(2.5))
    outcome = measured(always(answer(2, first_s=1.0)), setup)
    assert outcome.is_interrupted
    assert outcome.errors == [None, None, "cut"]
    assert (outcome.tally.num_failed, outcome.tally.num_interrupted) == (0, 1)


def test_a_run_that_is_ended_while_a_user_thinks() -> None:
    shape = PromptShape(input=Lengths(6, 6), output=Lengths(2, 2))
    setup = Setup(
        Pace(concurrency=1, num_requests=9), workload=Chats(shape, 3, 60.0, seed=0), meanwhile=ending_at(5.0)
    )
    outcome = measured(always(answer(2)), setup)
    assert len(outcome.samples) == 1
    assert outcome.is_interrupted
    assert outcome.took_s == pytest.approx(5.0)


def test_many_streams_at_once() -> None:
    setup = Setup(Pace(concurrency=300, num_requests=600))
    outcome = measured(always(answer(4, first_s=1.0)), setup)
    assert outcome.errors == [None] * 600
    assert len(outcome.server.connections) == 300
