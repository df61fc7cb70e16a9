"""PeerLink: outgoing connection to another agent, with all reads and waits on it.

Connects to the agent's Unix socket if reachable (then it is on this host and its shared memory can be mapped), else
over TCP. Opened on first use and kept until it breaks; then everything pending on it fails. An unreachable local
socket is probed with exponential backoff; once it answers, new reads open another link.
"""

from __future__ import annotations

import logging
import socket
from typing import Protocol

import numpy as np

from kvolt.core.errors import (
    ConnectFailed,
    KvoltError,
    ProtocolError,
    TransferFailed,
    Unsupported,
    WorkerLost,
    from_info,
)
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.transfer.memory.device_memory import Memory, MemoryKind
from kvolt.transfer.memory.slabs import Numbers
from kvolt.transfer.nixl.memory import RAM
from kvolt.transfer.nixl.path import Nixl
from kvolt.transfer.paths.path_watch import PathWatch
from kvolt.transfer.peer.chunk_connection import Action, ActionQueue, ChunkConnection, ConnectAttempt, OnError
from kvolt.transfer.peer.connection import FrameConnection
from kvolt.transfer.peer.handshakes import KEY_REMEDY, Handshakes
from kvolt.transfer.peer.mailbox import Waiter
from kvolt.transfer.peer.peer_memory import PeerMemory
from kvolt.transfer.peer.sockets import SocketProbe, host_port
from kvolt.transfer.reads import wire
from kvolt.transfer.reads.peer_paths import PeerPaths
from kvolt.transfer.reads.progress import ProgressThread
from kvolt.transfer.reads.read_op import NIXL, SHM, TCP, ReadOp

log = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """The hub as its links use it."""

    address: wire.Address
    progress: ProgressThread
    nixl: Nixl | None
    uses_unix: bool
    handshakes: Handshakes | None
    frame_budget: ByteBudget
    paths: PathWatch
    tests_paths: bool

    def has_link(self, address: wire.Address) -> bool: ...

    def remove_link(self, address: wire.Address, link: PeerLink) -> None: ...

    def retire(self, address: wire.Address, link: PeerLink) -> None:
        """Replace the link for new reads; close it when idle."""
        ...


