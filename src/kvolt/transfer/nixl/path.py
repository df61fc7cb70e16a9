"""The path over NIXL: a peer's memory is read into ours by NIXL, over whatever UCX has (RDMA, NVLink, the kernel).

One NIXL agent for a hub, made when it is first needed, by a thread of its own: half a second in which blocks move over
other paths. All else happens in the progress thread, which asks NIXL how things are while something is under way, on
either side: without that nothing is, as NIXL has no thread of its own here. It asks at every turn for a millisecond
after anything has happened, which is what a part takes, then once in a millisecond: each time NIXL does all there is to
do, so a slow peer costs no core, and what is fast waits a millisecond at most. NIXL gives nothing to wait on.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvolt.core.errors import KvoltError, ProtocolError, TransferFailed, Unsupported, WorkerLost
from kvolt.transfer.memory.piece_checks import check_pieces
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.nixl import library as nixl_library
from kvolt.transfer.nixl.memory import NixlMemory, OurMemory, is_one_sided
from kvolt.transfer.nixl.read import NixlRead
from kvolt.transfer.peer.progress import Progress, Timer
from kvolt.transfer.peer.read_op import Reading
from kvolt.transfer.peer.wire import Address, NixlSlab

log = logging.getLogger(__name__)

NIXL = "nixl"
_EAGER_S = 1e-3
_PATIENT_S = 1e-3
_MAX_TOLD = 4096
_HANGS_S = 10.0
"""A peer whose part has not come so long after nobody wanted it any more. UCX itself finds a dead one sooner."""


@dataclass(slots=True)
class _Peer:
    """That we read from."""

    slabs: dict[int, tuple[NixlSlab, NixlMemory]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """Of its NIXL agents: another one after it was made anew."""
    num_told: int = 0
    """Descriptions of memory that NIXL was given: it keeps something of each."""
    is_gone: bool = False


class Nixl:
    """See the module. In the progress thread only."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name
        self._agent: Any = None
        self._ours: OurMemory | None = None
        self._num_agents = 0
        self.is_usable = True
        """Until it turned out not to be."""
        self._is_closed = False
        self._is_making = False
        self._waiting: list[Callable[[], None]] = []
        self._peers: dict[Address, _Peer] = {}
        self._reads: dict[NixlRead, None] = {}
        self._num_served = 0
        self._is_turning = False
        self._timer: Timer | None = None
        self._last_event = 0.0

    # --- the agent

    @property
    def is_ready(self) -> bool:
        return self._agent is not None

    def when_ready(self, then: Callable[[], None]) -> None:
        """Or when it is known not to be usable."""
        if self.is_ready or not self.is_usable:
            then()
            return
        self._waiting.append(then)
        if not self._is_making:
            self._is_making = True
            self._num_agents += 1
            name = f"{self._name}-{self._num_agents}"
            threading.Thread(target=self._make, args=(name,), name="kvolt-nixl", daemon=True).start()

    def _make(self, name: str) -> None:
        """In a thread of its own."""
        made: Any = None
        error: KvoltError | None = None
        try:
            made = nixl_library.new_agent(name)
        except KvoltError as why:
            error = why
        self._progress.call(partial(self._made, made, error))

    def _made(self, agent: Any, error: KvoltError | None) -> None:
        self._is_making = False
        if error is not None:
            log.error("blocks will not be moved over NIXL: %s", error)
            self.is_usable = False
        elif not self._is_closed:
            self._agent, self._ours = agent, OurMemory(agent)
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def close(self, error: KvoltError) -> None:
        """All that is read ends."""
        self._is_closed, self.is_usable = True, False
        self._abandon(error)
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def _abandon(self, error: KvoltError) -> None:
        """Nothing moves any more when the agent is gone; then all reads are told."""
        reads = list(self._reads)
        self._reads.clear()
        for read in reads:
            read.give_up()
        for peer in self._peers.values():
            for _, memory in peer.slabs.values():
                _try("release a peer's memory", memory.release)
        self._peers.clear()
        if self._ours is not None:
            _try("release our memory", self._ours.close)
        gone = None if self._agent is None else weakref.ref(self._agent.agent)
        self._agent = self._ours = None
        if gone is not None and gone() is not None:  # pragma: no cover - a defect: somebody holds a handle
            log.critical("NIXL's agent outlives its use: it may still write to blocks that were given back")
        for read in reads:
            _try("end a read", partial(read.reading.let_go, error))

    # --- what peers read of ours

    def describe(self, slab: Slab, number: int) -> NixlSlab:
        """What a peer must know to read from it; Unsupported where it cannot. Another answer: the last one is void."""
        if self._ours is None:
            raise Unsupported("this agent has no NIXL, or no more", feature=NIXL)
        why = ""
        try:
            address, metadata = self._ours.describe(slab)
        except KvoltError:
            raise
        except Exception as error:  # NIXL's errors have no base of their own
            why = repr(error)  # and keep, by way of their traceback, its agent alive
        if why:
            log.warning("memory cannot be registered with NIXL (a limit on locked memory?): %s", why)
            raise Unsupported(f"this memory cannot be registered with NIXL: {why}", feature=NIXL)
        return NixlSlab(slab.info(number), address, 0, metadata)

    def serve(self) -> None:
        """A peer reads, until `serve_no_more`: its NIXL may need ours, at least to find it."""
        self._num_served += 1
        self._wake()

    def serve_no_more(self) -> None:
        self._num_served -= 1

    # --- what we read

    def read(self, agent: Address, slab: NixlSlab, numbers: Numbers, reading: Reading) -> bool:
        """Blocks of a peer's slab. False where NIXL is no good way from there: nothing was begun."""
        if self._agent is None or self._ours is None:
            reading.stop(WorkerLost("NIXL was started anew meanwhile", reason="restarted"))
            return True
        there = reading.pieces_there(numbers, slab.slab.block_bytes)
        if there is None:
            return True
        size = slab.slab.block_bytes * slab.slab.num_blocks
        try:
            check_pieces("blocks", there.offsets, there.piece_bytes, size)
        except ValueError as error:
            reading.stop(ProtocolError(str(error), rule="ready"))
            return True
        try:
            theirs = self._known(agent, slab)
            ours = self._ours.of(reading.wanted.slab)
            if not is_one_sided(self._agent, ours, theirs):
                log.warning("UCX has only an emulation to read from %s: NIXL is not used with it", agent.host)
                return False
            read = NixlRead(self._agent, agent, reading, there, ours, theirs)
        except Exception as error:  # NIXL's errors have no base of their own
            log.warning("NIXL cannot read from %s, and is not used with it: %s", agent.host, repr(error))
            return False
        reading.moved_by(read)
        self._reads[read] = None
        self._wake()
        return True

    def forget(self, agent: Address) -> None:
        """There is no connection to this peer any more."""
        peer = self._peers.get(agent)
        if peer is not None:
            peer.is_gone = True
            self._drop_if_unused(agent)

    def _known(self, agent: Address, slab: NixlSlab) -> NixlMemory:
        peer = self._peers.setdefault(agent, _Peer())
        peer.is_gone = False
        told, memory = peer.slabs.get(slab.slab.number, (None, None))
        if memory is None or told != slab:
            peer.num_told += 1
            if peer.num_told > _MAX_TOLD:
                raise Unsupported(f"a peer that has told its memories {_MAX_TOLD} times", feature=NIXL)
            owner = self._agent.add_remote_agent(slab.metadata)
            name = owner.decode() if isinstance(owner, bytes) else str(owner)
            size = slab.slab.block_bytes * slab.slab.num_blocks
            memory = NixlMemory(name, slab.address, size, slab.device)
            peer.names.add(name)
            peer.slabs[slab.slab.number] = (slab, memory)
        return memory

    def _drop_if_unused(self, agent: Address) -> None:
        peer = self._peers.get(agent)
        if peer is None or not peer.is_gone or any(read.peer == agent for read in self._reads):
            return
        del self._peers[agent]
        for _, memory in peer.slabs.values():
            _try("release a peer's memory", memory.release)
        still_used = {name for each in self._peers.values() for name in each.names}
        for name in peer.names - still_used:
            _try("forget a peer", partial(self._agent.remove_remote_agent, name))

    # --- progress

    def _wake(self) -> None:
        self._last_event = self._progress.now()
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_turning:
            self._is_turning = True
            self._progress.work(self)

    def turn(self) -> bool:
        """Work: see how things are."""
        has_happened = False
        for read in list(self._reads):
            has_happened |= self._advance(read)
            if read.is_over:
                self._reads.pop(read, None)
                self._drop_if_unused(read.peer)
        now = self._progress.now()
        if any(self._hangs(read, now) for read in self._reads):
            log.error("a peer that was read from over NIXL hangs: all that is under way over NIXL ends")
            self._abandon(WorkerLost("NIXL was started anew because of another peer", reason="restarted"))
        if self._num_served:
            self._answer_peers()
        if has_happened:
            self._last_event = now
        self._is_turning = bool(self._reads or self._num_served)
        if self._is_turning and now - self._last_event > _EAGER_S:
            self._is_turning = False
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._progress.at(now + _PATIENT_S, self._go_on)
        return self._is_turning

    def _advance(self, read: NixlRead) -> bool:
        """Whether anything has happened. What fails here is this read, and no other."""
        try:
            return read.advance()
        except Exception as error:
            log.warning("a read over NIXL failed", exc_info=True)
            failed = TransferFailed(f"what came cannot be dealt with: {error!r}", path=NIXL, reason="defect")
        # What is under way is waited for: NIXL writes to it.
        _try("end a read", partial(read.reading.stop, failed))
        return True

    def _answer_peers(self) -> None:
        if self._agent is None:
            return
        why = ""
        try:
            self._agent.get_new_notifs()  # there are none: asking is what lets NIXL do its part
        except Exception as error:  # NIXL's errors have no base of their own
            why = repr(error)
        # Not before here: an error that is being handled holds the agent, which must go.
        if why:
            log.error("NIXL is broken (%s), and made anew when it is needed again", why)
            self._abandon(WorkerLost("NIXL broke", reason=why))

    def _hangs(self, read: NixlRead, now: float) -> bool:
        if not read.is_stopped:
            return False
        if read.stopped_at is None:
            read.stopped_at = now
        return now - read.stopped_at > _HANGS_S


def _try(what: str, do: Callable[[], object]) -> None:
    """Some of NIXL's calls, and of those who are told, fail: the others' turn comes all the same."""
    try:
        do()
    except Exception as error:  # NIXL's errors have no base of their own
        log.debug("could not %s: %s", what, repr(error))
