"""Descriptions of the blocks in a disk tier, in a file beside it.

A tier knows a block by its key only, while KV events need its tokens. With this file vLLM can publish the content of
the disk after a restart. It contains no KV and affects no result: a block whose record is lost is published when it
is looked up next. I/O errors are logged, never raised.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

log = logging.getLogger(__name__)

_MAX_OWNERS = 64
_HEAD = struct.Struct("<II")
"""Header of a record: length and checksum."""
_SPARE_RECORDS = 4096
"""Records of removed blocks allowed in the file, in addition to one per stored block."""


class BlockDescription(msgspec.Struct, frozen=True, array_like=True):
    """A block as vLLM's KV events describe it."""

    number: int
    """`hash_of` its key."""
    name: bytes
    parent: bytes | None
    tokens: bytes
    """Token ids, four bytes each."""
    extra_keys: Any = None
    """Extra keys of its hash, as in vLLM's events."""

    @property
    def token_ids(self) -> list[int]:
        return array("I", self.tokens).tolist()


def packed_tokens(tokens: Iterable[int]) -> bytes:
    return array("I", tokens).tobytes()


_decode = msgspec.msgpack.Decoder(BlockDescription).decode
_encode = msgspec.msgpack.Encoder().encode


class NamesFile:
    """See the module. Several vLLM processes with one folder each write their own file and read all files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._lock: int | None = None
        self._path = folder / "none"
        self._recorded: set[int] = set()
        """Numbers of the blocks in the own file."""
        self._num_records = 0
        try:
            self._claim()
        except OSError as error:
            self._disable(error)

    def _claim(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in range(_MAX_OWNERS):
            lock = os.open(self._folder / f"{number:02}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock, self._path = lock, self._folder / f"{number:02}.names"
            return

    def read(self) -> dict[int, BlockDescription]:
        """Descriptions from all files in the folder, by number."""
        descriptions: dict[int, BlockDescription] = {}
        for path in sorted(self._folder.glob("*.names")):
            is_own = path == self._path
            end_of_records = 0
            try:
                content = path.read_bytes()
            except OSError as error:
                log.warning("block names unreadable: path=%s reason=%s", path, error)
                continue
            for described, end in _records(content):
                descriptions[described.number] = described
                end_of_records = end
                if is_own:
                    self._recorded.add(described.number)
                    self._num_records += 1
            if is_own and end_of_records < len(content):
                with contextlib.suppress(OSError):  # an incomplete record would hide those after it
                    os.truncate(path, end_of_records)
        return descriptions

    def keep(self, described: BlockDescription) -> None:
        """Append a description; written at the next `flush`."""
        if self._lock is None or described.number in self._recorded:
            return
        try:
            if self._file is None:
                self._file = self._path.open("ab")
            self._file.write(_record(described))
        except OSError as error:
            self._disable(error)
            return
        self._recorded.add(described.number)
        self._num_records += 1

    def flush(self) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._disable(error)

    def is_long(self, num_stored: int) -> bool:
        """Whether most records are of removed blocks."""
        return self._lock is not None and self._num_records > 2 * num_stored + _SPARE_RECORDS

    def rewrite(self, stored: Iterable[BlockDescription]) -> None:
        """Replace the file by one with these descriptions only."""
        if self._lock is None:
            return
        new, recorded = self._path.with_suffix(".new"), set()
        try:
            with new.open("wb") as file:
                for described in stored:
                    file.write(_record(described))
                    recorded.add(described.number)
            self._close_file()
            new.replace(self._path)
        except OSError as error:
            self._disable(error)
            return
        self._recorded, self._num_records = recorded, len(recorded)

    def close(self) -> None:
        self._close_file()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _disable(self, error: OSError) -> None:
        log.warning(
            "block names not saved, routers will not know the disk's blocks after a restart: reason=%s", error
        )
        self.close()


def _record(described: BlockDescription) -> bytes:
    body = _encode(described)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _records(content: bytes) -> Iterator[tuple[BlockDescription, int]]:
    """Complete records up to the first incomplete one, each with its end offset."""
    start = 0
    while start + _HEAD.size <= len(content):
        size, checksum = _HEAD.unpack_from(content, start)
        start += _HEAD.size
        body = content[start : start + size]
        start += size
        if len(body) < size or zlib.crc32(body) != checksum:
            return
        try:
            yield _decode(body), start
        except msgspec.MsgspecError:
            return
