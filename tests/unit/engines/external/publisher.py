"""A publisher of KV events as vLLM's ZmqEventPublisher is one: batches with numbers, and a socket that repeats them."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

_END = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 10
_JOIN_MS = 10_000


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Fields and order of vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def payload_of(*events: Any, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode(EventBatch(1700000000.0, list(events), rank))


class Publisher:
    """An XPUB socket, which is a PUB that can be asked whether somebody listens. Its replay has a thread."""

    def __init__(
        self, endpoint: str, replay_endpoint: str, *, topic: bytes = b"", buffer_steps: int = 10_000
    ) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.number = 0
        """Of the next batch."""
        self.num_replays = 0
        self._topic = topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.bind(self.endpoint)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(self.replay_endpoint)
        self._has_reader = False
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="replay")
        self._thread.start()

    @classmethod
    def within(cls, folder: Path, **more: Any) -> Self:
        return cls(f"ipc://{folder}/kv-events", f"ipc://{folder}/kv-replay", **more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for_reader(self) -> None:
        """It need not run for that: its sockets have threads of their own."""
        if not self._has_reader:
            assert self._pub.poll(_JOIN_MS), "nobody listens"
            assert self._pub.recv()[:1] == b"\x01"
            self._has_reader = True

    def publish(self, payload: bytes, *, is_lost: bool = False) -> None:
        """`is_lost`: nobody hears it, but it can be had again."""
        with self._lock:
            number, self.number = self.number, self.number + 1
            self._buffer.append((number, payload))
        if not is_lost:
            self.send(self._topic, number.to_bytes(8, "big"), payload)

    def send(self, *frames: bytes) -> None:
        """Whatever they are."""
        self._pub.send_multipart(frames)

    def forget(self) -> None:
        """What it had to repeat."""
        with self._lock:
            self._buffer.clear()

    def restart(self) -> None:
        """As another one that took its place: it counts from the start, and has nothing to repeat."""
        with self._lock:
            self.number = 0
            self._buffer.clear()

    def _serve(self) -> None:
        while not self._is_over:
            if self._replay.poll(_POLL_MS):
                client, _, first = self._replay.recv_multipart()
                self.num_replays += 1
                with self._lock:
                    kept = list(self._buffer)
                for number, payload in kept:
                    if number >= int.from_bytes(first, "big"):
                        self._replay.send_multipart(
                            (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                        )
                self._replay.send_multipart((client, b"", b"", _END, b""))

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._pub.close(0)
        self._replay.close(0)
        self._context.term()
