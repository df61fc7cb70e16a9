"""NixlRead: one read over NIXL, in parts; each part is one NIXL transfer and one is in flight at a time.

This is the only place where another component (UCX, a network card, the kernel) writes to local blocks, so that a
finished operation moves no byte depends on NIXL. Observed with NIXL 1.5.1 and UCX:

* A transfer that is reported done or failed has nothing in flight. The code relies on this.
* `release_xfer_handle` of a transfer in flight returns at once without an error and *the transfer continues*: 256 MiB
  were written after it. It is never called for a transfer in flight.
* Destroying the NIXL agent stops all its transfers.

A read is therefore stopped between two parts: the part in flight completes before the read is reported as done, about a
millisecond for a live peer and at once for a dead one. If a peer hangs, the NIXL agent is destroyed after a timeout
(`Nixl.step`).
"""

from __future__ import annotations

from typing import Any

from kvolt.core.errors import WorkerLost
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.nixl.memory import NixlMemory, unit_bytes_of, units_of
from kvolt.transfer.reads.read_op import ReadOp
from kvolt.transfer.reads.wire import Address

STEP_BYTES = 4 << 20
"""Bytes per part. Between processes of one host the kernel copies it during the call, in about a millisecond."""
_IN_PROGRESS = "PROC"
_DONE = "DONE"


class NixlRead:
    """Mover of a ReadOp. Progress thread only."""

    def __init__(
        self,
        agent: Any,
        peer: Address,
        read_op: ReadOp,
        source: Pieces,
        local: NixlMemory,
        remote: NixlMemory,
    ) -> None:
        """`source`: location of the blocks in the peer's memory. Raises if NIXL cannot read them."""
        self.peer = peer
        self.read_op = read_op
        self.stopped_at: float | None = None
        """Time at which `Nixl.step` first saw that it was stopped."""
        self.is_stopped = False
        self._agent = agent
        destination = read_op.request.into
        unit_bytes = unit_bytes_of(destination, source)
        self._lists = local.descriptor_list(agent, unit_bytes), remote.descriptor_list(agent, unit_bytes)
        self._local_units, self._remote_units = (
            units_of(destination, unit_bytes),
            units_of(source, unit_bytes),
        )
        self._units_per_block = len(self._local_units) // destination.num_blocks
        self._bytes_per_block = destination.bytes_per_block
        self._num_blocks = destination.num_blocks
        self._num_submitted = 0
        self._num_in_flight = 0
        self._handle: Any = None
        self._state = _DONE

    def stop(self) -> bool:
        self.is_stopped = True
        return self._handle is None

    def advance(self) -> bool:
        """Poll the part in flight and submit the next one. Return whether there was progress."""
        num_moved = 0
        try:
            if self._handle is not None:
                if self._state == _IN_PROGRESS:
                    self._state = self._agent.check_xfer_state(self._handle)
                if self._state == _IN_PROGRESS:
                    return False
                if self._state != _DONE:
                    raise ConnectionError("NIXL reports a failed transfer")
                self._handle.release()
                self._handle, num_moved = None, self._num_in_flight
            if not self.is_stopped and self._num_submitted < self._num_blocks:
                self._submit()  # first, so that it overlaps with the checksums of the last part
        except Exception as error:  # NIXL's errors have no common base class
            self._handle = None
            self.read_op.on_mover_stopped(
                WorkerLost("cannot read the peer's memory over NIXL", reason=repr(error))
            )
            return True
        if self.is_stopped:
            self.read_op.on_mover_stopped(None)
        elif num_moved:
            self.read_op.on_blocks_moved(num_moved)
        return True

    def release_agent(self) -> None:
        """Drop all references to the NIXL agent, which is about to be destroyed."""
        self._handle = self._agent = None
        self._lists = None, None

    @property
    def is_done(self) -> bool:
        """No part is in flight and none will follow."""
        return self._handle is None and (
            self.is_stopped or self.read_op.is_done or self._num_submitted == self._num_blocks
        )

    def _submit(self) -> None:
        count = min(max(STEP_BYTES // self._bytes_per_block, 1), self._num_blocks - self._num_submitted)
        first = self._num_submitted * self._units_per_block
        end = first + count * self._units_per_block
        local, remote = self._lists
        handle = self._agent.make_prepped_xfer(
            "READ", local, self._local_units[first:end], remote, self._remote_units[first:end]
        )
        self._num_submitted += count
        self._num_in_flight = count
        self._handle = handle
        self._state = self._agent.transfer(handle)
