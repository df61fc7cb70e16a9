"""The route planner: every kind of memory to every other, near and far, with what the two sides can do."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.errors import Fault
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.paths.capabilities import PathCapabilities
from kvolt.transfer.paths.lanes import LANES, Place, Reach, reach
from kvolt.transfer.paths.link_speeds import LARGE_BYTES, SMALL_BYTES, LinkSpeeds
from kvolt.transfer.paths.routes import (
    MAX_RULED_OUT,
    Lack,
    NoRoute,
    Sides,
    TransferRoute,
    plan,
)

CPU = ("copy", "shm", "tcp")
GPU = (*CPU, "cuda-copy")
EVERYTHING = (*GPU, "cuda-ipc", "nixl", "rdma")
NEAR = {"process": ("one", "p1"), "host": ("one", "p2"), "network": ("two", "p2")}
"""Where the destination is; the source is always process p1 of host one."""


def place(kind: str, host: str = "one", process: str = "p1", device: str = "GPU-0") -> Place:
    return Place(
        kind=MemoryKind(kind),
        host=host,
        process=process,
        device=device if kind == "device" else None,
    )


def can(*paths: str, **missing: str) -> PathCapabilities:
    return PathCapabilities(paths=frozenset(paths), missing=missing)


def planned(kinds: str, near: str, paths: tuple[str, ...], speeds: LinkSpeeds | None = None) -> TransferRoute:
    """Between two sides that can do the same."""
    source, destination = kinds.split()
    side = can(*paths)
    return plan(Sides(place(source), place(destination, *NEAR[near]), side, side), speeds or LinkSpeeds())


# What two GPU machines without NIXL and CUDA IPC do: the full matrix.
MATRIX = {
    "process": """
        host host      host -copy-> host
        host shared    host -copy-> shared
        host pinned    host -copy-> pinned
        host device    host -cuda-copy-> device
        shared host    shared -copy-> host
        shared shared  shared -copy-> shared
        shared pinned  shared -copy-> pinned
        shared device  shared -cuda-copy-> device
        pinned host    pinned -copy-> host
        pinned shared  pinned -copy-> shared
        pinned pinned  pinned -copy-> pinned
        pinned device  pinned -cuda-copy-> device
        device host    device -cuda-copy-> host
        device shared  device -cuda-copy-> shared
        device pinned  device -cuda-copy-> pinned
        device device  device -cuda-copy-> device
    """,
    "host": """
        host host      host -copy-> shared -shm-> host
        host shared    host -copy-> shared -shm-> shared
        host pinned    host -copy-> shared -shm-> pinned
        host device    host -copy-> pinned -shm-> device
        shared host    shared -shm-> host
        shared shared  shared -shm-> shared
        shared pinned  shared -shm-> pinned
        shared device  shared -shm-> device
        pinned host    pinned -shm-> host
        pinned shared  pinned -shm-> shared
        pinned pinned  pinned -shm-> pinned
        pinned device  pinned -shm-> device
        device host    device -cuda-copy-> pinned -shm-> host
        device shared  device -cuda-copy-> pinned -shm-> shared
        device pinned  device -cuda-copy-> pinned -shm-> pinned
        device device  device -cuda-copy-> pinned -shm-> device
    """,
    "network": """
        host host      host -tcp-> host
        host shared    host -tcp-> shared
        host pinned    host -tcp-> pinned
        host device    host -tcp-> pinned -cuda-copy-> device
        shared host    shared -tcp-> host
        shared shared  shared -tcp-> shared
        shared pinned  shared -tcp-> pinned
        shared device  shared -tcp-> pinned -cuda-copy-> device
        pinned host    pinned -tcp-> host
        pinned shared  pinned -tcp-> shared
        pinned pinned  pinned -tcp-> pinned
        pinned device  pinned -tcp-> pinned -cuda-copy-> device
        device host    device -cuda-copy-> pinned -tcp-> host
        device shared  device -cuda-copy-> pinned -tcp-> shared
        device pinned  device -cuda-copy-> pinned -tcp-> pinned
        device device  device -cuda-copy-> pinned -tcp-> pinned -cuda-copy-> device
    """,
}
ROWS = [
    (near, " ".join(line.split()[:2]), " ".join(line.split()[2:]))
    for near, text in MATRIX.items()
    for line in text.strip().splitlines()
]


def test_the_matrix_is_full() -> None:
    assert [(near, kinds) for near, kinds, _ in ROWS] == [
        (near, f"{source} {destination}")
        for near, source, destination in product(NEAR, MemoryKind, MemoryKind)
    ]


@pytest.mark.parametrize(
    ("near", "kinds", "words"), ROWS, ids=[f"{near}: {kinds}" for near, kinds, _ in ROWS]
)
def test_every_memory_reaches_every_other(near: str, kinds: str, words: str) -> None:
    assert str(planned(kinds, near, GPU)) == words


@pytest.mark.parametrize(
    ("near", "kinds", "words"),
    [
        ("host", "device device", "device -cuda-ipc-> device"),
        ("host", "device pinned", "device -cuda-ipc-> pinned"),
        ("host", "device host", "device -cuda-ipc-> host"),
        ("network", "device device", "device -nixl-> device"),
        ("network", "host device", "host -nixl-> device"),
        ("network", "shared host", "shared -nixl-> host"),
    ],
)
def test_with_everything_there_is_the_direct_route_is_taken_and_nothing_was_ruled_out(
    near: str, kinds: str, words: str
) -> None:
    route = planned(kinds, near, EVERYTHING)
    assert str(route) == words
    assert route.ruled_out == ()


def test_without_shared_memory_two_processes_use_tcp_and_say_so() -> None:
    route = plan(
        Sides(place("shared"), place("host", *NEAR["host"]), can("tcp"), can("tcp", shm="no /dev/shm")),
        LinkSpeeds(),
    )
    assert str(route) == "shared -tcp-> host"
    choose_path = route.ruled_out[0]
    assert choose_path.route == "shared -shm-> host"
    assert choose_path.lacks == (
        Lack("destination", "shm", "not offered"),
        Lack("source", "shm", "no /dev/shm"),
    )
    assert all(ruled_out.bytes_per_s > route.bytes_per_s for ruled_out in route.ruled_out)


def test_a_side_without_cuda_reaches_no_device_but_by_one_that_has_it() -> None:
    near = NEAR["host"]
    # The source has no CUDA; the reader copies to its device out of the mapping.
    assert (
        str(plan(Sides(place("shared"), place("device", *near), can(*GPU), can(*CPU)), LinkSpeeds()))
        == "shared -shm-> device"
    )
    with pytest.raises(NoRoute):
        plan(Sides(place("shared"), place("device", *near), can(*CPU), can(*GPU)), LinkSpeeds())


def test_two_devices_are_not_taken_for_one() -> None:
    side = can(*GPU, "cuda-ipc")
    other = place("device", *NEAR["host"], device="GPU-1")
    assert (
        plan(Sides(place("device"), other, side, side), LinkSpeeds()).hops[0].link == "cuda-ipc/device-peer"
    )
    # Numbers of devices mean nothing on another host.
    side = can(*EVERYTHING)
    other = place("device", *NEAR["network"], device="GPU-1")
    assert plan(Sides(place("device"), other, side, side), LinkSpeeds()).hops[0].link == "nixl/rdma"


def test_small_pieces_rule_out_a_path_that_pays_for_each() -> None:
    """NIXL between two processes on one GPU: ahead with large blocks, behind pinned staging with small ones."""
    side = can(*GPU, "nixl")
    source, destination = place("device"), place("device", *NEAR["host"])
    large = plan(Sides(source, destination, side, side), LinkSpeeds(), piece_bytes=64 << 20)
    small = plan(Sides(source, destination, side, side), LinkSpeeds(), piece_bytes=64 << 10)
    assert str(large) == "device -nixl-> device"
    assert str(small) == "device -cuda-copy-> pinned -shm-> device"
    assert small.bytes_per_s < large.bytes_per_s


def test_nixl_without_rdma_is_not_preferred_to_tcp() -> None:
    route = planned("host host", "network", (*GPU, "nixl"))
    assert str(route) == "host -tcp-> host"
    assert [lack.name for ruled_out in route.ruled_out for lack in ruled_out.lacks] == ["rdma", "rdma"]


def test_measured_speeds_win() -> None:
    speeds = LinkSpeeds()
    assert planned("shared host", "host", (*CPU, "nixl"), speeds).hops[0].path == "shm"
    speeds.observe("one", "nixl", SMALL_BYTES, 0.001)
    speeds.observe("one", "nixl", 100 * LARGE_BYTES, 0.011)
    speeds.observe("two", "shm", LARGE_BYTES, 1e-9)  # another host's
    (hop,) = planned("shared host", "host", (*CPU, "nixl"), speeds).hops
    assert (hop.path, hop.block_s) == ("nixl", 0.0)
    assert hop.bytes_per_s == pytest.approx(100 * LARGE_BYTES / 0.01)


def test_a_path_that_was_measured_slow_is_left_for_another() -> None:
    speeds = LinkSpeeds()
    speeds.observe("one", "shm", LARGE_BYTES, 1.0)
    route = planned("shared host", "host", CPU, speeds)
    assert str(route) == "shared -tcp-> host"
    assert [ruled_out.route for ruled_out in route.ruled_out] == ["shared -nixl-> host"]


def test_hops_inside_a_side_are_measured_on_its_own_host() -> None:
    speeds = LinkSpeeds()
    speeds.observe("one", "cuda-copy/device-pinned", LARGE_BYTES, 1e-5)
    speeds.observe("one", "cuda-copy/pinned-device", LARGE_BYTES, 1.0)
    speeds.observe("two", "cuda-copy/pinned-device", LARGE_BYTES, 1e-6)
    first, between, last = planned("device device", "network", GPU, speeds).hops
    assert first.bytes_per_s == pytest.approx(LARGE_BYTES / 1e-5)
    assert between.block_s, "by the table"
    assert last.bytes_per_s == pytest.approx(LARGE_BYTES / 1e-6)


def test_no_route_names_what_each_side_lacks_and_what_would_do() -> None:
    mine, theirs = can("tcp", "cuda-copy"), can("tcp", **{"cuda-copy": "no CUDA driver"})
    with pytest.raises(NoRoute) as caught:
        plan(Sides(place("device"), place("host", *NEAR["network"]), mine, theirs), LinkSpeeds())
    fields = caught.value.fields
    assert (fields["source"], fields["destination"]) == ("device", "host")
    assert "cuda-copy (no CUDA driver)" in str(fields["source_lacks"])
    assert "nixl (not offered)" in str(fields["destination_lacks"])
    assert fields["remedy"] == "enable cuda-copy at the source"
    assert "no CUDA driver" in caught.value.message
    assert caught.value.fault is Fault.OPERATOR


def test_no_route_in_one_process_is_about_one_side() -> None:
    with pytest.raises(NoRoute) as caught:
        plan(Sides(place("host"), place("shared"), can(), can(*EVERYTHING)), LinkSpeeds())
    assert caught.value.fields["source_lacks"] == "nothing"
    assert caught.value.fields["remedy"] == "enable copy at the destination"


@pytest.mark.parametrize("fields", [{"kind": "device"}, {"kind": "host", "device": "GPU-0"}])
def test_a_place_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError, match="only device memory names"):
        msgspec.convert({"host": "one", "process": "p1"} | fields, Place)


def test_what_crosses_the_wire_comes_back_equal() -> None:
    route = planned("device device", "host", GPU)
    assert route.ruled_out
    for value in (route, can(*GPU, nixl="not installed")):
        encoded = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.decode(encoded, type=type(value)) == value


def test_the_table_of_lanes() -> None:
    assert {lane.path for lane in LANES} | {"rdma"} == set(EVERYTHING)
    names = [(lane.name, lane.reach) for lane in LANES]
    assert len(set(names)) == len(names)
    for lane in LANES:
        assert min(lane.cost) > 0
    assert {reach(place("host"), place("host", *home)) for home in NEAR.values()} == set(Reach)


paths = st.frozensets(st.sampled_from(EVERYTHING))
kinds_of_place = st.sampled_from([kind.value for kind in MemoryKind])
observations = st.lists(
    st.tuples(st.sampled_from(["one", "two"]), st.sampled_from(LANES), st.floats(1e-6, 10.0)), max_size=6
)


@st.composite
def wishes(draw: st.DrawFn) -> tuple[Place, Place, LinkSpeeds, int]:
    speeds = LinkSpeeds()
    for host, lane, took_s in draw(observations):
        speeds.observe(host, lane.name, LARGE_BYTES, took_s)
    home = NEAR[draw(st.sampled_from(list(NEAR)))]
    destination = place(draw(kinds_of_place), *home, device=draw(st.integers(0, 1)))
    return place(draw(kinds_of_place)), destination, speeds, draw(st.sampled_from([4096, 1 << 16, 1 << 26]))


def able(names: frozenset[str]) -> PathCapabilities:
    return PathCapabilities(paths=names)


@given(wish=wishes(), mine=paths, theirs=paths)
def test_a_route_uses_only_what_both_sides_can_do(
    wish: tuple[Place, Place, LinkSpeeds, int],
    mine: frozenset[str],
    theirs: frozenset[str],
) -> None:
    source, destination, speeds, piece_bytes = wish
    try:
        route = plan(Sides(source, destination, able(mine), able(theirs)), speeds, piece_bytes)
    except NoRoute:
        return
    assert route.hops[0].source == source
    assert route.hops[-1].destination == destination
    assert [hop.destination for hop in route.hops[:-1]] == [hop.source for hop in route.hops[1:]]
    for hop in route.hops:
        for end in (hop.source, hop.destination):
            is_mine = end.home == destination.home
            assert hop.path in (mine if is_mine else theirs)
    speeds_of_hops = [1 / (1 / hop.bytes_per_s + hop.block_s / piece_bytes) for hop in route.hops]
    assert route.bytes_per_s == pytest.approx(1 / sum(1 / speed for speed in speeds_of_hops))
    assert len(route.ruled_out) <= MAX_RULED_OUT
    for ruled_out in route.ruled_out:
        assert ruled_out.bytes_per_s > route.bytes_per_s
        assert ruled_out.lacks
    faster = [ruled_out.bytes_per_s for ruled_out in route.ruled_out]
    assert faster == sorted(faster, reverse=True)


@given(wish=wishes(), mine=paths, theirs=paths, more=paths)
def test_more_capabilities_are_never_slower(
    wish: tuple[Place, Place, LinkSpeeds, int],
    mine: frozenset[str],
    theirs: frozenset[str],
    more: frozenset[str],
) -> None:
    source, destination, speeds, piece_bytes = wish
    try:
        less = plan(Sides(source, destination, able(mine), able(theirs)), speeds, piece_bytes)
    except NoRoute:
        return
    mine_more, theirs_more = able(mine | more), able(theirs | more)
    route = plan(Sides(source, destination, mine_more, theirs_more), speeds, piece_bytes)
    assert route.bytes_per_s >= less.bytes_per_s
    if mine_more == able(mine) and theirs_more == able(theirs):
        assert route == less
