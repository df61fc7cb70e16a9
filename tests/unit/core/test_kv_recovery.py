"""Answers about KV events travel in parts of a bounded size."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvolt.core.kv_events import HASHES_DTYPE, KvEventBatch
from kvolt.core.kv_recovery import PART_BYTES, pack_hash_parts, split_batches


@pytest.mark.parametrize("number", [0, 1, PART_BYTES // 8, PART_BYTES // 8 + 1, 3 * PART_BYTES // 8 - 5])
def test_hashes_are_packed_in_parts(number: int) -> None:
    hashes = [2**64 - 1 - index for index in range(number)]
    parts = list(pack_hash_parts(hashes))
    assert all(0 < len(part) <= PART_BYTES for part in parts)
    assert len(parts) == -(-number * 8 // PART_BYTES)
    assert np.frombuffer(b"".join(parts), dtype=HASHES_DTYPE).tolist() == hashes


def test_batches_are_grouped() -> None:
    assert list(split_batches([])) == [()]
    assert list(split_batches([b"a", b"b"])) == [(b"a", b"b")]
    large = bytes(PART_BYTES // 2)
    assert [len(group) for group in split_batches([large] * 5)] == [2, 2, 1]
    huge = bytes(2 * PART_BYTES)
    groups = list(split_batches([huge, b"small", huge]))
    assert [each for group in groups for each in group] == [huge, b"small", huge]


@pytest.mark.parametrize("kind", ["stored", "removed"])
def test_part_of_a_hash_is_refused_where_it_is_read(kind: str) -> None:
    raw = {"type": kind, "hashes": bytes(9)}
    batch = {"events": [{"event_id": 0, "epoch": 1, "change": raw}]}
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KvEventBatch)
