"""Memory as NIXL sees it: local memory registered with it, and peer memory by its description.

Both are descriptor lists of equal adjacent units, prepared once per memory and unit size. A transfer names units by
index arrays instead of one descriptor per block, which takes 4 us instead of 20 us for 64 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvolt.core.errors import Unsupported
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.memory.slabs import Slab

Units = npt.NDArray[np.int32]

OURS = "NIXL_INIT_AGENT"
"""NIXL's name for the local side of a transfer."""
RAM = frozenset((MemoryKind.HOST, MemoryKind.SHARED, MemoryKind.PINNED))
"""Memory kinds that NIXL is used with."""
_MAX_UNITS = 1 << 24
"""Limit per memory and per read: NIXL allocates some bytes per unit, and a peer's sizes are untrusted."""
_PROBE_BYTES = 1 << 20
_EMULATED_BYTES_PER_US = 50
"""Speed below which UCX emulates: it estimates 12 MB/s for an emulated read, 11,000 MB/s between processes of one
host."""


@dataclass(slots=True)
class NixlMemory:
    """Local or remote memory with its descriptor lists."""

    owner: str
    address: int
    num_bytes: int
    device: int = 0
    lists: dict[int, Any] = field(default_factory=dict)
    """NIXL descriptor lists by unit size."""
    is_one_sided: bool | None = None
    """Remote memory: whether UCX reads it one-sidedly; None until checked."""

    def descriptor_list(self, agent: Any, unit_bytes: int) -> Any:
        descriptors = self.lists.get(unit_bytes)
        if descriptors is None:
            count = self.num_bytes // unit_bytes
            if count > _MAX_UNITS:
                raise Unsupported(f"{count} pieces exceed the limit for NIXL", feature="nixl")
            row = np.array([[self.address, unit_bytes, self.device, unit_bytes, count]], dtype=np.uint64)
            descriptors = self.lists[unit_bytes] = agent.prep_xfer_dlist(self.owner, row, "DRAM")
        return descriptors

    def release(self) -> None:
        for each in self.lists.values():
            each.release()
        self.lists.clear()

    def row(self, num_bytes: int) -> npt.NDArray[np.uint64]:
        """Descriptor row of its first bytes."""
        return np.array([[self.address, num_bytes, self.device]], dtype=np.uint64)


def is_one_sided(agent: Any, local: NixlMemory, remote: NixlMemory) -> bool:
    """Whether UCX can read a peer's memory one-sidedly, by its cost estimate; no data is moved.

    Otherwise, between hosts without RDMA, UCX emulates reads: the peer's UCX sends on request. That is slower than the
    TCP path, and if a reader dies during a read, the process it reads from may die too (SIGABRT or SIGSEGV inside UCX,
    observed with NIXL 1.5.1).
    """
    if remote.is_one_sided is None:
        size = min(local.num_bytes, remote.num_bytes, _PROBE_BYTES)
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(local.row(size), "DRAM"),
            agent.get_xfer_descs(remote.row(size), "DRAM"),
            remote.owner,
        )
        expected_us = agent.estimate_xfer_cost(handle)[0]
        handle.release()
        remote.is_one_sided = size > expected_us * _EMULATED_BYTES_PER_US
    return remote.is_one_sided


@dataclass(slots=True)
class _Registered:
    memory: NixlMemory
    descriptors: Any
    metadata: bytes
    """NIXL metadata for peers: the memory and the agent."""
    slabs: WeakSet[Slab]
    """Slabs that use this memory."""

    @property
    def is_stale(self) -> bool:
        return all(map(_is_closed, self.slabs))


class LocalMemory:
    """Local memory registered with one NIXL agent, each memory once regardless of its slabs."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._known: dict[tuple[int, int], _Registered] = {}

    def of(self, slab: Slab) -> NixlMemory:
        return self._registered(slab).memory

    def describe(self, slab: Slab) -> tuple[int, bytes]:
        """Address and NIXL metadata for peers."""
        registered = self._registered(slab)
        return registered.memory.address, registered.metadata

    def close(self) -> None:
        for each in self._known.values():
            each.memory.release()
        self._known.clear()

    def _registered(self, slab: Slab) -> _Registered:
        if slab.kind not in RAM:
            raise Unsupported(f"NIXL does not support {slab.kind} memory", feature="nixl")
        array = np.frombuffer(slab.memory, dtype=np.uint8)
        key = (array.ctypes.data, array.nbytes)
        # New memory may have the address of freed memory, so stale registrations are removed first.
        for stale in [each for each, known in self._known.items() if known.is_stale]:
            removed = self._known.pop(stale)
            removed.memory.release()
            self._agent.deregister_memory(removed.descriptors)
        known = self._known.get(key)
        if known is None:
            memory = NixlMemory(OURS, *key)
            descriptors = self._agent.register_memory(memory.row(array.nbytes), "DRAM")
            metadata = self._agent.get_partial_agent_metadata(descriptors, inc_conn_info=True)
            known = self._known[key] = _Registered(memory, descriptors, metadata, WeakSet())
        known.slabs.add(slab)
        return known


def unit_bytes_of(destination: Pieces, source: Pieces) -> int:
    """Largest unit that divides all pieces; the block size for whole blocks."""
    offsets = np.concatenate(([destination.piece_bytes], destination.offsets, source.offsets))
    return int(np.gcd.reduce(offsets))


def units_of(pieces: Pieces, unit_bytes: int) -> Units:
    """Unit indexes of these pieces. Unsupported above the limit."""
    if len(pieces.offsets) * (pieces.piece_bytes // unit_bytes) > _MAX_UNITS:
        raise Unsupported(f"blocks in units of {unit_bytes} bytes exceed the limit for NIXL", feature="nixl")
    firsts = (pieces.offsets // unit_bytes).astype(np.int32)
    per_piece = pieces.piece_bytes // unit_bytes
    if per_piece == 1:
        return firsts
    return (firsts[:, None] + np.arange(per_piece, dtype=np.int32)[None, :]).ravel()


def _is_closed(slab: Slab) -> bool:
    try:
        return slab.memory.nbytes == 0
    except ValueError:  # released
        return True
