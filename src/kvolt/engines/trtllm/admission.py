"""Queue in front of TensorRT-LLM: which sequences it has, which wait, and how many blocks they hold. Pure.

Its LLM API accepts everything and does not report what has started; and prompts held for decode workers keep their
blocks, so that many of them leave no space to compute anything. So sequences wait here while all slots or blocks are
in use; context-only sequences also leave enough free blocks for the longest prompt. First come, first served, but
answers do not wait for context-only sequences. A sequence is a name and a number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Admission:
    """See the module. Added sequences wait until `admit` returns them."""

    max_running: int
    total_blocks: int
    """0 if unknown: then only `max_running` limits."""
    _waiting: dict[str, int] = field(default_factory=dict)
    _context_only: set[str] = field(default_factory=set)
    """Waiting sequences that are context-only."""
    _running: dict[str, int] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=dict)
    _max_prompt_blocks: int = 0
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
        """Blocks of running and held sequences."""
        return sum(self._running.values()) + self.num_held_blocks

    @property
    def reserve(self) -> int:
        """Free blocks that context-only sequences must leave: those of the longest prompt, at most half of all."""
        return min(self._max_prompt_blocks, self.total_blocks // 2)

    def is_waiting(self, name: str) -> bool:
        return name in self._waiting

    def add(self, name: str, num_blocks: int, *, is_context_only: bool = False) -> None:
        self._waiting[name] = num_blocks
        if is_context_only:
            self._context_only.add(name)
        self._max_prompt_blocks = max(self._max_prompt_blocks, num_blocks)

    def admit(self) -> list[str]:
        """Start waiting sequences as far as there is space; returns them."""
        admitted: list[str] = []
        is_full: set[bool] = set()
        for name, num_blocks in self._waiting.items():
            is_context_only = name in self._context_only
            if is_context_only in is_full:
                continue
            if not self._fits(num_blocks, is_context_only):
                is_full.add(is_context_only)  # later ones must not overtake: it would starve
                continue
            self._running[name] = num_blocks
            admitted.append(name)
        for name in admitted:
            del self._waiting[name]
        self._context_only.difference_update(admitted)
        return admitted

    def _fits(self, num_blocks: int, is_context_only: bool) -> bool:
        if len(self._running) >= self.max_running:
            return False
        if not self.total_blocks or not (self._running or self._held):
            return True
        reserve = self.reserve if is_context_only else 0
        return self.num_blocks + num_blocks + reserve <= self.total_blocks

    def hold(self, name: str) -> None:
        """The prompt is computed and held for a decode worker."""
        num_blocks = self._running.pop(name, None)
        if num_blocks is not None:
            self._held[name] = num_blocks

    def drop(self, name: str) -> None:
        """Remove a sequence. Unknown names are ignored."""
        self._context_only.discard(name)
        for each in (self._waiting, self._running, self._held):
            each.pop(name, None)

    def clear(self) -> None:
        self._context_only.clear()
        for each in (self._waiting, self._running, self._held):
            each.clear()
