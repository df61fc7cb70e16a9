"""Which path blocks take: what is planned to be the fastest, by guesses and then by what was measured."""

from __future__ import annotations

import pytest

from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.paths import path_watch
from kvolt.transfer.paths.capabilities import PathCapabilities
from kvolt.transfer.paths.lanes import Place
from kvolt.transfer.paths.link_speeds import LARGE_BYTES, LinkSpeeds
from kvolt.transfer.paths.path_choice import MIN_PROVEN_READS, PathChoice, choose, lane_name
from kvolt.transfer.paths.path_watch import Endpoints, PathWatch, Peer, TransferPath
from kvolt.transfer.paths.routes import Sides

NEAR = Place(kind=MemoryKind.SHARED, host="here", process="p1")
FAR = Place(kind=MemoryKind.SHARED, host="there", process="p1")
HERE = Place(kind=MemoryKind.SHARED, host="here", process="p2")
ENDS = Endpoints(MemoryKind.SHARED, MemoryKind.SHARED)


CAN = PathCapabilities(paths=frozenset(("copy", "shm", "nixl", "tcp")))
WITH_RDMA = PathCapabilities(paths=CAN.paths | {"rdma"})
ALL = ("shm", "nixl", "tcp")


def chosen(source: Place, paths: tuple[str, ...], speeds: LinkSpeeds | None = None, current: str = "") -> str:
    return choose(Sides(source, HERE, CAN, CAN), paths, speeds or LinkSpeeds(), current=current).path


def measured(*speeds: tuple[str, float]) -> LinkSpeeds:
    """Seconds that a large read took over a path, proven."""
    found = LinkSpeeds()
    for path, seconds in speeds:
        for _ in range(MIN_PROVEN_READS):
            found.observe("here", path, LARGE_BYTES, seconds)
    return found


def test_by_the_table_of_lanes() -> None:
    assert chosen(NEAR, ALL) == "shm"
    assert chosen(NEAR, ("nixl", "tcp")) == "nixl"
    assert chosen(FAR, ("nixl", "tcp")) == "tcp"
    assert choose(Sides(FAR, HERE, WITH_RDMA, WITH_RDMA), ("nixl", "tcp"), LinkSpeeds()).path == "nixl"


@pytest.mark.parametrize("device", ["GPU-0", "GPU-1"])
def test_devices_go_their_own_way_where_there_is_one(device: str) -> None:
    source = Place(kind=MemoryKind.DEVICE, host="here", process="p1", device="GPU-0")
    target = Place(kind=MemoryKind.DEVICE, host="here", process="p2", device=device)
    paths = ("cuda-ipc", "tcp")
    assert choose(Sides(source, target, CAN, CAN), paths, LinkSpeeds()) == PathChoice("cuda-ipc", None)
    assert choose(Sides(source, target, CAN, CAN), ("tcp",), LinkSpeeds()) == PathChoice("tcp", None)
    name = lane_name(Sides(source, target, CAN, CAN), "cuda-ipc")
    assert name is not None
    assert choose(Sides(source, target, CAN, CAN), paths, measured((name, 0.05))) == PathChoice(
        "cuda-ipc", "tcp"
    )


def test_what_was_measured_decides() -> None:
    speeds = measured(("shm", 0.01), ("nixl", 0.001))
    assert choose(Sides(NEAR, HERE, CAN, CAN), ALL, speeds) == PathChoice("nixl", "shm")


def test_a_busy_machine_is_not_compared_with_the_table_of_an_idle_one() -> None:
    """Every path is slow there: the one that is fast by the table stays, and the other gets a read now and then."""
    speeds = measured(("shm", 0.1))
    assert choose(Sides(NEAR, HERE, CAN, CAN), ("shm", "tcp"), speeds) == PathChoice("shm", "tcp")
    speeds = measured(("shm", 0.1), ("tcp", 0.2))
    assert choose(Sides(NEAR, HERE, CAN, CAN), ("shm", "tcp"), speeds) == PathChoice("shm", None)


def test_a_bad_moment_decides_nothing() -> None:
    speeds = LinkSpeeds()
    for _ in range(MIN_PROVEN_READS - 1):
        speeds.observe("here", "shm", LARGE_BYTES, 10.0)
    assert chosen(NEAR, ALL, speeds) == "shm"


def test_a_path_that_is_hardly_faster_is_not_changed_to() -> None:
    speeds = measured(("shm", 0.0011), ("nixl", 0.001))
    assert chosen(NEAR, ALL, speeds) == "shm"
    assert chosen(NEAR, ALL, speeds, current="nixl") == "nixl"


