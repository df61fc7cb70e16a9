"""TraceNaming: names the blocks of a trace request, whose tokens are unknown.

The request has one hash per full block of its prompt: equal hashes are equal blocks. Generated blocks are unique to
the request. Must not be used where block content is kept: these hashes do not identify content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xxhash import xxh3_64_intdigest as xxh3

from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.request import Request
from kvolt.kv import BlockNames


class TraceNaming:
    """Like TokenNaming, without tokens."""

    __slots__ = ("_seed", "names")

    def __init__(self, request: Request, block_size: int) -> None:
        num_blocks = request.num_prompt_tokens // block_size
        if request.block_size != block_size or len(request.sequence_hashes) < num_blocks:
            raise InvalidRequest(
                f"a trace request needs the hashes of its {num_blocks} blocks of {block_size} tokens",
                param="sequence_hashes",
            )
        self._seed = xxh3(request.request_id.encode())
        self.names = _names(request.sequence_hashes[:num_blocks])

    def reach(self, tokens: list[int], num_blocks: int) -> None:
        known = len(self.names)
        if num_blocks > known:
            generated = [
                xxh3(position.to_bytes(8, "little"), self._seed) for position in range(known, num_blocks)
            ]
            self.names.extend(_names(generated))


def _names(hashes: Sequence[int]) -> BlockNames:
    """Block names from hashes. The hash is also the key: trace blocks have no content."""
    return BlockNames(
        cast("list[BlockKey]", list(hashes)),
        cast("list[SequenceHash]", list(hashes)),
    )
