"""LinkSpeeds: what transfers tell of the links they went over."""

from __future__ import annotations

import pytest

from kvolt.core.card import MeasuredLink
from kvolt.transfer.paths.link_speeds import LARGE_BYTES, SMALL_BYTES, LinkSpeeds


def speed(speeds: LinkSpeeds, peer: str = "a", path: str = "tcp") -> float:
    link = speeds.expected(peer, path)
    assert link is not None
    return link.bytes_per_s


def test_an_unused_link_has_no_speed() -> None:
    assert LinkSpeeds().expected("a", "tcp") is None


def test_the_speed_of_equal_transfers_is_theirs() -> None:
    speeds = LinkSpeeds()
    for _ in range(5):
        speeds.observe("a", "tcp", LARGE_BYTES, 0.5)
    assert speeds.expected("a", "tcp") == MeasuredLink("tcp", pytest.approx(LARGE_BYTES / 0.5), 0.0)


def test_links_are_distinguished_by_peer_and_path() -> None:
    speeds = LinkSpeeds()
    speeds.observe("a", "tcp", LARGE_BYTES, 1.0)
    speeds.observe("a", "shm", LARGE_BYTES, 0.1)
    speeds.observe("b", "tcp", LARGE_BYTES, 4.0)
    assert speed(speeds, "a", "shm") > speed(speeds, "a", "tcp") > speed(speeds, "b", "tcp")


@pytest.mark.parametrize("num_bytes", [0, -1, SMALL_BYTES + 1, LARGE_BYTES - 1])
def test_a_transfer_of_a_size_that_tells_nothing_leaves_no_trace(num_bytes: int) -> None:
    speeds = LinkSpeeds()
    speeds.observe("a", "tcp", num_bytes, 1.0)
    assert len(speeds) == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_is_none_leaves_no_trace(seconds: float) -> None:
    speeds = LinkSpeeds()
    speeds.observe("a", "tcp", LARGE_BYTES, seconds)
    assert len(speeds) == 0


def test_the_first_transfer_counts_only_until_the_second() -> None:
    speeds = LinkSpeeds()
    speeds.observe("a", "tcp", LARGE_BYTES, 100.0)
    assert speed(speeds) == pytest.approx(LARGE_BYTES / 100.0)
    speeds.observe("a", "tcp", LARGE_BYTES, 1.0)
    assert speed(speeds) == pytest.approx(LARGE_BYTES)


def test_a_link_that_got_slower_is_believed_after_some_transfers_and_not_after_one() -> None:
    speeds = LinkSpeeds()
    for _ in range(20):
        speeds.observe("a", "tcp", LARGE_BYTES, 1.0)
    speeds.observe("a", "tcp", LARGE_BYTES, 2.0)
    assert speed(speeds) > 0.8 * LARGE_BYTES
    for _ in range(30):
        speeds.observe("a", "tcp", LARGE_BYTES, 2.0)
    assert speed(speeds) == pytest.approx(LARGE_BYTES / 2, rel=0.05)


def test_a_large_transfer_counts_for_more_than_a_small_one() -> None:
    speeds = LinkSpeeds()
    for _ in range(2):
        speeds.observe("a", "tcp", 100 * LARGE_BYTES, 100.0)
    speeds.observe("a", "tcp", LARGE_BYTES, 10.0)
    assert speed(speeds) > 0.8 * LARGE_BYTES


def test_small_transfers_tell_the_latency_and_no_speed() -> None:
    speeds = LinkSpeeds()
    for _ in range(2):
        speeds.observe("a", "tcp", SMALL_BYTES, 0.25)
    assert speeds.expected("a", "tcp") is None
    speeds.observe("a", "tcp", LARGE_BYTES, 1.25)
    assert speeds.expected("a", "tcp") == MeasuredLink("tcp", pytest.approx(LARGE_BYTES), pytest.approx(0.25))
    speeds.observe("a", "tcp", SMALL_BYTES, 1.25)
    link = speeds.expected("a", "tcp")
    assert link is not None
    assert link.latency_s == pytest.approx(0.35)


def test_a_latency_above_the_whole_time_makes_no_link_endlessly_fast() -> None:
    speeds = LinkSpeeds()
    speeds.observe("a", "tcp", 1, 5.0)
    speeds.observe("a", "tcp", LARGE_BYTES, 1.0)
    assert speed(speeds) == pytest.approx(LARGE_BYTES / 0.5)


def test_the_link_used_longest_ago_makes_room() -> None:
    speeds = LinkSpeeds(max_links=2)
    for peer in ("a", "b", "a", "c"):
        speeds.observe(peer, "tcp", LARGE_BYTES, 1.0)
    assert len(speeds) == 2
    assert speeds.expected("b", "tcp") is None
    assert speeds.expected("a", "tcp")
    assert speeds.expected("c", "tcp")


def test_a_peer_that_went_is_forgotten_with_all_its_paths() -> None:
    speeds = LinkSpeeds()
    for peer, path in (("a", "tcp"), ("a", "shm"), ("b", "tcp")):
        speeds.observe(peer, path, LARGE_BYTES, 1.0)
    speeds.forget("a")
    assert list(speeds.links()) == ["tcp@b"]


def test_links_have_the_form_of_engine_info() -> None:
    speeds = LinkSpeeds()
    speeds.observe("b", "tcp", LARGE_BYTES, 2.0)
    speeds.observe("a", "shm", LARGE_BYTES, 1.0)
    speeds.observe("a", "nixl", SMALL_BYTES, 1.0)
    assert speeds.links() == {
        "shm@a": MeasuredLink("shm", float(LARGE_BYTES), 0.0),
        "tcp@b": MeasuredLink("tcp", LARGE_BYTES / 2, 0.0),
    }
    assert list(speeds.links()) == ["shm@a", "tcp@b"]


def test_the_most_recently_used_links_are_returned() -> None:
    speeds = LinkSpeeds()
    for peer in ("a", "b", "c", "a"):
        speeds.observe(peer, "tcp", LARGE_BYTES, 1.0)
    assert list(speeds.links(2)) == ["tcp@a", "tcp@c"]
