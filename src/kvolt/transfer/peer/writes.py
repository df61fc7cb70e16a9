"""Writes: local blocks that peers may fill. This process reads the blocks that a peer offers for a write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvolt.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, KvoltError, NotFound, Overloaded
from kvolt.transfer.memory.slabs import Numbers, Slab, are_unique
from kvolt.transfer.peer.offers import unpack_numbers
from kvolt.transfer.peer.progress import Progress
from kvolt.transfer.peer.read_op import OnDone, ReadOp
from kvolt.transfer.peer.read_request import ALL, ReadRequest, new_read_request
from kvolt.transfer.peer.wire import WriteRequest

MAX_WRITABLES = 65_536


@dataclass(slots=True)
class Writable:
    """Blocks that a peer may write, each once."""

    slab: Slab
    blocks: Numbers
    seeds: bytes | None
    deadline: float
    on_done: OnDone
    is_claimed: npt.NDArray[np.bool_]
    """Per block: written, or being written."""
    num_left: int
    """Blocks not yet written."""
    read_ops: set[ReadOp] = field(default_factory=set)
    """Active reads from peers."""
    final_error: KvoltError | None = None
    """Error to report once the active reads have stopped."""


class Writes:
    """See the module. Progress thread only."""

    def __init__(self, progress: Progress, read: Callable[[ReadOp, float], None]) -> None:
        """`read` starts a read with a deadline."""
        self._progress = progress
        self._read = read
        self._writables: dict[int, Writable] = {}

    def add(self, secret: int, writable: Writable) -> None:
        if len(self._writables) >= MAX_WRITABLES:
            raise Overloaded(
                f"too many writable block sets: limit is {MAX_WRITABLES}",
                queue="writables",
                limit=MAX_WRITABLES,
            )
        self._writables[secret] = writable
        late = DeadlineExceeded("the blocks were not written before the deadline", stage="total")
        timer = self._progress.call_at(writable.deadline, lambda: self._finish(secret, late))
        writable.on_done = run_first(timer.cancel, writable.on_done)

    def withdraw(self, secret: int) -> None:
        self._finish(secret, Cancelled("the accept was cancelled"))

    def handle_request(self, write: WriteRequest, on_result: OnDone) -> None:
        """Read a peer's blocks into writable blocks and report the result."""
        try:
            writable, positions, request = self._claim_positions(write)
        except KvoltError as error:
            on_result(error)
            return

        def on_done(error: KvoltError | None) -> None:
            writable.is_claimed[positions] = error is None
            if error is None:
                writable.num_left -= len(positions)
            writable.read_ops.discard(read_op)
            on_result(error)
            if not writable.num_left:
                self._finish(write.secret, None)
            elif writable.final_error is not None and not writable.read_ops:
                writable.on_done(writable.final_error)

        read_op = ReadOp(request, on_done)
        writable.is_claimed[positions] = True
        writable.read_ops.add(read_op)
        self._read(read_op, writable.deadline)

    def _claim_positions(self, write: WriteRequest) -> tuple[Writable, Numbers, ReadRequest]:
        writable = self._writables.get(write.secret)
        if writable is None:
            raise NotFound(
                "the blocks are not writable or no longer", kind="ticket", name=f"{write.secret:016x}"
            )
        positions = unpack_numbers(write.positions)
        num_blocks = len(writable.blocks)
        if len(positions) != write.ticket.num_blocks or not len(positions):
            raise InvalidRequest("the number of positions must equal the number of blocks", param="positions")
        if positions.min() < 0 or positions.max() >= num_blocks or not are_unique(positions, num_blocks):
            raise InvalidRequest(f"positions are duplicate or outside {num_blocks} blocks", param="positions")
        if writable.is_claimed[positions].any():
            raise InvalidRequest("some of these blocks were already written", param="positions")
        seeds = None if writable.seeds is None else np.frombuffer(writable.seeds, "<u8")[positions].tobytes()
        blocks = writable.blocks[positions]
        request = new_read_request(write.ticket, writable.slab, blocks, ALL, seeds, write.is_checked)
        return writable, positions, request

    def _finish(self, secret: int, error: KvoltError | None) -> None:
        writable = self._writables.pop(secret, None)
        if writable is None:
            return
        if error is not None:
            for read_op in list(writable.read_ops):
                read_op.stop(error)
        if writable.read_ops:
            writable.final_error = error
        else:
            writable.on_done(error)

    def close(self, error: KvoltError) -> None:
        for secret in list(self._writables):
            self._finish(secret, error)


def run_first(first: Callable[[], None], on_done: OnDone) -> OnDone:
    """Callback that runs `first`, then `on_done`."""

    def run(error: KvoltError | None) -> None:
        first()
        on_done(error)

    return run
