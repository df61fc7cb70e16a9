"""ObjectBlocks: blocks in an object store or a shared file system, one object each, named by its key. Synchronous.

Anybody may write there: an object is made whole or not at all, and only where there is none of that name (where the
store can promise that; elsewhere the last of equals wins). It begins with a head that says whose bytes they are and
their checksum, which goes with them: two writers' bytes of one name may differ in the last digit, and both are right.
Knows not which blocks are there. Every call takes some seconds at most, whatever the network does.
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
_AT_ONCE = 16
"""Objects under way."""
_CALL_S, _RETRY_S = 5.0, 5.0
_MOST_RETRIES = 2

Value = TypeVar("Value")
Item = TypeVar("Item")


class Spoiled(NamedTuple):
    """An object that is no block of that name."""

    reason: str


Came = int | Spoiled | None
"""A block's checksum; None where there is no such object."""


class ObjectBlocks:
    """See the module. For any threads; `close` waits for what is under way."""

    def __init__(self, url: str, shape: BlockShape, is_packed: bool = False) -> None:
        """`is_packed`: written compressed; read is whatever there is. ConfigError for a store that there is no way
        to."""
        if is_packed:
            zstd()
        self._is_packed = is_packed
        self._width: int | None = None
        """Of numbers in blocks, once one was looked at."""
        self.url = url
        self.shape = shape
        self._store = open_store(url, makes_folder=True)
        self._library = importlib.import_module("obstore")
        self._folder = folder_of(shape)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "kv-object")
        self._is_conditional = True

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def path(self, key: BlockKey) -> str:
        """Spread over folders: stores share out their work by the beginning of names."""
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}"

    def are_there(self, keys: Sequence[BlockKey]) -> list[bool]:
        """TransferFailed where the store does not say."""
        return self._each(self._is_there, keys)

    def write(
        self,
        keys: Sequence[BlockKey],
        checksums: Sequence[int],
        memory: SlotMemory,
        slots: Numbers,
        replaced: Set[BlockKey] = frozenset(),
    ) -> list[bool]:
        """Slots of the memory into objects; whether each was new there. What is there of `replaced` is no good.
        TransferFailed."""
        return self._each(
            lambda each: self._put(*each, memory, each[0] in replaced),
            zip(keys, checksums, slots.tolist(), strict=True),
        )

    def read(self, keys: Sequence[BlockKey], memory: SlotMemory, slots: Numbers) -> list[Came]:
        """Objects into slots of the memory. TransferFailed where the store does not answer."""
        said = self._each(lambda each: self._get(*each, memory), zip(keys, slots.tolist(), strict=True))
        found = memory.checksums(slots, keys).tolist()
        return [
            Spoiled("its bytes are not what was written")
            if isinstance(wanted, int) and wanted != sums
            else wanted
            for wanted, sums in zip(said, found, strict=True)
        ]

    # ---

    def _each(self, call: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
        """All are over, one way or another, when this is: the memory is another's after it. TransferFailed by the first
        that failed, after which none is begun."""
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

    def _is_there(self, key: BlockKey) -> bool:
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

    def _get(self, key: BlockKey, slot: int, memory: SlotMemory) -> Came:
        try:
            whole = memoryview(self._library.get(self._store, self.path(key)).bytes())
        except FileNotFoundError:
            return None
        except (OSError, self._library.exceptions.BaseError) as error:
            raise self._failed(error) from None
        if len(whole) < _HEAD.size:
            return Spoiled("it has another size")
        magic, version, width, whose, checksum, piece_bytes, num_ranks = _HEAD.unpack_from(whole)
        shape = self.shape.piece_bytes, self.shape.num_ranks
        if (magic, version, whose, piece_bytes, num_ranks) != (_MAGIC, FORMAT, key, *shape):
            return Spoiled("it is not what its name says")
        data: bytes | memoryview | None = whole[_HEAD.size :]
        if width != RAW and data is not None:
            data = unpack(data, width, self.shape.block_bytes)
        if data is None or len(data) != self.shape.block_bytes:
            return Spoiled("it has another size")
        with memory.block(Slot(slot)) as view:
            view[:] = data
        return int(checksum)

    def _packed(self, data: memoryview) -> tuple[int, bytes | memoryview]:
        """As it is written, and by which width of numbers."""
        if not self._is_packed:
            return RAW, data
        if self._width is None:
            self._width = best_width(data)
        if self._width == RAW:
            return RAW, data
        packed = pack(data, self._width)
        return (self._width, packed) if len(packed) < len(data) else (RAW, data)

    def _failed(self, error: Exception) -> TransferFailed:
        told = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        return TransferFailed(
            f"{self.url} does not answer: {told}", path=self.url, reason=type(error).__name__
        )


def folder_of(shape: BlockShape) -> str:
    """Where blocks of a shape lie in any store: others would be of no use to who has this one."""
    return f"{ROOT}/{shape.piece_bytes}x{shape.num_ranks}"


def open_store(url: str, makes_folder: bool = False) -> Any:
    """Of `s3://bucket/folder`, `gs://`, `az://`, `file:///folder` or a folder's path. ConfigError."""
    try:
        library = importlib.import_module("obstore.store")
    except ImportError:
        raise ConfigError(
            "object stores need the obstore package", key="tiers.object", remedy="pip install 'kvolt[object]'"
        ) from None
    try:
        if re.match(r"[a-z0-9+]+:/[^/]", url):
            raise ValueError("it has one slash too few")
        if "://" not in url or url.startswith("file://"):
            folder = Path(url.removeprefix("file://")).expanduser().absolute()
            return library.LocalStore(folder, mkdir=makes_folder)
        return library.from_url(
            url,
            # Over plain http only where somebody named such an endpoint.
            client_options={
                "allow_http": True,
                "timeout": timedelta(seconds=_CALL_S),
                "connect_timeout": timedelta(seconds=_CALL_S),
            },
            retry_config={"max_retries": _MOST_RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)},
        )
    except Exception as error:  # the library has many, and any of them is about what was given
        raise ConfigError(
            f"{url} is no object store: {str(error).splitlines()[0]}",
            key="tiers.object",
            remedy="s3://bucket/folder with AWS_* in the environment, gs://, az://, or the path of a shared folder",
        ) from None
