"""Token blocks and their 64-bit routing hashes.

Cuts tokens into full blocks and computes LocalBlockHash and SequenceHash, bit for bit as NVIDIA Dynamo's router does,
so that events of its workers identify the same blocks. For routing and events only: a collision of 64 unkeyed bits
costs a cache hit, never a wrong answer. `core.block_key` identifies stored or shared bytes.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
from xxhash import xxh3_64_intdigest as xxh3

from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.core.ids import LocalBlockHash, SequenceHash

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]]"

BASE_SEED = 1337
_LORA_SEED = 0
_SALT_SEED = 1

_TOKEN_BYTES = 4
_PACKED_TOKENS = 64 * 1024
"""Tokens packed per call; bounds how long a call holds the GIL."""
_U64_MASK = 2**64 - 1
_MIN_DIGEST_BYTES = 16
_pack_link = struct.Struct("<QQ").pack


class MediaExtent(msgspec.Struct, frozen=True):
    """Position and content digest of one media object in the expanded prompt.

    The routing hash uses 64 bits of the digest, the BlockKey all of it.
    """

    start: int
    length: int
    digest: bytes

    def __post_init__(self) -> None:
        if not (0 <= self.start < 2**63 and 0 < self.length < 2**63):
            raise InvalidRequest("media position is outside the prompt", param="media")
        if len(self.digest) < _MIN_DIGEST_BYTES:
            raise InvalidRequest(f"media digest is shorter than {_MIN_DIGEST_BYTES} bytes", param="media")

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def media_hash(self) -> int:
        """First 8 bytes of the digest as an integer, as in the events of engines."""
        return int.from_bytes(self.digest[:8], "big")


def utf8(text: str, param: str) -> bytes:
    """Encode a caller's text; raises InvalidRequest on a lone surrogate (legal in JSON escapes)."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} is not valid Unicode", param=param) from None


def request_seed(lora: str | None, salt: str | None) -> int:
    """Hash seed of a request; blocks of different adapters or salts never match."""
    seed = BASE_SEED
    if lora:
        seed += xxh3(utf8(lora, "lora"), _LORA_SEED)
    if salt:
        seed += xxh3(utf8(salt, "salt"), _SALT_SEED)
    return seed & _U64_MASK


def token_bytes(tokens: TokenIds) -> bytes:
    """Encode token ids as little-endian u32. Raises InvalidRequest on an id out of range."""
    if not isinstance(tokens, (list, tuple)) and sys.byteorder == "little":
        try:
            view = memoryview(tokens)  # type: ignore[arg-type]  # a sequence without a buffer raises
        except TypeError:
            pass
        else:
            if view.format == "I" and view.itemsize == _TOKEN_BYTES and view.ndim == 1:
                return view.tobytes()
    try:
        if len(tokens) <= _PACKED_TOKENS:
            return struct.pack(f"<{len(tokens)}I", *tokens)
        parts = (tokens[start : start + _PACKED_TOKENS] for start in range(0, len(tokens), _PACKED_TOKENS))
        return b"".join(struct.pack(f"<{len(part)}I", *part) for part in parts)
    except (struct.error, TypeError):
        raise InvalidRequest(
            "token ids must be unsigned 32-bit integers", param="tokens", index=_first_bad(tokens)
        ) from None


def _first_bad(tokens: TokenIds) -> int | None:
    for index, token in enumerate(tokens):
        try:
            struct.pack("<I", token)
        except (struct.error, TypeError):
            return index
    return None


def check_block_size(block_size: int) -> int:
    if not 0 < block_size < 2**32:
        raise ConfigError(
            f"block size {block_size} is out of range",
            key="block_size",
            remedy="use a block size of 1 or more",
        )
    return block_size


def cut_blocks(data: bytes, block_size: int) -> Iterator[tuple[bytes]]:
    """Split `token_bytes` output into blocks, each in a tuple; `data` must be a whole number of blocks."""
    # iter_unpack splits in C: a third less time per block than slicing in a comprehension.
    return struct.iter_unpack(f"{block_size * _TOKEN_BYTES}s", data)


