"""BlockPool: which blocks of one memory are free, held, or kept because they may be asked for again.

Owns the state, holders and name of every block. Knows no bytes, no tokens and no clock: who calls it writes and
reads the memory.

A block is *held* by as many as acquired it. When the last lets go, a named block becomes inactive and stays
until its memory is needed; any other is free at once. What must be cheap is what is done to a whole prompt. So the
books are kept of runs (`run`): blocks that follow each other and have the same state and the same holders. A run is
cut where somebody asks for a part of it, and joined by the next block of its only holder. The free blocks are in no
run, but on a stack: the block used last is the one that is warm.

Chains. A block's name covers all blocks before it, so a block is of no use without its parents. Three rules keep
a parent in the pool as long as its children, and make the oldest inactive block always the end of a chain:

- Whoever holds a block holds all before it, and releases the deepest first.
- A name belongs to a held block if one has it. A second block of the same name is a duplicate, without effect
  until the first is let go; then it inherits the name. (So nobody's blocks hang below an inactive one.) Both are
  runs of their own.
- A block whose parent has no name gets none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvolt.core.errors import ConfigError
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Cleared, Stored, Tier
from kvolt.kv.changes import Change, ChangeLog, ToldHashes
from kvolt.kv.lifecycle import TRANSITIONS, BlockId, BlockMove, BlockState, IllegalMove, next_state
from kvolt.kv.names import BlockName, Names
from kvolt.kv.pool_check import check_pool
from kvolt.kv.run import Run, RunQueue
from kvolt.kv.sealed import SealedLog

# Once: to look up a member of an enum takes longer than most of what is done with it here.
_WRITING, _DUPLICATE, _REGISTERED, _INACTIVE = (
    BlockState.WRITING,
    BlockState.DUPLICATE,
    BlockState.REGISTERED,
    BlockState.INACTIVE,
)
_ALLOCATED = TRANSITIONS[BlockState.FREE, BlockMove.ALLOCATE]


class BlockPool:
    """See the module. `take_changes` is to be called now and then; what it tells is bounded either way."""

    def __init__(self, num_blocks: int, tells_changes: bool = True) -> None:
        """Without `tells_changes` nobody asks for them, and there are none."""
        if num_blocks < 1:
            raise ConfigError(
                "a pool has at least one block", key="kv_blocks", remedy="give the KV cache more memory"
            )
        self.num_blocks = num_blocks
        self._run_of: list[
            Run | None
        ] = []  # grows as blocks are first needed: a large pool at rest costs nothing
        self._free: list[BlockId] = []
        self._inactive = RunQueue()
        self._by_key: dict[BlockKey, BlockId] = {}
        self._duplicates: dict[BlockKey, list[BlockId]] = {}
        self._tells_changes = tells_changes
        self._hashes = ToldHashes()
        self._log = ChangeLog(limit=2 * num_blocks)
        self.sealed: SealedLog | None = None
        """Told of blocks that get a name which nobody had, once it is there."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give: the inactive ones are among them."""
        return self.num_blocks - len(self._run_of) + len(self._free) + self._inactive.num_blocks

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
        run = self._run_at(block)
        return None if run is None else run.name_at(run.index_of(block))

    def lineage(self, key: BlockKey) -> Names:
        """The names from the first block of its sequence to the one of this key; none when it is not here."""
        parts: list[Names] = []
        block = self._by_key.get(key)
        while block is not None:
            run = self._run_of[block]
            assert run is not None
            parts.append(run.names.part(0, run.index_of(block) + 1))
            block = self._by_key.get(run.parent.key) if run.parent is not None else None
        names = Names()
        for part in reversed(parts):
            names.extend(part)
        return names

    def num_holders(self, block: BlockId) -> int:
        run = self._run_at(block)
        return 0 if run is None else run.num_holders

    def runs(self) -> Iterable[Run]:
        """All that there are; for who looks, not to be changed."""
        return dict.fromkeys(run for run in self._run_of if run is not None)

    # --- holding

    def acquire(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Hold the longest run of `keys`, from the first on, that is here."""
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
        """Hold `count` blocks to write to, or none at all; evicts the inactive ones used longest ago."""
        if count > self.num_free:
            return None
        free, run_of = self._free, self._run_of
        kept = max(0, len(free) - count)
        taken = free[kept:]
        del free[kept:]
        taken.reverse()
        first, last = len(run_of), min(self.num_blocks, len(run_of) + count - len(taken))
        if last > first:  # never used so far
            run_of += [None] * (last - first)
            taken += map(BlockId, range(first, last))
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        if taken:
            self._place(Run(taken[:], _ALLOCATED, 1))
        return taken

    def retain(self, blocks: Iterable[BlockId]) -> None:
        """Hold blocks that somebody holds already. Ends with a `release` of its own."""
        for run in self._held(list(blocks), "retain"):
            run.num_holders += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Let go of blocks, the deepest of a chain first: it is then the first to be evicted."""
        for run in reversed(self._held(list(blocks)[::-1], "release")):
            run.num_holders -= 1
            if not run.num_holders:
                self._let_go(run)

    # --- names

    def register(self, block: BlockId, name: BlockName, parent: BlockId | None, position: int) -> bool:
        """The block is full and computed; it can be found from now on. Whether that is so.

        `parent` is the block before it in the caller's hands, None for a first one; `position` is its index
        in the sequence. It is not so when the parent has no name, or another held block has this one's.
        """
        run = self._run_at(block)
        parent_name = None if parent is None else self.name_of(parent)
        known = self._by_key.get(name.key)
        is_duplicate = known is not None and self.num_holders(known) > 0
        state = BlockState.FREE if run is None else run.state
        next_state(
            block, state, BlockMove.DUPLICATE if is_duplicate else BlockMove.REGISTER
        )  # which may raise
        if parent is not None and parent_name is None:
            return False
        run = self._alone(block)
        if is_duplicate:
            assert known is not None
            run.move(BlockMove.DUPLICATE)
            run.names, run.parent, run.position = Names.of([name]), parent_name, position
            self._alone(known)
            self._duplicates.setdefault(name.key, []).append(block)
            return False
        if known is not None:  # inactive: its name has a holder again, and its memory has no more use
            old = self._alone(known)
            self._inactive.remove(old)
            self._free_named(old)
            self._name(run, Names.of([name]), parent_name, position)
            return True
        self._name(run, Names.of([name]), parent_name, position)
        self._tell_stored(run)
        self._join(run, parent)
        return True

    def register_run(self, blocks: list[BlockId], names: Names, start: int, end: int) -> None:
        """`register` of the blocks from `start` to `end` of one sequence, whose blocks and names these are."""
        position = start
        while position < end:
            count = self._register_unknown(blocks, names, position, end)
            if not count:  # a name that is known, a parent without one, or a wrong state: the long way
                parent = blocks[position - 1] if position else None
                self.register(blocks[position], names[position], parent, position)
                count = 1
            position += count

    def clear(self) -> int:
        """Forget every name; the inactive blocks become free, the held ones stay with their holders.

        Returns how many names there were.
        """
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
        if self._tells_changes:
            self._hashes.clear()
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
        """Every named block, as long chains, parents first."""
        children: dict[BlockKey | None, list[Run]] = {}
        for run in self.runs():
            if run.state is _REGISTERED or run.state is _INACTIVE:
                has_parent = run.parent is not None and run.parent.key in self._by_key
                children.setdefault(run.parent.key if run.parent and has_parent else None, []).append(run)
        told: list[Stored] = []
        heads = children.pop(None, [])[::-1]
        while heads:
            head = run = heads.pop()
            names = Names()
            while True:
                names.extend(run.names)
                for key in run.names.keys[:-1]:
                    heads += children.get(key, ())
                below = children.get(run.names.keys[-1])
                if not below:
                    break
                heads += below[:0:-1]
                run = below[0]
            parent = head.parent.sequence_hash if head.parent else None
            told.append(Stored.of(names.sequence_hashes, parent, head.position))
        return told

    # --- runs

    def _run_at(self, block: BlockId) -> Run | None:
        """None for a free block; one that was never used is free."""
        return self._run_of[block] if block < len(self._run_of) else None

    def _place(self, run: Run) -> None:
        run_of = self._run_of
        for block in run.ids:
            run_of[block] = run

    def _cut(self, start: int, run: Run) -> Run:
        """The blocks from `start` on become a run of their own."""
        end = self._inactive.cut(start, run) if run.state is _INACTIVE else run.cut(start)
        self._place(end)
        return end

    def _parts(self, blocks: list[BlockId]) -> list[Run]:
        """The runs that these blocks are, made so that they are nothing else. IllegalMove for a free block."""
        parts: list[Run] = []
        start = 0
        while start < len(blocks):
            run = self._run_at(blocks[start])
            if run is None:
                raise _not_held(blocks[start], BlockState.FREE)
            asked = blocks[start : start + len(run.ids)]
            if asked != run.ids:
                first = run.index_of(blocks[start])
                if first:
                    run = self._cut(first, run)
                num_alike = _num_alike(asked, run.ids)
                if num_alike < len(run.ids):
                    self._cut(num_alike, run)
            parts.append(run)
            start += len(run.ids)
        return parts

    def _alone(self, block: BlockId) -> Run:
        (run,) = self._parts([block])
        return run

    def _held(self, blocks: list[BlockId], move: str) -> list[Run]:
        """The runs of blocks, all of them held and each named once: else nothing may be changed."""
        parts = self._parts(blocks)
        for run in parts:
            if not run.num_holders:
                raise _not_held(run.ids[0], run.state)
        if len(set(blocks)) != len(blocks):
            raise IllegalMove(f"a block is named twice in one {move}", move=move)
        return parts

    def _let_go(self, run: Run) -> None:
        """Nobody holds it any more."""
        if run.state is _REGISTERED:
            heirs = self._duplicates.get(run.names.keys[0]) if self._duplicates else None
            run.move(BlockMove.RELEASE)
            if heirs:
                self._pass_on(run, heirs[0])
            else:
                self._inactive.append(run)
            return
        if run.state is _DUPLICATE:
            self._drop_duplicate(run)
        run.move(BlockMove.RELEASE)
        self._give_back(run)

    def _pass_on(self, run: Run, heir_block: BlockId) -> None:
        """The name of a block to a duplicate of it."""
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
        """An inactive run becomes free; its names live on elsewhere, or are gone."""
        run.move(BlockMove.EVICT)
        self._give_back(run)

    def _give_back(self, run: Run) -> None:
        run_of = self._run_of
        for block in run.ids:
            run_of[block] = None
        self._free += reversed(run.ids)

    def _evict(self, count: int) -> list[BlockId]:
        """The inactive blocks used longest ago become free, and are the caller's to give."""
        by_key = self._by_key
        evicted: list[BlockId] = []
        gone: list[SequenceHash] = []
        while len(evicted) < count:
            ids, keys, hashes = self._inactive.take(count - len(evicted))
            for key in keys:
                del by_key[key]
            if self._tells_changes:
                hashes.reverse()
                gone += self._hashes.remove_all(hashes)
            ids.reverse()
            evicted += ids
        self._log.remove_run(gone)
        return evicted

    # --- naming

    def _register_unknown(self, blocks: list[BlockId], names: Names, position: int, end: int) -> int:
        """`register` of as many blocks at once as are one run and have names that nobody knows; how many."""
        run = self._run_at(blocks[position])
        parent = blocks[position - 1] if position else None
        above = None if parent is None else self._run_at(parent)
        has_chain = parent is None or (above is not None and above.names.keys)
        if run is None or run.state is not _WRITING or not has_chain:
            return 0
        found = names.part(position, position + _num_alike(blocks[position:end], run.ids))
        if not self._by_key.keys().isdisjoint(found.keys):
            found.cut(next(index for index, key in enumerate(found.keys) if key in self._by_key))
        count = len(found.keys)
        if not count or len(set(found.keys)) < count:
            return 0
        if count < len(run.ids):
            self._cut(count, run)
        parent_name = None if above is None or parent is None else above.name_at(above.index_of(parent))
        self._name(run, found, parent_name, position)
        self._tell_stored(run)
        self._join(run, parent)
        return count

    def _name(self, run: Run, names: Names, parent: BlockName | None, position: int) -> None:
        run.move(BlockMove.REGISTER)
        run.names, run.parent, run.position = names, parent, position
        self._by_key.update(zip(names.keys, run.ids, strict=True))

    def _tell_stored(self, run: Run) -> None:
        if self.sealed is not None:
            parent_key = None if run.parent is None else run.parent.key
            self.sealed.add(run.names.keys[-1], parent_key, run.position)
        if not self._tells_changes:
            return
        self._hashes.add_all(run.names.sequence_hashes)
        parent = None if run.parent is None else run.parent.sequence_hash
        self._log.store_run(run.names, parent, run.position)

    def _join(self, run: Run, parent: BlockId | None) -> None:
        """Make a run that was just named part of the one before it, if the two are alike.

        Who holds a block holds its parent: with as many holders they have the same.
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

    # ---

    def check_integrity(self) -> None:
        """AssertionError, with the story, where the pool contradicts itself or the rules above were broken."""
        check_pool(self)


def _num_alike(one: list[BlockId], other: list[BlockId]) -> int:
    """How many blocks the two begin with in common."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next(index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])


def _not_held(block: BlockId, state: BlockState) -> IllegalMove:
    return IllegalMove(
        f"block {block} is {state}: nobody holds it, so nobody can hold it too or let it go",
        block=block,
        state=state.value,
        move="release",
    )
