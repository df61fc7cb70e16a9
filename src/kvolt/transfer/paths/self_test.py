"""The self-test of two agents: a few MiB of a memory that is there for it, read over each path that there is.

Bounded: about 8 MiB a path, and a second for each (NIXL, which has to begin first, has five); where a link is slow it
does with half. Its reads are ordinary
ones, so what they tell is kept as what all reads tell is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvolt.core.errors import DeadlineExceeded, KvoltError
from kvolt.transfer.memory.slabs import Slab, SlabInfo
from kvolt.transfer.nixl.path import NIXL
from kvolt.transfer.paths.lanes import MemoryKind
from kvolt.transfer.paths.link_speeds import LARGE_BYTES, SMALL_BYTES
from kvolt.transfer.peer.progress import Progress
from kvolt.transfer.peer.read_op import Reading
from kvolt.transfer.peer.read_request import new_wanted
from kvolt.transfer.peer.wire import Address, Ticket

log = logging.getLogger(__name__)

SECRET = 0
"""The ticket of the memory that tests read: everybody knows it, and nothing is in it."""
BLOCK_BYTES = SMALL_BYTES
NUM_BLOCKS = LARGE_BYTES // BLOCK_BYTES
LIMIT_S = 1.0
NIXL_LIMIT_S = 5.0
"""Both sides may have to make their NIXL first."""
_ROUNDS = (2, 1, NUM_BLOCKS, NUM_BLOCKS)
"""Blocks of each read. The first pays for connections and mappings and, by its size, tells nothing; then what an
operation costs; the speed, with pages touched for the first time; the speed."""
_SLOW_S = 0.02
"""After a read that took so long the next one would tell little more."""


class Tested(Protocol):
    """The link whose paths are tested."""

    def read(self, reading: Reading) -> None: ...


def new_slab() -> Slab:
    """To be read by those who test."""
    try:
        return Slab.shared(NUM_BLOCKS, BLOCK_BYTES)
    except (AttributeError, OSError):  # no memory to share here: TCP is left
        return _private_slab()


class SelfTest:
    """See the module. In the progress thread only."""

    def __init__(
        self,
        progress: Progress,
        link: Tested,
        address: Address,
        paths: Sequence[str],
        on_done: Callable[[], None],
    ) -> None:
        """`paths`: one after the other."""
        self._progress = progress
        self._link = link
        self._address = address
        self._paths = deque(paths)
        self._on_done = on_done
        self._slab = _private_slab()
        self._rounds: deque[int] = deque()
        self._reading: Reading | None = None

    def start(self) -> None:
        """Of the next path, or its end."""
        if not self._paths:
            self._on_done()
            return
        self._path = self._paths.popleft()
        self._rounds = deque(_ROUNDS)
        limit_s = NIXL_LIMIT_S if self._path == NIXL else LIMIT_S
        self._timer = self._progress.at(self._progress.now() + limit_s, self._late)
        self._next()

    def _late(self) -> None:
        self._rounds.clear()
        if self._reading is not None:
            self._reading.stop(DeadlineExceeded("the self-test took too long", stage="total"))

    def _next(self) -> None:
        if not self._rounds:
            self._timer.cancel()
            self.start()
            return
        blocks = np.arange(self._rounds.popleft(), dtype=np.int64)
        info = SlabInfo(number=0, kind=MemoryKind.SHARED, block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS)
        ticket = Ticket(self._address, SECRET, info, NUM_BLOCKS, "read")
        reading = Reading(new_wanted(ticket, self._slab, blocks, blocks), self._over, is_last=False)
        reading.only_path, reading.is_test = self._path, True
        self._reading = reading
        self._link.read(reading)

    def _over(self, error: KvoltError | None) -> None:
        reading, self._reading = self._reading, None
        assert reading is not None
        if error is not None:
            log.debug("the self-test of %s ended: %s", reading.path or "a path", error)
        took_s = self._progress.now() - reading.began_at
        if error is not None or took_s > _SLOW_S:
            self._rounds.clear()
        self._progress.call(self._next)


def _private_slab() -> Slab:
    return Slab(memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES)), BLOCK_BYTES)
