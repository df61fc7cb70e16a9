"""Link: outgoing connection to another agent, with all reads and waits on it.

Connects to the agent's Unix socket if reachable (then it is on this host and its shared memory can be mapped), else
over TCP. Opened on first use and kept until it breaks; then everything pending on it fails. An unreachable local
socket is probed with exponential backoff; once it answers, new reads open another link.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable, Container
from typing import Protocol

import msgspec
import numpy as np

from kvolt.core.errors import ConnectFailed, KvoltError, ProtocolError, Unsupported, WorkerLost, from_info
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.transfer.memory.device_memory import DeviceMemory
from kvolt.transfer.memory.slabs import SlabInfo, map_for_reading
from kvolt.transfer.nixl.path import NIXL, Nixl
from kvolt.transfer.paths.lanes import MemoryKind
from kvolt.transfer.paths.path_watch import PathWatch
from kvolt.transfer.paths.peer_paths import PeerPaths
from kvolt.transfer.peer import wire
from kvolt.transfer.peer.chunks import ChunkReceiver
from kvolt.transfer.peer.connection import FrameConnection
from kvolt.transfer.peer.mailbox import Waiter
from kvolt.transfer.peer.progress import Progress, Timer
from kvolt.transfer.peer.read_op import TCP, OnDone, ReadOp
from kvolt.transfer.peer.sockets import connect, host_port

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Deadline for the Welcome message."""
PROBE_S = 5.0
"""Delay before an unreachable local socket is probed; doubled each time."""
_MAX_PROBE_S = 300.0
_MAX_SLABS = 1024
"""Per peer."""

_Action = Callable[[], None]
_ActionQueue = deque[tuple[_Action, Callable[[KvoltError], None]]]
"""Each with its error callback."""


def _nothing() -> None: ...


class LinkOwner(Protocol):
    """The hub as its links use it."""

    address: wire.Address
    progress: Progress
    nixl: Nixl | None
    uses_unix: bool
    frame_budget: ByteBudget
    paths: PathWatch
    tests_paths: bool

    def has_link(self, address: wire.Address) -> bool: ...

    def remove_link(self, address: wire.Address, link: Link) -> None: ...

    def retire(self, address: wire.Address, link: Link) -> None:
        """Replace the link for new reads; close it when idle."""
        ...

    def paths_from(
        self, source: MemoryKind, destination: MemoryKind, is_near: bool, serves: Container[str]
    ) -> list[str]:
        """Possible paths from a peer that serves `serves`, preferred first."""
        ...