def extents_by_block(
    extents: Iterable[MediaExtent], block_size: int, num_blocks: int, first_block: int = 0
) -> list[list[MediaExtent]]:
    """Extents that overlap each of `num_blocks` blocks from `first_block`, in input order."""
    blocks: list[list[MediaExtent]] = [[] for _ in range(num_blocks)]
    for extent in extents:
        first = max(extent.start // block_size - first_block, 0)
        last = min((extent.end - 1) // block_size - first_block, num_blocks - 1)
        for index in range(first, last + 1):
            blocks[index].append(extent)
    return blocks


def media_by_block(extents: Iterable[MediaExtent], block_size: int, num_blocks: int) -> list[list[int]]:
    """Hashes of the media that overlap each of the first `num_blocks` blocks."""
    return _media_hashes(extents_by_block(extents, check_block_size(block_size), num_blocks))


def _media_hashes(blocks: Iterable[Iterable[MediaExtent]]) -> list[list[int]]:
    return [sorted(extent.media_hash for extent in extents) for extents in blocks]


def local_hashes(
    tokens: TokenIds, block_size: int, seed: int = BASE_SEED, media: Sequence[Sequence[int]] | None = None
) -> list[LocalBlockHash]:
    """Hash each full block of `tokens`; a trailing partial block is ignored.

    `media` holds the media hashes of each block (see `media_by_block`), in any order, for at least all full blocks.
    """
    data = token_bytes(tokens)
    num_blocks = len(tokens) // check_block_size(block_size)
    if media is not None and len(media) < num_blocks:
        raise InvalidRequest("media does not cover all full blocks", param="media")
    full = data[: num_blocks * block_size * _TOKEN_BYTES]
    return _hash_blocks(full, block_size, seed, None if media is None else media[:num_blocks])


def _hash_blocks(
    data: bytes, block_size: int, seed: int, media: Sequence[Sequence[int]] | None
) -> list[LocalBlockHash]:
    blocks = cut_blocks(data, block_size)
    if media is None:
        hashed = [xxh3(block, seed) for (block,) in blocks]
    else:
        hashed = [
            xxh3(block + _media_bytes(hashes) if hashes else block, seed)
            for (block,), hashes in zip(blocks, media, strict=True)
        ]
    return cast("list[LocalBlockHash]", hashed)  # a NewType call per block costs as much as its hash


def _media_bytes(hashes: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(hashes)}Q", *sorted(hashes))
    except struct.error:
        raise InvalidRequest("media hashes must be unsigned 64-bit integers", param="media") from None


def sequence_hashes(
    local: Iterable[LocalBlockHash], parent: SequenceHash | None = None
) -> list[SequenceHash]:
    """Chain local hashes from `parent`, or from the start of a sequence."""
    link: int | None = parent
    chained = [link := block if link is None else xxh3(_pack_link(link, block), BASE_SEED) for block in local]
    return cast("list[SequenceHash]", chained)


@dataclass(slots=True)
class TokenBlocks:
    """Cuts a growing sequence into full blocks with the media that overlap each.

    Keeps the bytes of the open block and the extents that reach into it or lie after it. Each push that completes
    blocks scans those extents once, so push a long prompt whole.
    """

    block_size: int
    pending_media: list[MediaExtent]
    num_blocks: int = 0
    _open: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        self.pending_media = sorted(
            self.pending_media, key=lambda extent: (extent.start, extent.length, extent.digest)
        )

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size + len(self._open) // _TOKEN_BYTES

    def push(self, tokens: TokenIds) -> tuple[bytes, list[list[MediaExtent]] | None]:
        """Append tokens; return the bytes of the blocks they complete and the media per block (None: no media).

        Changes nothing if it raises.
        """
        self._open += token_bytes(tokens)
        block_bytes = self.block_size * _TOKEN_BYTES
        completed = len(self._open) // block_bytes
        if not completed:
            return b"", None
        full = bytes(self._open[: completed * block_bytes])
        del self._open[: completed * block_bytes]
        media = None
        if self.pending_media:
            media = extents_by_block(self.pending_media, self.block_size, completed, self.num_blocks)
            sealed_tokens = (self.num_blocks + completed) * self.block_size
            self.pending_media = [extent for extent in self.pending_media if extent.end > sealed_tokens]
        self.num_blocks += completed
        return full, media


class SequenceHasher:
    """Sequence hashes of a growing sequence. Extending costs only the new tokens."""

    def __init__(self, block_size: int, seed: int = BASE_SEED, media: Iterable[MediaExtent] = ()) -> None:
        self.sequence: list[SequenceHash] = []
        self._seed = seed
        self._blocks = TokenBlocks(block_size, list(media))

    @property
    def num_tokens(self) -> int:
        return self._blocks.num_tokens

    def extend(self, tokens: TokenIds) -> list[SequenceHash]:
        """Append tokens and return the hashes of the blocks they complete. Changes nothing if it raises."""
        data, extents = self._blocks.push(tokens)
        if not data:
            return []
        local = _hash_blocks(
            data, self._blocks.block_size, self._seed, None if extents is None else _media_hashes(extents)
        )
        sequence = sequence_hashes(local, self.sequence[-1] if self.sequence else None)
        self.sequence += sequence
        return sequence

    def append(self, block: bytes) -> SequenceHash:
        """Append one full block, given as token bytes; three times as fast as `extend`.

        Only for sequences without media and without an open block.
        """
        local = cast("LocalBlockHash", xxh3(block, self._seed))
        parent = self.sequence[-1] if self.sequence else None
        link = cast("SequenceHash", local if parent is None else xxh3(_pack_link(parent, local), BASE_SEED))
        self._blocks.num_blocks += 1
        self.sequence.append(link)
        return link
