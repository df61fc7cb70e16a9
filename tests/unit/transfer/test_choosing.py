"""Which path blocks take: what is planned to be the fastest, by guesses and then by what was measured."""

from __future__ import annotations

import pytest

from kvolt.transfer.capabilities import Capabilities
from kvolt.transfer.choosing import PROVEN, fastest, name_taken
from kvolt.transfer.lanes import MemoryKind, Place
from kvolt.transfer.link_speeds import LARGE_BYTES, LinkSpeeds
from kvolt.transfer.path_watch import Ends, PathWatch, Peer, Way

NEAR = Place(kind=MemoryKind.SHARED, host="here", process="p1")
FAR = Place(kind=MemoryKind.SHARED, host="there", process="p1")
HERE = Place(kind=MemoryKind.SHARED, host="here", process="p2")
ENDS = Ends(MemoryKind.SHARED, MemoryKind.SHARED)


CAN = Capabilities(paths=frozenset(("copy", "shm", "nixl", "tcp")))
WITH_RDMA = Capabilities(paths=CAN.paths | {"rdma"})
ALL = ("shm", "nixl", "tcp")


def chosen(source: Place, paths: tuple[str, ...], speeds: LinkSpeeds | None = None, taken: str = "") -> str:
    return fastest(source, HERE, paths, CAN, CAN, speeds or LinkSpeeds(), taken=taken)


def test_by_the_table_of_lanes() -> None:
    assert chosen(NEAR, ALL) == "shm"
    assert chosen(NEAR, ("nixl", "tcp")) == "nixl"
    assert chosen(FAR, ("nixl", "tcp")) == "tcp"
    assert fastest(FAR, HERE, ("nixl", "tcp"), WITH_RDMA, WITH_RDMA, LinkSpeeds()) == "nixl"


@pytest.mark.parametrize("device", ["GPU-0", "GPU-1"])
def test_devices_go_their_own_way_where_there_is_one(device: str) -> None:
    source = Place(kind=MemoryKind.DEVICE, host="here", process="p1", device="GPU-0")
    target = Place(kind=MemoryKind.DEVICE, host="here", process="p2", device=device)
    paths = ("cuda-ipc", "tcp")
    assert fastest(source, target, paths, CAN, CAN, LinkSpeeds()) == "cuda-ipc"
    assert fastest(source, target, ("tcp",), CAN, CAN, LinkSpeeds()) == "tcp"
    speeds, name = LinkSpeeds(), name_taken(source, target, "cuda-ipc", CAN, CAN)
    assert name is not None
    for _ in range(PROVEN):
        speeds.observe("here", name, LARGE_BYTES, 0.05)
    assert fastest(source, target, paths, CAN, CAN, speeds) == "tcp"


def test_what_was_measured_decides() -> None:
    speeds = LinkSpeeds()
    for _ in range(PROVEN):
        speeds.observe("here", "shm", LARGE_BYTES, 0.01)
    assert chosen(NEAR, ALL, speeds) == "nixl"


def test_a_bad_moment_decides_nothing() -> None:
    speeds = LinkSpeeds()
    for _ in range(PROVEN - 1):
        speeds.observe("here", "shm", LARGE_BYTES, 10.0)
    assert chosen(NEAR, ALL, speeds) == "shm"


def test_a_path_that_is_hardly_faster_is_not_changed_to() -> None:
    speeds = LinkSpeeds()
    for path, seconds in (("shm", 0.0011), ("nixl", 0.001)):
        for _ in range(PROVEN):
            speeds.observe("here", path, LARGE_BYTES, seconds)
    assert chosen(NEAR, ALL, speeds) == "nixl"
    assert chosen(NEAR, ALL, speeds, taken="shm") == "shm"


def test_a_watch_thinks_again_when_something_is_known() -> None:
    """Asked before every read, as links do."""
    watch, peer = PathWatch("here", "p2", CAN), Peer("here", "p1", CAN)
    taken = []
    for seconds in [0.05] * (PROVEN + 1) + [0.5] * (PROVEN + 1) + [0.001]:
        path = watch.fastest(peer, ENDS, ALL)
        taken.append(path)
        watch.observe(peer, Way(ENDS, path), LARGE_BYTES, seconds)
    assert taken[: PROVEN + 1] == ["shm"] * PROVEN + ["nixl"]
    assert taken[-1] == "tcp"


def test_a_path_that_was_left_is_tried_again_now_and_then() -> None:
    watch, peer = PathWatch("here", "p2", CAN), Peer("here", "p1", CAN)
    for _ in range(PROVEN):
        watch.observe(peer, Way(ENDS, "shm"), LARGE_BYTES, 0.05)
    taken = [watch.fastest(peer, ENDS, ALL) for _ in range(1000)]
    assert 2 <= taken.count("shm") <= 4
    for _ in range(100):  # which is what it needs to be seen to be fast
        watch.observe(peer, Way(ENDS, "shm"), LARGE_BYTES, 0.0002)
    assert watch.fastest(peer, ENDS, ALL) == "shm"


def test_what_goes_through_the_host_for_want_of_a_lane_has_a_speed_too() -> None:
    watch, peer = PathWatch("here", "p2", CAN), Peer("there", "p1", CAN)
    ends = Ends(MemoryKind.DEVICE, MemoryKind.DEVICE, "GPU-0", "GPU-0")
    watch.observe(peer, Way(ends, "tcp"), LARGE_BYTES, 0.01)
    assert list(watch.links()) == ["tcp/staged@there"]


def test_a_device_whose_blocks_go_through_the_host_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    can = Capabilities(paths=CAN.paths | {"cuda-copy", "cuda-ipc"})
    ends = Ends(MemoryKind.DEVICE, MemoryKind.DEVICE, "GPU-0", "GPU-0")
    for theirs, lack in ((can, "cuda-ipc"), (CAN, "cuda-ipc")):
        watch = PathWatch("here", "p2", can)
        watch.judge(Peer("here", "p1", theirs), Way(ends, "tcp"))
        assert ("tcp", lack) in watch.slow_paths()
    watch.judge(Peer("here", "p1", can), Way(ends, "cuda-ipc"))
    assert all(path == "tcp" for path, _ in watch.slow_paths())


def test_how_many_choices_are_kept_is_bounded() -> None:
    can = Capabilities(paths=frozenset(("copy", "shm", "tcp")))
    watch = PathWatch("here", "p2", can)
    for _ in range(3000):
        watch.fastest(Peer("here", "p1", can), ENDS, ("shm", "tcp"))
    assert len(watch._taken) <= 1024
    assert len(watch._chosen) <= 1024
