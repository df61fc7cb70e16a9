"""NIXL over UCX, used directly: memory is registered and blocks are described once; transfers then name block indices.

A transfer is created from block indices, posted, and polled until it is complete; its figure includes all three. There
is no progress thread, which would occupy a core: the initiator polls the state, and the other side polls at the same
time, as UCX requires where the kernel does not copy for it. Runs in the peer's interpreter, which has only numpy and
nixl.
"""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
from benchmarks.transfer.memories import Bytes, Memories, order


class _Agent:
    """One side of a transfer: each can initiate and each can poll."""

    def __init__(self, name: str, memory: Bytes) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._memory = memory
        self._registered = self._agent.register_memory([(self._address, len(memory), 0, "")], "DRAM")
        self._is_target = name == "target"
        self._peer, self._peer_address = "", 0
        self._prepared: dict[int, tuple[Any, Any]] = {}

    @property
    def _address(self) -> int:
        return int(self._memory.ctypes.data)

    def hello(self) -> dict[str, Any]:
        return {"metadata": b64encode(self._agent.get_agent_metadata()).decode(), "address": self._address}

    def meet(self, metadata: str, address: int) -> dict[str, Any]:
        name = self._agent.add_remote_agent(b64decode(metadata))
        self._peer = name if isinstance(name, str) else name.decode()
        self._peer_address = address
        return {}

    def move(self, operation: str, block_bytes: int, count: int) -> dict[str, Any]:
        """Transfer blocks: a READ at the target, a WRITE at the source."""
        here, there = self._descriptors(block_bytes)
        num_blocks = len(self._memory) // block_bytes
        mine = order(num_blocks, of_target=self._is_target).astype(np.int32)
        theirs = order(num_blocks, of_target=not self._is_target).astype(np.int32)
        agent, took_s = self._agent, []
        for _ in range(count):
            started = time.perf_counter()
            handle = agent.make_prepped_xfer(operation, here, mine, there, theirs)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            took_s.append(time.perf_counter() - started)
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")
            agent.release_xfer_handle(handle)
        return {"took_s": took_s}

    def progress(self) -> None:
        """Poll once, in place of a progress thread."""
        for _ in range(64):
            self._agent.get_new_notifs()

    def _descriptors(self, block_bytes: int) -> tuple[Any, Any]:
        """Descriptors of all blocks of both sides."""
        if block_bytes not in self._prepared:
            mine, theirs = (
                self._agent.prep_xfer_dlist(name, self._blocks(address, block_bytes), "DRAM")
                for name, address in (("NIXL_INIT_AGENT", self._address), (self._peer, self._peer_address))
            )
            self._prepared[block_bytes] = mine, theirs
        return self._prepared[block_bytes]

    def _blocks(self, address: int, block_bytes: int) -> Any:
        starts = address + np.arange(len(self._memory) // block_bytes) * block_bytes
        columns = (starts, np.full(len(starts), block_bytes), np.zeros(len(starts)))
        return np.stack(columns, axis=1).astype(np.uint64)


class Source(_Agent):
    def __init__(self, memories: Memories) -> None:
        super().__init__("source", memories.map_source())


class Target(_Agent):
    def __init__(self, memories: Memories) -> None:
        super().__init__("target", memories.map_target())


class PrivateSource(_Agent):
    """Private memory: numpy requests huge pages for it, which makes UCX faster."""

    def __init__(self, memories: Memories) -> None:
        super().__init__("source", memories.map_source().copy())


class PrivateTarget(_Agent):
    def __init__(self, memories: Memories) -> None:
        self._shared = memories.map_target()
        super().__init__("target", self._shared.copy())

    def clear(self) -> dict[str, Any]:
        self._memory[:] = 0
        return {}

    def show(self) -> dict[str, Any]:
        """Show the received bytes for the check."""
        self._shared[:] = self._memory
        return {}
