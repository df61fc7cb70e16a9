"""What a tally and its report say: sums, limits, warnings, files, the page."""

from __future__ import annotations

import io
import random
import re
from itertools import pairwise
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.bench.load import page
from kvolt.bench.load import tally as tally_module
from kvolt.bench.load.page import html_page
from kvolt.bench.load.report import BenchReport, RunFacts, decode_report, encode_report, make_report
from kvolt.bench.load.report_text import facts, latency_rows
from kvolt.bench.load.sample import Rows, Sample
from kvolt.bench.load.sla import Sla, parse_duration_s, parse_sla
from kvolt.bench.load.svg import Series, plot, ticks
from kvolt.bench.load.tally import MAX_INTERVALS, Tally, Timeline
from kvolt.core.errors import ConfigError

FACTS = RunFacts(
    url="http://h:1/v1",
    model="<m>",
    started_at=0.0,
    settings={"rate": 2.0},
    is_interrupted=False,
    open_loop=True,
)


def sample(number: int, ttft_s: float = 0.1, late_s: float = 0.0, **more: object) -> Sample:
    due_s = float(number)
    whole = Sample(
        number=number,
        session=number,
        turn=0,
        due_s=due_s,
        started_s=due_s + late_s,
        sent_s=due_s + late_s + 0.01,
        first_s=due_s + ttft_s,
        second_s=due_s + ttft_s + 0.02,
        last_s=due_s + ttft_s + 0.09,
        end_s=due_s + ttft_s + 0.1,
        max_gap_s=0.07,
        num_events=4,
        input_tokens=10,
        output_tokens=4,
        cached_tokens=5,
    )
    return msgspec.structs.replace(whole, **more)


def tallied(samples: list[Sample], sla: Sla | None = None) -> Tally:
    tally = Tally(sla, random.Random(0).random)
    for each in samples:
        tally.started(each.due_s)
        tally.add(each)
    return tally


def reported(samples: list[Sample], sla: Sla | None = None, facts: RunFacts = FACTS) -> BenchReport:
    return make_report(facts, tallied(samples, sla))


def test_sums_and_rates() -> None:
    report = reported([sample(number) for number in range(200)])
    assert report.throughput.window_s == pytest.approx(199.2)
    assert report.throughput.requests_per_s == pytest.approx(200 / 199.2)
    assert report.throughput.output_tokens_per_s == pytest.approx(800 / 199.2)
    assert report.user_tokens_per_s.mean == pytest.approx(3 / 0.09)
    assert (report.counts.cached_tokens, report.counts.input_tokens) == (1000, 2000)
    assert sum(report.timeline.tokens) == pytest.approx(800, rel=1e-3)
    assert sum(report.timeline.started) == sum(report.timeline.ended) == 200
    assert report.throughput.good_requests_per_s is None
    assert report.warnings == []


def test_the_offered_rate_excludes_the_time_of_the_last_answers() -> None:
    samples = [sample(number, ttft_s=20.0) for number in range(11)]
    report = reported(samples)
    assert report.throughput.requests_per_s < 0.4
    assert report.throughput.offered_requests_per_s == pytest.approx(1.1)
    assert ("offered requests/s", "1.1") in facts(report)
    closed = msgspec.structs.replace(FACTS, open_loop=False)
    for none in (reported(samples, facts=closed), reported(samples[:1])):
        assert none.throughput.offered_requests_per_s is None
        assert "offered requests/s" not in dict(facts(none))


def test_latencies_count_from_when_it_was_due() -> None:
    late = sample(0, ttft_s=0.5, late_s=0.3)
    assert (late.ttft_s, late.lateness_s) == (pytest.approx(0.5), pytest.approx(0.3))
    early = sample(1, ttft_s=0.5, late_s=-0.0004)  # a timer that fired a little early
    assert (early.ttft_s, early.lateness_s) == (pytest.approx(0.5004), 0.0)


