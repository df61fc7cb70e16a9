"""Link: a connection that we opened to another agent, and all that we read from it or wait for at it.

Opened when something is wanted of the agent, over its Unix socket where that can be reached: then it is on this host,
and its shared memory can be mapped; else over TCP. It stays until it breaks. When it does, or cannot be opened in time,
all that waits for it or is read over it fails. A socket of this host that could not be reached is tried again, ever
less often: once it is reached, new reads open another link.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvolt.core.errors import ConnectFailed, KvoltError, ProtocolError, Unsupported, WorkerLost, from_info
from kvolt.transfer.memory.device_memory import DeviceMemory
from kvolt.transfer.memory.slabs import SlabInfo, map_for_reading
from kvolt.transfer.nixl.path import NIXL
from kvolt.transfer.paths.lanes import MemoryKind
from kvolt.transfer.paths.peer_paths import PeerPaths
from kvolt.transfer.peer.chunks import ChunkReceiver
from kvolt.transfer.peer.connection import FrameConnection
from kvolt.transfer.peer.mailbox import Guest
from kvolt.transfer.peer.progress import Timer
from kvolt.transfer.peer.read_op import TCP, OnOver, Reading
from kvolt.transfer.peer.sockets import connect, name_of
from kvolt.transfer.peer.wire import (
    CUDA_IPC,
    MAX_GREETING_BYTES,
    Address,
    Declined,
    Described,
    DeviceSlab,
    Ended,
    Failed,
    Hello,
    Meet,
    Message,
    Met,
    NixlSlab,
    Offer,
    Ready,
    Sums,
    Taken,
    Welcome,
)

if TYPE_CHECKING:
    from kvolt.transfer.peer.hub import Hub

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Until a peer has said welcome."""
PROBE_S = 5.0
"""Until a socket of this host that could not be reached is tried again; doubled each time."""
_MOST_PROBE_S = 300.0
_MAX_SLABS = 1024
"""Of a peer."""

_Wish = Callable[[], None]
_Waiting = deque[tuple[_Wish, Callable[[KvoltError], None]]]
"""With how it is told that nothing comes of it."""


def _nothing() -> None: ...


