"""NIXL, the real one: what is over is not written to any more, however it came to be over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.unit.transfer.nixl_lab import (
    BLOCK,
    NUM,
    SOON_S,
    Side,
    in_thread,
    made,
    mute,
    new_sides,
    under_way,
    until,
)

from kvolt.core.errors import (
    Cancelled,
    DeadlineExceeded,
    WorkerLost,
)
from kvolt.transfer.nixl import path as nixl_path
from kvolt.transfer.nixl import read as nixl_read
from kvolt.transfer.paths import nixl_library
from kvolt.transfer.reads import read_op as reading
from kvolt.transfer.transfer_handle import OperationState

if nixl_library.find_package() is None:
    pytest.skip(f"NIXL is not installed: {nixl_library.REMEDY}", allow_module_level=True)


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    with new_sides() as new:
        yield new


@pytest.fixture
def source(sides: Callable[..., Side]) -> Side:
    return sides(seed=1)


@pytest.fixture
def target(sides: Callable[..., Side]) -> Side:
    return sides()


async def test_cancel_in_the_middle(source: Side, target: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts; the offer stays for others."""
    monkeypatch.setattr(nixl_read, "STEP_BYTES", BLOCK)
    landed, is_asked = reading.ReadOp.on_blocks_moved, threading.Event()

    def then_cancel(self: reading.ReadOp, count: int) -> None:
        landed(self, count)
        assert is_asked.wait(SOON_S)
        read.cancel()

    monkeypatch.setattr(reading.ReadOp, "on_blocks_moved", then_cancel)
    offer = source.agent.offer(source.slab, range(NUM), SOON_S)
    read = target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S)
    is_asked.set()
    with pytest.raises(Cancelled):
        await read
    assert 0 < target.rows.any(axis=1).sum() < NUM / 2
    before = target.rows.copy()
    monkeypatch.undo()
    await target.agent.read(offer.ticket, target.slab, [0], SOON_S, positions=[5])
    assert (target.rows[0] == source.rows[5]).all()
    assert (target.rows[1:] == before[1:]).all()


@pytest.mark.parametrize("why", ["cancel", "deadline"])
async def test_what_nixl_may_write_to_is_not_over(source: Side, target: Side, why: str) -> None:
    """A cancelled read in flight is reported as done only once it has stopped."""
    await made(source, target)
    offer = source.agent.offer(source.slab, range(NUM), SOON_S)
    with mute(source):
        read = target.agent.read(offer.ticket, target.slab, range(NUM), 0.5 if why == "deadline" else SOON_S)
        await under_way(target)
        if why == "cancel":
            read.cancel()
        await until(lambda: all(each.is_stopped for each in list(target.nixl._reads)))
        await asyncio.sleep(0.05)
        assert read.state is OperationState.IN_PROGRESS
    with pytest.raises(Cancelled if why == "cancel" else DeadlineExceeded):
        await read
    target.rows[:] = 7  # the blocks are reused now
    await asyncio.sleep(0.05)
    assert (target.rows == 7).all()
    await until(lambda: not source.nixl._num_served)


async def test_an_offer_that_expires_is_not_read(source: Side, target: Side) -> None:
    """What has come by then may be anything: the source has its blocks back."""
    await made(source, target)
    with mute(source):
        offer = source.agent.offer(source.slab, range(NUM), 0.5)
        read = target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S, is_checked=False)
        await under_way(target)
        with pytest.raises(DeadlineExceeded):
            await offer
        await until(lambda: all(each.is_stopped for each in list(target.nixl._reads)))
    with pytest.raises(DeadlineExceeded, match="expired"):
        await read


async def test_a_peer_that_hangs(
    source: Side, target: Side, sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL is given up, after which it writes no more; what else it had under way fails and can be tried again."""
    other = sides(seed=2)
    offers = [side.agent.offer(side.slab, range(NUM), SOON_S) for side in (source, other)]
    with mute(source, other):
        reads = [target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S) for offer in offers]
        await under_way(target, 2)
        monkeypatch.setattr(nixl_path, "_HANG_S", 0.1)
        reads[0].cancel()
        with pytest.raises(Cancelled):
            await reads[0]
        with pytest.raises(WorkerLost, match="restarted"):
            await reads[1]
        assert not target.nixl.is_ready
        target.rows[:] = 7  # the blocks are reused now
    await asyncio.sleep(0.05)
    assert (target.rows == 7).all()
    assert await target.agent.read(offers[1].ticket, target.slab, range(NUM), SOON_S) == "nixl"
    assert (target.rows == other.rows).all()


async def test_a_source_whose_nixl_was_made_anew(source: Side, target: Side) -> None:
    """It describes its slabs again."""
    for _ in range(2):
        offer = source.agent.offer(source.slab, range(NUM), SOON_S)
        assert await target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S) == "nixl"
        await in_thread(source, lambda: source.nixl._reset(WorkerLost("tried", reason="test")))
    assert (target.rows == source.rows).all()


async def test_nixl_that_breaks(source: Side, target: Side, caplog: pytest.LogCaptureFixture) -> None:
    """While it is asked to answer peers: it is made anew, and the thread that moves blocks goes on."""

    def broken() -> None:
        raise RuntimeError("broken")

    offer = source.agent.offer(source.slab, [1], SOON_S)
    await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    source.nixl._agent.get_new_notifs = broken
    for _ in range(5):
        offer = source.agent.offer(source.slab, [2], SOON_S)
        try:
            await target.agent.read(offer.ticket, target.slab, [2], SOON_S)
            break
        except WorkerLost:  # it broke under this very read
            continue
    assert (target.rows[2] == source.rows[2]).all()
    assert "NIXL agent failed" in caplog.text


async def test_an_agent_is_closed_under_way(source: Side, target: Side) -> None:
    offer = source.agent.offer(source.slab, range(NUM), SOON_S)
    with mute(source):
        read = target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S)
        await under_way(target)
        target.agent.close()
        with pytest.raises(Cancelled):
            await read
        assert not target.nixl.is_ready
        target.rows[:] = 7
    await asyncio.sleep(0.05)
    assert (target.rows == 7).all()


async def test_an_agent_is_closed_while_nixl_is_made(
    source: Side, target: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closed, new_agent = threading.Event(), nixl_library.new_agent

    def late(name: str) -> object:
        assert is_closed.wait(SOON_S)
        return new_agent(name)

    monkeypatch.setattr(nixl_library, "new_agent", late)
    offer = source.agent.offer(source.slab, [1], SOON_S)
    read = target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    await until(lambda: target.nixl._waiting)
    target.agent.close()
    is_closed.set()
    with pytest.raises(Cancelled):
        await read
