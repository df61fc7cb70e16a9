"""A worker reduced to its KV events, for the soak test of ingest and index."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator

import numpy as np

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.endpoints import CONTROL, GENERATE, KV_TOPIC, EndpointAddress
from kvolt.core.ids import CardHash, InstanceId, SequenceHash
from kvolt.core.kv_events import KvChange, Removed, Stored
from kvolt.core.kv_recovery import KvRecoveryRequest, KvRecoveryResponse
from kvolt.core.request import Role
from kvolt.runtime.endpoint.server import msgpack_decoder
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.runtime import Runtime
from kvolt.worker.kv.event_publisher import KvJournal

ENDPOINT = EndpointAddress("soak", "tellers", GENERATE)
BLOCK_SIZE = 64
REQUESTS_PER_STEP = 4
_MOST_BLOCKS = 12
"""Blocks that a request stores (at least 2), and blocks that every worker stores first, the same on all."""
_SHARED_BLOCKS = 64
_HASH_BYTES = 8
_CHUNK = 1 << 14
"""Block hashes generated at a time."""
_HISTORY_BYTES = 1 << 18
"""Batches that a worker keeps for replay: fewer than the default, so that all histories are full soon."""


class LoadPublisher:
    """A worker reduced to its KV events."""

    def __init__(self, runtime: Runtime, num_blocks: int, rng: random.Random) -> None:
        self.runtime = runtime
        self.instance_id = InstanceId("")
        self._room = num_blocks
        self._rng = rng
        self._journal: KvJournal | None = None
        self._stored: deque[bytes] = deque()
        self._num_stored = 0
        self._names = b""
        self._at = 0

    async def start(self) -> None:
        info = EngineInfo(
            engine="teller",
            role=Role.AGGREGATED,
            model="soak",
            card=CardHash(""),
            block_size=BLOCK_SIZE,
            capacity=Capacity(max_num_seqs=256, max_batch_tokens=8192, kv_total_blocks=self._room),
            features=("KvEvents",),
        )
        instance = await self.runtime.serve_streams(ENDPOINT, _refuse, info=info)
        self.instance_id = instance.id
        publish = self.runtime.events.publish
        self._journal = KvJournal(
            self._rng.getrandbits(62),
            instance.id,
            lambda payload: publish(KV_TOPIC, payload),
            _HISTORY_BYTES,
        )
        control = EndpointAddress(ENDPOINT.namespace, ENDPOINT.component, CONTROL)
        server = self.runtime.server
        server.register(
            str(control),
            InstanceId(""),
            server.wrap_generator(self._answer, msgpack_decoder(KvRecoveryRequest)),
        )
        self.journal.record(tuple(self._store(np.arange(1, _SHARED_BLOCKS + 1, dtype="<u8").tobytes(), None)))

    @property
    def journal(self) -> KvJournal:
        assert self._journal is not None
        return self._journal

    async def _answer(self, question: KvRecoveryRequest) -> AsyncIterator[KvRecoveryResponse]:
        for part in self.journal.recover(question):
            yield part

    def step(self) -> None:
        changes: list[KvChange] = []
        for _ in range(REQUESTS_PER_STEP):
            changes += self._store(self._new_names(2 + int(self._rng.random() * (_MOST_BLOCKS - 1))), None)
        self.journal.record(tuple(changes))

    def held(self) -> set[int]:
        """All blocks that the worker holds, from its journal."""
        return {each for _, _, blocks in self.journal._held_blocks.contents() for each in blocks}

    def _store(self, hashes: bytes, parent: SequenceHash | None) -> list[KvChange]:
        """Store a request's blocks, and evict for it the oldest request's, last block first."""
        changes: list[KvChange] = [Stored(hashes, parent)]
        self._stored.append(hashes)
        self._num_stored += len(hashes) // _HASH_BYTES
        while self._num_stored > self._room:
            gone = self._stored.popleft()
            self._num_stored -= len(gone) // _HASH_BYTES
            changes.append(Removed(gone))
        return changes

    def _new_names(self, num: int) -> bytes:
        start, stop = self._at, self._at + num * _HASH_BYTES
        if stop > len(self._names):
            first = np.uint64(self._rng.getrandbits(63))
            self._names = (np.arange(_CHUNK, dtype="<u8") * np.uint64(0x9E3779B97F4A7C15) + first).tobytes()
            start, stop = 0, num * _HASH_BYTES
        self._at = stop
        return self._names[start:stop]


def _refuse(stream: IncomingStream) -> None:
    raise AssertionError("a load publisher answers no requests")
