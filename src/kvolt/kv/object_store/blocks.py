"""ObjectBlocks: blocks in an object store or a shared file system, one object per block key. Synchronous.

Many workers write to the store. Objects are created atomically and only if absent (if the store supports that;
otherwise the last write wins). Each starts with a header with identity and checksum of its bytes: two writers' bytes
for one key may differ in the last bits, and both are valid. Does not know which blocks exist. Every call ends within
seconds, even on network failures.
"""

from __future__ import annotations

import importlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvolt.core.errors import ConfigError, TransferFailed
from kvolt.core.ids import BlockKey
from kvolt.kv.object_store.packing import RAW, best_width, pack, unpack, zstd
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import Slot
from kvolt.transfer.memory.slabs import Numbers

FORMAT = 1
ROOT = f"kv{FORMAT}"
"""Folder of all blocks in a store."""
_HEAD = struct.Struct("<4sHH16sQQIxxxx")
_MAGIC = b"KVOB"
_NUM_THREADS = 16
"""Concurrent objects."""
_CALL_S, _RETRY_S = 5.0, 5.0
_MAX_RETRIES = 2

Value = TypeVar("Value")
Item = TypeVar("Item")


class CorruptObject(NamedTuple):
    """Object that is not a valid block of its name."""

    reason: str


ReadResult = int | CorruptObject | None
"""Checksum of a block; None if the object does not exist."""


