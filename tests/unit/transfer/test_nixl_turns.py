"""Nixl steps without the NIXL library: a failure of one read or of the library does not affect others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvolt.core.errors import KvoltError, Unsupported, WorkerLost
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.memory.slabs import Slab, SlabInfo
from kvolt.transfer.nixl import memory as nixl_memory
from kvolt.transfer.nixl import path as nixl_path
from kvolt.transfer.nixl.memory import NixlMemory, units_of
from kvolt.transfer.nixl.path import Nixl
from kvolt.transfer.reads.progress import Timer, Work
from kvolt.transfer.reads.wire import Address, NixlSlab

HERE = Address("a", "127.0.0.1", 1, "")


class Turns:
    """A Progress by hand."""

    def __init__(self) -> None:
        self.queue: list[Work] = []

    def now(self) -> float:
        return 0.0

    def schedule(self, work: Work) -> None:
        self.queue.append(work)

    def call_at(self, when: float, do: Callable[[], None]) -> Timer:
        return Timer(when, do)


class Library:
    """What is held by an agent, and holds it while it fails."""


class Agent:
    """NIXL's, which breaks where it is told to."""

    def __init__(self) -> None:
        self.agent = Library()

    def get_new_notifs(self) -> None:
        held = self.agent
        raise RuntimeError("broken", type(held))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return b"name"


class Ended:
    """A ReadOp as NIXL sees it."""

    def __init__(self) -> None:
        self.errors: list[KvoltError | None] = []

    def stop(self, error: KvoltError) -> None:
        self.errors.append(error)

    def on_mover_stopped(self, error: KvoltError | None) -> None:
        self.errors.append(error)


class Read:
    peer = HERE
    is_stopped = False

    def __init__(self, fails: bool) -> None:
        self.read_op = Ended()
        self.num_turns = 0
        self._fails = fails

    def advance(self) -> bool:
        self.num_turns += 1
        if self._fails:
            raise RuntimeError("a defect")
        return True

    def release_agent(self) -> None: ...

    @property
    def is_done(self) -> bool:
        return bool(self.read_op.errors)


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def nixl(turns: Turns) -> Nixl:
    return Nixl(turns, "test")  # type: ignore[arg-type]


def test_a_read_that_fails_in_a_way_of_its_own_stops_no_other(nixl: Nixl) -> None:
    broken, fine = Read(fails=True), Read(fails=False)
    nixl._reads = {broken: None, fine: None}  # type: ignore[dict-item]
    nixl._poll_eagerly()
    assert nixl.step()
    assert nixl.step()
    assert [type(each).__name__ for each in broken.read_op.errors] == ["TransferFailed"]
    assert (broken.num_turns, fine.num_turns) == (1, 2)
    assert list(nixl._reads) == [fine]


def test_a_failing_callback_stops_no_other_read(nixl: Nixl, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Ended, error: KvoltError | None) -> None:
        self.errors.append(error)
        raise RuntimeError("a defect")

    monkeypatch.setattr(Ended, "on_mover_stopped", broken)
    reads = [Read(fails=False), Read(fails=False)]
    nixl._reads = dict.fromkeys(reads)  # type: ignore[arg-type]
    nixl._reset(WorkerLost("all ends", reason="test"))
    assert [len(read.read_op.errors) for read in reads] == [1, 1]


def test_an_agent_that_breaks_goes(nixl: Nixl, caplog: pytest.LogCaptureFixture) -> None:
    """The error that it broke with does not keep it: it could still write to blocks that were given back."""
    read = Read(fails=False)
    nixl._agent, nixl._reads = Agent(), {read: None}  # type: ignore[dict-item]
    nixl.start_serving()
    nixl.step()
    assert not nixl.is_ready
    assert isinstance(read.read_op.errors[0], WorkerLost)
    assert "NIXL agent failed" in caplog.text
    assert "still referenced" not in caplog.text


def test_an_agent_that_cannot_take_memory_is_not_held_by_why(nixl: Nixl) -> None:
    class Full:
        def describe(self, slab: Slab) -> Any:
            raise RuntimeError("no memory can be locked")

    nixl._local_memory = Full()  # type: ignore[assignment]
    with pytest.raises(Unsupported, match="locked") as raised:
        nixl.describe(Slab.shared(1, 4096), 0)
    assert raised.value.__context__ is None


def test_units_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of a peer's memory are its own word."""
    monkeypatch.setattr(nixl_memory, "_MAX_UNITS", 8)
    with pytest.raises(Unsupported, match="9 pieces"):
        NixlMemory("peer", 0, 9 * 64).descriptor_list(object(), 64)
    with pytest.raises(Unsupported, match="units of 1 bytes"):
        units_of(Pieces(np.array([0]), 9), 1)
    assert len(units_of(Pieces(np.array([0]), 8), 1)) == 8


def test_descriptions_are_counted(nixl: Nixl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_path, "_MAX_DESCRIPTIONS", 2)
    nixl._agent = Agent()
    slab = SlabInfo(number=1, kind=MemoryKind.HOST, block_bytes=64, num_blocks=1)
    told = [NixlSlab(slab, address, 0, b"") for address in range(3)]
    for each in [*told[:2], told[1]]:
        nixl._remote_memory(HERE, each)
    with pytest.raises(Unsupported, match="2 times"):
        nixl._remote_memory(HERE, told[2])


def test_peers_with_one_agent_name_are_distinguished(nixl: Nixl) -> None:
    """NIXL removes an agent name once no peer uses it."""
    forgotten: list[str] = []
    nixl._agent = Agent()
    nixl._agent.remove_remote_agent = forgotten.append
    slab = NixlSlab(SlabInfo(number=1, kind=MemoryKind.HOST, block_bytes=64, num_blocks=1), 0, 0, b"")
    there = Address("a", "127.0.0.1", 2, "")
    for address in (HERE, there):
        nixl._remote_memory(address, slab)
    nixl.forget_peer(HERE)
    assert (forgotten, list(nixl._peers)) == ([], [there])
    nixl.forget_peer(there)
    assert forgotten == ["name"]
