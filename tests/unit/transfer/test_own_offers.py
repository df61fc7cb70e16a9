"""Reads of what the very same agent offers: they keep to the rules that peers keep to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from kvolt.core.errors import Cancelled, DeadlineExceeded
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.reads import read_op as read_op_module

SOON_S = 20.0
BLOCK = 4096


@pytest.fixture
def agent() -> Iterator[TransferAgent]:
    found = TransferAgent()
    yield found
    found.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slab:
    """Destination of reads that never end by themselves."""

    def no_end(self: read_op_module.ReadOp) -> bool:
        time.sleep(0.001)
        return not self.is_done

    monkeypatch.setattr(read_op_module.ReadOp, "step", no_end)
    return Slab.shared(8, BLOCK)


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
