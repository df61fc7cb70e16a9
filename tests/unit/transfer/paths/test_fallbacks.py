"""Fallbacks: which path is a slow one, in whose place, and for want of what."""

from __future__ import annotations

import logging

import pytest

from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.paths.capabilities import MachineFacts, PathCapabilities, capabilities_of
from kvolt.transfer.paths.fallbacks import Fallback, find_fallback, table_route
from kvolt.transfer.paths.lanes import Place
from kvolt.transfer.paths.link_speeds import LARGE_BYTES, LinkSpeeds
from kvolt.transfer.paths.path_choice import lane_of_path
from kvolt.transfer.paths.path_watch import Endpoints, PathWatch, Peer, TransferPath
from kvolt.transfer.paths.routes import Sides

RDMA = capabilities_of(MachineFacts(nixl_package="nixl", rdma_devices=("mlx5_0",)))
PLAIN = capabilities_of(MachineFacts())
SHARED, HOST = MemoryKind.SHARED, MemoryKind.HOST


def found(
    path: str,
    host: str = "there",
    kind: MemoryKind = SHARED,
    mine: PathCapabilities = PLAIN,
    theirs: PathCapabilities = PLAIN,
    measured: dict[str, float] | None = None,
) -> Fallback | None:
    """For blocks that came from a process of that host; the reader is at `here`."""
    speeds = LinkSpeeds()
    for link, speed in (measured or {}).items():
        speeds.observe(host, link, LARGE_BYTES, LARGE_BYTES / speed)
    source = Place(kind=kind, host=host, process="p1")
    destination = Place(kind=SHARED, host="here", process="p2")
    route = table_route(Sides(source, destination, mine, theirs))
    return find_fallback(Sides(source, destination, mine, theirs), path, speeds, route)


def lacks(fallback: Fallback | None) -> set[tuple[str, str]]:
    assert fallback is not None
    return {(lack.side, lack.name) for lack in fallback.lacks}


def test_shared_memory_of_one_host_is_no_fallback() -> None:
    assert found("shm", "here") is None


def test_tcp_between_hosts_without_rdma_names_what_each_side_lacks() -> None:
    both = {(side, name) for side in ("source", "destination") for name in ("nixl", "rdma")}
    assert lacks(found("tcp")) == both
    assert lacks(found("tcp", mine=RDMA)) == {("source", "nixl"), ("source", "rdma")}
    told = str(found("tcp", mine=RDMA))
    assert "no RDMA device" in told
    assert "pip install" in told


def test_nixl_over_rdma_is_no_fallback() -> None:
    assert found("nixl", mine=RDMA, theirs=RDMA) is None


def test_a_network_as_fast_as_rdma_is_assumed_to_be_is_no_fallback() -> None:
    assert found("tcp", measured={"tcp": 9e9}) is None
    assert found("tcp", measured={"tcp": 1e9}) is not None


def test_a_slow_machine_is_no_fallback() -> None:
    assert found("shm", "here", measured={"shm": 0.2e9}) is None


def test_the_measured_speed_is_reported() -> None:
    fallback = found("tcp", measured={"tcp": 0.5e9})
    assert fallback is not None
    assert fallback.bytes_per_s == pytest.approx(0.5e9)
    assert str(fallback).startswith(
        "path=tcp gb_per_s=0.5 alternative='shared -nixl-> shared' alternative_gb_per_s="
    )


def test_shared_memory_that_is_off_is_named() -> None:
    off = capabilities_of(MachineFacts(), shared_memory=False)
    fallback = found("tcp", "here", theirs=off)
    assert lacks(fallback) == {("source", "shm")}
    assert "transfer.shared_memory" in str(fallback)


def test_a_socket_that_cannot_be_reached_on_one_host() -> None:
    fallback = found("tcp", "here")
    assert lacks(fallback) == {("source", "socket")}
    assert "network namespace" in str(fallback)


def test_private_memory_on_one_host() -> None:
    assert "Slab.shared" in str(found("tcp", "here", HOST))
    assert found("tcp", "here", HOST, measured={"tcp": 6e9}) is None


def test_nixl_where_shared_memory_would_be_faster_and_is_not_reached() -> None:
    assert lacks(found("nixl", "here", mine=RDMA, theirs=RDMA)) == {("source", "socket")}
    fast = {"nixl": 12e9, "shm": 10e9}
    assert found("nixl", "here", mine=RDMA, theirs=RDMA, measured=fast) is None


