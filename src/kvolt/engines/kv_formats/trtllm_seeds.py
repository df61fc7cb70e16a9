"""SeedBook: whose a block is, for an engine that does not say.

TensorRT-LLM's hashes tell blocks of other adapters and tenants apart, but its events name neither. What is known is
which requests were given, so the first block of a sequence is looked up by its tokens: where all requests that begin
so have one adapter and one salt, it is theirs. Where there are several, it is the one that has no block yet; where
that is not one either, nobody knows, and it is left out. Pure, and bounded: the least recently used is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvolt.core.hashing import local_hashes
from kvolt.engines.kv_formats.trtllm_schema import EngineHash

MAX_ROOTS = 1 << 16


@dataclass(slots=True)
class _Open:
    seed: int
    tokens: list[int]
    """Fewer than a block."""


@dataclass(slots=True)
class SeedBook:
    """See the module. `begin` each sequence before its blocks are told of."""

    block_size: int
    max_roots: int = MAX_ROOTS
    _open: dict[str, _Open] = field(default_factory=dict)
    _roots: dict[int, dict[int, EngineHash | None]] = field(default_factory=dict)
    """By the tokens of a first block: the seeds that begin with it, each with its block as far as it is known."""

    def begin(self, name: str, seed: int, tokens: Sequence[int]) -> None:
        if len(tokens) >= self.block_size:
            self._note(seed, tokens[: self.block_size])
        else:
            self._open[name] = _Open(seed, list(tokens))

    def grow(self, name: str, tokens: Sequence[int]) -> None:
        """Of an answer, until the first block is full."""
        found = self._open.get(name)
        if found is None:
            return
        found.tokens += tokens
        if len(found.tokens) >= self.block_size:
            del self._open[name]
            self._note(found.seed, found.tokens[: self.block_size])

    def end(self, name: str) -> None:
        self._open.pop(name, None)

    def forget(self, seeds: Collection[int]) -> None:
        """What comes under these has other names from now on."""
        for named in self._roots.values():
            for seed in seeds:
                named.pop(seed, None)

    def _note(self, seed: int, tokens: Sequence[int]) -> None:
        root = self._root(tokens)
        seeds = self._roots.pop(root, {})
        seeds.setdefault(seed, None)
        self._roots[root] = seeds  # taken out and put back: the order is then least recently used first
        while len(self._roots) > self.max_roots:
            del self._roots[next(iter(self._roots))]

    def _root(self, tokens: Sequence[int]) -> int:
        return local_hashes(tokens, self.block_size)[0]

    def find(self, block: EngineHash, tokens: Sequence[int]) -> int | None:
        """The seed of a first block; None where it cannot be told."""
        seeds = self._roots.get(self._root(tokens), {})
        known = next((seed for seed, named in seeds.items() if named == block), None)
        if known is not None:
            return known
        free = [seed for seed, named in seeds.items() if named is None]
        if len(free) != 1:
            return None
        seeds[free[0]] = block
        return free[0]