class Link:
    """See the module. In the progress thread only."""

    def __init__(self, hub: Hub, to: Address) -> None:
        self._hub = hub
        self._to = to
        self._frames: FrameConnection | None = None
        self._chunks: ChunkReceiver | None = None
        self._greeting: FrameConnection | None = None
        """That will carry chunks."""
        self._give_up: Callable[[], None] = _nothing
        """Of what is being connected."""
        self._probe: Timer | None = None
        self._give_up_probe: Callable[[], None] = _nothing
        self._has_tcp = True
        """Blocks can be sent over TCP, as far as is known."""
        self._key = ""
        self._is_welcome = False
        self._waiting: _Waiting = deque()
        self._waiting_for_chunks: _Waiting = deque()
        self._readings: dict[int, Reading] = {}
        self._offers: dict[int, OnOver] = {}
        self._guests: dict[int, Guest] = {}
        self._slabs: dict[int, tuple[SlabInfo, mmap.mmap]] = {}
        self._nixl_slabs: dict[int, NixlSlab] = {}
        self._device_slabs: dict[int, DeviceSlab] = {}
        self._opened: dict[tuple[int, DeviceMemory], DeviceMemory] = {}
        """Those of them that a device of ours has mapped."""
        self._unopened: set[int] = set()
        """Those that none could."""
        self._serves: frozenset[str] = frozenset()
        """Paths beside those that everybody has, as long as they were not found to be of no use."""
        self._num_ops = 0
        self._closed_with: KvoltError | None = None
        self._paths = PeerPaths(hub.paths, hub.progress, self, to, hub.tests_paths)
        self._timer = self._answer_within(CONNECT_S)
        self._connect(use_unix=hub.uses_unix and bool(to.unix))

    @property
    def is_closed(self) -> bool:
        return self._closed_with is not None

    @property
    def is_busy(self) -> bool:
        """Something is read, or about to be."""
        return bool(self._readings or self._waiting or self._waiting_for_chunks)

    @property
    def is_idle(self) -> bool:
        return not (self.is_busy or self._offers or self._guests)

    # --- what is wanted of the peer

    def read(self, reading: Reading) -> None:
        """Its end is told to it."""
        self._when_ready(lambda: self._begin(reading), reading.stop)

    def offer(self, new_offer: Callable[[int], Offer], on_over: OnOver) -> None:
        """To one who may be written to; `on_over` is told whether it was taken."""

        def send() -> None:
            self._num_ops += 1
            self._offers[self._num_ops] = on_over
            self.send(new_offer(self._num_ops))

        self._when_ready(send, on_over)

    def meet(self, guest: Guest) -> None:
        """The peer has the room."""

        def send() -> None:
            if guest.is_over:
                return
            self._num_ops += 1
            op = self._num_ops
            self._guests[op] = guest
            guest.then(lambda: self._left(op))
            self.send(Meet(op, guest.room, guest.deadline - self._hub.progress.now()))

        self._when_ready(send, guest.fail)

    def _left(self, op: int) -> None:
        """Told to the peer, unless it was he who said so."""
        if self._guests.pop(op, None) is not None:
            self.send(Ended(op, is_whole=False))

    def decline(self, secret: int) -> None:
        self._when_ready(lambda: self.send(Declined(secret)), lambda error: None)

    def send(self, message: Message) -> None:
        if self._frames is not None:
            self._frames.send(message)

    def ended(self, op: int, is_whole: bool) -> None:
        """We read no more of it."""
        reading = self._readings.pop(op, None)
        self.send(Ended(op, is_whole))
        if reading is not None:
            self._paths.ended(reading)

    def forget(self, op: int) -> None:
        self._readings.pop(op, None)

    def close(self, error: KvoltError) -> None:
        """All that is under way fails."""
        if self._closed_with is not None:
            return
        self._closed_with = error
        self._timer.cancel()
        self._give_up()
        self._give_up_probe()
        if self._probe is not None:
            self._probe.cancel()
        for connection in (self._frames, self._greeting, self._chunks):
            if connection is not None:
                connection.close()
        self._hub.unlink(self._to, self)
        for reading in list(self._readings.values()):
            reading.stop(error)
        for on_over in list(self._offers.values()):
            on_over(error)
        self._offers.clear()
        for guest in list(self._guests.values()):
            guest.fail(error)
        for waiting in (self._waiting, self._waiting_for_chunks):
            while waiting:
                _, fail = waiting.popleft()
                fail(error)
        self._slabs.clear()  # the last who reads from one of them unmaps it
        self._device_slabs.clear()
        while self._opened:
            self._opened.popitem()[1].close()
        if self._hub.nixl is not None and not self._hub.is_linked(self._to):
            self._hub.nixl.forget(self._to)

    # --- connecting

    def _answer_within(self, seconds: float) -> Timer:
        def late() -> None:
            named = name_of(self._to)
            self.close(ConnectFailed(f"no answer from {named} within {seconds:g} s", address=named))

        return self._hub.progress.at(self._hub.progress.now() + seconds, late)

    def _connect(self, use_unix: bool) -> None:
        def done(found: socket.socket | ConnectFailed) -> None:
            if not isinstance(found, ConnectFailed):
                self._frames = FrameConnection(
                    self._hub.progress,
                    found,
                    self._on_message,
                    self.close,
                    budget=self._hub.unfinished,
                )
                self.send(Hello(self._hub.address.agent, "frames"))
            elif use_unix:
                if self._to.host == self._hub.address.host:
                    self._probe_socket(PROBE_S)
                self._connect(use_unix=False)
            else:
                self.close(found)

        self._open(use_unix, done)

    def _probe_socket(self, after_s: float) -> None:
        def tried(found: socket.socket | ConnectFailed) -> None:
            self._give_up_probe = _nothing
            if isinstance(found, ConnectFailed):
                self._probe_socket(min(2 * after_s, _MOST_PROBE_S))
                return
            found.close()
            log.info("shared memory of %s can be reached again: new reads use it", name_of(self._to))
            self._hub.retire(self._to, self)

        def probe() -> None:
            give_up = connect(self._hub.progress, self._to, True, tried)
            if self._probe is timer and not self.is_closed:
                self._give_up_probe = give_up

        timer = self._probe = self._hub.progress.at(self._hub.progress.now() + after_s, probe)

    def _connect_chunks(self) -> None:
        def done(found: socket.socket | ConnectFailed) -> None:
            if isinstance(found, ConnectFailed):
                if self._frames is None or not self._frames.is_unix:
                    self.close(found)
                    return
                # On this host, and not reached so: what has another path takes that.
                self._timer.cancel()
                self._has_tcp = False
                self._grant(self._waiting_for_chunks)
                return
            greeting = FrameConnection(
                self._hub.progress, found, self._welcome_chunks, self.close, MAX_GREETING_BYTES
            )
            self._greeting = greeting
            greeting.send(Hello(self._hub.address.agent, "chunks", key=self._key))

        self._timer = self._answer_within(CONNECT_S)
        self._open(use_unix=False, done=done)

    def _open(self, use_unix: bool, done: Callable[[socket.socket | ConnectFailed], None]) -> None:
        is_done = False

        def once(found: socket.socket | ConnectFailed) -> None:
            nonlocal is_done
            is_done = True
            self._give_up = _nothing
            done(found)

        give_up = connect(self._hub.progress, self._to, use_unix, once)
        if not is_done:
            self._give_up = give_up

    def _welcome_chunks(self, message: Message) -> None:
        if not isinstance(message, Welcome) or self._greeting is None:
            raise ProtocolError(f"{type(message).__name__} in the place of a welcome", rule="hello")
        self._timer.cancel()
        link, self._greeting = self._greeting.detach(), None
        self._chunks = ChunkReceiver(
            self._hub.progress,
            link,
            self._readings.get,
            lambda error: self.close(WorkerLost("the connection for blocks broke", reason=str(error))),
        )
        self._grant(self._waiting_for_chunks)

    def _grant(self, waiting: _Waiting) -> None:
        """One by one: each may find out that the peer is gone, and then the others are told so by `close`."""
        while waiting:
            wish, _ = waiting.popleft()
            wish()

    def _when_ready(self, wish: _Wish, fail: Callable[[KvoltError], None]) -> None:
        if self._closed_with is not None:
            fail(self._closed_with)
        elif self._is_welcome:
            wish()
        else:
            self._waiting.append((wish, fail))

    def _begin(self, reading: Reading) -> None:
        if reading.is_over:
            return
        if self._closed_with is not None:
            reading.stop(self._closed_with)
            return
        wanted = reading.wanted
        slab = wanted.ticket.slab
        paths = self.paths_between(slab.kind, wanted.slab.kind)
        if slab.number in self._unopened:
            paths = [each for each in paths if each != CUDA_IPC]
        path = reading.only_path or self._paths.choose(wanted, paths)
        if path == NIXL and self._hub.nixl is not None and not self._hub.nixl.is_usable:
            reading.stop(Unsupported("NIXL is of no use here", feature=NIXL))  # a test, which asked for it
            return
        if path == NIXL and self._hub.nixl is not None and not self._hub.nixl.is_ready:
            self._hub.nixl.when_ready(lambda: self.read(reading))
            return
        if path == TCP and not self._has_tcp:
            reading.stop(ConnectFailed(f"no connection to {name_of(self._to)}", address=name_of(self._to)))
            return
        if path == TCP and self._chunks is None:
            self._waiting_for_chunks.append((lambda: self._begin(reading), reading.stop))
            if len(self._waiting_for_chunks) == 1:
                self._connect_chunks()
            return
        self._num_ops += 1
        self._readings[self._num_ops] = reading
        reading.began_at = self._hub.progress.now()
        self.send(reading.begin(self, self._num_ops, path))

    def paths_between(self, source: MemoryKind, destination: MemoryKind) -> list[str]:
        """By which blocks could come from the peer."""
        is_near = self._frames is not None and self._frames.is_unix
        *others, tcp = self._hub.paths_from(source, destination, is_near, self._serves)
        return others if others and not self._has_tcp else [*others, tcp]

    # --- what the peer says

    def _on_message(self, message: Message) -> None:
        match message:
            case Welcome(agent) if not self._is_welcome:
                if agent != self._to.agent:
                    raise WorkerLost("another agent has its address now", reason="replaced")
                can = frozenset() if message.can is None else message.can.paths & {CUDA_IPC}
                self._serves, self._key = can.union(message.also_serves), message.key
                self._is_welcome = True
                self._timer.cancel()
                self._paths.welcomed(message.can, self._frames is not None and self._frames.is_unix)
                self._grant(self._waiting)
            case _ if not self._is_welcome:
                raise ProtocolError(f"{type(message).__name__} in the place of a welcome", rule="hello")
            case Described():
                self._map(message)
            case NixlSlab(slab):
                self._nixl_slabs[slab.number] = message
                _check_number(len(self._nixl_slabs))
            case DeviceSlab(slab):
                self._device_slabs[slab.number] = message
                _check_number(len(self._device_slabs))
            case Ready(op):
                reading = self._readings.get(op)
                if reading is not None:
                    reading.expect_ready()
                    self._copy(reading, message)
            case Sums(op):
                reading = self._readings.get(op)
                if reading is not None:
                    reading.on_sums(message)
            case Failed(op):
                reading = self._readings.get(op)
                if reading is not None:
                    self._failed(reading, message)
                guest = self._guests.pop(op, None)
                if guest is not None:
                    guest.fail(from_info(message.error))
            case Met(op, note):
                guest = self._guests.pop(op, None)
                if guest is not None:
                    guest.take(note)
            case Taken(op, error):
                on_over = self._offers.pop(op, None)
                if on_over is not None:
                    on_over(None if error is None else from_info(error))
            case _:
                raise ProtocolError(f"{type(message).__name__} from who is read from", rule="direction")

    def _map(self, message: Described) -> None:
        """Read only: only its owner writes to a memory."""
        slab = message.slab
        descriptor = (
            self._frames.take_descriptor() if self._frames is not None and message.has_descriptor else None
        )
        if descriptor is None or slab.kind is not MemoryKind.SHARED:
            raise ProtocolError("a memory to be mapped came without its descriptor", rule="described")
        try:
            mapped = map_for_reading(descriptor, slab.block_bytes * slab.num_blocks)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"a memory that cannot be mapped: {error}", rule="described") from None
        finally:
            os.close(descriptor)
        self._slabs[slab.number] = (slab, mapped)
        _check_number(len(self._slabs))

    def _failed(self, reading: Reading, message: Failed) -> None:
        if reading.path in (NIXL, CUDA_IPC) and message.error.code == Unsupported.code:
            reading.expect_ready()  # what somebody may write to is not begun anew
            log.warning("a peer has no %s for us: %s", reading.path, message.error.message)
            if reading.path == NIXL:
                self._without(NIXL, reading)
            else:
                self._unopened.add(reading.wanted.ticket.slab.number)
                _check_number(len(self._unopened))
                self._again(reading)
        else:
            reading.on_failed(message)

    def _read_over_nixl(self, reading: Reading, message: Ready) -> None:
        known = self._nixl_slabs.get(message.slab)
        if known is None or self._hub.nixl is None:
            raise ProtocolError("blocks of a memory that was not described", rule="ready")
        numbers = np.frombuffer(message.blocks, dtype="<i8")
        if not self._hub.nixl.read(self._to, known, numbers, reading):
            self.send(Ended(reading.op, is_whole=False))
            self._without(NIXL, reading)

    def _read_over_ipc(self, reading: Reading, message: Ready) -> None:
        known, device = self._device_slabs.get(message.slab), reading.wanted.slab.device
        if known is None or device is None:
            raise ProtocolError("blocks of a memory that was not described", rule="ready")
        memory = self._opened.get((message.slab, device))
        try:
            memory = memory or self._opened.setdefault((message.slab, device), device.open(known.handle))
        except Unsupported as error:
            log.warning("blocks of a peer's device do not come by %s: %s", CUDA_IPC, error)
            self.send(Ended(reading.op, is_whole=False))
            self._unopened.add(message.slab)
            self._again(reading)
            return
        except KvoltError as error:
            reading.stop(error)
            return
        numbers = np.frombuffer(message.blocks, dtype="<i8")
        if reading.copy_from(memory, numbers, known.slab.block_bytes):
            self._hub.progress.work(reading)

    def _without(self, path: str, reading: Reading) -> None:
        """From this peer from now on: over another path."""
        self._serves -= {path}
        self._again(reading)

    def _again(self, reading: Reading) -> None:
        """Over what is left; a test of one path is over with it."""
        self.forget(reading.op)
        if reading.only_path:
            reading.stop(Unsupported(f"a peer has no {reading.only_path} for us", feature=reading.only_path))
            return
        self._begin(reading)

    def _copy(self, reading: Reading, message: Ready) -> None:
        if reading.path == NIXL:
            self._read_over_nixl(reading, message)
            return
        if reading.path == CUDA_IPC:
            self._read_over_ipc(reading, message)
            return
        known = self._slabs.get(message.slab)
        if known is None:
            raise ProtocolError("blocks of a memory that was not described", rule="ready")
        slab, mapped = known
        numbers = np.frombuffer(message.blocks, dtype="<i8")
        if reading.copy_from(memoryview(mapped), numbers, slab.block_bytes):
            self._hub.progress.work(reading)


def _check_number(num_slabs: int) -> None:
    if num_slabs > _MAX_SLABS:
        raise ProtocolError(f"a peer with more than {_MAX_SLABS} memories", rule="described")
