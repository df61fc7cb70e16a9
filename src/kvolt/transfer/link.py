"""Link: a connection that we opened to another agent, and all that we read from it.

Opened when something is wanted of the agent, over its Unix socket where that can be reached: then it is on this host,
and its shared memory can be mapped; else over TCP. It stays until it breaks.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvolt.core.errors import ConnectFailed, KvoltError, ProtocolError, Unsupported, WorkerLost, from_info
from kvolt.transfer.chunks import ChunkReceiver
from kvolt.transfer.connection import FrameConnection, connect
from kvolt.transfer.lanes import MemoryKind
from kvolt.transfer.memory import SlabInfo, map_for_reading
from kvolt.transfer.nixl_path import NIXL
from kvolt.transfer.reading import OnOver, Reading
from kvolt.transfer.wire import (
    Address,
    Declined,
    Described,
    Ended,
    Failed,
    Hello,
    Message,
    NixlSlab,
    Offer,
    Ready,
    Sums,
    Taken,
    Welcome,
)

if TYPE_CHECKING:
    from kvolt.transfer.hub import Hub

log = logging.getLogger(__name__)

_Wish = Callable[[], None]


class Link:
    """See the module. In the progress thread only."""

    def __init__(self, hub: Hub, to: Address) -> None:
        self._hub = hub
        self._to = to
        self._frames: FrameConnection | None = None
        self._chunks: ChunkReceiver | None = None
        self._is_welcome = False
        self._waiting: list[tuple[_Wish, Callable[[KvoltError], None]]] = []
        self._waiting_for_chunks: list[tuple[_Wish, Callable[[KvoltError], None]]] | None = None
        self._readings: dict[int, Reading] = {}
        self._offers: dict[int, OnOver] = {}
        self._slabs: dict[int, tuple[SlabInfo, mmap.mmap]] = {}
        self._nixl_slabs: dict[int, NixlSlab] = {}
        self._also_serves: tuple[str, ...] = ()
        self._num_ops = 0
        self._is_closed = False
        self._connect(use_unix=hub.uses_unix)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

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

    def decline(self, secret: int) -> None:
        self._when_ready(lambda: self.send(Declined(secret)), lambda error: None)

    def send(self, message: Message) -> None:
        if self._frames is not None:
            self._frames.send(message)

    def ended(self, op: int, is_whole: bool) -> None:
        """We read no more of it."""
        self.forget(op)
        self.send(Ended(op, is_whole))

    def forget(self, op: int) -> None:
        self._readings.pop(op, None)

    def close(self, error: KvoltError) -> None:
        """All that is under way fails."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._frames is not None:
            self._frames.close()
        if self._chunks is not None:
            self._chunks.close()
        self._hub.unlink(self._to.agent)
        for reading in list(self._readings.values()):
            reading.stop(error)
        for on_over in list(self._offers.values()):
            on_over(error)
        self._offers.clear()
        for _, fail in [*self._waiting, *(self._waiting_for_chunks or ())]:
            fail(error)
        self._waiting, self._waiting_for_chunks = [], None
        self._slabs.clear()  # the last who reads from one of them unmaps it
        if self._hub.nixl is not None:
            self._hub.nixl.forget(self._to.agent)

    # --- connecting

    def _connect(self, use_unix: bool) -> None:
        def done(found: socket.socket | ConnectFailed) -> None:
            if self._is_closed:
                if not isinstance(found, ConnectFailed):
                    found.close()
            elif not isinstance(found, ConnectFailed):
                self._frames = FrameConnection(self._hub.progress, found, self._on_message, self.close)
                self.send(Hello(self._hub.address.agent, "frames"))
            elif use_unix:
                self._connect(use_unix=False)
            else:
                self.close(found)

        connect(self._hub.progress, self._to, use_unix, done)

    def _connect_chunks(self) -> None:
        def done(found: socket.socket | ConnectFailed) -> None:
            if isinstance(found, ConnectFailed):
                self.close(found)
            elif self._is_closed:
                found.close()
            else:
                greeted = FrameConnection(
                    self._hub.progress, found, lambda message: welcomed(greeted, message), self.close
                )
                greeted.send(Hello(self._hub.address.agent, "chunks"))

        def welcomed(greeted: FrameConnection, message: Message) -> None:
            if not isinstance(message, Welcome):
                raise ProtocolError(f"{type(message).__name__} in the place of a welcome", rule="hello")
            self._chunks = ChunkReceiver(
                self._hub.progress,
                greeted.detach(),
                self._readings.get,
                lambda error: self.close(WorkerLost("the connection for blocks broke", reason=str(error))),
            )
            waiting, self._waiting_for_chunks = self._waiting_for_chunks or [], None
            for wish, _ in waiting:
                wish()

        connect(self._hub.progress, self._to, False, done)

    def _when_ready(self, wish: _Wish, fail: Callable[[KvoltError], None]) -> None:
        if self._is_closed:
            fail(WorkerLost("the connection to a peer broke", reason="closed"))
        elif self._is_welcome:
            wish()
        else:
            self._waiting.append((wish, fail))

    def _begin(self, reading: Reading) -> None:
        if reading.is_over:
            return
        is_near = self._frames is not None and self._frames.is_unix
        path = self._hub.path_to(reading.wanted, is_near, self._also_serves)
        if path == NIXL and self._hub.nixl is not None and not self._hub.nixl.is_ready:
            self._hub.nixl.when_ready(lambda: self.read(reading))
            return
        if path == "tcp" and self._chunks is None:
            if self._waiting_for_chunks is None:
                self._waiting_for_chunks = []
                self._connect_chunks()
            if self._waiting_for_chunks is not None:
                self._waiting_for_chunks.append((lambda: self._begin(reading), reading.stop))
            return
        self._num_ops += 1
        self._readings[self._num_ops] = reading
        self.send(reading.begin(self, self._num_ops, path))

    # --- what the peer says

    def _on_message(self, message: Message) -> None:
        match message:
            case Welcome(agent, _, also_serves):
                self._also_serves = also_serves
                if agent != self._to.agent:
                    raise WorkerLost("another agent has its address now", reason="replaced")
                self._is_welcome = True
                waiting, self._waiting = self._waiting, []
                for wish, _ in waiting:
                    wish()
            case Described():
                self._map(message)
            case NixlSlab(slab):
                self._nixl_slabs[slab.number] = message
            case Ready(op):
                reading = self._readings.get(op)
                if reading is not None:
                    self._copy(reading, message)
            case Sums(op):
                reading = self._readings.get(op)
                if reading is not None:
                    reading.on_sums(message)
            case Failed(op):
                reading = self._readings.get(op)
                if reading is not None:
                    self._failed(reading, message)
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

    def _failed(self, reading: Reading, message: Failed) -> None:
        if reading.path == NIXL and message.error.code == Unsupported.code:
            log.warning("a peer has no NIXL for us: %s", message.error.message)
            self._without_nixl(reading)
        else:
            reading.on_failed(message)

    def _read_over_nixl(self, reading: Reading, message: Ready) -> None:
        known = self._nixl_slabs.get(message.slab)
        if known is None or self._hub.nixl is None:
            raise ProtocolError("blocks of a memory that was not described", rule="ready")
        numbers = np.frombuffer(message.blocks, dtype="<i8")
        if not self._hub.nixl.read(self._to.agent, known, numbers, reading):
            self.send(Ended(reading.op, is_whole=False))
            self._without_nixl(reading)

    def _without_nixl(self, reading: Reading) -> None:
        """From this peer from now on: over another path."""
        self._also_serves = tuple(each for each in self._also_serves if each != NIXL)
        self.forget(reading.op)
        self._begin(reading)

    def _copy(self, reading: Reading, message: Ready) -> None:
        if reading.path == NIXL:
            self._read_over_nixl(reading, message)
            return
        known = self._slabs.get(message.slab)
        if known is None:
            raise ProtocolError("blocks of a memory that was not described", rule="ready")
        slab, mapped = known
        numbers = np.frombuffer(message.blocks, dtype="<i8")
        if reading.copy_from(memoryview(mapped), numbers, slab.block_bytes):
            self._hub.progress.work(reading)
