"""Shared links by example, and the waiting that is done on them."""

from __future__ import annotations

import asyncio

import pytest

from kvolt.engines.sim.links import SharedLinks, SimLink, TransferId
from kvolt.engines.sim.transfers import SimTransfers
from kvolt.testing import run_virtual


def rate(shared: SharedLinks, transfer: TransferId) -> float:
    """In bytes per second; 0 after the last byte was sent."""
    moving = shared._moving.get(transfer)
    return 0.0 if moving is None else moving.rate


def test_the_picture_in_the_module() -> None:
    shared = SharedLinks([SimLink("out", 10.0), SimLink("in", 4.0)])
    a, b, c = (shared.start(0.0, 100.0, path) for path in (["out"], ["out", "in"], ["in"]))
    assert [rate(shared, each) for each in (a, b, c)] == [8.0, 2.0, 2.0]
    assert shared.next_arrival() == 12.5
    assert shared.advance(12.5) == [a]
    assert [rate(shared, each) for each in (a, b, c)] == [0.0, 2.0, 2.0], "`in` is what holds the others"
    assert shared.advance(50.0) == [b, c]
    assert shared.next_arrival() is None


def test_two_over_one_link_take_twice_as_long() -> None:
    shared = SharedLinks([SimLink("wire", 10.0)])
    first = shared.start(0.0, 100.0, ["wire"])
    assert shared.next_arrival() == 10.0
    second = shared.start(5.0, 100.0, ["wire"])
    assert shared.next_arrival() == 15.0, "half of it was over, the rest takes twice as long"
    assert shared.advance(15.0) == [first]
    assert shared.next_arrival() == 20.0, "and the other is faster from then on"
    assert shared.advance(20.0) == [second]


def test_latency_is_added_and_does_not_use_the_link() -> None:
    shared = SharedLinks([SimLink("wire", 10.0, latency_s=3.0)])
    first = shared.start(0.0, 10.0, ["wire"])
    second = shared.start(0.0, 20.0, ["wire"])
    assert shared.advance(2.0) == []
    assert rate(shared, second) == 10.0, "the first one's bytes are gone"
    assert shared.advance(5.0) == [first]
    assert shared.advance(6.0) == [second]


def test_nothing_to_move_and_nowhere_to_go_take_no_bandwidth() -> None:
    shared = SharedLinks([SimLink("wire", 10.0, latency_s=1.0)])
    empty = shared.start(0.0, 0.0, ["wire"])
    here = shared.start(0.0, 1e9, [])
    assert shared.advance(0.0) == [here]
    assert shared.advance(1.0) == [empty]


def test_a_link_named_twice_is_crossed_once() -> None:
    shared = SharedLinks([SimLink("wire", 10.0)])
    transfer = shared.start(0.0, 10.0, ["wire", "wire"])
    assert rate(shared, transfer) == 10.0
    assert shared.advance(1.0) == [transfer]


def test_small_times_on_a_large_clock_come_to_an_end() -> None:
    shared = SharedLinks([SimLink("wire", 1e12)])
    ids = [shared.start(1e9, 1.0 + number, ["wire"]) for number in range(3)]
    arrived = []
    for _ in range(10):
        due = shared.next_arrival()
        if due is None:
            break
        arrived += shared.advance(due)
    assert arrived == ids


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="not a valid bandwidth"):
        SimLink("wire", 0.0)
    with pytest.raises(ValueError, match="not a valid latency"):
        SimLink("wire", 1.0, -1.0)
    with pytest.raises(ValueError, match="two links have the same name"):
        SharedLinks([SimLink("wire", 1.0), SimLink("wire", 2.0)])
    shared = SharedLinks([SimLink("wire", 1.0)])
    with pytest.raises(KeyError):
        shared.start(0.0, 1.0, ["other"])
    with pytest.raises(ValueError, match="bytes"):
        shared.start(0.0, -1.0, ["wire"])
    shared.start(5.0, 1.0, ["wire"])
    with pytest.raises(ValueError, match="time must not decrease"):
        shared.advance(4.0)


# --- waiting


def timed(*moves: tuple[float, float, tuple[str, ...]], cancel: int | None = None) -> list[float | None]:
    """When each of (start, bytes, path) had arrived, over a wire of 10 bytes/s; None if it was cancelled at 1 s."""

    async def main() -> list[float | None]:
        loop = asyncio.get_running_loop()
        transfers = SimTransfers([SimLink("wire", 10.0)], loop.time)
        began = loop.time()

        async def move(start: float, num_bytes: float, path: tuple[str, ...]) -> float:
            await asyncio.sleep(start)
            assert await transfers.move(num_bytes, *path)
            return loop.time() - began

        tasks = [loop.create_task(move(*each)) for each in moves]
        if cancel is not None:
            await asyncio.sleep(1.0)
            tasks[cancel].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert not transfers._waiting
        return [None if isinstance(each, BaseException) else each for each in done]

    return run_virtual(main)


def test_a_move_takes_its_time() -> None:
    assert timed((0.0, 100.0, ("wire",))) == [pytest.approx(10.0)]
    assert timed((0.0, 100.0, ("wire",)), (5.0, 100.0, ("wire",))) == [
        pytest.approx(15.0),
        pytest.approx(20.0),
    ]
    assert timed((0.0, 100.0, ("elsewhere",))) == [0.0], "a link that is not there takes no time"


def test_a_cancelled_move_gives_its_share_to_the_others() -> None:
    assert timed((0.0, 100.0, ("wire",)), (0.0, 100.0, ("wire",)), cancel=1) == [pytest.approx(10.5), None]


def test_closing_ends_what_moves() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        transfers = SimTransfers([SimLink("wire", 10.0)], loop.time)
        moving = loop.create_task(transfers.move(100.0, "wire"))
        await asyncio.sleep(1.0)
        transfers.close()
        assert await moving is False
        assert loop.time() == pytest.approx(1.0)
        assert await transfers.move(1.0, "wire") is False
        assert await transfers.move(1.0) is True
        assert not transfers._waiting

    run_virtual(main)