def reads(watch: PathWatch, peer: Peer, seconds: dict[str, float], number: int) -> list[str]:
    """Asked before every read, as links do."""
    current = []
    for _ in range(number):
        path = watch.choose_path(peer, ENDS, ALL)
        current.append(path)
        watch.observe(peer, TransferPath(ENDS, path), LARGE_BYTES, seconds[path])
        watch.check_fallback(peer, TransferPath(ENDS, path))
    return current


def test_blocks_leave_a_slow_path_when_another_has_proven_faster_and_come_back() -> None:
    watch, peer = PathWatch("here", "p2", CAN), Peer("here", "p1", CAN, is_near=True)
    slow_shm = {"shm": 0.05, "nixl": 0.001, "tcp": 0.005}
    current = reads(watch, peer, slow_shm, 200)
    assert current[:MIN_PROVEN_READS] == ["shm"] * MIN_PROVEN_READS
    assert current[: 8 * MIN_PROVEN_READS].count("shm") >= 7 * MIN_PROVEN_READS - 1
    assert current[-50:].count("nixl") >= 40
    current = reads(watch, peer, {**slow_shm, "shm": 0.0004}, 2000)
    assert current[-50:].count("shm") == 50
    assert not watch.slow_paths()  # it was a choice, and nothing is lacking


def test_on_a_busy_machine_blocks_stay_where_they_are() -> None:
    watch, peer = PathWatch("here", "p2", CAN), Peer("here", "p1", CAN, is_near=True)
    current = reads(watch, peer, {"shm": 0.1, "nixl": 0.15, "tcp": 0.2}, 1000)
    assert current.count("shm") >= 980
    assert not watch.slow_paths()


def test_a_path_that_is_still_slow_is_tried_less_and_less() -> None:
    watch, peer = PathWatch("here", "p2", CAN), Peer("here", "p1", CAN, is_near=True)
    reads(watch, peer, {"shm": 0.05, "nixl": 0.001, "tcp": 0.005}, 1000)
    current = reads(watch, peer, {"shm": 0.05, "nixl": 0.001, "tcp": 0.005}, 2560)
    assert 5 <= current.count("shm") <= 20


def test_a_socket_that_cannot_be_reached_is_lacking() -> None:
    watch, peer = PathWatch("here", "p2", CAN), Peer("here", "p1", CAN, is_near=False)
    watch.check_fallback(peer, TransferPath(ENDS, "tcp"))
    assert watch.slow_paths() == {("tcp", "socket"): 1}


def test_what_goes_through_the_host_for_want_of_a_lane_has_a_speed_too() -> None:
    watch, peer = PathWatch("here", "p2", CAN), Peer("there", "p1", CAN)
    endpoints = Endpoints(MemoryKind.DEVICE, MemoryKind.DEVICE, "GPU-0", "GPU-0")
    watch.observe(peer, TransferPath(endpoints, "tcp"), LARGE_BYTES, 0.01)
    assert list(watch.links()) == ["tcp/staged@there"]


def test_a_staged_device_path_has_a_name(caplog: pytest.LogCaptureFixture) -> None:
    can = PathCapabilities(paths=CAN.paths | {"cuda-copy", "cuda-ipc"})
    endpoints = Endpoints(MemoryKind.DEVICE, MemoryKind.DEVICE, "GPU-0", "GPU-0")
    for theirs, lack in ((can, "cuda-ipc"), (CAN, "cuda-ipc")):
        watch = PathWatch("here", "p2", can)
        watch.check_fallback(Peer("here", "p1", theirs), TransferPath(endpoints, "tcp"))
        assert ("tcp", lack) in watch.slow_paths()
    watch.check_fallback(Peer("here", "p1", can), TransferPath(endpoints, "cuda-ipc"))
    assert all(path == "tcp" for path, _ in watch.slow_paths())


def test_how_many_choices_are_kept_is_bounded() -> None:
    can = PathCapabilities(paths=frozenset(("copy", "shm", "tcp")))
    watch = PathWatch("here", "p2", can)
    for _ in range(3000):
        watch.choose_path(Peer("here", "p1", can), ENDS, ("shm", "tcp"))
    assert len(watch._pairs) <= 1024


def test_routes_are_planned_once_for_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, planned = PathWatch("here", "p2", CAN), []
    monkeypatch.setattr(path_watch, "table_route", lambda *sides: planned.append(sides))
    peers = [Peer("there", f"p{number}", CAN) for number in range(3)]
    for peer in peers * 2:
        watch.check_fallback(peer, TransferPath(ENDS, "tcp"))
    assert len(planned) == 3
    for _ in range(3000):
        watch.check_fallback(Peer("there", "p", CAN), TransferPath(ENDS, "tcp"))
    assert len(watch._pairs) <= 1024
