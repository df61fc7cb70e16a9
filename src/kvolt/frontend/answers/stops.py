"""Stop strings in a text that comes in pieces: nothing of one leaks, nothing else waits.

An Aho-Corasick automaton. Its state is the longest end of the text that begins a stop string: exactly
what must be held back. Each character costs amortized constant time, whatever the stop strings are.

The occurrence that starts first wins, wherever the text was cut. Of those that start together the shortest
wins: it is a stop as soon as it is there, and to wait for a longer one would only change its name.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

_ROOT = 0

_MOST_CACHED_CHARACTERS = 4096


class _Automaton:
    """States are the prefixes of the stop strings, the empty one first.

    A prefix's first continuation is the next number; only others need a dict. So a state costs some forty
    bytes, and 32 long stop strings are no burden for each stream that has them.
    """

    __slots__ = ("_branches", "_fallback", "depth", "first", "longest_end", "stop", "straight")

    def __init__(self, stops: Sequence[str]) -> None:
        self.first: dict[str, int] = {}
        """The states of one character."""
        self.straight = [""]
        """The character that leads to the next number, if one does."""
        self._branches: dict[int, dict[str, int]] = {_ROOT: self.first}
        self.depth = array("l", (0,))
        """Characters of the prefix."""
        self.stop = [""]
        """A stop string that begins with the prefix."""
        self.longest_end = [0]
        """Characters of the longest stop string that ends here; 0 for none."""
        for stop in stops:
            self._add(stop)
        self._fallback = array("l", bytes(self.depth.itemsize * len(self.depth)))
        """The longest other state that is an end of this one."""
        self._link()

    def step(self, state: int, character: str) -> int:
        straight, branches = self.straight, self._branches
        while True:
            if straight[state] == character:
                return state + 1
            others = branches.get(state)
            if others is not None and character in others:
                return others[character]
            if state == _ROOT:
                return _ROOT
            state = self._fallback[state]

    def _child(self, state: int, character: str) -> int | None:
        if self.straight[state] == character:
            return state + 1
        return self._branches.get(state, {}).get(character)

    def _add(self, stop: str) -> None:
        state, depth = _ROOT, 0
        while depth < len(stop) and (child := self._child(state, stop[depth])) is not None:
            state, depth = child, depth + 1
        if depth < len(stop):
            new = len(self.depth)
            if state != _ROOT and new == state + 1:
                self.straight[state] = stop[depth]
            else:
                self._branches.setdefault(state, {})[stop[depth]] = new
            num_new = len(stop) - depth
            self.straight.extend(stop[depth + 1 :])
            self.straight.append("")
            self.depth.extend(range(depth + 1, len(stop) + 1))
            self.stop.extend([stop] * num_new)
            self.longest_end.extend([0] * num_new)
            state = new + num_new - 1
        self.longest_end[state] = len(stop)

    def _children(self, state: int) -> list[tuple[str, int]]:
        children = list(self._branches.get(state, {}).items())
        if self.straight[state]:
            children.append((self.straight[state], state + 1))
        return children

    def _link(self) -> None:
        """Nearest to the root first, so that a fallback is complete before it is used."""
        waiting = deque(self.first.values())
        while waiting:
            state = waiting.popleft()
            for character, child in self._children(state):
                fallback = self._fallback[child] = self.step(self._fallback[state], character)
                if not self.longest_end[child]:
                    self.longest_end[child] = self.longest_end[fallback]
                waiting.append(child)


_cached_automaton = lru_cache(maxsize=64)(_Automaton)
"""The requests of one application have the same stop strings."""


def _automaton(stops: tuple[str, ...]) -> _Automaton:
    small = sum(map(len, stops)) <= _MOST_CACHED_CHARACTERS
    return _cached_automaton(stops) if small else _Automaton(stops)


class StopMatcher:
    """Gives out the text before the first stop string as soon as it is certain to be before it.

    With `include` the stop string is given out too; then only text after a possible match waits.
    An empty string stops nothing.
    """

    __slots__ = ("_automaton", "_best", "_firsts", "_include", "_num_given", "_state", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(filter(None, stops))
        self._include = include
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._automaton: _Automaton | None = None
        """Made when a first character of a stop string is met: many answers never meet one."""
        self._state = _ROOT
        """Its prefix is the open text: the end of what was fed that may become part of a stop string."""
        self._num_given = 0
        """How much of the open text is given out; only with `include`."""
        self._best: tuple[int, int] | None = None
        """Start and end, in the open text, of a stop string that one with an earlier start may replace."""
        self.matched: str | None = None

    @property
    def num_held(self) -> int:
        """Characters held back: fewer than the longest stop string has."""
        return 0 if self._automaton is None else self._automaton.depth[self._state] - self._num_given

    def feed(self, text: str) -> str:
        """Text that is safe to send now; "" once a stop string has matched."""
        if self.matched is not None:
            return ""
        if self._state == _ROOT and self._firsts.isdisjoint(text):
            return text
        return self._scan(text)

    def finish(self) -> str:
        """The text ends here: what was held back of it, up to a stop string if one is in it."""
        if self._automaton is None or self.matched is not None:
            return ""
        stop, num_open = self._automaton.stop[self._state], self._automaton.depth[self._state]
        if self._best is not None:
            return self._match(stop, num_open, "", self._best)
        self._state, num_given, self._num_given = _ROOT, self._num_given, 0
        return stop[num_given:num_open]

    def _scan(self, text: str) -> str:
        automaton = self._automaton
        if automaton is None:
            automaton = self._automaton = _automaton(self._stops)
        first, straight, longest_end = automaton.first, automaton.straight, automaton.longest_end
        state, best = self._state, self._best
        stop, num_open = automaton.stop[state], automaton.depth[state]
        at = num_open
        for character in text:
            at += 1
            if state == _ROOT:
                state = first.get(character, _ROOT)
                if state == _ROOT:  # nothing is open, so there is no best either
                    continue
            elif straight[state] == character:
                state += 1
            else:
                state = automaton.step(state, character)
            if longest_end[state] and (best is None or at - longest_end[state] < best[0]):
                best = (at - longest_end[state], at)
            if best is not None and best[0] <= at - automaton.depth[state]:
                return self._match(stop, num_open, text, best)
        num_closed = at - automaton.depth[state]
        num_safe = num_closed
        if self._include:
            num_safe = at if best is None else best[1]
        safe = _cut(stop, num_open, text, self._num_given, num_safe)
        self._state = state
        self._num_given = num_safe - num_closed
        self._best = None if best is None else (best[0] - num_closed, best[1] - num_closed)
        return safe

    def _match(self, stop: str, num_open: int, text: str, best: tuple[int, int]) -> str:
        start, end = best
        self.matched = _cut(stop, num_open, text, start, end)
        safe = _cut(stop, num_open, text, self._num_given, end if self._include else start)
        self._state, self._num_given, self._best = _ROOT, 0, None
        return safe


def _cut(stop: str, num_open: int, text: str, start: int, end: int) -> str:
    """From the open text and what came after it; not joined first, since the open text may be long."""
    if start >= num_open:
        return text[start - num_open : end - num_open]
    return stop[start : min(end, num_open)] + text[: max(0, end - num_open)]
