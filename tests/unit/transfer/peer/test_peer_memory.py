"""Slabs that a peer announces: what it says of them is not believed."""

from __future__ import annotations

import os

import pytest

from kvolt.core.errors import ProtocolError
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.memory.slabs import SlabInfo
from kvolt.transfer.peer.peer_memory import PeerMemory
from kvolt.transfer.reads.wire import SharedSlab


@pytest.mark.parametrize(("kind", "num_blocks"), [(MemoryKind.HOST, 1), (MemoryKind.SHARED, 1 << 40)])
def test_the_descriptor_of_an_invalid_announcement_is_closed(kind: MemoryKind, num_blocks: int) -> None:
    descriptor = os.memfd_create("slab")
    os.ftruncate(descriptor, 4096)
    slab = SlabInfo(number=0, kind=kind, block_bytes=4096, num_blocks=num_blocks)
    with pytest.raises(ProtocolError):
        PeerMemory().add_shared(SharedSlab(slab, has_descriptor=True), descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
