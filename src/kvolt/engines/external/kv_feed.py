"""KvFeed: an engine's KV events as they come over ZMQ, in our words.

Engines publish (topic, number, payload). Subscribers can miss some, before they are connected or while they are slow:
a hole in the numbers is filled from the engine's replay socket where it has one. Where it cannot be, all that was told
is taken back: a block that a router does not know costs a cache hit, a block that is not there a wrong decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable

import msgspec
import zmq
import zmq.asyncio

from kvolt.core.kv_events import Cleared, KvChange
from kvolt.engines.kv_formats.schema import Engine
from kvolt.engines.kv_formats.translator import Translator

log = logging.getLogger(__name__)

_MOST_WAITING = 100_000
"""Batches in our socket; more are dropped, and found missing."""
_REPLAY_S = 5.0
_END = -1
"""The number that ends a replay."""
_ALL = 1 << 62


class KvFeed:
    """Of one rank. `changes` until it is cancelled; `close` it."""

    def __init__(
        self,
        engine: Engine,
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
        self._socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self._translator = self._new_translator()
        self._skipped: Counter[str] = Counter()
        self._next = 0
        """The number of the batch that is due. An engine begins with 0, perhaps before we listen."""
        self._num_repeated = 0
        """Those before were read by `catch_up`, and may wait in the socket besides."""
        self.num_batches = 0
        self.num_lost = 0
        """Batches that were missed and could not be had again."""

    @property
    def num_passed(self) -> int:
        """Of the engine's batches from its first on, those that were read or are lost."""
        return self._next

    @property
    def skipped(self) -> dict[str, int]:
        """Blocks that routers are not told of, by reason."""
        return dict(self._skipped + self._translator.skipped)

    def _new_translator(self) -> Translator:
        return Translator(self._engine, self._block_size, self._lora_name)

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    async def catch_up(self) -> list[tuple[KvChange, ...]]:
        """What was said before anybody listened, as far as it is repeated. To be asked before `changes`: it comes with
        the next batch otherwise, whenever that is."""
        missed = await self._replay(self._next, _ALL)
        found = [self._read(each) for each in missed]
        self._next += len(missed)
        self._num_repeated = self._next
        return [changes for changes in found if changes]

    async def changes(self) -> AsyncIterator[tuple[KvChange, ...]]:
        """What changed, in order, for each batch that says something."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) < 3:
                log.warning("a KV event of %d frames is passed over", len(frames))
                continue
            number = int.from_bytes(frames[-2], "big")
            for changes in await self._in_order(number, frames[-1]):
                if changes:
                    yield changes

    async def _in_order(self, number: int, payload: bytes) -> list[tuple[KvChange, ...]]:
        if number < self._num_repeated:
            return []
        self._num_repeated = 0
        found: list[tuple[KvChange, ...]] = []
        due = self._next
        if (
            number < due
        ):  # it counts from the start again: another engine has taken the place of the one before
            found.append(self._begin_anew())
            due = 0
        if number > due:
            missed = await self._replay(due, number)
            if len(missed) == number - due:
                found += [self._read(each) for each in missed]
            else:
                self.num_lost += number - due - len(missed)
                log.warning("%d batches of KV events were lost: its blocks are told anew", number - due)
                found.append(self._begin_anew())
        found.append(self._read(payload))
        self._next = number + 1
        return found

    def _begin_anew(self) -> tuple[KvChange, ...]:
        self._skipped += self._translator.skipped
        self._translator = self._new_translator()
        return (Cleared(),)

    def _read(self, payload: bytes) -> tuple[KvChange, ...]:
        self.num_batches += 1
        try:
            return self._translator.translate(payload).changes
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("a batch of KV events cannot be read, its blocks are told anew: %s", error)
            return self._begin_anew()  # it may have told of blocks that went

    async def _replay(self, first: int, end: int) -> list[bytes]:
        """The batches from `first` on before `end`, as far as the engine still has them in one piece."""
        if self._replay_endpoint is None:
            return []
        socket = self._context.socket(zmq.DEALER)  # one question, many answers
        socket.setsockopt(zmq.LINGER, 0)
        found: dict[int, bytes] = {}
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
                    found[number] = frames[-1]
        except (TimeoutError, zmq.ZMQError) as error:
            log.warning("KV events cannot be replayed: %r", error)
        finally:
            socket.close(0)
        missed: list[bytes] = []
        while (payload := found.get(first + len(missed))) is not None:
            missed.append(payload)
        return missed