class ObjectBlocks:
    """See the module. Thread-safe; `close` waits for calls in progress."""

    def __init__(self, url: str, shape: BlockShape, is_packed: bool = False) -> None:
        """`is_packed`: compress on write; reads accept both. ConfigError if the store is not accessible."""
        if is_packed:
            zstd()
        self._is_packed = is_packed
        self._width: int | None = None
        """Compression width, determined by the first block."""
        self.url = url
        self.shape = shape
        self._store = open_store(url, makes_folder=True)
        self._library = importlib.import_module("obstore")
        self._folder = folder_of(shape)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-object")
        self._is_conditional = True

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def path(self, key: BlockKey) -> str:
        """Object path; spread over prefixes, by which stores partition their load."""
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}"

    def exist(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks exist. TransferFailed if the store does not respond."""
        return self._each(self._exists, keys)

    def write(
        self,
        keys: Sequence[BlockKey],
        checksums: Sequence[int],
        memory: SlotMemory,
        slots: Numbers,
        replaced: Set[BlockKey] = frozenset(),
    ) -> list[bool]:
        """Write slots to objects; return whether each was new. Existing objects in `replaced` are overwritten.
        TransferFailed on errors."""
        return self._each(
            lambda each: self._put(*each, memory, each[0] in replaced),
            zip(keys, checksums, slots.tolist(), strict=True),
        )

    def read(self, keys: Sequence[BlockKey], memory: SlotMemory, slots: Numbers) -> list[ReadResult]:
        """Read objects into slots and verify them. TransferFailed if the store does not respond."""
        results = self._each(lambda each: self._get(*each, memory), zip(keys, slots.tolist(), strict=True))
        sums = memory.checksums(slots, keys).tolist()
        return [
            CorruptObject("checksum mismatch") if isinstance(result, int) and result != actual else result
            for result, actual in zip(results, sums, strict=True)
        ]

    def _each(self, call: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
        """Run all calls in parallel and wait for them, since they use the memory. After a failure no further call
        starts and the first TransferFailed is raised."""
        failures: list[BaseException] = []

        def unless_failed(item: Item) -> Value:
            if failures:
                raise failures[0]
            try:
                return call(item)
            except TransferFailed as error:
                failures.append(error)
                raise

        running = [self._threads.submit(unless_failed, item) for item in items]
        wait(running)
        return [each.result() for each in running]

    def _exists(self, key: BlockKey) -> bool:
        try:
            self._library.head(self._store, self.path(key))
        except FileNotFoundError:
            return False
        except (OSError, self._library.exceptions.BaseError) as error:
            raise self._failed(error) from None
        return True

    def _put(self, key: BlockKey, checksum: int, slot: int, memory: SlotMemory, is_replaced: bool) -> bool:
        shape, errors = self.shape, self._library.exceptions
        with memory.block(Slot(slot)) as view:
            width, data = self._packed(view)
            head = _HEAD.pack(_MAGIC, FORMAT, width, key, checksum, shape.piece_bytes, shape.num_ranks)
            whole = b"".join((head, data))
        try:
            if self._is_conditional and not is_replaced:
                try:
                    self._library.put(self._store, self.path(key), whole, mode="create")
                    return True
                except errors.NotSupportedError:
                    self._is_conditional = False
            self._library.put(self._store, self.path(key), whole)
        except (errors.AlreadyExistsError, errors.PreconditionError):
            return False
        except (OSError, errors.BaseError) as error:
            raise self._failed(error) from None
        return True

    def _get(self, key: BlockKey, slot: int, memory: SlotMemory) -> ReadResult:
        try:
            whole = memoryview(self._library.get(self._store, self.path(key)).bytes())
        except FileNotFoundError:
            return None
        except (OSError, self._library.exceptions.BaseError) as error:
            raise self._failed(error) from None
        if len(whole) < _HEAD.size:
            return CorruptObject("wrong size")
        magic, version, width, whose, checksum, piece_bytes, num_ranks = _HEAD.unpack_from(whole)
        shape = self.shape.piece_bytes, self.shape.num_ranks
        if (magic, version, whose, piece_bytes, num_ranks) != (_MAGIC, FORMAT, key, *shape):
            return CorruptObject("header does not match the name")
        data: bytes | memoryview | None = whole[_HEAD.size :]
        if width != RAW and data is not None:
            data = unpack(data, width, self.shape.block_bytes)
        if data is None or len(data) != self.shape.block_bytes:
            return CorruptObject("wrong size")
        with memory.block(Slot(slot)) as view:
            view[:] = data
        return int(checksum)

    def _packed(self, data: memoryview) -> tuple[int, bytes | memoryview]:
        """Width and bytes to store."""
        if not self._is_packed:
            return RAW, data
        if self._width is None:
            self._width = best_width(data)
        if self._width == RAW:
            return RAW, data
        packed = pack(data, self._width)
        return (self._width, packed) if len(packed) < len(data) else (RAW, data)

    def _failed(self, error: Exception) -> TransferFailed:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        return TransferFailed(
            f"object store {self.url} failed: {reason}", path=self.url, reason=type(error).__name__
        )


def folder_of(shape: BlockShape) -> str:
    """Folder of blocks of this shape in any store."""
    return f"{ROOT}/{shape.piece_bytes}x{shape.num_ranks}"


def open_store(url: str, makes_folder: bool = False) -> Any:
    """Open `s3://bucket/folder`, `gs://`, `az://`, `file:///folder` or a folder path. ConfigError if not possible."""
    try:
        library = importlib.import_module("obstore.store")
    except ImportError:
        raise ConfigError(
            "object stores need the obstore package", key="tiers.object", remedy="pip install 'kvolt[object]'"
        ) from None
    try:
        if re.match(r"[a-z0-9+]+:/[^/]", url):
            raise ValueError("a slash is missing after the scheme")
        if "://" not in url or url.startswith("file://"):
            folder = Path(url.removeprefix("file://")).expanduser().absolute()
            return library.LocalStore(folder, mkdir=makes_folder)
        return library.from_url(
            url,
            # Plain HTTP only if such an endpoint is configured.
            client_options={
                "allow_http": True,
                "timeout": timedelta(seconds=_CALL_S),
                "connect_timeout": timedelta(seconds=_CALL_S),
            },
            retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)},
        )
    except Exception as error:  # all errors here are about the given URL
        raise ConfigError(
            f"invalid object store {url}: {str(error).splitlines()[0]}",
            key="tiers.object",
            remedy="s3://bucket/folder with AWS_* in the environment, gs://, az://, or the path of a shared folder",
        ) from None
