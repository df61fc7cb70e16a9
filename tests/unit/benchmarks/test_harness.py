"""Tables of the benchmarks: rows of rounds to spreads, ratios within a round, columns declared once."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from benchmarks.harness import Figure, Rows, Spread, comparison, row_table, table


class Row(NamedTuple):
    round: int
    system: str
    cpu_us: float
    num_items: int = 1


CPU = Figure("CPU us", "cpu_us", ".0f")
PER_ITEM = Figure("us per item", lambda row: row.cpu_us / row.num_items, ".1f")
ROWS = Rows(
    [Row(1, "ours", 10.0, 5), Row(1, "theirs", 20.0), Row(2, "ours", 30.0, 5), Row(2, "theirs", 30.0)]
)


def test_rows_of_a_line_are_folded_over_rounds() -> None:
    sides = dict(ROWS.each("system"))
    assert list(sides) == ["ours", "theirs"]
    assert sides["ours"].cells((CPU, PER_ITEM)) == ["20 (10..30)", "4.0 (2.0..6.0)"]
    assert sides["ours"].fold(Figure("mean", "cpu_us", fold=fmean)) == 20.0
    assert ROWS.where(system="others").cells((CPU,)) == ["-"]


def test_ratios_are_taken_within_a_round() -> None:
    ours, theirs = ROWS.where(system="ours"), ROWS.where(system="theirs")
    assert ours.over(theirs, CPU) == Spread(0.75, 0.5, 1.0)
    ratio = ours.over(theirs, PER_ITEM, CPU)
    assert ratio is not None
    assert ratio.text() == "0.15 (0.10..0.20)"
    assert ours.over(theirs.only(lambda row: row.round == 3), CPU) is None


def test_a_comparison_has_a_ratio_where_both_sides_ran() -> None:
    sides = dict(ROWS.each("system"))
    lines = comparison("load", (CPU,), sides, "ours", "theirs").splitlines()
    assert lines[0].split() == ["load", "ours", "theirs", "ours", "/", "theirs"]
    assert lines[2].endswith("0.75 (0.50..1.00)")
    assert "/" not in comparison("load", (CPU,), {"ours": sides["ours"]}, "ours", "theirs")


def test_cells_of_a_table() -> None:
    assert table("a | b", [(None, Spread(1.0, 0.5, 2.0))]).splitlines()[2] == "-  1.00 (0.50..2.00)"
    assert row_table((Figure("system", "system", ""), CPU), ROWS.rows[:1]).splitlines()[2] == "ours    10"
