"""A sample of seeds of the virtual cluster; `make seeds` runs a thousand."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvolt.core.delta import Delta
from kvolt.testing import faults
from kvolt.testing.cluster import Violation

SAMPLE = range(24)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("kvolt")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def test_a_sample_of_seeds_holds_in_two_processes_with_equal_logs(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults.compare(SAMPLE) == 0, capsys.readouterr().err


def test_a_seed_gives_work_and_trouble() -> None:
    """The suite would be worthless if nothing were asked, or nothing ever went wrong."""
    reports = [faults.run_seed(seed) for seed in range(4)]
    assert sum(report.ok for report in reports) > 200
    assert sum(sum(report.failed.values()) for report in reports) > 10
    assert any("crashes" in line for report in reports for line in report.log)


def test_lost_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in merging (the later tokens only) must show as a violation, with the seed in its text."""
    merge = Delta.merge

    def forgetful(self: Delta, later: Delta) -> Delta | None:
        return None if merge(self, later) is None else later

    monkeypatch.setattr(Delta, "merge", forgetful)
    with pytest.raises(Violation, match=r"seed \d+ at"):
        for seed in range(8):
            faults.run_seed(seed)


def test_different_seeds_differ() -> None:
    assert faults.log_digest(faults.run_seed(1, 20.0)) != faults.log_digest(faults.run_seed(2, 20.0))
