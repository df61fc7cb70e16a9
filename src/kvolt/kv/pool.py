"""BlockPool: which blocks of one memory are free, held, or kept because they may be asked for again.

Owns the state, holders and name of every block. Knows no bytes, no tokens and no clock: who calls it writes and
reads the memory.

A block is *held* by as many as acquired it. When the last lets go, a named block becomes inactive and stays
until its memory is needed; any other is free at once. What must be cheap:

- The free blocks are a list used as a stack: taking and giving back is O(1), and the block used last is the one
  that is warm.
- The inactive blocks are an OrderedDict, oldest first. It is a linked list with an index: a block is revived
  from its middle and evicted from its front in O(1). A plain dict keeps the order too, but finds its first
  entry by walking over all that were deleted before it.

Chains. A block's name covers all blocks before it, so a block is of no use without its parents. Three rules keep
a parent in the pool as long as its children, and make the oldest inactive block always the end of a chain:

- Whoever holds a block holds all before it, and releases the deepest first.
- A name belongs to a held block if one has it. A second block of the same name is a duplicate, without effect
  until the first is let go; then it inherits the name. (So nobody's blocks hang below an inactive one.)
- A block whose parent has no name gets none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvolt.core.errors import ConfigError
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Cleared, Stored, StoredBlock, Tier
from kvolt.kv.changes import Change, ChangeLog
from kvolt.kv.lifecycle import (
    TRANSITIONS,
    BlockId,
    BlockMove,
    BlockName,
    BlockState,
    IllegalMove,
    next_state,
)
from kvolt.kv.pool_check import check_pool

# Once: to look up a member of an enum takes longer than most of what is done with it here.
_ALLOCATE, _REGISTER, _RELEASE, _EVICT = (
    BlockMove.ALLOCATE,
    BlockMove.REGISTER,
    BlockMove.RELEASE,
    BlockMove.EVICT,
)
_FREE, _WRITING, _REGISTERED, _INACTIVE = (
    BlockState.FREE,
    BlockState.WRITING,
    BlockState.REGISTERED,
    BlockState.INACTIVE,
)
# The four moves of nearly every block's life, looked up once; the loops below are otherwise as long as the table is.
_ALLOCATED, _NAMED = TRANSITIONS[_FREE, _ALLOCATE], TRANSITIONS[_WRITING, _REGISTER]
_LET_GO, _EVICTED = TRANSITIONS[_REGISTERED, _RELEASE], TRANSITIONS[_INACTIVE, _EVICT]


@dataclass(slots=True, eq=False)
class Block:
    """What the pool knows of one block; its own, and of who checks it."""

    id: BlockId
    state: BlockState = _FREE
    num_holders: int = 0
    name: BlockName | None = None
    parent: BlockName | None = None
    """Name of the block before it. A name and not a block: the name may pass on to another one."""
    position: int = 0

    def move(self, move: BlockMove) -> None:
        self.state = next_state(self.id, self.state, move)


class BlockPool:
    """See the module. `take_changes` is to be called now and then; what it tells is bounded either way."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(
                "a pool has at least one block", key="kv_blocks", remedy="give the KV cache more memory"
            )
        self.num_blocks = num_blocks
        self._blocks: list[Block] = []  # made as they are first needed: a large pool at rest costs nothing
        self._free: list[BlockId] = []
        self._inactive: OrderedDict[BlockId, None] = OrderedDict()
        self._by_key: dict[BlockKey, BlockId] = {}
        self._duplicates: dict[BlockKey, list[BlockId]] = {}
        # Events know blocks by 64 bits: two names that share them are one block there, gone with the second.
        self._num_by_hash: dict[SequenceHash, int] = {}
        self._log = ChangeLog(limit=2 * num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give: the inactive ones are among them."""
        return self.num_blocks - len(self._blocks) + len(self._free) + len(self._inactive)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    @property
    def num_registered(self) -> int:
        """Blocks that can be found by their key."""
        return len(self._by_key)

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys`, from the first on, are here. Changes nothing."""
        by_key = self._by_key
        for index, key in enumerate(keys):
            if key not in by_key:
                return index
        return len(keys)

    def block_of(self, key: BlockKey) -> BlockId | None:
        return self._by_key.get(key)

    def name_of(self, block: BlockId) -> BlockName | None:
        """The name of a full block, which a duplicate has as well; None when it has none."""
        return self._blocks[block].name if block < len(self._blocks) else None

    def lineage(self, key: BlockKey) -> list[BlockName]:
        """The names from the first block of its sequence to the one of this key; none when it is not here."""
        names: list[BlockName] = []
        block_id = self._by_key.get(key)
        while block_id is not None:
            block = self._blocks[block_id]
            assert block.name is not None
            names.append(block.name)
            block_id = self._by_key.get(block.parent.key) if block.parent is not None else None
        return names[::-1]

    def num_holders(self, block: BlockId) -> int:
        return self._blocks[block].num_holders if block < len(self._blocks) else 0

    # --- holding

    def acquire(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Hold the longest run of `keys`, from the first on, that is here."""
        acquired: list[BlockId] = []
        for key in keys:
            block_id = self._by_key.get(key)
            if block_id is None:
                break
            block = self._blocks[block_id]
            if block.state is _INACTIVE:
                block.move(BlockMove.ACQUIRE)
                del self._inactive[block_id]
            block.num_holders += 1
            acquired.append(block_id)
        return acquired

    def allocate(self, count: int) -> list[BlockId] | None:
        """Hold `count` blocks to write to, or none at all; evicts the inactive ones used longest ago."""
        if count > self.num_free:
            return None
        blocks, free = self._blocks, self._free
        kept = max(0, len(free) - count)
        taken = free[kept:]
        del free[kept:]
        taken.reverse()
        first, last = len(blocks), min(self.num_blocks, len(blocks) + count - len(taken))
        if last > first:  # never used so far
            unused = [Block(BlockId(number)) for number in range(first, last)]
            blocks += unused
            taken += [block.id for block in unused]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        for block_id in taken:
            block = blocks[block_id]
            if block.state is not _FREE:
                block.move(_ALLOCATE)  # which tells what is wrong
            block.state = _ALLOCATED
            block.num_holders = 1
        return taken

    def retain(self, blocks: Iterable[BlockId]) -> None:
        """Hold blocks that somebody holds already. Ends with a `release` of its own."""
        for block in self._held(blocks, "retain"):
            block.num_holders += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Let go of blocks, the deepest of a chain first: it is then the first to be evicted."""
        inactive = self._inactive
        for block in self._held(blocks, "release"):
            block.num_holders -= 1
            if block.num_holders:
                continue
            if block.state is _REGISTERED and not self._duplicates:
                block.state = _LET_GO
                inactive[block.id] = None
            else:
                self._let_go(block)

    # --- names

    def register(self, block_id: BlockId, name: BlockName, parent: BlockId | None, position: int) -> bool:
        """The block is full and computed; it can be found from now on. Whether that is so.

        `parent` is the block before it in the caller's hands, None for a first one; `position` is its index
        in the sequence. It is not so when the parent has no name, or another held block has this one's.
        """
        block = self._made(block_id)
        parent_name = None if parent is None else self._blocks[parent].name
        if parent is not None and parent_name is None:
            next_state(block_id, block.state, BlockMove.REGISTER)  # to raise where it always would
            return False
        known = self._by_key.get(name.key)
        is_duplicate = known is not None and self._blocks[known].state is _REGISTERED
        block.move(BlockMove.DUPLICATE if is_duplicate else _REGISTER)
        block.name, block.parent, block.position = name, parent_name, position
        if is_duplicate:
            self._duplicates.setdefault(name.key, []).append(block_id)
            return False
        self._by_key[name.key] = block_id
        if known is not None:  # inactive: its name has a holder again, and its memory has no more use
            del self._inactive[known]
            self._free_named(self._blocks[known])
            return True
        self._num_by_hash[name.sequence_hash] = self._num_by_hash.get(name.sequence_hash, 0) + 1
        self._log.store(name, parent_name.sequence_hash if parent_name else None, position)
        return True

    def register_run(
        self, blocks: Sequence[BlockId], names: Sequence[BlockName], start: int, end: int
    ) -> None:
        """`register` of the blocks from `start` to `end` of one sequence, whose blocks and names these are."""
        by_key, num_by_hash, made = self._by_key, self._num_by_hash, self._blocks
        position = start
        parent = made[blocks[start - 1]].name if start else None
        while position < end:
            stored: list[BlockName] = []
            first, above = position, parent
            while position < end and (parent is not None or not position):
                name, block = names[position], made[blocks[position]]
                if name.key in by_key or block.state is not _WRITING:
                    break
                block.state, block.name, block.parent, block.position = _NAMED, name, parent, position
                by_key[name.key] = block.id
                hashed = name.sequence_hash
                num_by_hash[hashed] = num_by_hash.get(hashed, 0) + 1
                stored.append(name)
                parent = name
                position += 1
            if stored:
                self._log.store_run(stored, above.sequence_hash if above else None, first)
            if position < end:  # a name that is known, a parent without one, or a wrong state: the long way
                self.register(
                    blocks[position], names[position], blocks[position - 1] if position else None, position
                )
                parent = made[blocks[position]].name
                position += 1

    def clear(self) -> int:
        """Forget every name; the inactive blocks become free, the held ones stay with their holders.

        Returns how many names there were.
        """
        num_names = len(self._by_key)
        for block_id in self._inactive:
            self._free_named(self._blocks[block_id])
        self._inactive.clear()
        for block in self._blocks:
            if block.name is not None:
                block.move(BlockMove.FORGET)
                block.name = block.parent = None
        self._by_key.clear()
        self._duplicates.clear()
        self._num_by_hash.clear()
        self._log.clear()
        return num_names

    # --- what others are told

    def take_changes(self) -> tuple[Change, ...]:
        """What happened to the names since this was last asked, in order.

        When more happened than it is worth to tell one by one, the answer is all that there is now.
        """
        is_lost = self._log.is_lost
        changes = self._log.take()
        return (Cleared(Tier.DEVICE), *self.contents()) if is_lost else changes

    def contents(self) -> list[Stored]:
        """Every named block, in runs, parents first."""
        children: dict[BlockKey | None, list[Block]] = {}
        for block_id in self._by_key.values():
            block = self._blocks[block_id]
            has_parent = block.parent is not None and block.parent.key in self._by_key
            children.setdefault(block.parent.key if block.parent and has_parent else None, []).append(block)
        runs: list[Stored] = []
        heads = children.pop(None, [])[::-1]
        while heads:
            head = block = heads.pop()
            run: list[StoredBlock] = []
            while True:
                assert block.name is not None
                run.append(StoredBlock(block.name.sequence_hash, block.name.local_hash))
                below = children.get(block.name.key)
                if not below:
                    break
                heads += below[:0:-1]
                block = below[0]
            runs.append(Stored(tuple(run), head.parent.sequence_hash if head.parent else None, head.position))
        return runs

    # ---

    def _make(self) -> None:
        block = Block(BlockId(len(self._blocks)))
        self._blocks.append(block)
        self._free.append(block.id)

    def _made(self, block_id: BlockId) -> Block:
        """A block of the caller's; one that was never used is free, as it would be had it been made at the start."""
        while len(self._blocks) <= block_id < self.num_blocks:
            self._make()
        return self._blocks[block_id]

    def _held(self, blocks: Iterable[BlockId], move: str) -> list[Block]:
        """The blocks, all of them held and each named once: else nothing may be changed."""
        found = [self._made(block_id) for block_id in blocks]
        for block in found:
            if not block.num_holders:
                raise IllegalMove(
                    f"block {block.id} is {block.state}: nobody holds it, so nobody can {move} it",
                    block=block.id,
                    state=block.state.value,
                    move=move,
                )
        if len({block.id for block in found}) != len(found):
            raise IllegalMove(f"a block is named twice in one {move}", move=move)
        return found

    def _let_go(self, block: Block) -> None:
        """Nobody holds it any more."""
        if block.state is _REGISTERED:
            assert block.name is not None
            block.move(BlockMove.RELEASE)
            heirs = self._duplicates.get(block.name.key)
            if not heirs:
                self._inactive[block.id] = None
                return
            heir = self._blocks[heirs[0]]
            self._drop_duplicate(heir)
            heir.move(BlockMove.INHERIT)
            self._by_key[block.name.key] = heir.id
            self._free_named(block)
            return
        if block.state is BlockState.DUPLICATE:
            self._drop_duplicate(block)
            block.name = block.parent = None
        block.move(BlockMove.RELEASE)
        self._free.append(block.id)

    def _drop_duplicate(self, block: Block) -> None:
        assert block.name is not None
        duplicates = self._duplicates[block.name.key]
        duplicates.remove(block.id)
        if not duplicates:
            del self._duplicates[block.name.key]

    def _evict(self, count: int) -> list[BlockId]:
        """The inactive blocks used longest ago become free, and are the caller's to give."""
        blocks, by_key, num_by_hash, inactive = (
            self._blocks,
            self._by_key,
            self._num_by_hash,
            self._inactive,
        )
        evicted: list[BlockId] = []
        gone: list[SequenceHash] = []
        for _ in range(count):
            block_id, _ = inactive.popitem(last=False)
            block = blocks[block_id]
            name = block.name
            assert name is not None
            del by_key[name.key]
            hashed = name.sequence_hash
            left = num_by_hash[hashed] - 1
            if left:
                num_by_hash[hashed] = left
            else:
                del num_by_hash[hashed]
                gone.append(hashed)
            if block.state is not _INACTIVE:
                block.move(_EVICT)  # which tells what is wrong
            block.state = _EVICTED
            block.name = block.parent = None
            evicted.append(block_id)
        self._log.remove_run(gone)
        return evicted

    def _free_named(self, block: Block) -> None:
        """An inactive block becomes free; its name lives on elsewhere, or is gone."""
        block.move(BlockMove.EVICT)
        block.name = block.parent = None
        self._free.append(block.id)

    # ---

    def check_integrity(self) -> None:
        """AssertionError, with the story, where the pool contradicts itself or the rules above were broken."""
        check_pool(self)
