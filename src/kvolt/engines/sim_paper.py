"""PaperNames: the blocks of a request whose tokens nobody knows, as those of a trace.

What is known are the hashes that came with it, one for each full block of the prompt: equal hashes are equal blocks.
What is generated is nobody else's. Must not be used where bytes are kept: somebody's hash is no identity.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest as xxh3

from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import BlockKey, LocalBlockHash, SequenceHash
from kvolt.core.request import Request
from kvolt.kv import BlockName

_pack_key = struct.Struct(">QQ").pack
_PAPER = 0x7061706572
"""The other half of every key, so that none is taken for one that was worked out from tokens."""


class PaperNames:
    """As BlockNames; nothing is looked at but how many blocks are asked for."""

    __slots__ = ("_seed", "keys", "names")

    def __init__(self, request: Request, block_size: int) -> None:
        num_blocks = len(request.token_ids) // block_size
        if request.block_size != block_size or len(request.sequence_hashes) < num_blocks:
            raise InvalidRequest(
                f"a request on paper needs the hashes of its {num_blocks} blocks of {block_size} tokens",
                param="sequence_hashes",
            )
        self._seed = xxh3(request.request_id.encode())
        hashes = request.sequence_hashes[:num_blocks]
        self.keys: list[BlockKey] = [BlockKey(_pack_key(_PAPER, each)) for each in hashes]
        self.names: list[BlockName] = [
            BlockName(key, each, LocalBlockHash(each)) for key, each in zip(self.keys, hashes, strict=True)
        ]

    def reach(self, tokens: list[int], num_blocks: int) -> None:
        for position in range(len(self.names), num_blocks):
            made = xxh3(position.to_bytes(8, "little"), self._seed)
            key = BlockKey(_pack_key(_PAPER, made))
            self.keys.append(key)
            self.names.append(BlockName(key, SequenceHash(made), LocalBlockHash(made)))
