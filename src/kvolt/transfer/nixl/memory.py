"""Memory as NIXL knows it: ours that is registered with it, and that of peers by what they told us.

Both are lists of equal units side by side, made once for a memory and a size of unit. A transfer names units by their
numbers, in arrays: there is no descriptor to be made for a block. For 64 blocks that takes 4 us in the place of 20.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvolt.core.errors import Unsupported
from kvolt.transfer.memory.slabs import Pieces, Slab
from kvolt.transfer.paths.lanes import MemoryKind

Units = npt.NDArray[np.int32]

OURS = "NIXL_INIT_AGENT"
"""The owner of our own side of a transfer, in NIXL's words."""
RAM = frozenset((MemoryKind.HOST, MemoryKind.SHARED, MemoryKind.PINNED))
"""Kinds of memory that it is used with."""
_MAX_UNITS = 1 << 24
"""Of a memory, or of a read: NIXL takes some bytes for each, and the sizes of a peer's memory are its own word."""
_PROBE_BYTES = 1 << 20
_EMULATED_BYTES_PER_US = 50
"""UCX expects 12 MB/s of a read that it emulates, and 11,000 where processes of a host read each other's memory."""


@dataclass(slots=True)
class NixlMemory:
    """See the module."""

    owner: str
    address: int
    num_bytes: int
    device: int = 0
    lists: dict[int, Any] = field(default_factory=dict)
    """NIXL's handles, by the size of a unit."""
    is_one_sided: bool | None = None
    """Of a peer's: whether it is read without the peer's doing; None until UCX was asked."""

    def list_of(self, agent: Any, unit_bytes: int) -> Any:
        found = self.lists.get(unit_bytes)
        if found is None:
            count = self.num_bytes // unit_bytes
            if count > _MAX_UNITS:
                raise Unsupported(f"NIXL is not used with {count} pieces of a memory", feature="nixl")
            row = np.array([[self.address, unit_bytes, self.device, unit_bytes, count]], dtype=np.uint64)
            found = self.lists[unit_bytes] = agent.prep_xfer_dlist(self.owner, row, "DRAM")
        return found

    def release(self) -> None:
        for each in self.lists.values():
            each.release()
        self.lists.clear()

    def row(self, num_bytes: int) -> npt.NDArray[np.uint64]:
        """The descriptor of its first bytes."""
        return np.array([[self.address, num_bytes, self.device]], dtype=np.uint64)


def is_one_sided(agent: Any, ours: NixlMemory, theirs: NixlMemory) -> bool:
    """Whether UCX has a way to read a peer's memory without the peer's doing. Nothing is moved to find out.

    Else, which is between hosts without RDMA, it emulates: the peer's UCX sends when it is asked to. That is slower
    than our own TCP path; and when a reader dies in mid-read, the process that it reads from may die with it (SIGABRT
    or SIGSEGV inside UCX, tried with NIXL 1.5.1).
    """
    if theirs.is_one_sided is None:
        size = min(ours.num_bytes, theirs.num_bytes, _PROBE_BYTES)
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(ours.row(size), "DRAM"),
            agent.get_xfer_descs(theirs.row(size), "DRAM"),
            theirs.owner,
        )
        expected_us = agent.estimate_xfer_cost(handle)[0]
        handle.release()
        theirs.is_one_sided = size > expected_us * _EMULATED_BYTES_PER_US
    return theirs.is_one_sided


@dataclass(slots=True)
class _Registered:
    memory: NixlMemory
    descriptors: Any
    metadata: bytes
    """What the NIXL of a peer must know of it, and of us."""
    slabs: WeakSet[Slab]
    """That lie over it."""

    @property
    def is_stale(self) -> bool:
        return all(map(_is_closed, self.slabs))


class OurMemory:
    """What of ours is registered with one NIXL agent, each memory once, whatever slabs lie over it."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._known: dict[tuple[int, int], _Registered] = {}

    def of(self, slab: Slab) -> NixlMemory:
        return self._registered(slab).memory

    def describe(self, slab: Slab) -> tuple[int, bytes]:
        """For peers: its address, and what their NIXL must know of it and of us."""
        found = self._registered(slab)
        return found.memory.address, found.metadata

    def close(self) -> None:
        for each in self._known.values():
            each.memory.release()
        self._known.clear()

    def _registered(self, slab: Slab) -> _Registered:
        if slab.kind not in RAM:
            raise Unsupported(f"NIXL is not used with {slab.kind} memory", feature="nixl")
        array = np.frombuffer(slab.memory, dtype=np.uint8)
        key = (array.ctypes.data, array.nbytes)
        # Another memory may have the address of one that is gone: NIXL must not take the one for the other.
        for stale in [each for each, known in self._known.items() if known.is_stale]:
            gone = self._known.pop(stale)
            gone.memory.release()
            self._agent.deregister_memory(gone.descriptors)
        known = self._known.get(key)
        if known is None:
            memory = NixlMemory(OURS, *key)
            descriptors = self._agent.register_memory(memory.row(array.nbytes), "DRAM")
            metadata = self._agent.get_partial_agent_metadata(descriptors, inc_conn_info=True)
            known = self._known[key] = _Registered(memory, descriptors, metadata, WeakSet())
        known.slabs.add(slab)
        return known


def unit_bytes_of(here: Pieces, there: Pieces) -> int:
    """The largest unit that all these pieces are made of whole: a block where blocks are whole."""
    offsets = np.concatenate(([here.piece_bytes], here.offsets, there.offsets))
    return int(np.gcd.reduce(offsets))


def units_of(pieces: Pieces, unit_bytes: int) -> Units:
    """The numbers of the units that these pieces are made of. Unsupported for more than NIXL is asked for at a time."""
    if len(pieces.offsets) * (pieces.piece_bytes // unit_bytes) > _MAX_UNITS:
        raise Unsupported(f"NIXL is not used with blocks cut into {unit_bytes} bytes", feature="nixl")
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
