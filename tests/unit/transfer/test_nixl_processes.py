"""Real NIXL between processes: a killed process does not affect others."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
from tests.unit.transfer.nixl_lab import (
    PEER_BLOCK,
    PEER_NUM,
    SOON_S,
    Side,
    new_sides,
    peer,
    peer_content,
    tickets_of,
    until,
)

from kvolt.core.errors import NetworkFault
from kvolt.transfer.agent import Operation
from kvolt.transfer.memory.slabs import Slab
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


async def kill_in_the_middle(
    read: Callable[[], Operation], process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    landed, parts = reading.ReadOp.on_blocks_moved, []

    def then_kill(self: reading.ReadOp, count: int) -> None:
        landed(self, count)
        parts.append(count)
        if len(parts) == 3:
            process.send_signal(signal.SIGKILL)
            process.wait()

    monkeypatch.setattr(nixl_read, "STEP_BYTES", PEER_BLOCK)
    monkeypatch.setattr(reading.ReadOp, "on_blocks_moved", then_kill)
    with pytest.raises(NetworkFault):
        await read()
    assert 3 <= len(parts) < PEER_NUM
    monkeypatch.undo()


async def test_between_processes_and_one_is_killed(target: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    content = peer_content()
    into = Slab(memoryview(bytearray(PEER_BLOCK * PEER_NUM)), PEER_BLOCK)
    with peer("offer") as first, peer("offer") as second:
        one, two = tickets_of(first), tickets_of(second)
        assert await target.agent.read(one[0], into, range(PEER_NUM), SOON_S) == "nixl"
        assert into.memory == content
        await kill_in_the_middle(
            lambda: target.agent.read(one[1], into, range(PEER_NUM), SOON_S), first, monkeypatch
        )
        into.memory[:] = bytes(len(content))
        assert await target.agent.read(two[0], into, range(PEER_NUM), SOON_S) == "nixl"
        assert into.memory == content
        with pytest.raises(NetworkFault):
            await target.agent.read(one[2], into, range(PEER_NUM), SOON_S)
        await until(lambda: len(target.nixl._peers) == 1)


async def test_who_reads_from_us_is_killed(source: Side) -> None:
    """We live, and others read."""
    slab = Slab(memoryview(bytearray(os.urandom(PEER_BLOCK * PEER_NUM))), PEER_BLOCK)
    for count in (1, 2):
        offers = [source.agent.offer(slab, range(PEER_NUM), SOON_S) for _ in range(50)]
        with peer("read", *(each.ticket.hex() for each in offers)) as process:
            assert process.stdout is not None
            for _ in range(count):
                assert process.stdout.readline() == "nixl\n"
            process.kill()
            process.wait()
        await until(lambda: not source.nixl._num_served)
        assert any(each.state is OperationState.IN_PROGRESS for each in offers)
    with peer("read", source.agent.offer(slab, range(PEER_NUM), SOON_S).ticket.hex()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "nixl\n"
