"""Progress as log lines: the first at once, then few, then the last."""

from __future__ import annotations

import logging

import pytest

from kvolt.models.fetch_progress import ProgressLog, share_text, size_text


class Hands:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_a_thousand_reports_are_a_few_lines(lines: pytest.LogCaptureFixture) -> None:
    clock = Hands()
    progress = ProgressLog(clock, every_s=5.0)
    for done in range(1001):
        progress("weights", done * 1_000_000, 1_000_000_000)
        clock.now += 0.01
    progress("weights", 1_000_000_000, 1_000_000_000)
    assert lines.messages == [
        "fetching weights (1.0 GB)",
        "fetching weights: 500 MB of 1.0 GB (50%), 100 MB/s",
        "fetched weights, 100 MB/s",
    ]


def test_what_was_here_before_is_no_speed(lines: pytest.LogCaptureFixture) -> None:
    clock = Hands()
    progress = ProgressLog(clock)
    progress("weights", 900, 1000)
    clock.now += 10
    progress("weights", 950, 1000)
    assert lines.messages == [
        "fetching weights (1 kB), 900 B already here",
        "fetching weights: 950 B of 1 kB (95%), 5 B/s",
    ]


def test_an_unknown_size_and_a_wait(lines: pytest.LogCaptureFixture) -> None:
    clock = Hands()
    progress = ProgressLog(clock)
    progress("weights", 0, None)
    clock.now += 10
    progress("weights", 0, None)
    clock.now += 10
    progress("weights", 10_000, None)
    assert lines.messages == [
        "fetching weights",
        "fetching weights, still waiting",
        "fetching weights: 10 kB, 500 B/s",
    ]


def test_each_thing_has_its_first_line(lines: pytest.LogCaptureFixture) -> None:
    progress = ProgressLog(Hands())
    progress("a", 0, 10)
    progress("b", 0, 20)
    assert lines.messages == ["fetching a (10 B)", "fetching b (20 B)"]


def test_lines_can_go_elsewhere(lines: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    ProgressLog(Hands(), write_line=said.append)("a 100% name", 0, 10)
    assert said == ["fetching a 100% name (10 B)"]
    assert lines.messages == []
    ProgressLog(Hands())("a 100% name", 0, 10)
    assert lines.messages == said


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (98_362_432, "98.4 MB"),
        (999_900_000, "1.0 GB"),
        (16e9, "16.0 GB"),
    ],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


def test_shares() -> None:
    assert share_text(999, 1000) == "999 B of 1 kB (99%)"
    assert share_text(5, None) == "5 B"
