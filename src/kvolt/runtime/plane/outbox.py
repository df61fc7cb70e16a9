"""The items of all served streams on their way into frames, sans-I/O.

What streams send within a tick is kept in order in segments and encoded in one go. An item that turns
out to be longer than a chunk leaves the batch for the bulk sender, and what its stream sent after it
waits behind it; an item that does not encode ends its stream and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvolt.core.delta import Delta, plain_delta
from kvolt.core.errors import KvoltError, PayloadTooLarge
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.bulk import BulkSender, MessageKind
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.steps import unpack_u32
from kvolt.runtime.plane.streams import ServedStream
from kvolt.runtime.plane.wire import FrameKind

_ITEMS_PER_FRAME = 4096

_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)

Behind = dict[int, list[Any]]
"""Streams whose last item could not leave with the batch, and what they sent after it."""


class Outbox:
    """Filled by streams, emptied once per tick."""

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
        """The DELTAS frame being filled, when it is the last thing queued: streams append to it directly."""

    def __bool__(self) -> bool:
        return bool(self._segments)

    def add(self, stream_id: int, item: Any) -> None:
        kind = FrameKind.DELTAS if type(item) is Delta else FrameKind.ITEMS
        segments = self._segments
        if segments and segments[-1][0] is kind:
            segments[-1][1].append((stream_id, item))
        else:
            items: list[tuple[int, Any]] = [(stream_id, item)]
            segments.append((kind, items))
            self.open_deltas = items if kind is FrameKind.DELTAS else None

    def add_step(self, frame: bytes, num_items: int) -> None:
        self._segments.append((FrameKind.STEP, [(num_items, frame)]))
        self.open_deltas = None

    def clear(self) -> None:
        self._segments.clear()
        self.open_deltas = None

    def take(self, out: list[bytes]) -> None:
        """Encode what is queued into frames."""
        segments, self._segments = self._segments, []
        self.open_deltas = None
        behind: Behind = {}
        for kind, items in segments:
            if kind is not FrameKind.STEP:
                self._encode_segment(kind, items, out, behind)
            elif behind:
                deltas = step_deltas(items[0][1][wire.HEADER.size :])
                self._encode_segment(FrameKind.DELTAS, deltas, out, behind)
            else:
                num_items, frame = items[0]
                self._stats.items_out += num_items
                out.append(frame)
        for stream_id, late in behind.items():
            self._put_back(self._served[stream_id], late)

    def _encode_segment(
        self,
        kind: FrameKind,
        items: Sequence[tuple[int, Any]],
        out: list[bytes],
        behind: Behind,
    ) -> None:
        self._stats.items_out += len(items)
        for start in range(0, len(items), _ITEMS_PER_FRAME):
            self._encode_items(kind, items[start : start + _ITEMS_PER_FRAME], out, behind)

    def _encode_items(
        self,
        kind: FrameKind,
        items: Sequence[tuple[int, Any]],
        out: list[bytes],
        behind: Behind,
    ) -> None:
        """One frame for all, as a rule. `behind` gets what must not leave now, by stream."""
        if not behind and not (kind is FrameKind.ITEMS and (len(items) == 1 or _has_long_bytes(items))):
            try:
                payload = wire.encode(items)
            except _UNENCODABLE:
                pass
            else:
                if len(payload) <= wire.CHUNK_BYTES:
                    out.append(wire.frame(kind, 0, payload))
                    return
        self._encode_singly(kind, items, out, behind)

    def _encode_singly(
        self,
        kind: FrameKind,
        items: Sequence[tuple[int, Any]],
        out: list[bytes],
        behind: Behind,
    ) -> None:
        """A batch that is too long, holds what does not encode, or comes after such a one: item by item."""
        batch: list[tuple[int, msgspec.Raw]] = []
        batch_bytes = 0
        for stream_id, item in items:
            stream = self._served.get(stream_id)
            if stream is None or stream.closed:
                continue
            if stream_id in behind:
                behind[stream_id].append(item)
                continue
            whole = _is_long_bytes(item)
            try:
                encoded = item if whole else wire.encode(item)
                self._check_size("an item", len(encoded))
            except _UNENCODABLE as error:
                stream.break_off(KvoltError(f"the handler yielded what cannot be encoded: {error}"))
                behind[stream_id] = []
                continue
            except PayloadTooLarge as error:
                stream.break_off(error)
                behind[stream_id] = []
                continue
            if len(encoded) > wire.CHUNK_BYTES:
                self._settle_step()  # its batch has to see that this stream is not writable
                stream.bulk = True
                self._bulk.add(stream_id, encoded, _message_kind(kind, whole))
                behind[stream_id] = []
                continue
            if batch_bytes + len(encoded) > wire.CHUNK_BYTES:
                out.append(wire.frame(kind, 0, wire.encode(batch)))
                batch, batch_bytes = [], 0
            batch.append((stream_id, msgspec.Raw(encoded)))
            batch_bytes += len(encoded) + 8
        if batch:
            out.append(wire.frame(kind, 0, wire.encode(batch)))

    def _put_back(self, stream: ServedStream, late: list[Any]) -> None:
        """Items behind a bulk message wait for it; behind one that cannot leave they are dropped."""
        self._stats.items_out -= len(late)
        if late and stream.bulk:
            stream.put_back(late)


def _is_long_bytes(item: Any) -> bool:
    """Leaves as it is. Of this type only: a bytearray could change while it is being sent."""
    return type(item) is bytes and len(item) > wire.CHUNK_BYTES


def _has_long_bytes(items: Sequence[tuple[int, Any]]) -> bool:
    return any(_is_long_bytes(item) for _, item in items)


def _message_kind(kind: FrameKind, whole: bool) -> MessageKind:
    if whole:
        return MessageKind.BYTES
    return MessageKind.DELTA if kind is FrameKind.DELTAS else MessageKind.ENCODED


def step_deltas(payload: bytes) -> list[tuple[int, Delta]]:
    """A step as what DELTAS would carry."""
    middle = len(payload) // 2
    return list(
        zip(unpack_u32(payload[:middle]), map(plain_delta, unpack_u32(payload[middle:])), strict=True)
    )
