"""What lies in an object tier's store, as somebody sees it who tends it: listed, read, removed. Synchronous.

A store has no owner, so that all of this works while workers use it: what they miss they compute.
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

_READ_AT_ONCE_BYTES = 64 << 20
_REMOVED_AT_ONCE = 1000


class ObjectFound(NamedTuple):
    """One block, as the store lists it."""

    key: BlockKey
    shape: BlockShape
    path: str
    num_bytes: int
    written_at: datetime


def objects_in(url: str) -> Iterator[ObjectFound]:
    """All blocks there. TransferFailed where the store does not say."""
    store = open_store(url)
    with _answered(url) as library:
        for batch in library.list(store, ROOT):
            for each in batch:
                found = _found(each)
                if found is not None:
                    yield found


def _found(listed: Any) -> ObjectFound | None:
    """None where somebody else put something there."""
    try:
        _, shape, _, name = listed["path"].split("/")
        piece_bytes, _, num_ranks = shape.partition("x")
        key, kept_as = BlockKey(bytes.fromhex(name)), BlockShape(int(piece_bytes), int(num_ranks))
    except ValueError:
        return None
    return ObjectFound(key, kept_as, listed["path"], listed["size"], listed["last_modified"])


def spoiled(url: str, found: Sequence[ObjectFound]) -> Iterator[tuple[ObjectFound, bool]]:
    """Each, once it was read, and whether it is not what was written. One that has gone meanwhile is not spoiled."""
    for shape in sorted({each.shape for each in found}, key=folder_of):
        these = iter([each for each in found if each.shape == shape])
        at_once = max(_READ_AT_ONCE_BYTES // shape.slot_bytes, 1)
        memory, blocks = SlotMemory(shape, at_once), ObjectBlocks(url, shape)
        try:
            while some := list(islice(these, at_once)):
                came = blocks.read([each.key for each in some], memory, np.arange(len(some)))
                for each, block in zip(some, came, strict=True):
                    yield each, block is not None and not isinstance(block, int)
        finally:
            blocks.close()
            memory.close()


def remove(url: str, found: Sequence[ObjectFound]) -> None:
    """TransferFailed where the store does not do it."""
    store = open_store(url)
    with _answered(url) as library:
        for start in range(0, len(found), _REMOVED_AT_ONCE):
            library.delete(store, [each.path for each in found[start : start + _REMOVED_AT_ONCE]])


@contextmanager
def _answered(url: str) -> Iterator[Any]:
    library = importlib.import_module("obstore")
    try:
        yield library
    except (OSError, library.exceptions.BaseError) as error:
        told = str(error).strip().partition("\n")[0]
        raise TransferFailed(f"{url} does not answer: {told}", path=url, reason="unanswered") from None