class Link:
    """See the module. Progress thread only."""

    def __init__(self, hub: LinkOwner, address: wire.Address) -> None:
        self._hub = hub
        self._address = address
        self._frames: FrameConnection | None = None
        self._chunks: ChunkReceiver | None = None
        self._chunk_handshake: FrameConnection | None = None
        """Handshake of the chunk connection."""
        self._cancel_connect: Callable[[], None] = _nothing
        """Cancels the pending connect."""
        self._probe_timer: Timer | None = None
        self._cancel_probe: Callable[[], None] = _nothing
        self._has_tcp = True
        """TCP is reachable, as far as known."""
        self._chunk_key = ""
        self._is_welcomed = False
        self._waiting: _ActionQueue = deque()
        self._waiting_for_chunk_socket: _ActionQueue = deque()
        self._read_ops: dict[int, ReadOp] = {}
        self._write_requests: dict[int, OnDone] = {}
        self._waiters: dict[int, Waiter] = {}
        self._slabs: dict[int, tuple[SlabInfo, mmap.mmap]] = {}
        self._nixl_slabs: dict[int, wire.NixlSlab] = {}
        self._device_slabs: dict[int, wire.DeviceSlab] = {}
        self._opened_memory: dict[tuple[int, DeviceMemory], DeviceMemory] = {}
        """Device slabs mapped by a local device."""
        self._unopenable_slabs: set[int] = set()
        """Device slabs that no local device can map."""
        self._served_paths: frozenset[str] = frozenset()
        """Optional paths the peer serves, less those found unusable."""
        self._last_op = 0
        self._close_error: KvoltError | None = None
        self._paths = PeerPaths(hub.paths, hub.progress, self, address, hub.tests_paths)
        self._deadline = self._start_deadline(CONNECT_S)
        self._connect(use_unix=hub.uses_unix and bool(address.unix))

    @property
    def is_closed(self) -> bool:
        return self._close_error is not None

    @property
    def is_busy(self) -> bool:
        """Whether reads are active or queued."""
        return bool(self._read_ops or self._waiting or self._waiting_for_chunk_socket)

    @property
    def is_idle(self) -> bool:
        return not (self.is_busy or self._write_requests or self._waiters)

    # --- requests to the peer

    def read(self, read_op: ReadOp) -> None:
        """Start a read; failures are reported to it."""
        self._when_ready(lambda: self._start_read(read_op), read_op.stop)

    def send_write_request(self, request: wire.WriteRequest, on_done: OnDone) -> None:
        """Ask the peer to read our blocks into its writable ones; `on_done` gets the result. Sets the op."""

        def send() -> None:
            self._last_op += 1
            self._write_requests[self._last_op] = on_done
            self.send(msgspec.structs.replace(request, op=self._last_op))

        self._when_ready(send, on_done)

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

    def decline(self, secret: int) -> None:
        self._when_ready(lambda: self.send(wire.Declined(secret)), lambda error: None)

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
        self._deadline.cancel()
        self._cancel_connect()
        self._cancel_probe()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        for connection in (self._frames, self._chunk_handshake, self._chunks):
            if connection is not None:
                connection.close()
        self._hub.remove_link(self._address, self)
        for read_op in list(self._read_ops.values()):
            read_op.stop(error)
        for on_done in list(self._write_requests.values()):
            on_done(error)
        self._write_requests.clear()
        for waiter in list(self._waiters.values()):
            waiter.fail(error)
        for waiting in (self._waiting, self._waiting_for_chunk_socket):
            while waiting:
                _, fail = waiting.popleft()
                fail(error)
        self._slabs.clear()  # unmapped when the last reader is gone
        self._device_slabs.clear()
        while self._opened_memory:
            self._opened_memory.popitem()[1].close()
        if self._hub.nixl is not None and not self._hub.has_link(self._address):
            self._hub.nixl.forget_peer(self._address)

    # --- connecting

    def _start_deadline(self, seconds: float) -> Timer:
        def on_timeout() -> None:
            peer = host_port(self._address)
            self.close(ConnectFailed(f"no answer from {peer} within {seconds:g} s", address=peer))

        return self._hub.progress.call_at(self._hub.progress.now() + seconds, on_timeout)

    def _connect(self, use_unix: bool) -> None:
        def done(result: socket.socket | ConnectFailed) -> None:
            if not isinstance(result, ConnectFailed):
                self._frames = FrameConnection(
                    self._hub.progress,
                    result,
                    self._on_message,
                    self.close,
                    budget=self._hub.frame_budget,
                )
                self.send(wire.Hello(self._hub.address.agent, "frames"))
            elif use_unix:
                if self._address.host == self._hub.address.host:
                    self._probe_socket(PROBE_S)
                self._connect(use_unix=False)
            else:
                self.close(result)

        self._open(use_unix, done)

    def _probe_socket(self, after_s: float) -> None:
        def on_probed(result: socket.socket | ConnectFailed) -> None:
            self._cancel_probe = _nothing
            if isinstance(result, ConnectFailed):
                self._probe_socket(min(2 * after_s, _MAX_PROBE_S))
                return
            result.close()
            log.info("shared memory reachable again: peer=%s", host_port(self._address))
            self._hub.retire(self._address, self)

        def probe() -> None:
            cancel = connect(self._hub.progress, self._address, True, on_probed)
            if self._probe_timer is timer and not self.is_closed:
                self._cancel_probe = cancel

        timer = self._probe_timer = self._hub.progress.call_at(self._hub.progress.now() + after_s, probe)

    def _connect_chunks(self) -> None:
        def done(result: socket.socket | ConnectFailed) -> None:
            if isinstance(result, ConnectFailed):
                if self._frames is None or not self._frames.is_unix:
                    self.close(result)
                    return
                # Same host but TCP unreachable: only reads with another path proceed.
                self._deadline.cancel()
                self._has_tcp = False
                self._run_queue(self._waiting_for_chunk_socket)
                return
            handshake = FrameConnection(
                self._hub.progress, result, self._on_chunk_welcome, self.close, wire.MAX_GREETING_BYTES
            )
            self._chunk_handshake = handshake
            handshake.send(wire.Hello(self._hub.address.agent, "chunks", key=self._chunk_key))

        self._deadline = self._start_deadline(CONNECT_S)
        self._open(use_unix=False, done=done)

    def _open(self, use_unix: bool, done: Callable[[socket.socket | ConnectFailed], None]) -> None:
        is_done = False

        def once(result: socket.socket | ConnectFailed) -> None:
            nonlocal is_done
            is_done = True
            self._cancel_connect = _nothing
            done(result)

        cancel = connect(self._hub.progress, self._address, use_unix, once)
        if not is_done:
            self._cancel_connect = cancel

    def _on_chunk_welcome(self, message: wire.Message) -> None:
        if not isinstance(message, wire.Welcome) or self._chunk_handshake is None:
            raise ProtocolError(f"expected Welcome, got {type(message).__name__}", rule="hello")
        self._deadline.cancel()
        link, self._chunk_handshake = self._chunk_handshake.detach(), None
        self._chunks = ChunkReceiver(
            self._hub.progress,
            link,
            self._read_ops.get,
            lambda error: self.close(WorkerLost("chunk connection lost", reason=str(error))),
        )
        self._run_queue(self._waiting_for_chunk_socket)

    def _run_queue(self, waiting: _ActionQueue) -> None:
        """Run one at a time: each may find the peer gone, and `close` then fails the rest."""
        while waiting:
            action, _ = waiting.popleft()
            action()

    def _when_ready(self, action: _Action, fail: Callable[[KvoltError], None]) -> None:
        if self._close_error is not None:
            fail(self._close_error)
        elif self._is_welcomed:
            action()
        else:
            self._waiting.append((action, fail))

    def _start_read(self, read_op: ReadOp) -> None:
        if read_op.is_done:
            return
        if self._close_error is not None:
            read_op.stop(self._close_error)
            return
        request = read_op.request
        slab = request.ticket.slab
        paths = self.paths_between(slab.kind, request.slab.kind)
        if slab.number in self._unopenable_slabs:
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
        if path == TCP and self._chunks is None:
            self._waiting_for_chunk_socket.append((lambda: self._start_read(read_op), read_op.stop))
            if len(self._waiting_for_chunk_socket) == 1:
                self._connect_chunks()
            return
        self._last_op += 1
        self._read_ops[self._last_op] = read_op
        read_op.started_at = self._hub.progress.now()
        self.send(read_op.start(self, self._last_op, path))

    def paths_between(self, source: MemoryKind, destination: MemoryKind) -> list[str]:
        """Paths by which blocks could come from the peer."""
        is_near = self._frames is not None and self._frames.is_unix
        *others, tcp = self._hub.paths_from(source, destination, is_near, self._served_paths)
        return others if others and not self._has_tcp else [*others, tcp]

    # --- messages from the peer

    def _on_message(self, message: wire.Message) -> None:
        match message:
            case wire.Welcome(agent) if not self._is_welcomed:
                if agent != self._address.agent:
                    raise WorkerLost("the address belongs to another agent", reason="replaced")
                ipc = (
                    frozenset()
                    if message.capabilities is None
                    else message.capabilities.paths & {wire.CUDA_IPC}
                )
                self._served_paths, self._chunk_key = ipc.union(message.also_serves), message.key
                self._is_welcomed = True
                self._deadline.cancel()
                self._paths.on_welcome(
                    message.capabilities, self._frames is not None and self._frames.is_unix
                )
                self._run_queue(self._waiting)
            case _ if not self._is_welcomed:
                raise ProtocolError(f"expected Welcome, got {type(message).__name__}", rule="hello")
            case wire.SharedSlab():
                self._map_slab(message)
            case wire.NixlSlab(slab):
                self._nixl_slabs[slab.number] = message
                _check_slab_limit(len(self._nixl_slabs))
            case wire.DeviceSlab(slab):
                self._device_slabs[slab.number] = message
                _check_slab_limit(len(self._device_slabs))
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
            case wire.WriteResult(op, error):
                on_done = self._write_requests.pop(op, None)
                if on_done is not None:
                    on_done(None if error is None else from_info(error))
            case _:
                raise ProtocolError(
                    f"unexpected {type(message).__name__} from a serving peer", rule="direction"
                )

    def _map_slab(self, message: wire.SharedSlab) -> None:
        """Map read-only: only the owner writes to a memory."""
        slab = message.slab
        descriptor = (
            self._frames.take_descriptor() if self._frames is not None and message.has_descriptor else None
        )
        if descriptor is None or slab.kind is not MemoryKind.SHARED:
            raise ProtocolError("SharedSlab without its descriptor", rule="described")
        try:
            mapped = map_for_reading(descriptor, slab.block_bytes * slab.num_blocks)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"cannot map the peer's memory: {error}", rule="described") from None
        finally:
            os.close(descriptor)
        self._slabs[slab.number] = (slab, mapped)
        _check_slab_limit(len(self._slabs))

    def _on_failed(self, read_op: ReadOp, message: wire.Failed) -> None:
        if read_op.path in (NIXL, wire.CUDA_IPC) and message.error.code == Unsupported.code:
            read_op.expect_ready()  # a read with a mover cannot restart
            log.warning("path unavailable: path=%s error=%s", read_op.path, message.error.message)
            if read_op.path == NIXL:
                self._drop_path(NIXL, read_op)
            else:
                self._unopenable_slabs.add(read_op.request.ticket.slab.number)
                _check_slab_limit(len(self._unopenable_slabs))
                self._retry(read_op)
        else:
            read_op.on_failed(message)

    def _read_over_nixl(self, read_op: ReadOp, message: wire.Ready) -> None:
        known = self._nixl_slabs.get(message.slab)
        if known is None or self._hub.nixl is None:
            raise ProtocolError("Ready for an unknown slab", rule="ready")
        numbers = np.frombuffer(message.blocks, dtype="<i8")
        if not self._hub.nixl.read(self._address, known, numbers, read_op):
            self.send(wire.Ended(read_op.op, is_whole=False))
            self._drop_path(NIXL, read_op)

    def _read_over_ipc(self, read_op: ReadOp, message: wire.Ready) -> None:
        known, device = self._device_slabs.get(message.slab), read_op.request.slab.device
        if known is None or device is None:
            raise ProtocolError("Ready for an unknown slab", rule="ready")
        memory = self._opened_memory.get((message.slab, device))
        try:
            memory = memory or self._opened_memory.setdefault(
                (message.slab, device), device.open(known.handle)
            )
        except Unsupported as error:
            log.warning("cannot open the peer's device memory: path=%s error=%s", wire.CUDA_IPC, error)
            self.send(wire.Ended(read_op.op, is_whole=False))
            self._unopenable_slabs.add(message.slab)
            self._retry(read_op)
            return
        except KvoltError as error:
            read_op.stop(error)
            return
        numbers = np.frombuffer(message.blocks, dtype="<i8")
        if read_op.start_copy(memory, numbers, known.slab.block_bytes):
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
        if read_op.path == NIXL:
            self._read_over_nixl(read_op, message)
            return
        if read_op.path == wire.CUDA_IPC:
            self._read_over_ipc(read_op, message)
            return
        known = self._slabs.get(message.slab)
        if known is None:
            raise ProtocolError("Ready for an unknown slab", rule="ready")
        slab, mapped = known
        numbers = np.frombuffer(message.blocks, dtype="<i8")
        if read_op.start_copy(memoryview(mapped), numbers, slab.block_bytes):
            self._hub.progress.schedule(read_op)


def _check_slab_limit(num_slabs: int) -> None:
    if num_slabs > _MAX_SLABS:
        raise ProtocolError(f"the peer announced more than {_MAX_SLABS} slabs", rule="described")
