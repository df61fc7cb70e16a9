"""Reads of what the very same agent offers: they keep to the rules that peers keep to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvolt.core.errors import Cancelled, DeadlineExceeded, TransferFailed
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.paths import file_path
from kvolt.transfer.peer import read_op as read_op_module

SOON_S = 20.0
BLOCK = 4096


@pytest.fixture
def agent() -> Iterator[TransferAgent]:
    found = TransferAgent()
    yield found
    found.close()


@pytest.fixture(params=["copy", "file"])
def slow(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slab:
    """Where to; it never ends by itself."""

    def no_end(self: read_op_module.ReadOp | file_path.FileMover) -> bool:
        time.sleep(0.001)
        is_done = self.is_done if isinstance(self, read_op_module.ReadOp) else self._read_op.is_done
        return not is_done

    for kind in (read_op_module.ReadOp, file_path.FileMover):
        monkeypatch.setattr(kind, "step", no_end)
    return Slab.shared(8, BLOCK) if request.param == "copy" else Slab.of_file(tmp_path / "f", 8, BLOCK)


async def test_a_read_ends_with_the_offer(agent: TransferAgent, slow: Slab) -> None:
    """Its blocks are the owner's again, who may change them."""
    offer = agent.offer(Slab.shared(8, BLOCK), [1, 2], 0.1)
    read = agent.read(offer.ticket, slow, [1, 2], SOON_S)
    with pytest.raises(DeadlineExceeded, match="not read before"):
        await offer
    with pytest.raises(DeadlineExceeded, match="expired"):
        await asyncio.wait_for(read.wait_done(), 5) or await read
    assert not agent._hub._local_reads


async def test_a_read_ends_with_the_agent(agent: TransferAgent, slow: Slab) -> None:
    offer = agent.offer(Slab.shared(8, BLOCK), [1, 2], SOON_S)
    read = agent.read(offer.ticket, slow, [1, 2], SOON_S)
    agent.close()
    for each in (read, offer):
        with pytest.raises(Cancelled, match="closed"):
            each.result(5)


async def test_a_memory_that_is_closed_too_early(agent: TransferAgent, tmp_path: Path) -> None:
    """The read fails; the thread that moves blocks does not notice."""
    memory, file = Slab.shared(8, BLOCK), Slab.of_file(tmp_path / "f", 8, BLOCK)
    offer = agent.offer(file, [1], SOON_S)
    memory.memory.release()
    with pytest.raises(TransferFailed, match="cannot move blocks"):
        await agent.read(offer.ticket, memory, [1], SOON_S)
    whole = Slab.shared(8, BLOCK)
    assert await agent.read(offer.ticket, whole, [1], SOON_S) == "file"
    file.close()
