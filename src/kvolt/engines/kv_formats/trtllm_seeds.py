"""SequenceSeeds: finds the adapter and salt of a block, which TensorRT-LLM's events do not name. Pure.

TensorRT-LLM's hashes distinguish blocks of different adapters and tenants, but its events name neither. The first
block of a sequence is looked up by its tokens among the submitted requests. If all requests with these tokens have
the same adapter and salt, the block gets their seed; if they differ, it gets the only seed without a block yet; if
there are several of these, the block is skipped. Bounded: the least recently used entries are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvolt.core.hashing import local_hashes

EngineHash = int | str
"""TensorRT-LLM's hash of a block; opaque."""

MAX_ROOTS = 1 << 16


@dataclass(slots=True)
class _Open:
    seed: int
    tokens: list[int]
    """Fewer than one block."""


@dataclass(slots=True)
class SequenceSeeds:
    """See the module. `begin` must be called for each sequence before the events of its blocks."""

    block_size: int
    max_roots: int = MAX_ROOTS
    _open: dict[str, _Open] = field(default_factory=dict)
    _roots: dict[int, dict[int, EngineHash | None]] = field(default_factory=dict)
    """By hash of a first block's tokens: the seeds of its sequences, each with the block that has it, if known."""

    def begin(self, name: str, seed: int, tokens: Sequence[int]) -> None:
        if len(tokens) >= self.block_size:
            self._add_root(seed, tokens[: self.block_size])
        else:
            self._open[name] = _Open(seed, list(tokens))

    def grow(self, name: str, tokens: Sequence[int]) -> None:
        """Append generated tokens, until the first block is full."""
        entry = self._open.get(name)
        if entry is None:
            return
        entry.tokens += tokens
        if len(entry.tokens) >= self.block_size:
            del self._open[name]
            self._add_root(entry.seed, entry.tokens[: self.block_size])

    def end(self, name: str) -> None:
        self._open.pop(name, None)

    def drop_seeds(self, seeds: Collection[int]) -> None:
        """Drop seeds: later blocks do not have them."""
        for blocks in self._roots.values():
            for seed in seeds:
                blocks.pop(seed, None)

    def _add_root(self, seed: int, tokens: Sequence[int]) -> None:
        root = self._root_hash(tokens)
        seeds = self._roots.pop(root, {})
        seeds.setdefault(seed, None)
        self._roots[root] = seeds  # reinserted, so that the dict is in order of use
        while len(self._roots) > self.max_roots:
            del self._roots[next(iter(self._roots))]

    def _root_hash(self, tokens: Sequence[int]) -> int:
        return local_hashes(tokens, self.block_size)[0]

    def find(self, block: EngineHash, tokens: Sequence[int]) -> int | None:
        """The seed of a first block; None if it is ambiguous or unknown."""
        seeds = self._roots.get(self._root_hash(tokens), {})
        known = next((seed for seed, named in seeds.items() if named == block), None)
        if known is not None:
            return known
        free = [seed for seed, named in seeds.items() if named is None]
        if len(free) != 1:
            return None
        seeds[free[0]] = block
        return free[0]
