"""KV events of an engine, read over ZMQ and translated.

Engines publish (topic, number, payload). Batches may be missed before the connection or by a slow subscriber; gaps
are filled from the engine's replay socket, if it has one. If a gap cannot be filled all blocks are cleared: an
unknown block costs a cache hit, a wrong one a wrong routing decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import zmq
import zmq.asyncio

from kvolt.core.errors import MALFORMED
from kvolt.core.kv_events import Cleared, KvChange
from kvolt.engines.kv_formats.schema import SourceEngine
from kvolt.engines.kv_formats.translator import Translator

log = logging.getLogger(__name__)

_MAX_WAITING = 100_000
"""Batches buffered in the socket; more are dropped and detected as a gap."""
_REPLAY_S = 5.0
_END = -1
"""Number that marks the end of a replay."""
_ALL = 1 << 62


class KvFeed:
    """Events of one DP rank. Iterate `changes` until cancelled, then `close`."""

    def __init__(
        self,
        engine: SourceEngine,
        block_size: int,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        lora_name: Callable[[int | str], str | None] = lambda lora_id: None,
    ) -> None:
        self._engine = engine
        self._block_size = block_size
        self._lora_name = lora_name
        self._replay_endpoint = replay_endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self._translator = self._new_translator()
        self.num_processed = 0
        """Batches since the engine's first one that were read or lost; the number of the next batch."""
        self._num_repeated = 0
        """Batches before this number were read by `read_missed` and may also be in the socket."""
        self.num_batches = 0
        self.num_lost = 0
        """Batches that were missed and could not be replayed."""

    def _new_translator(self) -> Translator:
        return Translator(self._engine, self._block_size, self._lora_name)

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    async def read_missed(self) -> list[tuple[KvChange, ...]]:
        """Replay the batches published before the connection, if possible. Call before `changes`, which would otherwise
        do so with the next batch only."""
        missed = await self._replay(self.num_processed, _ALL)
        batches = [self._read(each) for each in missed]
        self.num_processed += len(missed)
        self._num_repeated = self.num_processed
        return [changes for changes in batches if changes]

    async def changes(self) -> AsyncIterator[tuple[KvChange, ...]]:
        """Changes of each non-empty batch, in order."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) < 3:
                log.warning("malformed KV event ignored: frames=%d", len(frames))
                continue
            number = int.from_bytes(frames[-2], "big")
            for changes in await self._in_order(number, frames[-1]):
                if changes:
                    yield changes

    async def _in_order(self, number: int, payload: bytes) -> list[tuple[KvChange, ...]]:
        if number < self._num_repeated:
            return []
        self._num_repeated = 0
        batches: list[tuple[KvChange, ...]] = []
        due = self.num_processed
        if number < due:  # numbers start again: the engine was restarted
            batches.append(self._reset())
            due = 0
        if number > due:
            missed = await self._replay(due, number)
            if len(missed) == number - due:
                batches += [self._read(each) for each in missed]
            else:
                self.num_lost += number - due - len(missed)
                log.warning("KV events lost, blocks cleared: batches=%d", number - due)
                batches.append(self._reset())
        batches.append(self._read(payload))
        self.num_processed = number + 1
        return batches

    def _reset(self) -> tuple[KvChange, ...]:
        self._translator = self._new_translator()
        return (Cleared(),)

    def _read(self, payload: bytes) -> tuple[KvChange, ...]:
        self.num_batches += 1
        try:
            return self._translator.translate(payload).changes
        except MALFORMED as error:
            log.warning("KV events unreadable, blocks cleared: reason=%s", error)
            return self._reset()  # it may have contained removals

    async def _replay(self, first: int, end: int) -> list[bytes]:
        """Batches from `first` to before `end`, without gaps, as far as the engine still has them."""
        if self._replay_endpoint is None:
            return []
        socket = self._context.socket(zmq.DEALER)  # one request, many responses
        socket.setsockopt(zmq.LINGER, 0)
        payloads: dict[int, bytes] = {}
        try:
            socket.connect(self._replay_endpoint)
            async with asyncio.timeout(_REPLAY_S):
                await socket.send_multipart((b"", first.to_bytes(8, "big")))
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 2:
                        break
                    number = int.from_bytes(frames[-2], "big", signed=True)
                    if number == _END or number >= end:
                        break
                    payloads[number] = frames[-1]
        except (TimeoutError, zmq.ZMQError) as error:
            log.warning("KV event replay failed: %r", error)
        finally:
            socket.close(0)
        missed: list[bytes] = []
        while (payload := payloads.get(first + len(missed))) is not None:
            missed.append(payload)
        return missed
