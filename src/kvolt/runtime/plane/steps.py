"""Step frames: one token for each stream of a batch, at a cost per step and not per token.

A decoding batch keeps its members for many steps. During this time a STEP frame is two arrays: the stream ids,
identical in every step, and the new tokens. Both sides resolve the members once and count credit once for all of
them. When anything else happens to a member (an end, a cancel, another item, no credit), the count is settled into
the streams and the ordinary path continues.

    STEP payload:  u32 stream id x n  |  u32 token x n        little-endian
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from struct import unpack, unpack_from

from kvolt.core.delta import Delta, plain_delta
from kvolt.core.errors import ProtocolError
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.plane.served_stream import ServedStream, ServerHost
from kvolt.runtime.plane.streams import CallerStream
from kvolt.runtime.plane.wire import CHUNK_BYTES, HEADER, FrameKind

_SWAP = sys.byteorder == "big"

_MAX_MEMBERS = CHUNK_BYTES // 8
"""A STEP frame fits into a chunk; larger batches use the ordinary path."""


_Picker = Callable[[Sequence[int]], Sequence[int]]


def pack_u32(values: Sequence[int]) -> bytes:
    packed = array("I", values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(data: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(data) // 4}I", data)


class StepBatch:
    """The members of a batch on one connection."""

    __slots__ = ("_budget", "_head", "_pending", "_session", "_streams")

    def __init__(self, session: ServerHost, streams: list[ServedStream]) -> None:
        self._session = session
        self._streams = streams
        ids = pack_u32([stream.id for stream in streams])
        self._head = HEADER.pack(2 * len(ids), FrameKind.STEP, 0) + ids
        """The frame without the tokens."""
        self._budget = 0
        """Steps for which every member has credit."""
        self._pending = 0
        """Steps sent and not yet subtracted from the members' credit."""

    def send(self, token_ids: Sequence[int]) -> None:
        session = self._session
        if ((session.step_owner is not self or self._budget == 0) and not self._begin()) or session.paused:
            _send_singly(self._streams, token_ids)
        else:
            self._budget -= 1
            self._pending += 1
            session.queue_step(self._head + pack_u32(token_ids), len(token_ids))

    def _begin(self) -> bool:
        """Start combined credit counting if every member is writable."""
        session = self._session
        session.settle_step()
        if len(self._streams) > _MAX_MEMBERS or not all(stream.writable for stream in self._streams):
            return False
        session.step_owner = self
        self._budget = min(stream.credit for stream in self._streams)
        return True

    def settle(self) -> None:
        """Subtract the steps sent from the members' credit."""
        pending, self._pending, self._budget = self._pending, 0, 0
        if pending:
            for stream in self._streams:
                stream.credit -= pending


def _send_singly(streams: Sequence[IncomingStream], token_ids: Sequence[int]) -> None:
    for stream, token_id in zip(streams, token_ids, strict=True):
        stream.send(plain_delta(token_id))


class StepSender:
    """The streams of a batch over all connections and planes. None stands for a closed stream."""

    __slots__ = ("_parts",)

    def __init__(self, streams: Sequence[IncomingStream | None]) -> None:
        by_session: dict[int, tuple[ServerHost, list[ServedStream], list[int]]] = {}
        others: list[IncomingStream] = []
        others_at: list[int] = []
        for position, stream in enumerate(streams):
            if isinstance(stream, ServedStream):
                session = stream.session
                _, members, positions = by_session.setdefault(id(session), (session, [], []))
                members.append(stream)
                positions.append(position)
            elif stream is not None:
                others.append(stream)
                others_at.append(position)
        self._parts: list[tuple[Callable[[Sequence[int]], None], _Picker | None]] = [
            (StepBatch(session, members).send, _picker(positions, len(streams)))
            for session, members, positions in by_session.values()
        ]
        if others:
            self._parts.append((partial(_send_singly, others), _picker(others_at, len(streams))))

    def send(self, token_ids: Sequence[int]) -> None:
        """Send one token to each stream, in constructor order."""
        for send, pick in self._parts:
            send(token_ids if pick is None else pick(token_ids))


def _picker(positions: list[int], total: int) -> _Picker | None:
    if len(positions) == total:
        return None
    if len(positions) == 1:
        only = positions[0]
        return lambda values: (values[only],)
    return itemgetter(*positions)


class StepReader:
    """Receiving side: the caller streams of one array of ids."""

    __slots__ = ("_budget", "_calls", "_delivers", "_format", "_now", "_pending", "_sinks", "_whole", "ids")

    def __init__(self, ids: bytes, calls: list[CallerStream]) -> None:
        self.ids = ids
        self._calls = calls
        self._delivers = [call.deliver for call in calls]
        self._sinks = [call.sink for call in calls]
        shared = calls[0].steps
        self._whole = shared if all(call.steps is shared for call in calls) else None
        """The StepSink, if all members share it."""
        self._format = f"<{len(calls)}I"
        self._budget = 0
        self._pending = 0
        self._now = 0.0

    def receive(self, payload: bytes, now: float) -> int:
        """Deliver one token to each stream from a payload that starts with our ids; returns their number."""
        if self._budget == 0:
            self.settle()
            for call in self._calls:
                if call.window_left <= call.low_water:
                    call.on_low()
            self._budget = min(
                min(call.window_left, max(call.window_left - call.low_water, 1)) for call in self._calls
            )
            if self._budget <= 0:
                raise ProtocolError("a step for a stream without credit", rule="credit")
        self._budget -= 1
        self._pending += 1
        self._now = now
        token_ids = unpack_from(self._format, payload, len(self.ids))
        if self._whole is not None:
            self._whole.on_step(self._sinks, token_ids)
        else:
            for deliver, token_id in zip(self._delivers, token_ids, strict=True):
                deliver(plain_delta(token_id))
        if self._budget == 0:
            self.settle()  # now: the next step may need the credit that this returns
        return len(token_ids)

    def mute(self, call: CallerStream) -> None:
        """Deliver nothing more to a stream, even if it is cancelled in the middle of a step."""
        for index, member in enumerate(self._calls):
            if member is call:
                self._delivers[index] = _ignore

    def settle(self) -> None:
        """Subtract the received steps from the windows, record arrival, and return credit that is due."""
        pending, self._pending, self._budget = self._pending, 0, 0
        if not pending:
            return
        for call in self._calls:
            call.last_arrival = self._now
            call.window_left -= pending
            if call.window_left <= call.low_water and not call.ended:
                call.on_low()


def _ignore(item: Delta) -> None:
    pass


def resolve_step(ids: bytes, calls: dict[int, CallerStream]) -> StepReader | None:
    """A reader for these ids; None if a stream is closed (cancelled while the step was in transit)."""
    stream_ids = unpack_u32(ids)
    if len(dict.fromkeys(stream_ids)) != len(stream_ids):
        raise ProtocolError("a stream twice in one step", rule="step")
    resolved = [call for stream_id in stream_ids if (call := calls.get(stream_id)) is not None]
    return StepReader(ids, resolved) if len(resolved) == len(stream_ids) else None
