"""SelfTest: measures each path between two agents by reading a few MiB of a test slab.

About 8 MiB and at most one second per path (five seconds for NIXL, which starts its agent first); half of that on a
slow link. The reads are ordinary reads, so their speeds are recorded like those of all reads.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvolt.core.errors import DeadlineExceeded, KvoltError
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.memory.slabs import Slab, SlabInfo
from kvolt.transfer.paths.link_speeds import LARGE_BYTES, SMALL_BYTES
from kvolt.transfer.reads.progress import ProgressThread
from kvolt.transfer.reads.read_op import NIXL, ReadOp
from kvolt.transfer.reads.read_request import new_read_request
from kvolt.transfer.reads.wire import Address, Ticket

log = logging.getLogger(__name__)

SECRET = b""
"""Well-known ticket secret of the test slab, which holds no data."""
BLOCK_BYTES = SMALL_BYTES
NUM_BLOCKS = LARGE_BYTES // BLOCK_BYTES
LIMIT_S = 1.0
NIXL_LIMIT_S = 5.0
"""Includes the creation of the NIXL agents on both sides."""
_ROUNDS = (2, 1, NUM_BLOCKS, NUM_BLOCKS)
"""Blocks per read: set up connections and mappings (a size that is not recorded); operation cost; speed with
first-touch pages; speed."""
_SLOW_S = 0.02
"""Skip the remaining reads of a path after a read that took longer."""


class TestedLink(Protocol):
    """Link whose paths are tested."""

    @property
    def is_busy(self) -> bool: ...

    def read(self, read_op: ReadOp) -> None: ...

    def paths_between(self, source: MemoryKind, destination: MemoryKind) -> list[str]: ...


def new_slab() -> Slab:
    """Slab that peers read in their self-tests."""
    try:
        return Slab.shared(NUM_BLOCKS, BLOCK_BYTES)
    except (AttributeError, OSError):  # no shared memory on this system: only TCP can be tested
        return _private_slab()


class SelfTest:
    """See the module. Progress thread only."""

    def __init__(
        self,
        progress: ProgressThread,
        link: TestedLink,
        address: Address,
        paths: Sequence[str],
        on_done: Callable[[], None],
    ) -> None:
        """`paths` are tested sequentially."""
        self._progress = progress
        self._link = link
        self._address = address
        self._paths = deque(paths)
        self._on_done = on_done
        self._slab = _private_slab()
        self._rounds: deque[int] = deque()
        self._read_op: ReadOp | None = None

    def start(self) -> None:
        """Test the next path; call `on_done` after the last."""
        if not self._paths:
            self._on_done()
            return
        self._path = self._paths.popleft()
        self._rounds = deque(_ROUNDS)
        limit_s = NIXL_LIMIT_S if self._path == NIXL else LIMIT_S
        self._timer = self._progress.call_at(self._progress.now() + limit_s, self._on_timeout)
        self._run_round()

    def _on_timeout(self) -> None:
        self._rounds.clear()
        if self._read_op is not None:
            self._read_op.stop(DeadlineExceeded("the self-test exceeded its time limit", stage="total"))

    def _run_round(self) -> None:
        if not self._rounds:
            self._timer.cancel()
            self.start()
            return
        blocks = np.arange(self._rounds.popleft(), dtype=np.int64)
        info = SlabInfo(number=0, kind=MemoryKind.SHARED, block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS)
        ticket = Ticket(self._address, SECRET, info, NUM_BLOCKS)
        read_op = ReadOp(
            new_read_request(ticket, self._slab, blocks, blocks), self._on_read_done, is_last=False
        )
        read_op.forced_path, read_op.is_test = self._path, True
        self._read_op = read_op
        self._link.read(read_op)

    def _on_read_done(self, error: KvoltError | None) -> None:
        read_op, self._read_op = self._read_op, None
        assert read_op is not None
        if error is not None:
            log.debug("self-test failed: path=%s error=%s", read_op.path or "unknown", error)
        elapsed_s = self._progress.now() - read_op.started_at
        if error is not None or elapsed_s > _SLOW_S:
            self._rounds.clear()
        self._progress.call_soon(self._run_round)


def _private_slab() -> Slab:
    return Slab(memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES)), BLOCK_BYTES)