def test_one_token_has_no_gaps_and_breaks_no_limit() -> None:
    short = sample(0, second_s=None, num_events=1, output_tokens=1, last_s=0.1)
    assert (short.ttst_s, short.itl_s, short.tpot_s, short.tokens_per_s) == (None, None, None, None)
    assert tallied([short], Sla({"itl": 1e-6, "max_gap": 1e-6})).num_good == 1


def test_goodput() -> None:
    failed = sample(3, error="http_500", message="no")
    report = reported([sample(0), sample(1, ttft_s=2.0), sample(2), failed], Sla({"ttft": 0.5}))
    assert report.throughput.good_share == 0.5
    assert report.throughput.good_requests_per_s == pytest.approx(2 / report.throughput.window_s)
    assert report.errors == {"http_500": 1}
    assert report.messages == {"http_500": "no"}


def test_a_late_generator_says_so_in_an_open_loop_only() -> None:
    samples = [sample(number, late_s=0.05, ttft_s=0.2) for number in range(200)]
    assert any("could not keep the schedule" in warning for warning in reported(samples).warnings)
    closed = msgspec.structs.replace(FACTS, open_loop=False)
    assert not any("schedule" in warning for warning in reported(samples, facts=closed).warnings)


def test_other_warnings() -> None:
    cut = msgspec.structs.replace(FACTS, is_interrupted=True)
    samples = [sample(0, output_tokens=9), sample(1, error="cut"), sample(2, error="hang_up")]
    said = "\n".join(reported(samples, facts=cut).warnings)
    assert all(
        part in said
        for part in ("1 running requests are not counted", "33.3 %", "only 1 responses", "2.2 tokens")
    )


def test_kinds_of_errors_are_bounded() -> None:
    tally = tallied([sample(number, error=f"http_{number}") for number in range(100)])
    assert len(tally.errors) == 65
    assert sum(tally.errors.values()) == tally.num_failed == 100


def test_kept_answers_are_bounded_and_a_fair_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_module, "MAX_SAMPLES", 100)
    kept = tallied([sample(number) for number in range(5000)]).sampled
    assert len(kept) == 100
    assert 1500 < sum(each.at_s for each in kept) / 100 < 3500


def test_a_report_survives_its_file() -> None:
    report = reported([sample(number) for number in range(10)], Sla({"ttft": 0.5}))
    assert decode_report(encode_report(report), "x") == report
    with pytest.raises(ConfigError, match=r"x\.json is not a kvolt bench report"):
        decode_report(b"{}", "x.json")
    other = msgspec.structs.replace(report, format="other/9")
    with pytest.raises(ConfigError, match="other/9"):
        decode_report(encode_report(other), "x.json")


def test_rows_are_one_line_a_request() -> None:
    file = io.StringIO()
    rows = Rows(file)
    rows.add(sample(0), counted=False)
    rows.add(sample(1, error="http_500", message='a "b",\nc'), counted=True)
    header, first, *_ = file.getvalue().splitlines()
    assert header.startswith("counted,number,session,turn,due_s")
    assert first.startswith("0,0,0,0,0.0,0.0,0.01,0.2,0.1,0.02,0.03,0.07,0.03,0.2,10,5,4,4,")


@pytest.mark.parametrize(
    "samples", [[], [sample(0)], [sample(number, ttft_s=0.01 * number) for number in range(300)]]
)
def test_the_page_is_whole_and_needs_nothing_else(samples: list[Sample]) -> None:
    text = html_page(reported([*samples, sample(9, error="http_500", message="<b>")], Sla({"ttft": 0.5})))
    assert "<m>" not in text
    assert "<b>" not in text
    assert not re.search(r"(src|href)=|@import|url\(", text)
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert text.count("<svg") >= 4
    assert text.rstrip().endswith("</html>")


