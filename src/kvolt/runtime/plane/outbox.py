"""Outgoing items of all served streams, encoded into frames, sans-I/O.

Items sent within a tick keep their order in segments and are encoded together. An item longer than a chunk moves
to the bulk sender, and later items of its stream wait for it. An item that does not encode ends its own stream
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvolt.core.delta import Delta, plain_delta
from kvolt.core.errors import KvoltError, PayloadTooLarge
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.bulk import BulkSender, MessageKind
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.steps import unpack_u32
from kvolt.runtime.plane.wire import FrameKind

_ITEMS_PER_FRAME = 4096

_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)

Deferred = dict[int, list[Any]]
"""Streams whose last item could not be sent with the batch, and the items sent after it."""


class Outbox:
    """Filled by streams, drained once per tick."""

    def __init__(
        self,
        served: Mapping[int, ServedStream],
        bulk: BulkSender,
        stats: PlaneStats,
        check_size: Callable[[str, int], None],
        settle_step: Callable[[], None],
    ) -> None:
        self._served = served
        self._bulk = bulk
        self._stats = stats
        self._check_size = check_size
        self._settle_step = settle_step
        self._segments: list[tuple[FrameKind, list[tuple[int, Any]]]] = []
        self.open_deltas: list[tuple[int, Any]] | None = None
        """The DELTAS frame being filled, if it is the last segment: streams append to it directly."""

    def __bool__(self) -> bool:
        return bool(self._segments)

    def append_item(self, stream_id: int, item: Any) -> None:
        kind = FrameKind.DELTAS if type(item) is Delta else FrameKind.ITEMS
        segments = self._segments
        if segments and segments[-1][0] is kind:
            segments[-1][1].append((stream_id, item))
        else:
            items: list[tuple[int, Any]] = [(stream_id, item)]
            segments.append((kind, items))
            self.open_deltas = items if kind is FrameKind.DELTAS else None

    def append_step(self, frame: bytes, num_items: int) -> None:
        self._segments.append((FrameKind.STEP, [(num_items, frame)]))
        self.open_deltas = None

    def clear(self) -> None:
        self._segments.clear()
        self.open_deltas = None

    def drain_into(self, out: list[bytes]) -> None:
        """Append the encoded frames of all queued items to `out`."""
        segments, self._segments = self._segments, []
        self.open_deltas = None
        deferred: Deferred = {}
        for kind, items in segments:
            if kind is not FrameKind.STEP:
                self._encode_segment(kind, items, out, deferred)
            elif deferred:
                deltas = step_deltas(items[0][1][wire.HEADER.size :])
                self._encode_segment(FrameKind.DELTAS, deltas, out, deferred)
            else:
                num_items, frame = items[0]
                self._stats.items_out += num_items
                out.append(frame)
        for stream_id, items in deferred.items():
            self._requeue(self._served[stream_id], items)

    def _encode_segment(
        self,
        kind: FrameKind,
        items: Sequence[tuple[int, Any]],
        out: list[bytes],
        deferred: Deferred,
    ) -> None:
        self._stats.items_out += len(items)
        for start in range(0, len(items), _ITEMS_PER_FRAME):
            self._encode_items(kind, items[start : start + _ITEMS_PER_FRAME], out, deferred)

    def _encode_items(
        self,
        kind: FrameKind,
        items: Sequence[tuple[int, Any]],
        out: list[bytes],
        deferred: Deferred,
    ) -> None:
        """Encode items into one frame if possible. `deferred` collects items that must wait, by stream."""
        if not deferred and not (kind is FrameKind.ITEMS and (len(items) == 1 or _has_long_bytes(items))):
            try:
                payload = wire.encode(items)
            except _UNENCODABLE:
                pass
            else:
                if len(payload) <= wire.CHUNK_BYTES:
                    out.append(wire.frame(kind, 0, payload))
                    return
        self._encode_one_by_one(kind, items, out, deferred)

    def _encode_one_by_one(
        self,
        kind: FrameKind,
        items: Sequence[tuple[int, Any]],
        out: list[bytes],
        deferred: Deferred,
    ) -> None:
        """Encode item by item: for batches that are too long, or contain unencodable or deferred items."""
        batch: list[tuple[int, msgspec.Raw]] = []
        batch_bytes = 0
        for stream_id, item in items:
            stream = self._served.get(stream_id)
            if stream is None or stream.closed:
                continue
            if stream_id in deferred:
                deferred[stream_id].append(item)
                continue
            is_raw = _is_long_bytes(item)
            try:
                encoded = item if is_raw else wire.encode(item)
                self._check_size("an item", len(encoded))
            except _UNENCODABLE as error:
                stream.force_fail(KvoltError(f"the handler yielded an item that cannot be encoded: {error}"))
                deferred[stream_id] = []
                continue
            except PayloadTooLarge as error:
                stream.force_fail(error)
                deferred[stream_id] = []
                continue
            if len(encoded) > wire.CHUNK_BYTES:
                self._settle_step()  # its batch must check `writable` again
                stream.bulk = True
                self._bulk.enqueue(stream_id, encoded, _message_kind(kind, is_raw))
                deferred[stream_id] = []
                continue
            if batch_bytes + len(encoded) > wire.CHUNK_BYTES:
                out.append(wire.frame(kind, 0, wire.encode(batch)))
                batch, batch_bytes = [], 0
            batch.append((stream_id, msgspec.Raw(encoded)))
            batch_bytes += len(encoded) + 8
        if batch:
            out.append(wire.frame(kind, 0, wire.encode(batch)))

    def _requeue(self, stream: ServedStream, items: list[Any]) -> None:
        """Requeue items behind a bulk message; drop items behind one that failed."""
        self._stats.items_out -= len(items)
        if items and stream.bulk:
            stream.requeue(items)


def _is_long_bytes(item: Any) -> bool:
    """Sent unencoded. Only `bytes`: a bytearray could change while it is being sent."""
    return type(item) is bytes and len(item) > wire.CHUNK_BYTES


def _has_long_bytes(items: Sequence[tuple[int, Any]]) -> bool:
    return any(_is_long_bytes(item) for _, item in items)


def _message_kind(kind: FrameKind, is_raw: bool) -> MessageKind:
    if is_raw:
        return MessageKind.BYTES
    return MessageKind.DELTA if kind is FrameKind.DELTAS else MessageKind.ENCODED


def step_deltas(payload: bytes) -> list[tuple[int, Delta]]:
    """Convert a STEP payload to the entries of a DELTAS frame."""
    middle = len(payload) // 2
    return list(
        zip(unpack_u32(payload[:middle]), map(plain_delta, unpack_u32(payload[middle:])), strict=True)
    )
