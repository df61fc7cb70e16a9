"""Asks a worker what was missed of its KV events, and puts the parts of its answer together.

Owns the bounds of an answer. Knows no index.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from kvolt.core.endpoints import CONTROL
from kvolt.core.errors import InvalidRequest, KvoltError, NotFound, ProtocolError, Unavailable, Unsupported
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvEventBatch, Tier
from kvolt.core.kv_recovery import (
    KvAnswer,
    KvQuestion,
    KvReplay,
    KvSnapshot,
    KvSnapshotPart,
)
from kvolt.core.packed_hashes import HASH_BYTES
from kvolt.router.ingest.feed import Refused, Replayed, Snapshotted
from kvolt.runtime.endpoint.address import EndpointAddress, Instance
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import open_stream
from kvolt.runtime.plane.port import Destination, RequestPlane
from kvolt.runtime.plane.wire import MALFORMED

MAX_BLOCKS = 8_000_000
"""Of one worker: 64 MB on the way. Who holds more is followed from its events alone."""
MAX_REPLAY_BYTES = 64 * 1024 * 1024

_decode_answer = msgspec.msgpack.Decoder(KvAnswer).decode
_decode_batch = msgspec.msgpack.Decoder(KvEventBatch).decode

_NO_SUCH_QUESTION = (Unsupported, NotFound, InvalidRequest)
"""What a worker says that does not know the question, or not the answer."""


async def ask_worker(
    plane: RequestPlane, instance: Instance, question: KvQuestion, deadlines: Deadlines
) -> Replayed | Snapshotted | Refused:
    """KvoltError when there is no answer now; another try may bring one."""
    endpoint = EndpointAddress(instance.endpoint.namespace, instance.endpoint.component, CONTROL)
    to = Destination(instance.address, str(endpoint))
    try:
        async with await open_stream(plane, to, question, deadlines, _decode_answer) as parts:
            first: KvAnswer | None = await anext(parts, None)
            match first:
                case KvReplay():
                    _check_name(instance, first.instance)
                    return await _replayed(first, parts)
                case KvSnapshot():
                    _check_name(instance, first.instance)
                    return await _snapshotted(first, parts)
                case _:
                    raise ProtocolError("the worker's answer has no beginning", rule="kv_recovery")
    except _NO_SUCH_QUESTION:
        return Refused()


def _check_name(asked: Instance, answered: InstanceId) -> None:
    """The control endpoint answers for the process, which may be another one by now."""
    if asked.id != answered:
        raise Unavailable(f"instance {asked.id} is gone", reason="stale_instance")


async def _replayed(first: KvReplay, parts: AsyncIterator[KvAnswer]) -> Replayed:
    packed = list(first.batches)
    num_bytes = sum(map(len, packed))
    async for part in parts:
        if not isinstance(part, KvReplay) or (part.epoch, part.next_id) != (first.epoch, first.next_id):
            raise ProtocolError("a replay has parts that do not belong together", rule="kv_recovery")
        packed += part.batches
        num_bytes += sum(map(len, part.batches))
        if num_bytes > MAX_REPLAY_BYTES:
            raise Unsupported("the replay is too large", feature="kv_events_since")
    try:
        batches = [_decode_batch(each) for each in packed]
    except MALFORMED as error:
        raise ProtocolError(f"a replayed batch cannot be read: {error}", rule="kv_recovery") from error
    return Replayed(first.epoch, first.next_id, batches, first.is_gone, first.digests)


async def _snapshotted(first: KvSnapshot, parts: AsyncIterator[KvAnswer]) -> Snapshotted:
    num_blocks = sum(each.num_blocks for each in first.digests)
    if num_blocks > MAX_BLOCKS:
        raise Unsupported("the worker holds more blocks than a snapshot may have", feature="kv_contents")
    blocks: dict[tuple[int, Tier], list[bytes]] = {}
    num_bytes = 0
    async for part in parts:
        if not isinstance(part, KvSnapshotPart):
            raise ProtocolError("a snapshot has parts that are none", rule="kv_recovery")
        num_bytes += len(part.hashes)
        if num_bytes > num_blocks * HASH_BYTES:
            break
        blocks.setdefault((part.dp_rank, part.tier), []).append(part.hashes)
    if num_bytes != num_blocks * HASH_BYTES:
        raise KvoltError(f"a snapshot of {num_blocks} blocks came with {num_bytes} bytes")
    whole = {place: b"".join(pieces) for place, pieces in blocks.items()}
    if any(len(packed) % HASH_BYTES for packed in whole.values()):
        raise ProtocolError("a snapshot ends within a block", rule="kv_recovery")
    return Snapshotted(first.epoch, first.next_id, whole, first.digests)
