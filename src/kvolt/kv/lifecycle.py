"""The life of a block in any tier: its states, and the moves between them as a table.

Owns what a block may become next. Knows no pool: who holds a block and what it is called is kept there.

    FREE --allocate--> WRITING --register--> REGISTERED --release--> INACTIVE --evict--> FREE
                          |  ^                 ^    |  ^                |
                          |  +-----forget------|----+  +----acquire-----+
                          |  |                 |
                          +--|--duplicate--> DUPLICATE
                             +---forget--------+         release of WRITING or DUPLICATE --> FREE

(The line up from DUPLICATE to REGISTERED is `inherit`.)
A block is WRITING while somebody holds it and it has no name: it is not full, not computed, or its name was
forgotten. A DUPLICATE is full and computed as well, but another held block has its name. The name of an
INACTIVE block is the only reason to keep it.

Where bytes and their name are kept apart, as on a disk, there are two states more:

    WRITING --seal--> SEALED --register--> REGISTERED        INACTIVE --condemn--> EVICTING --evict--> FREE

A SEALED block has its bytes and their checksum, and is not found yet. An EVICTING block is not found any more, and
its memory is not to be used again before that is known for good. What is found complete by who begins is INACTIVE at
once (`restore`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NewType

from kvolt.core.errors import KvoltError

BlockId = NewType("BlockId", int)
"""Which piece of the memory: from 0 to the size of the pool, less one."""


class BlockState(StrEnum):
    FREE = "free"
    WRITING = "writing"
    SEALED = "sealed"
    DUPLICATE = "duplicate"
    REGISTERED = "registered"
    INACTIVE = "inactive"
    EVICTING = "evicting"

    @property
    def is_held(self) -> bool:
        return self not in (BlockState.FREE, BlockState.INACTIVE, BlockState.EVICTING)


class BlockMove(StrEnum):
    """What may happen to a block. Further holders, and all but the last to let go, move nothing."""

    ALLOCATE = "allocate"
    SEAL = "seal"
    REGISTER = "register"
    DUPLICATE = "duplicate"
    INHERIT = "inherit"
    FORGET = "forget"
    RELEASE = "release"
    """The last holder lets go."""
    RESTORE = "restore"
    """It was found complete, by who begins."""
    ACQUIRE = "acquire"
    CONDEMN = "condemn"
    EVICT = "evict"


TRANSITIONS: Mapping[tuple[BlockState, BlockMove], BlockState] = MappingProxyType(
    {
        (BlockState.FREE, BlockMove.ALLOCATE): BlockState.WRITING,
        (BlockState.FREE, BlockMove.RESTORE): BlockState.INACTIVE,
        (BlockState.WRITING, BlockMove.REGISTER): BlockState.REGISTERED,
        (BlockState.WRITING, BlockMove.DUPLICATE): BlockState.DUPLICATE,
        (BlockState.WRITING, BlockMove.RELEASE): BlockState.FREE,
        (BlockState.WRITING, BlockMove.SEAL): BlockState.SEALED,
        (BlockState.SEALED, BlockMove.REGISTER): BlockState.REGISTERED,
        (BlockState.SEALED, BlockMove.RELEASE): BlockState.FREE,
        (BlockState.DUPLICATE, BlockMove.INHERIT): BlockState.REGISTERED,
        (BlockState.DUPLICATE, BlockMove.FORGET): BlockState.WRITING,
        (BlockState.DUPLICATE, BlockMove.RELEASE): BlockState.FREE,
        (BlockState.REGISTERED, BlockMove.FORGET): BlockState.WRITING,
        (BlockState.REGISTERED, BlockMove.RELEASE): BlockState.INACTIVE,
        (BlockState.INACTIVE, BlockMove.ACQUIRE): BlockState.REGISTERED,
        (BlockState.INACTIVE, BlockMove.CONDEMN): BlockState.EVICTING,
        (BlockState.INACTIVE, BlockMove.EVICT): BlockState.FREE,
        (BlockState.EVICTING, BlockMove.EVICT): BlockState.FREE,
    }
)


class IllegalMove(KvoltError):
    """A defect of the caller: the block is in no state for this. Nothing was changed. Fields: block, state, move."""


def next_state(block: BlockId, state: BlockState, move: BlockMove) -> BlockState:
    """Where `move` leads; IllegalMove where it leads nowhere."""
    found = TRANSITIONS.get((state, move))
    if found is None:
        raise IllegalMove(
            f"block {block} is {state}: it cannot {move}", block=block, state=state.value, move=move.value
        )
    return found
