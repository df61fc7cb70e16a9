"""One read over NIXL: its blocks in parts, each a transfer of NIXL's, one under way at a time.

Here alone somebody else writes to our memory: NIXL, which is UCX, a network card or the kernel. So the rule that an
operation which is over moves no byte needs its word. What that is worth was tried out with NIXL 1.5.1 and UCX:

* That a transfer is done, or has failed, is told when nothing of it is under way any more. This is believed.
* `release_xfer_handle` of a transfer under way returns at once and without an error, and *the transfer goes on*: 256
  MiB were written after it. It is never called for one that is under way.
* When the NIXL agent itself is destroyed nothing of it moves any more.

Hence: who stops a read stops it between two parts. What is under way is waited for, and only then is the read told to
be over: in a millisecond or so from a peer that lives, at once from one that died. From one that hangs nothing comes;
then, after a while, the NIXL agent is given up with all that it had under way (`Nixl.turn`).
"""

from __future__ import annotations

from typing import Any

from kvolt.core.errors import WorkerLost
from kvolt.transfer.memory.slabs import Pieces
from kvolt.transfer.nixl.memory import NixlMemory, unit_bytes_of, units_of
from kvolt.transfer.peer.read_op import Reading
from kvolt.transfer.peer.wire import Address

TURN_BYTES = 4 << 20
"""Of a part. The kernel copies it while we ask for it, between processes of one host: a millisecond or so."""
_UNDER_WAY = "PROC"
_DONE = "DONE"


class NixlRead:
    """See the module: the Mover of a Reading. In the progress thread only."""

    def __init__(
        self, agent: Any, peer: Address, reading: Reading, there: Pieces, ours: NixlMemory, theirs: NixlMemory
    ) -> None:
        """`there`: where the blocks lie in the memory of the peer. An error for what NIXL cannot, or may not, read."""
        self.peer = peer
        self.reading = reading
        self.stopped_at: float | None = None
        """When `Nixl.turn` first saw that it was."""
        self.is_stopped = False
        self._agent = agent
        here = reading.wanted.into
        unit_bytes = unit_bytes_of(here, there)
        self._lists = ours.list_of(agent, unit_bytes), theirs.list_of(agent, unit_bytes)
        self._here, self._there = units_of(here, unit_bytes), units_of(there, unit_bytes)
        self._units_per_block = len(self._here) // here.num_blocks
        self._bytes_per_block = here.bytes_per_block
        self._num_blocks = here.num_blocks
        self._num_asked = 0
        self._num_under_way = 0
        self._handle: Any = None
        self._state = _DONE

    def stop(self) -> bool:
        self.is_stopped = True
        return self._handle is None

    def advance(self) -> bool:
        """See how it stands, and ask for the next part. Whether anything has happened."""
        landed = 0
        try:
            if self._handle is not None:
                if self._state == _UNDER_WAY:
                    self._state = self._agent.check_xfer_state(self._handle)
                if self._state == _UNDER_WAY:
                    return False
                if self._state != _DONE:
                    raise ConnectionError("NIXL says that the transfer failed")
                self._handle.release()
                self._handle, landed = None, self._num_under_way
            if not self.is_stopped and self._num_asked < self._num_blocks:
                self._ask()  # before what has landed is looked at: it can come meanwhile
        except Exception as error:  # NIXL's errors have no base of their own
            self._handle = None
            self.reading.let_go(WorkerLost("a peer's memory cannot be read over NIXL", reason=repr(error)))
            return True
        if self.is_stopped:
            self.reading.let_go(None)
        elif landed:
            self.reading.landed(landed)
        return True

    def give_up(self) -> None:
        """The NIXL agent goes, and must not be held by a part of this."""
        self._handle = self._agent = None
        self._lists = None, None

    @property
    def is_over(self) -> bool:
        """Nothing is under way, and nothing more will be."""
        return self._handle is None and (
            self.is_stopped or self.reading.is_over or self._num_asked == self._num_blocks
        )

    def _ask(self) -> None:
        count = min(max(TURN_BYTES // self._bytes_per_block, 1), self._num_blocks - self._num_asked)
        first = self._num_asked * self._units_per_block
        end = first + count * self._units_per_block
        ours, theirs = self._lists
        handle = self._agent.make_prepped_xfer(
            "READ", ours, self._here[first:end], theirs, self._there[first:end]
        )
        self._num_asked += count
        self._num_under_way = count
        self._handle = handle
        self._state = self._agent.transfer(handle)
