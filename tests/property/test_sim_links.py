"""Shared links under random starts and ends: no bytes are lost, links with transfers are never idle, equal
transfers are equal."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.engines.sim.test_links import rate

from kvolt.engines.sim.links import SharedLinks, SimLink, TransferId

LINKS = ("a", "b", "c", "d")

links = st.lists(st.floats(1.0, 1e11), min_size=1, max_size=4).map(
    lambda speeds: [SimLink(name, speed) for name, speed in zip(LINKS, speeds, strict=False)]
)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[SimLink], list[tuple[float, float, tuple[str, ...]]]]:
    """Links, and transfers as (start, bytes, path) in order of start."""
    made = draw(links)
    names = [link.name for link in made]
    transfers = draw(
        st.lists(
            st.tuples(
                st.floats(0.0, 10.0),
                st.floats(1.0, 1e12),
                st.lists(st.sampled_from(names), min_size=1, unique=True).map(tuple),
            ),
            min_size=1,
            max_size=12,
        )
    )
    return made, sorted(transfers)


def alone_s(made: list[SimLink], num_bytes: float, path: tuple[str, ...]) -> float:
    return num_bytes / min(link.bytes_per_s for link in made if link.name in path)


class Run:
    """Drives links through a workload, looking at the rates after each event."""

    def __init__(self, made: list[SimLink]) -> None:
        self.made = made
        self.shared = SharedLinks(made)
        self.paths: dict[TransferId, tuple[str, ...]] = {}
        self.arrived_at: dict[TransferId, float] = {}
        self.order: list[TransferId] = []
        self.moved: Counter[TransferId] = Counter()
        """Bytes by transfer, from the rates between events."""
        self.now = 0.0

    def drive(self, transfers: list[tuple[float, float, tuple[str, ...]]]) -> list[TransferId]:
        ids = []
        for start, num_bytes, path in transfers:
            self.until(start)
            self.pass_time(start)
            transfer = self.shared.start(start, num_bytes, path)
            self.paths[transfer] = path
            ids.append(transfer)
            self.check_rates()
        self.until(math.inf)
        return ids

    def until(self, end: float) -> None:
        while (due := self.shared.next_arrival()) is not None and due <= end:
            self.pass_time(due)
            for transfer in self.shared.advance(due):
                self.arrived_at[transfer] = due
                self.order.append(transfer)
            self.check_rates()

    def pass_time(self, now: float) -> None:
        for transfer in self.paths:
            self.moved[transfer] += rate(self.shared, transfer) * (now - self.now)
        self.now = now

    def check_rates(self) -> None:
        """Max-min fair: rates are within the links' bandwidth, and each transfer has a full link on which
        none is faster."""
        rates = {transfer: rate(self.shared, transfer) for transfer in self.paths}
        moving = {transfer: each for transfer, each in rates.items() if each > 0}
        room = {link.name: link.bytes_per_s for link in self.made}
        used = {
            name: sum(each for transfer, each in moving.items() if name in self.paths[transfer])
            for name in room
        }
        for name, bytes_per_s in room.items():
            assert used[name] <= bytes_per_s * (1 + 1e-9)
        for transfer, own in moving.items():
            assert any(
                used[name] >= room[name] * (1 - 1e-9)
                and all(own >= other * (1 - 1e-9) for one, other in moving.items() if name in self.paths[one])
                for name in self.paths[transfer]
            ), "it could be faster without slowing a slower transfer"


@given(workloads())
def test_fair_work_conserving_and_complete(
    workload: tuple[list[SimLink], list[tuple[float, float, tuple[str, ...]]]],
) -> None:
    made, transfers = workload
    run = Run(made)
    ids = run.drive(transfers)
    assert sorted(run.arrived_at) == ids, "each arrives once"
    for transfer, (start, num_bytes, path) in zip(ids, transfers, strict=True):
        moved = run.moved[transfer]
        assert math.isclose(moved, num_bytes, rel_tol=1e-6, abs_tol=1.0), "what went in came out"
        took_s = run.arrived_at[transfer] - start
        assert took_s >= alone_s(made, num_bytes, path) * (1 - 1e-6) - 1e-9, "none is faster than alone"
    assert run.shared.next_arrival() is None


@given(workloads())
def test_the_same_twice(workload: tuple[list[SimLink], list[tuple[float, float, tuple[str, ...]]]]) -> None:
    made, transfers = workload
    one, other = Run(made), Run(made)
    one.drive(transfers)
    other.drive(transfers)
    assert one.arrived_at == other.arrived_at
    assert one.order == other.order


@given(
    st.floats(1.0, 1e11), st.floats(1e3, 1e12), st.integers(1, 50), st.floats(0.0, 1e5), st.floats(0.0, 10.0)
)  # so that no transfer is shorter than what a float can tell apart at that time
def test_equals_end_together_after_as_many_times_the_time(
    bytes_per_s: float, num_bytes: float, count: int, now: float, latency_s: float
) -> None:
    shared = SharedLinks([SimLink("wire", bytes_per_s, latency_s)])
    ids = [shared.start(now, num_bytes, ["wire"]) for _ in range(count)]
    assert len({rate(shared, transfer) for transfer in ids}) == 1
    arrived: list[TransferId] = []
    while (due := shared.next_arrival()) is not None:
        found = shared.advance(due)
        if found:
            arrived += found
            last = due
    assert arrived == ids, "at once, in the order of their start"
    expected_s = count * num_bytes / bytes_per_s + latency_s
    assert math.isclose(last - now, expected_s, rel_tol=1e-6, abs_tol=1e-6)


@given(workloads(), st.data())
def test_cancelling_leaves_the_rest_whole(
    workload: tuple[list[SimLink], list[tuple[float, float, tuple[str, ...]]]], data: st.DataObject
) -> None:
    made, transfers = workload
    run = Run(made)
    shared = run.shared
    start = transfers[-1][0]
    for _, num_bytes, path in transfers:
        run.paths[shared.start(0.0, num_bytes, path)] = path
    cancelled = data.draw(st.sets(st.sampled_from(sorted(run.paths))))
    run.until(start)
    for transfer in sorted(cancelled):
        shared.cancel(start, transfer)
        run.check_rates()
    run.until(math.inf)
    assert {one for one in run.paths if one not in cancelled} <= set(run.arrived_at)
    assert shared.next_arrival() is None
