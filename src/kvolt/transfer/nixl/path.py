"""Nixl: reads peer memory over NIXL with any UCX transport (RDMA, NVLink, kernel copies).

One NIXL agent per hub, created on first use in a separate thread; reads wait about half a second for it. Everything
else runs in the progress thread. NIXL has no progress thread here and nothing to wait on, so it is polled while a read
is active on either side: at every step for a millisecond after progress, which is the duration of a part, then once per
millisecond. Each poll does all pending work, so a slow peer uses no core and a fast one waits a millisecond at most.
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
from kvolt.transfer.memory.pieces import check_pieces
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.nixl.memory import LocalMemory, NixlMemory, is_one_sided
from kvolt.transfer.nixl.read import NixlRead
from kvolt.transfer.paths import nixl_library
from kvolt.transfer.reads.progress import ProgressThread, Timer
from kvolt.transfer.reads.read_op import NIXL, ReadOp
from kvolt.transfer.reads.wire import Address, NixlSlab

log = logging.getLogger(__name__)

_EAGER_POLL_S = 1e-3
_IDLE_POLL_S = 1e-3
_MAX_DESCRIPTIONS = 4096
"""Memory descriptions accepted per peer."""
_HANG_S = 10.0
"""Deadline for the part in flight of a stopped read. UCX detects a dead peer sooner."""


@dataclass(slots=True)
class _Peer:
    """Peer that this agent reads from."""

    slabs: dict[int, tuple[NixlSlab, NixlMemory]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """Names of its NIXL agents; a new one after each restart."""
    num_described: int = 0
    """Memory descriptions loaded into NIXL, which keeps state for each."""
    is_gone: bool = False


class Nixl:
    """See the module. Progress thread only."""

    def __init__(self, progress: ProgressThread, name: str) -> None:
        self._progress = progress
        self._name = name
        self._agent: Any = None
        self._local_memory: LocalMemory | None = None
        self._num_agents = 0
        self.is_usable = True
        """False once an agent could not be created, and after `close`."""
        self._is_closed = False
        self._is_creating = False
        self._waiting: list[Callable[[], None]] = []
        self._peers: dict[Address, _Peer] = {}
        self._reads: dict[NixlRead, None] = {}
        self._num_served = 0
        self._is_scheduled = False
        self._timer: Timer | None = None
        self._last_event = 0.0

    # --- the agent

    @property
    def is_ready(self) -> bool:
        return self._agent is not None

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the agent exists or is known to be unusable."""
        if self.is_ready or not self.is_usable:
            callback()
            return
        self._waiting.append(callback)
        if not self._is_creating:
            self._is_creating = True
            self._num_agents += 1
            name = f"{self._name}-{self._num_agents}"
            threading.Thread(target=self._create_agent, args=(name,), name="kvolt-nixl", daemon=True).start()

    def _create_agent(self, name: str) -> None:
        """Runs in its own thread."""
        agent: Any = None
        error: KvoltError | None = None
        try:
            agent = nixl_library.new_agent(name)
        except KvoltError as failure:
            error = failure
        self._progress.call_soon(partial(self._on_agent, agent, error))

    def _on_agent(self, agent: Any, error: KvoltError | None) -> None:
        self._is_creating = False
        if error is not None:
            log.error("NIXL disabled: error=%s", error)
            self.is_usable = False
        elif not self._is_closed:
            self._agent, self._local_memory = agent, LocalMemory(agent)
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def close(self, error: KvoltError) -> None:
        """Fail all reads."""
        self._is_closed, self.is_usable = True, False
        self._reset(error)
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def _reset(self, error: KvoltError) -> None:
        """Destroy the agent, which stops all transfers, then fail the reads."""
        reads = list(self._reads)
        self._reads.clear()
        for read in reads:
            read.release_agent()
        for peer in self._peers.values():
            for _, memory in peer.slabs.values():
                _try("release a peer's memory", memory.release)
        self._peers.clear()
        if self._local_memory is not None:
            _try("release our memory", self._local_memory.close)
        agent_ref = None if self._agent is None else weakref.ref(self._agent.agent)
        self._agent = self._local_memory = None
        if agent_ref is not None and agent_ref() is not None:  # pragma: no cover - a defect: a leaked handle
            log.critical("NIXL agent still referenced after release: it may still write to released blocks")
        for read in reads:
            _try("end a read", partial(read.read_op.on_mover_stopped, error))

    # --- reads by peers

    def describe(self, slab: Slab, number: int) -> NixlSlab:
        """Description with which a peer can read the slab. A different result invalidates the previous one. Unsupported
        if it cannot be read."""
        if self._local_memory is None:
            raise Unsupported("this agent has no NIXL agent", feature=NIXL)
        failure = ""
        try:
            address, metadata = self._local_memory.describe(slab)
        except KvoltError:
            raise
        except Exception as error:  # NIXL's errors have no common base class
            failure = repr(error)  # the traceback would keep the agent alive
        if failure:
            log.warning(
                "NIXL memory registration failed, check the limit on locked memory: error=%s", failure
            )
            raise Unsupported(f"cannot register this memory with NIXL: {failure}", feature=NIXL)
        return NixlSlab(slab.info(number), address, 0, metadata)

    def start_serving(self) -> None:
        """Poll for a reading peer until `stop_serving`: its NIXL agent may need this one, at least to connect."""
        self._num_served += 1
        self._poll_eagerly()

    def stop_serving(self) -> None:
        self._num_served -= 1

    # --- reads from peers

    def read(self, agent: Address, slab: NixlSlab, numbers: Numbers, read_op: ReadOp) -> bool:
        """Read blocks of a peer's slab. Return False, with nothing started, if NIXL is not usable with this peer."""
        if self._agent is None or self._local_memory is None:
            read_op.stop(WorkerLost("NIXL was restarted", reason="restarted"))
            return True
        source = read_op.source_pieces(numbers, slab.slab.block_bytes)
        if source is None:
            return True
        size = slab.slab.block_bytes * slab.slab.num_blocks
        try:
            check_pieces("blocks", source.offsets, source.piece_bytes, size)
        except ValueError as error:
            read_op.stop(ProtocolError(str(error), rule="ready"))
            return True
        try:
            remote = self._remote_memory(agent, slab)
            local = self._local_memory.of(read_op.request.slab)
            if not is_one_sided(self._agent, local, remote):
                log.warning("NIXL not used with peer: UCX only emulates one-sided reads: host=%s", agent.host)
                return False
            read = NixlRead(self._agent, agent, read_op, source, local, remote)
        except Exception as error:  # NIXL's errors have no common base class
            log.warning("NIXL not used with peer: host=%s error=%s", agent.host, repr(error))
            return False
        read_op.set_mover(read)
        self._reads[read] = None
        self._poll_eagerly()
        return True

    def forget_peer(self, agent: Address) -> None:
        """Release the peer's state once its reads are done, since the connection is closed."""
        peer = self._peers.get(agent)
        if peer is not None:
            peer.is_gone = True
            self._drop_if_unused(agent)

    def _remote_memory(self, agent: Address, slab: NixlSlab) -> NixlMemory:
        peer = self._peers.setdefault(agent, _Peer())
        peer.is_gone = False
        known, memory = peer.slabs.get(slab.slab.number, (None, None))
        if memory is None or known != slab:
            peer.num_described += 1
            if peer.num_described > _MAX_DESCRIPTIONS:
                raise Unsupported(
                    f"the peer described its memory more than {_MAX_DESCRIPTIONS} times", feature=NIXL
                )
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

    def _poll_eagerly(self) -> None:
        self._last_event = self._progress.now()
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._progress.schedule(self)

    def step(self) -> bool:
        """Work: poll all reads."""
        has_progress = False
        for read in list(self._reads):
            has_progress |= self._advance(read)
            if read.is_done:
                self._reads.pop(read, None)
                self._drop_if_unused(read.peer)
        now = self._progress.now()
        if any(self._is_hung(read, now) for read in self._reads):
            log.error("NIXL read hangs: all NIXL reads are failed: timeout_s=%s", _HANG_S)
            self._reset(
                WorkerLost("NIXL was restarted because a read from another peer hung", reason="restarted")
            )
        if self._num_served:
            self._poll_peers()
        if has_progress:
            self._last_event = now
        self._is_scheduled = bool(self._reads or self._num_served)
        if self._is_scheduled and now - self._last_event > _EAGER_POLL_S:
            self._is_scheduled = False
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._progress.call_at(now + _IDLE_POLL_S, self._schedule)
        return self._is_scheduled

    def _advance(self, read: NixlRead) -> bool:
        """Advance one read and return whether it made progress. An error fails only this read."""
        try:
            return read.advance()
        except Exception as error:
            log.warning("NIXL read failed", exc_info=True)
            failed = TransferFailed(f"cannot process the blocks: {error!r}", path=NIXL, reason="defect")
        # `stop` waits for the part in flight, since NIXL writes to its blocks.
        _try("end a read", partial(read.read_op.stop, failed))
        return True

    def _poll_peers(self) -> None:
        if self._agent is None:
            return
        failure = ""
        try:
            self._agent.get_new_notifs()  # there are none, but polling makes NIXL progress
        except Exception as error:  # NIXL's errors have no common base class
            failure = repr(error)
        # Outside the except block: a handled exception references the agent, which must be destroyed.
        if failure:
            log.error("NIXL agent failed, recreated on next use: error=%s", failure)
            self._reset(WorkerLost("the NIXL agent failed", reason=failure))

    def _is_hung(self, read: NixlRead, now: float) -> bool:
        if not read.is_stopped:
            return False
        if read.stopped_at is None:
            read.stopped_at = now
        return now - read.stopped_at > _HANG_S


def _try(action: str, call: Callable[[], object]) -> None:
    """Call and log an exception, so that one failing call does not prevent the next ones."""
    try:
        call()
    except Exception as error:  # NIXL's errors have no common base class
        log.debug("cleanup failed: action=%r error=%s", action, repr(error))
