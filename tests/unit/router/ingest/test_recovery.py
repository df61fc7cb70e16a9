"""Recovery requests: assembled responses, and refused malformed ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.unit.engines.lab import NAMESPACE, Lab

from kvolt.core.endpoints import CONTROL, GENERATE, EndpointAddress, Instance
from kvolt.core.errors import InvalidRequest, KvoltError, NotFound, Overloaded, ProtocolError, Unsupported
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvDigest, KvEvent, KvEventBatch, Removed, Tier
from kvolt.core.kv_recovery import (
    KvContents,
    KvEventsSince,
    KvRecoveryRequest,
    KvReplay,
    KvSnapshot,
    KvSnapshotPart,
)
from kvolt.router.ingest import recovery as ingest_asking
from kvolt.router.ingest.feed import RecoveryRefused, ReplayReceived, SnapshotReceived
from kvolt.router.ingest.recovery import request_recovery
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.testing import run_virtual

NAME = InstanceId("i")
DIGESTS = (KvDigest(2, 5), KvDigest(1, 6, 1, Tier.HOST))
HEAD = KvSnapshot(NAME, 7, 3, DIGESTS)
REPLAY = KvReplay(NAME, 7, 3)
SINCE = KvEventsSince(7, 0)
LIMITS = Deadlines(connect_s=1.0, first_s=1.0, between_s=1.0, total_s=5.0)


def batch(event_id: int) -> KvEventBatch:
    return KvEventBatch((KvEvent(event_id, 7, Removed.from_hashes([])),))


def packed(event_id: int) -> bytes:
    return msgspec.msgpack.encode(batch(event_id))


def answer_to(
    question: KvRecoveryRequest, *parts: Any
) -> ReplayReceived | SnapshotReceived | RecoveryRefused:
    """Of a worker that says these parts, an error among them as such."""

    async def control(received: Any) -> AsyncIterator[Any]:
        assert received == msgspec.to_builtins(question)
        for part in parts:
            if isinstance(part, Exception):
                raise part
            yield part

    async def scenario() -> ReplayReceived | SnapshotReceived | RecoveryRefused:
        async with Lab() as lab:
            worker = await lab.runtime("worker")
            address = worker.plane.address
            assert address is not None
            await worker.serve(EndpointAddress(NAMESPACE, "c", CONTROL), control)
            endpoint = EndpointAddress(NAMESPACE, "c", GENERATE)
            instance = Instance(id=NAME, endpoint=endpoint, address=address)
            router = await lab.runtime("router")
            return await request_recovery(router.plane, instance, question, LIMITS)

    return run_virtual(scenario)


def test_a_replay_is_put_together() -> None:
    first = msgspec.structs.replace(REPLAY, batches=(packed(0), packed(1)), digests=DIGESTS)
    second = msgspec.structs.replace(REPLAY, batches=(packed(2),), digests=DIGESTS)
    found = answer_to(SINCE, first, second)
    assert found == ReplayReceived(7, 3, [batch(0), batch(1), batch(2)], False, DIGESTS)
    gone = msgspec.structs.replace(REPLAY, is_unavailable=True)
    assert answer_to(SINCE, gone) == ReplayReceived(7, 3, [], True)


def test_a_snapshot_is_put_together() -> None:
    parts = (
        KvSnapshotPart(b"1" * 8),
        KvSnapshotPart(b"2" * 8, 1, Tier.HOST),
        KvSnapshotPart(b"3" * 8),
    )
    blocks = {(0, Tier.DEVICE): b"1" * 8 + b"3" * 8, (1, Tier.HOST): b"2" * 8}
    assert answer_to(KvContents(), HEAD, *parts) == SnapshotReceived(7, 3, blocks, DIGESTS)
    assert answer_to(KvContents(), KvSnapshot(NAME, 7, 0)) == SnapshotReceived(7, 0, {})


@pytest.mark.parametrize("error", [Unsupported("no"), NotFound("no"), InvalidRequest("what is that?")])
def test_an_unsupported_request_is_not_repeated(error: KvoltError) -> None:
    assert answer_to(KvContents(), error) == RecoveryRefused()


@pytest.mark.parametrize(
    ("question", "parts", "error"),
    [
        (KvContents(), (), ProtocolError),
        (KvContents(), (KvSnapshotPart(b""),), ProtocolError),
        (KvContents(), (HEAD,), KvoltError),
        (KvContents(), (HEAD, KvSnapshotPart(bytes(32))), KvoltError),
        (KvContents(), (HEAD, REPLAY), ProtocolError),
        (KvContents(), (HEAD, KvSnapshotPart(bytes(20)), KvSnapshotPart(bytes(4), 1)), ProtocolError),
        (KvContents(), (HEAD, KvSnapshotPart(bytes(8)), Overloaded("full")), Overloaded),
        (SINCE, (REPLAY, HEAD), ProtocolError),
        (SINCE, (REPLAY, KvReplay(NAME, 7, 4)), ProtocolError),
        (SINCE, (KvReplay(NAME, 7, 3, (b"\xc1",)),), ProtocolError),
        (SINCE, (KvReplay(InstanceId("other"), 7, 3),), KvoltError),
    ],
)
def test_what_is_no_answer_is_an_error(
    question: KvRecoveryRequest, parts: tuple[Any, ...], error: type[KvoltError]
) -> None:
    with pytest.raises(error):
        answer_to(question, *parts)


def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_asking, "MAX_BLOCKS", 2)
    monkeypatch.setattr(ingest_asking, "MAX_REPLAY_BYTES", 100)
    assert answer_to(KvContents(), HEAD) == RecoveryRefused()
    large = msgspec.structs.replace(REPLAY, batches=(bytes(60),))
    assert answer_to(SINCE, large, large) == RecoveryRefused()
