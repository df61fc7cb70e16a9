"""Admission: which sequences TensorRT-LLM has, which wait here, and what KV those it has are known to hold.

Its LLM API takes everything and says of nothing whether it has begun; and prompts that it keeps for others hold blocks
until they are fetched, so that enough of them leave it no room to compute anything. So sequences wait here while all
places are taken, or all blocks; and prompts for others also while one more would leave fewer free blocks than the
longest prompt needs. First come first served, but answers do not wait for prompts of others. Pure. Knows no request: a
sequence is a name and a number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Admission:
    """See the module. What is added waits until `admit` names it."""

    max_running: int
    total_blocks: int
    """0 where nobody knows: then only places count."""
    _waiting: dict[str, int] = field(default_factory=dict)
    _for_others: set[str] = field(default_factory=set)
    """Of those that wait."""
    _running: dict[str, int] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=dict)
    _longest: int = 0
    """Blocks of the longest prompt so far."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_held_blocks(self) -> int:
        return sum(self._held.values())

    @property
    def num_blocks(self) -> int:
        """Of prompts that are computed, gone on with, or kept."""
        return sum(self._running.values()) + self.num_held_blocks

    @property
    def reserve(self) -> int:
        """Blocks that prompts for others leave free; never so many that half of them could not be used."""
        return min(self._longest, self.total_blocks // 2)

    def is_waiting(self, name: str) -> bool:
        return name in self._waiting

    def add(self, name: str, num_blocks: int, *, for_others: bool = False) -> None:
        self._waiting[name] = num_blocks
        if for_others:
            self._for_others.add(name)
        self._longest = max(self._longest, num_blocks)

    def admit(self) -> list[str]:
        """Those whose turn it is; they run from now on."""
        admitted: list[str] = []
        is_full: set[bool] = set()
        for name, num_blocks in self._waiting.items():
            for_others = name in self._for_others
            if for_others in is_full:
                continue
            if not self._has_room(num_blocks, for_others):
                is_full.add(for_others)  # those behind it do not overtake: it would never come in
                continue
            self._running[name] = num_blocks
            admitted.append(name)
        for name in admitted:
            del self._waiting[name]
        self._for_others.difference_update(admitted)
        return admitted

    def _has_room(self, num_blocks: int, for_others: bool) -> bool:
        if len(self._running) >= self.max_running:
            return False
        if not self.total_blocks or not (self._running or self._held):
            return True
        reserve = self.reserve if for_others else 0
        return self.num_blocks + num_blocks + reserve <= self.total_blocks

    def hold(self, name: str) -> None:
        """Its prompt is computed and kept for others."""
        num_blocks = self._running.pop(name, None)
        if num_blocks is not None:
            self._held[name] = num_blocks

    def drop(self, name: str) -> None:
        """It has ended, or is not wanted any more. Unknown names are no error."""
        self._for_others.discard(name)
        for each in (self._waiting, self._running, self._held):
            each.pop(name, None)

    def clear(self) -> None:
        self._for_others.clear()
        for each in (self._waiting, self._running, self._held):
            each.clear()
