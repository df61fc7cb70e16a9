"""Recovery requests to workers: sends one and assembles the parts of its response within size limits."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from kvolt.core.endpoints import CONTROL, EndpointAddress, Instance
from kvolt.core.errors import (
    MALFORMED,
    InvalidRequest,
    KvoltError,
    NotFound,
    ProtocolError,
    Unavailable,
    Unsupported,
)
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import HASH_BYTES, KvEventBatch, Tier
from kvolt.core.kv_recovery import (
    KvRecoveryRequest,
    KvRecoveryResponse,
    KvReplay,
    KvSnapshot,
    KvSnapshotPart,
)
from kvolt.router.ingest.feed import RecoveryRefused, ReplayReceived, Response, SnapshotReceived
from kvolt.runtime.endpoint.call import Deadlines, open_stream
from kvolt.runtime.plane.port import Destination, RequestPlane

MAX_BLOCKS = 8_000_000
"""Snapshot limit per worker: 64 MB. Workers with more blocks are indexed from their events alone."""
MAX_REPLAY_BYTES = 64 * 1024 * 1024

_decode_answer = msgspec.msgpack.Decoder(KvRecoveryResponse).decode
_decode_batch = msgspec.msgpack.Decoder(KvEventBatch).decode

_UNSUPPORTED = (Unsupported, NotFound, InvalidRequest)
"""Errors of a worker that does not support the request."""


async def request_recovery(
    plane: RequestPlane, instance: Instance, recovery_request: KvRecoveryRequest, deadlines: Deadlines
) -> Response:
    """Raises KvoltError if there is no response now; a retry may succeed."""
    endpoint = EndpointAddress(instance.endpoint.namespace, instance.endpoint.component, CONTROL)
    to = Destination(instance.address, str(endpoint), instance.identity)
    try:
        async with await open_stream(plane, to, recovery_request, deadlines, _decode_answer) as parts:
            first: KvRecoveryResponse | None = await anext(parts, None)
            match first:
                case KvReplay():
                    _check_instance(instance, first.instance)
                    return await _read_replay(first, parts)
                case KvSnapshot():
                    _check_instance(instance, first.instance)
                    return await _read_snapshot(first, parts)
                case _:
                    raise ProtocolError("the recovery response has no header", rule="kv_recovery")
    except _UNSUPPORTED:
        return RecoveryRefused()


def _check_instance(instance: Instance, responder: InstanceId) -> None:
    """The control endpoint belongs to the process, which may run another instance by now."""
    if instance.id != responder:
        raise Unavailable(f"instance {instance.id} is gone", reason="stale_instance")


async def _read_replay(first: KvReplay, parts: AsyncIterator[KvRecoveryResponse]) -> ReplayReceived:
    packed = list(first.batches)
    num_bytes = sum(map(len, packed))
    async for part in parts:
        if not isinstance(part, KvReplay) or (part.epoch, part.next_id) != (first.epoch, first.next_id):
            raise ProtocolError("parts of different replays in one response", rule="kv_recovery")
        packed += part.batches
        num_bytes += sum(map(len, part.batches))
        if num_bytes > MAX_REPLAY_BYTES:
            raise Unsupported(f"the replay exceeds {MAX_REPLAY_BYTES} bytes", feature="kv_events_since")
    try:
        batches = [_decode_batch(each) for each in packed]
    except MALFORMED as error:
        raise ProtocolError(f"cannot decode a replayed batch: {error}", rule="kv_recovery") from error
    return ReplayReceived(first.epoch, first.next_id, batches, first.is_unavailable, first.digests)


async def _read_snapshot(first: KvSnapshot, parts: AsyncIterator[KvRecoveryResponse]) -> SnapshotReceived:
    num_blocks = sum(each.num_blocks for each in first.digests)
    if num_blocks > MAX_BLOCKS:
        raise Unsupported(f"the worker holds more than {MAX_BLOCKS} blocks", feature="kv_contents")
    blocks: dict[tuple[int, Tier], list[bytes]] = {}
    num_bytes = 0
    async for part in parts:
        if not isinstance(part, KvSnapshotPart):
            raise ProtocolError("unexpected part in a snapshot response", rule="kv_recovery")
        num_bytes += len(part.hashes)
        if num_bytes > num_blocks * HASH_BYTES:
            break
        blocks.setdefault((part.dp_rank, part.tier), []).append(part.hashes)
    if num_bytes != num_blocks * HASH_BYTES:
        raise KvoltError(
            f"snapshot has the wrong size: {num_blocks * HASH_BYTES} bytes announced, {num_bytes} received"
        )
    contents = {key: b"".join(pieces) for key, pieces in blocks.items()}
    if any(len(packed) % HASH_BYTES for packed in contents.values()):
        raise ProtocolError("a snapshot part ends within a hash", rule="kv_recovery")
    return SnapshotReceived(first.epoch, first.next_id, contents, first.digests)
