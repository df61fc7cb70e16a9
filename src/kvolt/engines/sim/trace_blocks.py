"""PaperNaming: the blocks of a request whose tokens nobody knows, as those of a trace.

What is known are the hashes that came with it, one for each full block of the prompt: equal hashes are equal blocks.
What is generated is nobody else's. Must not be used where bytes are kept: somebody's hash is no identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xxhash import xxh3_64_intdigest as xxh3

from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.request import Request
from kvolt.kv import Names


class PaperNaming:
    """As TokenNaming; nothing is looked at but how many blocks are asked for."""

    __slots__ = ("_seed", "names")

    def __init__(self, request: Request, block_size: int) -> None:
        num_blocks = request.num_prompt_tokens // block_size
        if request.block_size != block_size or len(request.sequence_hashes) < num_blocks:
            raise InvalidRequest(
                f"a request on paper needs the hashes of its {num_blocks} blocks of {block_size} tokens",
                param="sequence_hashes",
            )
        self._seed = xxh3(request.request_id.encode())
        self.names = _names(request.sequence_hashes[:num_blocks])

    def reach(self, tokens: list[int], num_blocks: int) -> None:
        known = len(self.names)
        if num_blocks > known:
            made = [xxh3(position.to_bytes(8, "little"), self._seed) for position in range(known, num_blocks)]
            self.names.extend(_names(made))


def _names(hashes: Sequence[int]) -> Names:
    """One number is all that is known of a block. It stands for the key, too: on paper nobody asks for one's bytes."""
    return Names(
        cast("list[BlockKey]", list(hashes)),
        cast("list[SequenceHash]", list(hashes)),
    )
