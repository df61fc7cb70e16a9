"""What vLLM calls the blocks of its tiers and what they are made of, kept beside the disk that keeps their KV.

A tier knows a block by its key, from which nothing can be read off; who routes is told of tokens. So that a vLLM that
starts can tell what its disk has, descriptions are appended to a file. It holds no KV and nothing is decided by it: a
record that is lost is a block that routers hear of when it is next asked for. Never an error.
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

_MOST_OWNERS = 64
_HEAD = struct.Struct("<II")
"""Before each record: how long it is, and its checksum."""
_SPARE_RECORDS = 4096
"""Of blocks that have gone, so many and as many as of those that are there may be in the file."""


class Described(msgspec.Struct, frozen=True, array_like=True):
    """A block, in vLLM's words."""

    number: int
    """What tiers tell of it by (`hash_of` its key)."""
    name: bytes
    parent: bytes | None
    tokens: bytes
    """Four bytes each."""
    extra_keys: Any = None
    """What else its name is made of, as vLLM's events say it."""

    @property
    def token_ids(self) -> list[int]:
        return array("I", self.tokens).tolist()


def packed_tokens(tokens: Iterable[int]) -> bytes:
    return array("I", tokens).tobytes()


_decode = msgspec.msgpack.Decoder(Described).decode
_encode = msgspec.msgpack.Encoder().encode


class NamesFile:
    """See the module. Of several vLLMs with one folder each writes a file of its own, and reads all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._lock: int | None = None
        self._path = folder / "none"
        self._kept: set[int] = set()
        """Of those in our file."""
        self._num_records = 0
        try:
            self._claim()
        except OSError as error:
            self._give_up(error)

    def _claim(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in range(_MOST_OWNERS):
            lock = os.open(self._folder / f"{number:02}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock, self._path = lock, self._folder / f"{number:02}.names"
            return

    def read(self) -> dict[int, Described]:
        """All that anybody has kept here."""
        found: dict[int, Described] = {}
        for path in sorted(self._folder.glob("*.names")):
            is_ours = path == self._path
            num_whole = 0
            try:
                content = path.read_bytes()
            except OSError as error:
                log.warning("what %s says of KV blocks is not read: %s", path, error)
                continue
            for described, end in _records(content):
                found[described.number] = described
                num_whole = end
                if is_ours:
                    self._kept.add(described.number)
                    self._num_records += 1
            if is_ours and num_whole < len(content):
                with contextlib.suppress(
                    OSError
                ):  # a record that was never finished would hide those after it
                    os.truncate(path, num_whole)
        return found

    def keep(self, described: Described) -> None:
        """With the next `flush`."""
        if self._lock is None or described.number in self._kept:
            return
        try:
            if self._file is None:
                self._file = self._path.open("ab")
            self._file.write(_record(described))
        except OSError as error:
            self._give_up(error)
            return
        self._kept.add(described.number)
        self._num_records += 1

    def flush(self) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def is_long(self, num_there: int) -> bool:
        """Whether most of it is of blocks that have gone."""
        return self._lock is not None and self._num_records > 2 * num_there + _SPARE_RECORDS

    def rewrite(self, there: Iterable[Described]) -> None:
        """Only these from now on."""
        if self._lock is None:
            return
        new, kept = self._path.with_suffix(".new"), set()
        try:
            with new.open("wb") as file:
                for described in there:
                    file.write(_record(described))
                    kept.add(described.number)
            self._end_file()
            new.replace(self._path)
        except OSError as error:
            self._give_up(error)
            return
        self._kept, self._num_records = kept, len(kept)

    def close(self) -> None:
        self._end_file()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _give_up(self, error: OSError) -> None:
        log.warning("routers will not hear of the disk's KV blocks after a restart: %s", error)
        self.close()


def _record(described: Described) -> bytes:
    body = _encode(described)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _records(content: bytes) -> Iterator[tuple[Described, int]]:
    """Those that are whole, up to the first that is not; where each ends."""
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
