"""Block lifecycle in any tier: states and their transition table. Holders and names are kept by the pool.

    FREE --allocate--> WRITING --register--> REGISTERED --release--> INACTIVE --evict--> FREE
                          |  ^                 ^    |  ^                |
                          |  +-----forget------|----+  +----acquire-----+
                          |  |                 |
                          +--|--duplicate--> DUPLICATE
                             +---forget--------+         release of WRITING or DUPLICATE --> FREE

(The line up from DUPLICATE to REGISTERED is `inherit`.) A WRITING block is held and unnamed: not full, not
computed, or its name was removed. A DUPLICATE is full and computed, but another held block has its name. An
INACTIVE block is not held and kept only because of its name.

Tiers that store bytes and names separately, such as a disk, use two further states:

    WRITING --seal--> SEALED --register--> REGISTERED        INACTIVE --start_eviction--> EVICTING --evict--> FREE

A SEALED block has its bytes and checksum but is not indexed yet. An EVICTING block is no longer indexed; its memory
must not be reused before that is durable. Blocks found complete at startup are INACTIVE (`restore`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NewType

from kvolt.core.errors import KvoltError

BlockId = NewType("BlockId", int)
"""Index of a block in the memory of its pool."""


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
    """Transition of a block. Acquiring a held block and releasing all but the last hold are none."""

    ALLOCATE = "allocate"
    SEAL = "seal"
    REGISTER = "register"
    DUPLICATE = "duplicate"
    INHERIT = "inherit"
    FORGET = "forget"
    RELEASE = "release"
    """By the last holder."""
    RESTORE = "restore"
    """Found complete at startup."""
    ACQUIRE = "acquire"
    START_EVICTION = "start_eviction"
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
        (BlockState.INACTIVE, BlockMove.START_EVICTION): BlockState.EVICTING,
        (BlockState.INACTIVE, BlockMove.EVICT): BlockState.FREE,
        (BlockState.EVICTING, BlockMove.EVICT): BlockState.FREE,
    }
)


class IllegalMove(KvoltError):
    """A defect of the caller: the state does not allow the move. Nothing was changed. Fields: block, state, move."""


def next_state(block: BlockId, state: BlockState, move: BlockMove) -> BlockState:
    """State after `move`. IllegalMove if the table has none."""
    successor = TRANSITIONS.get((state, move))
    if successor is None:
        raise IllegalMove(
            f"block {block} is {state}: it cannot {move}", block=block, state=state.value, move=move.value
        )
    return successor


def not_held(block: BlockId, state: BlockState) -> IllegalMove:
    return IllegalMove(
        f"block {block} is {state}, not held: it cannot be retained or released",
        block=block,
        state=state.value,
        move="release",
    )
