"""Administration of an object tier's store: list, verify and remove blocks. Synchronous.

A store has no owner, so this works while workers use it; they recompute removed blocks.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kvolt.core.errors import TransferFailed
from kvolt.core.ids import BlockKey
from kvolt.kv.object_store.blocks import ROOT, ObjectBlocks, folder_of, open_store
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory

_READ_BATCH_BYTES = 64 << 20
_REMOVE_BATCH = 1000


class StoredObject(NamedTuple):
    """Block as listed by the store."""

    key: BlockKey
    shape: BlockShape
    path: str
    num_bytes: int
    written_at: datetime


def list_objects(url: str) -> Iterator[StoredObject]:
    """List all blocks. TransferFailed if the store does not respond."""
    store = open_store(url)
    with _store_errors(url) as library:
        for batch in library.list(store, ROOT):
            for each in batch:
                parsed = _parse(each)
                if parsed is not None:
                    yield parsed


def _parse(listed: Any) -> StoredObject | None:
    """None for objects that are not blocks."""
    try:
        _, shape, _, name = listed["path"].split("/")
        piece_bytes, _, num_ranks = shape.partition("x")
        key, block_shape = BlockKey(bytes.fromhex(name)), BlockShape(int(piece_bytes), int(num_ranks))
    except ValueError:
        return None
    return StoredObject(key, block_shape, listed["path"], listed["size"], listed["last_modified"])


def verify_objects(url: str, objects: Sequence[StoredObject]) -> Iterator[tuple[StoredObject, bool]]:
    """Read all objects; yield each with whether it is corrupt. A removed object is not corrupt."""
    for shape in sorted({each.shape for each in objects}, key=folder_of):
        selected = iter([each for each in objects if each.shape == shape])
        batch_blocks = max(_READ_BATCH_BYTES // shape.slot_bytes, 1)
        memory, blocks = SlotMemory(shape, batch_blocks), ObjectBlocks(url, shape)
        try:
            while batch := list(islice(selected, batch_blocks)):
                results = blocks.read([each.key for each in batch], memory, np.arange(len(batch)))
                for each, result in zip(batch, results, strict=True):
                    yield each, result is not None and not isinstance(result, int)
        finally:
            blocks.close()
            memory.close()


def remove_objects(url: str, objects: Sequence[StoredObject]) -> None:
    """Remove objects. TransferFailed if the store fails."""
    store = open_store(url)
    with _store_errors(url) as library:
        for start in range(0, len(objects), _REMOVE_BATCH):
            library.delete(store, [each.path for each in objects[start : start + _REMOVE_BATCH]])


@contextmanager
def _store_errors(url: str) -> Iterator[Any]:
    library = importlib.import_module("obstore")
    try:
        yield library
    except (OSError, library.exceptions.BaseError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise TransferFailed(f"object store {url} failed: {reason}", path=url, reason="unanswered") from None
