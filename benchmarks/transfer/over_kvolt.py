"""kvolt's two paths between hosts' memories, TCP with TLS too, and beside them what limits them: a memcpy and a plain
socket.

One process has the source, the other the target; both have an agent for each path, which sleeps while it is not used.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.transfer.memories import Bytes, Memories, order

from kvolt.runtime.clock import SystemClock
from kvolt.runtime.security.credentials import Credentials, KeySource
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.transfer.agent import OfferHandle, TransferAgent, TransferOptions
from kvolt.transfer.memory.slabs import Slab

FEW_BYTES = 64
"""Size of a block in requests where the number of bytes does not matter."""
FEW_BLOCKS = 1000
_PATIENCE_S = 60.0


CLUSTER_KEY = "BENCH_CLUSTER_KEY"
"""Environment variable with the file of the key that both processes have."""


def _agents() -> dict[str, TransferAgent]:
    source = KeySource(Path(os.environ[CLUSTER_KEY]), Identity(ProcessRole.WORKER, "bench"))
    over_tcp = TransferOptions(shared_memory=False)
    return {
        "shm": TransferAgent(),
        "tcp": TransferAgent(over_tcp),
        "tls": TransferAgent(over_tcp, credentials=Credentials(source, SystemClock())),
    }


class _Slabs:
    """One for each size of a block, over the same memory; and the one of few bytes."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._num_bytes = num_bytes
        self._slabs = {FEW_BYTES: Slab.shared(FEW_BLOCKS, FEW_BYTES)}

    def of(self, block_bytes: int) -> Slab:
        if block_bytes not in self._slabs:
            mapped = Slab.mapped(os.dup(self._descriptor), self._num_bytes, block_bytes)
            self._slabs[block_bytes] = mapped
        return self._slabs[block_bytes]


class Source:
    """Offers blocks; sends all of the memory over a plain socket on request."""

    def __init__(self, memories: Memories) -> None:
        self._agents = _agents()
        self._slabs = _Slabs(memories.source, memories.num_bytes)
        self._slabs.of(FEW_BYTES).memory[:] = _few_bytes()
        self._offers: list[OfferHandle] = []
        self._memory = memories.map_source()
        self._listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def hello(self) -> dict[str, Any]:
        return {"port": self._listening.getsockname()[1]}

    def offer(self, path: str, block_bytes: int, count: int) -> dict[str, Any]:
        slab = self._slabs.of(block_bytes)
        blocks = order(slab.num_blocks, of_target=False)
        made = [self._agents[path].offer(slab, blocks, _PATIENCE_S) for _ in range(count)]
        self._offers.extend(made)
        return {"tickets": [b64encode(each.ticket).decode() for each in made]}

    def settle(self) -> dict[str, Any]:
        """All that was offered has been read: an error where it has not."""
        for offer in self._offers:
            offer.result(_PATIENCE_S)
        self._offers.clear()
        return self.mark()

    def mark(self) -> dict[str, Any]:
        return {"cpu_s": time.process_time()}

    def _serve(self) -> None:
        link, _ = self._listening.accept()
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while link.recv(1):
            link.sendall(self._memory.data)


class Target:
    """Reads."""

    def __init__(self, memories: Memories) -> None:
        self._agents = _agents()
        self._slabs = _Slabs(memories.target, memories.num_bytes)
        self._from, self._to = memories.map_source_to_read(), memories.map_target()
        self._link: socket.socket | None = None

    def hello(self) -> dict[str, Any]:
        return {}

    def meet(self, port: int) -> dict[str, Any]:
        self._link = socket.create_connection(("127.0.0.1", port), _PATIENCE_S)
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link.setblocking(True)
        return {}

    def read(self, path: str, block_bytes: int, tickets: list[str], is_checked: bool) -> dict[str, Any]:
        """One after the other; how long each took, from the ticket to the last block."""
        agent, slab = self._agents[path], self._slabs.of(block_bytes)
        blocks = order(slab.num_blocks, of_target=True)
        ready = [b64decode(ticket) for ticket in tickets]
        took_s = []
        for ticket in ready:
            started = time.perf_counter()
            went = agent.read(ticket, slab, blocks, _PATIENCE_S, is_checked=is_checked).result(_PATIENCE_S)
            took_s.append(time.perf_counter() - started)
            if went != path.replace("tls", "tcp"):
                raise RuntimeError(f"the bytes went over {went}, not over {path}")
        if block_bytes == FEW_BYTES:
            self._check_few(slab)
        return {"took_s": took_s}

    def memcpy(self, count: int) -> dict[str, Any]:
        to, of, size = self._to.ctypes.data, self._from.ctypes.data, len(self._to)
        return {"took_s": [_timed(lambda: ctypes.memmove(to, of, size)) for _ in range(count)]}

    def socket(self, count: int) -> dict[str, Any]:
        return {"took_s": [_timed(self._receive) for _ in range(count)]}

    def mark(self) -> dict[str, Any]:
        return {"cpu_s": time.process_time()}

    def _receive(self) -> None:
        assert self._link is not None
        into, got = self._to.data, 0
        self._link.sendall(b"!")
        while got < len(into):
            received = self._link.recv_into(into[got:])
            if not received:
                raise ConnectionResetError("the source closed its socket")
            got += received

    def _check_few(self, slab: Slab) -> None:
        came = np.frombuffer(slab.memory, dtype=np.uint8).reshape(FEW_BLOCKS, FEW_BYTES)
        left = np.frombuffer(_few_bytes(), dtype=np.uint8).reshape(FEW_BLOCKS, FEW_BYTES)
        if not np.array_equal(
            came[order(FEW_BLOCKS, of_target=True)], left[order(FEW_BLOCKS, of_target=False)]
        ):
            raise RuntimeError("small blocks came to other places, or changed")
        came[:] = 0


def _few_bytes() -> bytes:
    few: Bytes = np.random.default_rng(3).integers(0, 256, FEW_BLOCKS * FEW_BYTES, dtype=np.uint8)
    return few.tobytes()


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
