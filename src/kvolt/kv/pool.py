"""BlockPool: free, held and cached blocks of one memory.

Owns state, holder count and name of every block. Knows no bytes, tokens or clock; the caller reads and writes the
memory.

A block is *held* while its holder count is positive. When the last holder releases it, a named block becomes inactive
and stays cached until its memory is needed; an unnamed block becomes free. Operations on whole prompts must be cheap,
so state is kept per run (`run`): consecutive blocks with equal state and holders. A run is split when an operation
covers part of it, and extended by the next block of the same holders. Free blocks are on a stack, so that the most
recently used memory is reused first.

Chains: a block's name covers all blocks before it, so a block is useless without its parents. Three rules keep a parent
in the pool as long as its children and make the oldest inactive block always the end of a chain:

- A holder of a block holds all blocks before it and releases the deepest first.
- A name belongs to a held block if there is one with that name. A second block with the name is a duplicate without
  effect until the first is released; then it inherits the name. Held blocks therefore never follow an inactive one.
  Both are runs of one block.
- A block whose parent has no name gets none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvolt.core.errors import ConfigError
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Cleared, Stored, Tier
from kvolt.kv.changes import Change, ChangeLog
from kvolt.kv.lifecycle import TRANSITIONS, BlockId, BlockMove, BlockState, IllegalMove, next_state, not_held
from kvolt.kv.names import BlockName, BlockNames
from kvolt.kv.run import Run, RunQueue, chains, common_prefix_len
from kvolt.kv.sealed import SealedLog

# Cached: looking up an enum member is slower than most operations here.
_WRITING, _DUPLICATE = BlockState.WRITING, BlockState.DUPLICATE
_REGISTERED, _INACTIVE = BlockState.REGISTERED, BlockState.INACTIVE
_ALLOCATED = TRANSITIONS[BlockState.FREE, BlockMove.ALLOCATE]


class BlockPool:
    """See the module. Call `take_changes` regularly; pending changes are bounded."""

    def __init__(self, num_blocks: int, publishes_changes: bool = True) -> None:
        """`publishes_changes`: record changes for `take_changes`."""
        if num_blocks < 1:
            raise ConfigError(
                "the KV cache has no room for a block",
                key="kv_blocks",
                remedy="give the KV cache more memory",
            )
        self.num_blocks = num_blocks
        # Grows on first use of each block, so an idle large pool costs nothing.
        self._run_of: list[Run | None] = []
        self._free: list[BlockId] = []
        self._inactive = RunQueue()
        self._by_key: dict[BlockKey, BlockId] = {}
        self._duplicates: dict[BlockKey, list[BlockId]] = {}
        self._publishes_changes = publishes_changes
        self._log = ChangeLog(limit=2 * num_blocks)
        self.sealed: SealedLog | None = None
        """Records newly named blocks, if set."""

    @property
    def num_free(self) -> int:
        """Blocks available to `allocate`, including inactive ones."""
        return self.num_blocks - len(self._run_of) + len(self._free) + self._inactive.num_blocks

    @property
    def num_used(self) -> int:
        """Held blocks."""
        return self.num_blocks - self.num_free

    def match(self, keys: Sequence[BlockKey]) -> int:
        """Length of the prefix of `keys` in the pool. Changes nothing."""
        by_key = self._by_key
        for index, key in enumerate(keys):
            if key not in by_key:
                return index
        return len(keys)

    def block_of(self, key: BlockKey) -> BlockId | None:
        return self._by_key.get(key)

    def name_of(self, block: BlockId) -> BlockName | None:
        """Name of a full block, also of a duplicate; None if it has none."""
        run = self._run_at(block)
        return None if run is None else run.name_at(run.index_of(block))

    def lineage(self, key: BlockKey) -> BlockNames:
        """Names from the first block of the sequence to this key; empty if the key is unknown."""
        parts: list[BlockNames] = []
        block = self._by_key.get(key)
        while block is not None:
            run = self._run_of[block]
            assert run is not None
            parts.append(run.names.slice(0, run.index_of(block) + 1))
            block = self._by_key.get(run.parent.key) if run.parent is not None else None
        names = BlockNames()
        for part in reversed(parts):
            names.extend(part)
        return names

    def num_holders(self, block: BlockId) -> int:
        run = self._run_at(block)
        return 0 if run is None else run.num_holders

    def runs(self) -> Iterable[Run]:
        """All runs, read-only."""
        return dict.fromkeys(run for run in self._run_of if run is not None)

    # --- holding

    def acquire(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Hold the longest prefix of `keys` in the pool."""
        by_key = self._by_key
        acquired: list[BlockId] = []
        for key in keys:
            block = by_key.get(key)
            if block is None:
                break
            acquired.append(block)
        for run in self._parts(acquired):
            if run.state is _INACTIVE:
                self._inactive.remove(run)
                run.move(BlockMove.ACQUIRE)
            run.num_holders += 1
        return acquired

    def allocate(self, count: int) -> list[BlockId] | None:
        """Hold `count` blocks for writing, evicting least recently used ones as needed; None if there are too few."""
        if count > self.num_free:
            return None
        free, run_of = self._free, self._run_of
        num_kept = max(0, len(free) - count)
        blocks = free[num_kept:]
        del free[num_kept:]
        blocks.reverse()
        first, last = len(run_of), min(self.num_blocks, len(run_of) + count - len(blocks))
        if last > first:  # never used before
            run_of += [None] * (last - first)
            blocks += map(BlockId, range(first, last))
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        if blocks:
            self._place(Run(blocks[:], _ALLOCATED, 1))
        return blocks

    def retain(self, blocks: Iterable[BlockId]) -> None:
        """Hold blocks that are already held. Needs its own `release`."""
        for run in self._held(list(blocks), "retain"):
            run.num_holders += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Release blocks, the deepest of a chain first, so that it is evicted first."""
        for run in reversed(self._held(list(blocks)[::-1], "release")):
            run.num_holders -= 1
            if not run.num_holders:
                self._release_run(run)

    # --- names

    def register(self, block: BlockId, name: BlockName, parent: BlockId | None, position: int) -> bool:
        """Index a full, computed block by its name. Return whether it was indexed.

        `parent`: the preceding block held by the caller, None for the first; `position`: index in the sequence. False
        if the parent has no name or another held block has the same name.
        """
        run = self._run_at(block)
        parent_name = None if parent is None else self.name_of(parent)
        known = self._by_key.get(name.key)
        is_duplicate = known is not None and self.num_holders(known) > 0
        state = BlockState.FREE if run is None else run.state
        next_state(block, state, BlockMove.DUPLICATE if is_duplicate else BlockMove.REGISTER)  # may raise
        if parent is not None and parent_name is None:
            return False
        run = self._alone(block)
        if is_duplicate:
            assert known is not None
            run.move(BlockMove.DUPLICATE)
            run.names, run.parent, run.position = BlockNames.of([name]), parent_name, position
            self._alone(known)
            self._duplicates.setdefault(name.key, []).append(block)
            return False
        if known is not None:  # inactive: the name moves to the held block and the old memory becomes free
            old = self._alone(known)
            self._inactive.remove(old)
            self._free_named(old)
        self._name(run, BlockNames.of([name]), parent_name, position)
        if known is None:
            self._record_stored(run)
            self._join(run, parent)
        return True

    def register_run(self, blocks: list[BlockId], names: BlockNames, start: int, end: int) -> None:
        """Like `register`, for the blocks from `start` to `end` of one sequence."""
        position = start
        while position < end:
            count = self._register_unknown(blocks, names, position, end)
            if not count:  # known name, unnamed parent or wrong state: register singly
                parent = blocks[position - 1] if position else None
                self.register(blocks[position], names[position], parent, position)
                count = 1
            position += count

    def clear(self) -> int:
        """Remove all names: inactive blocks become free, held blocks stay held. Return the number of names."""
        num_names = len(self._by_key)
        for run in self._inactive:
            self._free_named(run)
        self._inactive.clear()
        for run in self.runs():
            if run.names:
                run.move(BlockMove.FORGET)
                run.forget()
        self._by_key.clear()
        self._duplicates.clear()
        if self._publishes_changes:
            self._log.clear()
        return num_names

    # --- changes

    def take_changes(self) -> tuple[Change, ...]:
        """Changes of names since the last call, in order; the complete contents if there were too many."""
        is_lost = self._log.is_lost
        changes = self._log.take()
        return (Cleared(Tier.DEVICE), *self.contents()) if is_lost else changes

    def contents(self) -> list[Stored]:
        """All named blocks as chains, parents first."""
        return chains(self.runs(), self._by_key)

    # --- runs

    def _run_at(self, block: BlockId) -> Run | None:
        """Run of a block; None if it is free or was never used."""
        return self._run_of[block] if block < len(self._run_of) else None

    def _place(self, run: Run) -> None:
        run_of = self._run_of
        for block in run.ids:
            run_of[block] = run

    def _split_run(self, start: int, run: Run) -> Run:
        """Split the blocks from `start` on into their own run."""
        end = self._inactive.split_off(start, run) if run.state is _INACTIVE else run.split_off(start)
        self._place(end)
        return end

    def _parts(self, blocks: list[BlockId]) -> list[Run]:
        """Split runs so that they cover exactly these blocks, and return them. IllegalMove for a free block."""
        parts: list[Run] = []
        start = 0
        while start < len(blocks):
            run = self._run_at(blocks[start])
            if run is None:
                raise not_held(blocks[start], BlockState.FREE)
            part = blocks[start : start + len(run.ids)]
            if part != run.ids:
                first = run.index_of(blocks[start])
                if first:
                    run = self._split_run(first, run)
                num_equal = common_prefix_len(part, run.ids)
                if num_equal < len(run.ids):
                    self._split_run(num_equal, run)
            parts.append(run)
            start += len(run.ids)
        return parts

    def _alone(self, block: BlockId) -> Run:
        (run,) = self._parts([block])
        return run

    def _held(self, blocks: list[BlockId], move: str) -> list[Run]:
        """Runs of these blocks. IllegalMove, with nothing changed, unless all are held and distinct."""
        parts = self._parts(blocks)
        for run in parts:
            if not run.num_holders:
                raise not_held(run.ids[0], run.state)
        if len(set(blocks)) != len(blocks):
            raise IllegalMove(f"duplicate block in one {move}", move=move)
        return parts

    def _release_run(self, run: Run) -> None:
        """Handle the release by the last holder."""
        if run.state is _REGISTERED:
            heirs = self._duplicates.get(run.names.keys[0]) if self._duplicates else None
            run.move(BlockMove.RELEASE)
            if heirs:
                self._inherit_name(run, heirs[0])
            else:
                self._inactive.append(run)
            return
        if run.state is _DUPLICATE:
            self._drop_duplicate(run)
        run.move(BlockMove.RELEASE)
        self._free_blocks(run)

    def _inherit_name(self, run: Run, heir_block: BlockId) -> None:
        """Move the name of a released block to a duplicate of it."""
        heir = self._run_of[heir_block]
        assert heir is not None
        self._drop_duplicate(heir)
        heir.move(BlockMove.INHERIT)
        self._by_key[run.names.keys[0]] = heir_block
        self._free_named(run)

    def _drop_duplicate(self, run: Run) -> None:
        key = run.names.keys[0]
        duplicates = self._duplicates[key]
        duplicates.remove(run.ids[0])
        if not duplicates:
            del self._duplicates[key]

    def _free_named(self, run: Run) -> None:
        """Free an inactive run whose names were moved or removed."""
        run.move(BlockMove.EVICT)
        self._free_blocks(run)

    def _free_blocks(self, run: Run) -> None:
        run_of = self._run_of
        for block in run.ids:
            run_of[block] = None
        self._free += reversed(run.ids)

    def _evict(self, count: int) -> list[BlockId]:
        """Evict the least recently used inactive blocks for the caller."""
        by_key = self._by_key
        evicted: list[BlockId] = []
        removed: list[SequenceHash] = []
        while len(evicted) < count:
            ids, keys, hashes = self._inactive.pop_blocks(count - len(evicted))
            for key in keys:
                del by_key[key]
            if self._publishes_changes:
                hashes.reverse()
                removed += hashes
            ids.reverse()
            evicted += ids
        self._log.remove_run(removed)
        return evicted

    # --- naming

    def _register_unknown(self, blocks: list[BlockId], names: BlockNames, position: int, end: int) -> int:
        """Register the leading blocks that are in one run and have unknown names; return their number."""
        run = self._run_at(blocks[position])
        parent = blocks[position - 1] if position else None
        above = None if parent is None else self._run_at(parent)
        has_chain = parent is None or (above is not None and above.names.keys)
        if run is None or run.state is not _WRITING or not has_chain:
            return 0
        new_names = names.slice(position, position + common_prefix_len(blocks[position:end], run.ids))
        if not self._by_key.keys().isdisjoint(new_names.keys):
            new_names.split_off(
                next(index for index, key in enumerate(new_names.keys) if key in self._by_key)
            )
        count = len(new_names.keys)
        if not count or len(set(new_names.keys)) < count:
            return 0
        if count < len(run.ids):
            self._split_run(count, run)
        parent_name = None if above is None or parent is None else above.name_at(above.index_of(parent))
        self._name(run, new_names, parent_name, position)
        self._record_stored(run)
        self._join(run, parent)
        return count

    def _name(self, run: Run, names: BlockNames, parent: BlockName | None, position: int) -> None:
        run.move(BlockMove.REGISTER)
        run.names, run.parent, run.position = names, parent, position
        self._by_key.update(zip(names.keys, run.ids, strict=True))

    def _record_stored(self, run: Run) -> None:
        if self.sealed is not None:
            parent_key = None if run.parent is None else run.parent.key
            self.sealed.add_run(run.names.keys[-1], parent_key, run.position)
        if not self._publishes_changes:
            return
        parent = None if run.parent is None else run.parent.sequence_hash
        self._log.store_run(run.names, parent, run.position)

    def _join(self, run: Run, parent: BlockId | None) -> None:
        """Merge a newly named run into the preceding one if state and holders are equal.

        A holder of a block holds its parent, so equal holder counts mean equal holders.
        """
        above = None if parent is None else self._run_at(parent)
        if (
            above is not None
            and above.state is _REGISTERED
            and above.num_holders == run.num_holders
            and above.ids[-1] == parent
            and (not self._duplicates or above.names.keys[0] not in self._duplicates)
        ):
            above.join(run)
            run_of = self._run_of
            for block in run.ids:
                run_of[block] = above