def test_rows_of_text() -> None:
    report = reported([sample(number) for number in range(3)], Sla({"ttft": 0.5}))
    rows = {row[0]: row[1:] for row in latency_rows(report)}
    assert rows["time to first token (ttft)"][0] == "100.0"
    assert rows["gap between tokens (itl)"][0] == "-"
    assert dict(facts(report))["goodput"].endswith("100.0 % within ttft 500.0 ms")
    assert dict(facts(report))["input from cache"] == "50.0 %"


@given(st.lists(st.floats(0.0, 1e5), max_size=60))
def test_a_timeline_is_bounded_and_loses_nothing(times: list[float]) -> None:
    timeline = Timeline()
    for at_s in times:
        timeline.started(at_s)
        timeline.ended(at_s + 1.0, failed=False)
        timeline.tokens(3, at_s, at_s + 1.0)
    data = timeline.data()
    assert len(data.started) <= MAX_INTERVALS
    assert len(data.started) == len(data.ended) == len(data.failed) == len(data.tokens)
    assert (sum(data.started), sum(data.ended)) == (len(times), len(times))
    assert sum(data.tokens) == pytest.approx(3 * len(times), rel=0.01)


@given(st.floats(1e-9, 1e12))
def test_ticks_are_few_and_reach_the_largest(largest: float) -> None:
    found = ticks(largest)
    assert found[0] == 0.0
    assert found[-1] >= largest * (1 - 1e-6)
    assert 2 <= len(found) <= 12


def test_a_limit_is_drawn_and_named() -> None:
    drawing = plot("Time to first token", "s", "ms", [Series("a", [(0.0, 10.0), (1.0, 20.0)])], 60.0)
    assert "limit 60" in drawing
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    assert "limit" not in plot("Time to first token", "s", "ms", [Series("a", [(0.0, 10.0)])])


def test_a_unit_is_told_once() -> None:
    assert ">ms<" in plot("Time to first token", "s", "ms", [])
    assert ">requests<" not in plot("Requests under way", "s", "requests", [])


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=MAX_INTERVALS), st.sampled_from([0.25, 0.5, 1.0, 4.0])
)
def test_rates_over_longer_times_are_of_the_same_requests(counts: list[int], width_s: float) -> None:
    rates = page._rates(counts, width_s)
    assert len(rates) <= page._MAX_RATES
    edges = [0.0]
    for at_s, _ in rates:
        edges.append(2 * at_s - edges[-1])  # each is told of its middle
    assert edges[-1] == pytest.approx(len(counts) * width_s)
    total = sum(rate * (end - begin) for (_, rate), (begin, end) in zip(rates, pairwise(edges), strict=True))
    assert total == pytest.approx(sum(counts))
    if edges[-1] > page._LONG_S:
        assert all(end - begin >= 1.0 for begin, end in list(pairwise(edges))[:-1])


def test_a_plot_of_nothing() -> None:
    assert ElementTree.fromstring(plot("t", "x", "y", [Series("a", [])])).tag.endswith("svg")


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("1.5s", 1.5), ("2m", 120.0), ("3", 3.0), (" 20 us", 2e-5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


def test_sla_limits_have_a_unit() -> None:
    assert parse_sla("ttft=500ms,itl=1.5 s").limits == {"ttft": 0.5, "itl": 1.5}
    with pytest.raises(ConfigError, match="itl=50 has no unit") as caught:
        parse_sla("ttft=500ms, itl=50")
    assert caught.value.fields["remedy"] == "write itl=50ms or itl=50s"


@pytest.mark.parametrize("text", ["", "ms", "-1s", "1d", "1s2", "nan", "9" * 400])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_duration_s(text)


def test_limits_as_written() -> None:
    assert parse_sla("ttft=500ms, itl=50ms").limits == {"ttft": 0.5, "itl": 0.05}
    for text in ("", "ttft", "speed=3", "ttft=fast"):
        with pytest.raises(ConfigError):
            parse_sla(text)