def test_nixl_that_both_have_and_that_is_not_taken() -> None:
    fallback = found("tcp", mine=RDMA, theirs=RDMA)
    assert lacks(fallback) == {("destination", "nixl")}


def test_a_path_that_the_table_has_not_is_left_alone() -> None:
    assert found("pigeon") is None


def test_sides_that_by_their_word_have_no_route_are_left_alone() -> None:
    nothing = PathCapabilities(paths=frozenset())
    assert found("tcp", mine=nothing, theirs=nothing) is None


def test_a_peers_reasons_are_cut_and_kept_to_one_line() -> None:
    rude = PathCapabilities(paths=PLAIN.paths, missing={"rdma": "a\nb" * 1000, "nixl": "x"})
    told = str(found("tcp", mine=RDMA, theirs=rude))
    assert "\n" not in told
    assert len(told) < 1000


def test_the_lane_of_nixl_between_hosts_depends_on_rdma() -> None:
    source = Place(kind=SHARED, host="there", process="p1")
    destination = Place(kind=SHARED, host="here", process="p2")
    with_rdma = lane_of_path(Sides(source, destination, RDMA, RDMA), "nixl")
    without = lane_of_path(Sides(source, destination, RDMA, PLAIN), "nixl")
    assert with_rdma is not None
    assert with_rdma.name == "nixl/rdma"
    assert without is not None
    assert without.name == "nixl"


# --- the watch

OVER_TCP = TransferPath(Endpoints(SHARED, SHARED), "tcp")


def watch_of(mine: PathCapabilities = PLAIN) -> tuple[PathWatch, list[None]]:
    watch, news = PathWatch("here", "p2", mine), list[None]()
    watch.on_speed_change = lambda: news.append(None)
    return watch, news


def test_a_slow_path_is_logged_once_per_host_and_counted_per_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, _ = watch_of(RDMA)
    with caplog.at_level(logging.WARNING):
        for agent in ("a1", "a2"):
            watch.check_fallback(Peer("there", agent, PLAIN), OVER_TCP)
        watch.check_fallback(Peer("elsewhere", "a3", PLAIN), OVER_TCP)
        watch.check_fallback(Peer("there", "a4", RDMA), TransferPath(Endpoints(SHARED, SHARED), "nixl"))
    logged = [record.getMessage() for record in caplog.records]
    assert [text.split(" path=")[0] for text in logged] == [
        f"slow transfer path: host={host}" for host in ("there", "elsewhere")
    ]
    assert watch.slow_paths() == {("tcp", "nixl"): 3, ("tcp", "rdma"): 3}


def test_logged_slow_paths_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvolt.transfer.paths.path_watch._MAX_REPORTED", 2)
    watch, _ = watch_of()
    for number in range(5):
        watch.check_fallback(Peer(f"host{number}", "a", PLAIN), OVER_TCP)
    assert len(caplog.records) == 2
    assert watch.slow_paths()["tcp", "rdma"] == 5


def test_a_speed_is_news_when_it_is_the_first_or_much_has_changed() -> None:
    watch, news = watch_of()
    peer = Peer("there", "a", PLAIN)
    watch.observe(peer, OVER_TCP, LARGE_BYTES, 0.004)
    assert len(news) == 1
    for _ in range(20):
        watch.observe(peer, OVER_TCP, LARGE_BYTES, 0.005)
    assert len(news) == 1
    for _ in range(20):
        watch.observe(peer, OVER_TCP, LARGE_BYTES, 0.05)
    assert len(news) > 1
    assert list(watch.links()) == ["tcp@there"]


def test_what_tells_nothing_is_no_news() -> None:
    watch, news = watch_of()
    peer = Peer("there", "a", PLAIN)
    watch.observe(peer, OVER_TCP, 100, 0.001)
    watch.observe(peer, TransferPath(Endpoints(SHARED, SHARED), "pigeon"), LARGE_BYTES, 0.001)
    assert not news
    assert watch.links() == {}


def test_what_was_news_is_forgotten_with_its_link() -> None:
    watch, news = watch_of()
    for number in range(2000):
        watch.observe(Peer(f"host{number}", "a", PLAIN), OVER_TCP, LARGE_BYTES, 0.004)
    assert len(news) == 2000
    assert len(watch._reported_speeds) <= 1026