class PeerLink:
    """See the module. Progress thread only."""

    def __init__(self, hub: LinkOwner, address: wire.Address) -> None:
        self._hub = hub
        self._address = address
        self._frames: FrameConnection | None = None
        self._chunks: ChunkConnection | None = None
        """Set by Welcome."""
        self._probe: SocketProbe | None = None
        self._is_welcomed = False
        self._waiting = ActionQueue()
        self._read_ops: dict[int, ReadOp] = {}
        self._waiters: dict[int, Waiter] = {}
        self._memory = PeerMemory()
        self._served_paths: frozenset[str] = frozenset()
        """Optional paths the peer serves, less those found unusable."""
        self._last_op = 0
        self._close_error: KvoltError | None = None
        self._paths = PeerPaths(hub.paths, hub.progress, self, address, hub.tests_paths)
        self._attempt = ConnectAttempt(hub.progress, address, self.close, hub.handshakes)
        self._connect(use_unix=hub.uses_unix and bool(address.unix))

    @property
    def is_closed(self) -> bool:
        return self._close_error is not None

    @property
    def is_busy(self) -> bool:
        """Whether reads are active or queued."""
        return bool(self._read_ops or self._waiting) or (self._chunks is not None and self._chunks.is_awaited)

    @property
    def is_idle(self) -> bool:
        return not (self.is_busy or self._waiters)

    # --- requests to the peer

    def read(self, read_op: ReadOp) -> None:
        """Start a read; failures are reported to it."""
        self._when_ready(lambda: self._start_read(read_op), read_op.stop)

    def receive(self, waiter: Waiter) -> None:
        """Wait for a mailbox of the peer."""

        def send() -> None:
            if waiter.is_done:
                return
            self._last_op += 1
            op = self._last_op
            self._waiters[op] = waiter
            waiter.add_cleanup(lambda: self._on_waiter_done(op))
            self.send(wire.Receive(op, waiter.mailbox, waiter.deadline - self._hub.progress.now()))

        self._when_ready(send, waiter.fail)

    def _on_waiter_done(self, op: int) -> None:
        """Tell the peer, unless it completed the wait."""
        if self._waiters.pop(op, None) is not None:
            self.send(wire.Ended(op, is_whole=False))

    def decline(self, ticket: wire.Ticket) -> None:
        declined = wire.Declined(ticket.secret, ticket.proof)
        self._when_ready(lambda: self.send(declined), lambda error: None)

    def send(self, message: wire.Message) -> None:
        if self._frames is not None:
            self._frames.send(message)

    def end_read(self, op: int, is_whole: bool) -> None:
        """Send Ended and drop the read."""
        read_op = self._read_ops.pop(op, None)
        self.send(wire.Ended(op, is_whole))
        if read_op is not None:
            self._paths.on_read_done(read_op)

    def forget_read(self, op: int) -> None:
        self._read_ops.pop(op, None)

    def close(self, error: KvoltError) -> None:
        """Fail everything pending."""
        if self._close_error is not None:
            return
        self._close_error = error
        self._attempt.end()
        for connection in (self._frames, self._chunks, self._probe):
            if connection is not None:
                connection.close()
        self._hub.remove_link(self._address, self)
        for read_op in list(self._read_ops.values()):
            read_op.stop(error)
        for waiter in list(self._waiters.values()):
            waiter.fail(error)
        for waiting in (self._waiting, self._chunks):
            if waiting is not None:
                waiting.fail(error)
        self._memory.close()
        if self._hub.nixl is not None and not self._hub.has_link(self._address):
            self._hub.nixl.forget_peer(self._address)

    # --- connecting

    def _connect(self, use_unix: bool) -> None:
        def done(result: socket.socket | ConnectFailed) -> None:
            if not isinstance(result, ConnectFailed):
                self._frames = FrameConnection(
                    self._hub.progress,
                    result,
                    self._on_message,
                    self._on_frames_lost,
                    budget=self._hub.frame_budget,
                )
                self.send(wire.Hello(self._hub.address.agent, "frames"))
            elif use_unix:
                if self._address.host == self._hub.address.host:
                    self._probe = SocketProbe(self._hub.progress, self._address, self._on_socket_reachable)
                self._connect(use_unix=False)
            else:
                self.close(result)

        self._attempt.connect(use_unix, done)

    def _on_frames_lost(self, error: KvoltError) -> None:
        """A peer that closes before its Welcome may have refused this process; it does not say why."""
        if not self._is_welcomed and isinstance(error, WorkerLost):
            peer, reason = host_port(self._address), error.fields.get("reason")
            error = ConnectFailed(
                f"{peer} closed the connection at once ({reason}); it may have another version or --cluster-key",
                address=peer,
                remedy=KEY_REMEDY,
            )
        self.close(error)

    def _on_socket_reachable(self) -> None:
        log.info("shared memory reachable again: peer=%s", host_port(self._address))
        self._hub.retire(self._address, self)

    def _when_ready(self, action: Action, on_error: OnError) -> None:
        if self._close_error is not None:
            on_error(self._close_error)
        elif self._is_welcomed:
            action()
        else:
            self._waiting.enqueue(action, on_error)

    def _start_read(self, read_op: ReadOp) -> None:
        if read_op.is_done:
            return
        if self._close_error is not None:
            read_op.stop(self._close_error)
            return
        request = read_op.request
        slab = request.ticket.slab
        paths = self.paths_between(slab.kind, request.slab.kind)
        if not self._memory.is_openable(slab.number):
            paths = [each for each in paths if each != wire.CUDA_IPC]
        path = read_op.forced_path or self._paths.choose_path(request, paths)
        if path == NIXL and self._hub.nixl is not None and not self._hub.nixl.is_usable:
            read_op.stop(Unsupported("NIXL is not usable", feature=NIXL))  # only self-tests force a path
            return
        if path == NIXL and self._hub.nixl is not None and not self._hub.nixl.is_ready:
            self._hub.nixl.when_ready(lambda: self.read(read_op))
            return
        if path == TCP and not self._has_tcp:
            read_op.stop(
                ConnectFailed(
                    f"no connection to {host_port(self._address)}", address=host_port(self._address)
                )
            )
            return
        if path == TCP and self._chunks is not None and not self._chunks.is_open:
            self._chunks.when_open(lambda: self._start_read(read_op), read_op.stop)
            return
        self._last_op += 1
        self._read_ops[self._last_op] = read_op
        read_op.started_at = self._hub.progress.now()
        self.send(read_op.start(self, self._last_op, path))

    def paths_between(self, source: MemoryKind, destination: MemoryKind) -> list[str]:
        """Paths by which blocks could come from the peer, preferred first."""
        paths = []
        if self._is_near and source is MemoryKind.SHARED:
            paths.append(SHM)
        if (
            self._is_near
            and source is destination is MemoryKind.DEVICE
            and wire.CUDA_IPC in self._served_paths
        ):
            paths.append(wire.CUDA_IPC)
        nixl = self._hub.nixl
        uses_nixl = nixl is not None and nixl.is_usable and NIXL in self._served_paths
        if uses_nixl and source in RAM and destination in RAM:
            paths.append(NIXL)
        return paths if paths and not self._has_tcp else [*paths, TCP]

    @property
    def _has_tcp(self) -> bool:
        """TCP is reachable, as far as known."""
        return self._chunks is None or not self._chunks.is_unreachable

    @property
    def _is_near(self) -> bool:
        """Whether the peer was reached over its Unix socket, so that its shared memory can be mapped."""
        return self._frames is not None and self._frames.is_unix

    # --- messages from the peer

    def _on_message(self, message: wire.Message) -> None:
        match message:
            case wire.Welcome(agent) if not self._is_welcomed:
                if agent != self._address.agent:
                    self.close(WorkerLost("the address belongs to another agent", reason="replaced"))
                    return
                ipc = (
                    frozenset()
                    if message.capabilities is None
                    else message.capabilities.paths & {wire.CUDA_IPC}
                )
                self._served_paths = ipc.union(message.also_serves)
                self._chunks = ChunkConnection(
                    self._hub.progress,
                    self._address,
                    wire.Hello(self._hub.address.agent, "chunks", key=message.key),
                    self._read_ops.get,
                    self.close,
                    is_optional=self._is_near,
                    handshakes=self._hub.handshakes,
                )
                self._is_welcomed = True
                self._attempt.end()
                self._paths.on_welcome(message.capabilities, self._is_near)
                self._waiting.run()
            case _ if not self._is_welcomed:
                raise ProtocolError(f"expected Welcome, got {type(message).__name__}", rule="hello")
            case wire.SharedSlab():
                descriptor = None
                if self._frames is not None and message.has_descriptor:
                    descriptor = self._frames.take_descriptor()
                self._memory.add_shared(message, descriptor)
            case wire.NixlSlab():
                self._memory.add_nixl(message)
            case wire.DeviceSlab():
                self._memory.add_device(message)
            case wire.Ready(op):
                read_op = self._read_ops.get(op)
                if read_op is not None:
                    read_op.expect_ready()
                    self._on_ready(read_op, message)
            case wire.Checksums(op):
                read_op = self._read_ops.get(op)
                if read_op is not None:
                    read_op.on_sums(message)
            case wire.Failed(op):
                read_op = self._read_ops.get(op)
                if read_op is not None:
                    self._on_failed(read_op, message)
                waiter = self._waiters.pop(op, None)
                if waiter is not None:
                    waiter.fail(from_info(message.error))
            case wire.Delivered(op, payload):
                waiter = self._waiters.pop(op, None)
                if waiter is not None:
                    waiter.deliver(payload)
            case _:
                raise ProtocolError(
                    f"unexpected {type(message).__name__} from a serving peer", rule="direction"
                )

    def _on_failed(self, read_op: ReadOp, message: wire.Failed) -> None:
        if read_op.path in (NIXL, wire.CUDA_IPC) and message.error.code == Unsupported.code:
            read_op.expect_ready()  # a read with a mover cannot restart
            log.warning("path unavailable: path=%s error=%s", read_op.path, message.error.message)
            if read_op.path == NIXL:
                self._drop_path(NIXL, read_op)
            else:
                self._memory.mark_unopenable(read_op.request.ticket.slab.number)
                self._retry(read_op)
        else:
            read_op.on_failed(message)

    def _read_over_nixl(self, read_op: ReadOp, slab: wire.NixlSlab, numbers: Numbers) -> None:
        assert self._hub.nixl is not None
        if not self._hub.nixl.read(self._address, slab, numbers, read_op):
            self.send(wire.Ended(read_op.op, is_whole=False))
            self._drop_path(NIXL, read_op)

    def _read_over_ipc(self, read_op: ReadOp, number: int, numbers: Numbers) -> None:
        try:
            slab, memory = self._memory.open_device(number, read_op.request.slab.device)
        except Unsupported as error:
            log.warning("cannot open the peer's device memory: path=%s error=%s", wire.CUDA_IPC, error)
            self.send(wire.Ended(read_op.op, is_whole=False))
            self._memory.mark_unopenable(number)
            self._retry(read_op)
        except TransferFailed as error:
            read_op.stop(error)
        else:
            self._start_copy(read_op, memory, numbers, slab.block_bytes)

    def _start_copy(self, read_op: ReadOp, memory: Memory, numbers: Numbers, block_bytes: int) -> None:
        if read_op.start_copy(memory, numbers, block_bytes):
            self._hub.progress.schedule(read_op)

    def _drop_path(self, path: str, read_op: ReadOp) -> None:
        """Stop using `path` with this peer and retry the read."""
        self._served_paths -= {path}
        self._retry(read_op)

    def _retry(self, read_op: ReadOp) -> None:
        """Retry over another path; a read with a forced path fails."""
        self.forget_read(read_op.op)
        if read_op.forced_path:
            read_op.stop(
                Unsupported(f"the peer does not serve {read_op.forced_path}", feature=read_op.forced_path)
            )
            return
        self._start_read(read_op)

    def _on_ready(self, read_op: ReadOp, message: wire.Ready) -> None:
        numbers = np.frombuffer(message.blocks, dtype="<i8")
        if read_op.path == NIXL:
            self._read_over_nixl(read_op, self._memory.nixl(message.slab), numbers)
        elif read_op.path == wire.CUDA_IPC:
            self._read_over_ipc(read_op, message.slab, numbers)
        else:
            slab, mapped = self._memory.shared(message.slab)
            self._start_copy(read_op, memoryview(mapped), numbers, slab.block_bytes)
