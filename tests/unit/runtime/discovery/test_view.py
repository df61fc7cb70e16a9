"""Who lives, decided without a file or a clock."""

from __future__ import annotations

from kvolt.runtime.discovery.port import LeaseId
from kvolt.runtime.discovery.view import LeaseObservation, Record, Snapshot, View

WALL_S = 1_000_000.0
TTL_S = 3.0
L1, L2 = LeaseId("l1"), LeaseId("l2")


class Reader:
    """A view whose scans come every second unless said otherwise."""

    def __init__(self) -> None:
        self.view = View(max_step_s=2.0)
        self.now_s = 100.0
        self.leases: dict[LeaseId, LeaseObservation] = {}
        self.records: dict[str, Record] = {}

    def lease(self, name: LeaseId, mtime_s: float = WALL_S, ended: bool = False) -> None:
        self.leases[name] = LeaseObservation(TTL_S, int(mtime_s * 1e9), ended)

    def key(self, key: str, lease: LeaseId, value: bytes | None = b"v") -> None:
        self.records = {**self.records, key: Record(key, lease, value)}

    def scan(self, after_s: float = 1.0, wall_s: float = WALL_S) -> list[tuple[str, bytes | None]]:
        self.now_s += after_s
        return self.view.apply_snapshot(Snapshot(dict(self.leases), self.records), self.now_s, wall_s)


def test_a_silent_lease_dies_after_its_ttl_and_comes_back_with_a_sign_of_life() -> None:
    reader = Reader()
    reader.lease(L1)
    reader.key("a", L1)
    assert reader.scan() == [("a", b"v")]
    assert [reader.scan() for _ in range(2)] == [[], []]
    assert reader.scan() == [("a", None)]
    reader.lease(L1, WALL_S + 1)
    assert reader.scan() == [("a", b"v")]


def test_a_wall_clock_jump_expires_no_known_lease() -> None:
    reader = Reader()
    reader.lease(L1)
    reader.key("a", L1)
    reader.scan()
    assert reader.scan(wall_s=WALL_S + 1e6) == []
    reader.lease(L1, WALL_S - 1e6)
    assert [reader.scan(wall_s=WALL_S - 1e6) for _ in range(2)] == [[], []]


def test_at_first_sight_an_old_mtime_is_dead_and_a_future_one_alive() -> None:
    reader = Reader()
    reader.lease(L1, WALL_S - TTL_S - 1)
    reader.lease(L2, WALL_S + 50)
    reader.key("old", L1)
    reader.key("young", L2)
    assert reader.scan() == [("young", b"v")]


def test_an_ended_lease_and_a_tombstone_count_at_once() -> None:
    reader = Reader()
    reader.lease(L1)
    reader.lease(L2)
    for key, lease in (("a", L1), ("b", L1), ("c", L2)):
        reader.key(key, lease)
    reader.scan()
    reader.lease(L1, ended=True)
    reader.key("c", L2, None)
    assert reader.scan(0.01) == [("a", None), ("b", None), ("c", None)]


def test_what_vanished_is_believed_for_one_ttl() -> None:
    reader = Reader()
    reader.lease(L1)
    reader.key("a", L1)
    reader.scan()
    reader.leases, reader.records = {}, {}
    assert [reader.scan() for _ in range(3)] == [[], [], []]
    assert reader.view.content() == {"a": b"v"}
    assert reader.scan() == [("a", None)]


def test_a_vanished_key_of_a_living_lease_goes_after_one_ttl() -> None:
    reader = Reader()
    reader.lease(L1)
    reader.key("a", L1)
    reader.key("b", L1)
    reader.scan()
    reader.records = {"b": reader.records["b"]}
    changes = []
    for number in range(6):
        reader.lease(L1, WALL_S + number + 1)
        changes.append(reader.scan())
    assert changes == [[], [], [], [("a", None)], [], []]


def test_put_back_in_time_is_no_news() -> None:
    reader = Reader()
    reader.lease(L1)
    reader.key("a", L1)
    reader.scan()
    records, reader.leases, reader.records = reader.records, {}, {}
    reader.scan()
    reader.lease(L1, WALL_S + 2)
    reader.records = dict(records)
    assert reader.scan() == []
    assert reader.scan() == []


def test_time_in_which_nothing_was_seen_does_not_count() -> None:
    stopped, cut_off = Reader(), Reader()
    for reader in (stopped, cut_off):
        reader.lease(L1)
        reader.key("a", L1)
        reader.scan()
    assert stopped.scan(3600.0) == []
    cut_off.scan(2.0)
    cut_off.view.mark_unreadable()
    assert [cut_off.scan(3600.0), cut_off.scan(2.0)] == [[], []]
    assert cut_off.scan(1.0) == [("a", None)]


def test_takeover_changes_the_owner() -> None:
    reader = Reader()
    reader.lease(L1)
    reader.lease(L2)
    reader.key("a", L1)
    reader.scan()
    reader.key("a", L2)
    assert reader.scan() == []
    reader.lease(L1, ended=True)
    assert reader.scan() == []
    reader.lease(L2, ended=True)
    assert reader.scan() == [("a", None)]


def test_garbage_is_what_was_dead_for_long() -> None:
    reader = Reader()
    mtime_s = WALL_S - 100
    reader.lease(L1, mtime_s)
    reader.key("orphan", LeaseId("nobody"))
    reader.scan()
    found = []
    for _ in range(200):
        reader.scan()
        found.append(reader.view.collect_dead_leases())
    assert found.index({L1: int(mtime_s * 1e9)}) == 11
    assert any(LeaseId("nobody") in collect_dead_leases for collect_dead_leases in found)
    assert reader.view.content() == {}
