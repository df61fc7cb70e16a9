"""Incremental stop string matching: holds back exactly the text that may become part of a stop string.

An Aho-Corasick automaton, whose state is the longest suffix of the text that is a prefix of a stop string. Amortized
constant time per character, for any number of stop strings.

The match that starts first wins, however the text is split; of matches with the same start, the shortest.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

_ROOT = 0

_MAX_CACHED_CHARS = 4096


class _Automaton:
    """States are the prefixes of the stop strings; state 0 is the empty prefix.

    The first continuation of a prefix is the next state number; only further ones need a dict. A state takes about
    40 bytes, so that many long stop strings per stream stay cheap.
    """

    __slots__ = ("_branches", "_fallback", "depth", "first", "longest_end", "stop", "straight")

    def __init__(self, stops: Sequence[str]) -> None:
        self.first: dict[str, int] = {}
        """States of one character."""
        self.straight = [""]
        """Character that leads to the next state number; "" for none."""
        self._branches: dict[int, dict[str, int]] = {_ROOT: self.first}
        self.depth = array("l", (0,))
        """Length of the prefix."""
        self.stop = [""]
        """A stop string that starts with the prefix."""
        self.longest_end = [0]
        """Length of the longest stop string that ends here; 0 for none."""
        for stop in stops:
            self._add(stop)
        self._fallback = array("l", bytes(self.depth.itemsize * len(self.depth)))
        """State of the longest proper suffix."""
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
        """Compute fallbacks breadth-first, so that each is complete before it is used."""
        waiting = deque(self.first.values())
        while waiting:
            state = waiting.popleft()
            for character, child in self._children(state):
                fallback = self._fallback[child] = self.step(self._fallback[state], character)
                if not self.longest_end[child]:
                    self.longest_end[child] = self.longest_end[fallback]
                waiting.append(child)


_cached_automaton = lru_cache(maxsize=64)(_Automaton)
"""Cached, since requests of one application share their stop strings."""


def _automaton(stops: tuple[str, ...]) -> _Automaton:
    small = sum(map(len, stops)) <= _MAX_CACHED_CHARS
    return _cached_automaton(stops) if small else _Automaton(stops)


class StopMatcher:
    """Passes text on as soon as it is certain to precede the first stop string.

    With `include` the stop string itself is passed on too. Empty stop strings are ignored.
    """

    __slots__ = ("_automaton", "_best", "_firsts", "_include", "_num_emitted", "_state", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(filter(None, stops))
        self._include = include
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._automaton: _Automaton | None = None
        """Built when the first character of a stop string occurs, which many answers never have."""
        self._state = _ROOT
        """Its prefix is the open text: the suffix of the input that may become part of a stop string."""
        self._num_emitted = 0
        """Characters of the open text already passed on; only with `include`."""
        self._best: tuple[int, int] | None = None
        """Start and end, in the open text, of a match that one with an earlier start may still replace."""
        self.matched: str | None = None

    @property
    def num_held(self) -> int:
        """Characters held back, fewer than the longest stop string has."""
        return 0 if self._automaton is None else self._automaton.depth[self._state] - self._num_emitted

    def feed(self, text: str) -> str:
        """Return the text that is safe to send; "" after a match."""
        if self.matched is not None:
            return ""
        if self._state == _ROOT and self._firsts.isdisjoint(text):
            return text
        return self._scan(text)

    def finish(self) -> str:
        """Return the held text at the end of the input, up to a stop string in it."""
        if self._automaton is None or self.matched is not None:
            return ""
        stop, num_open = self._automaton.stop[self._state], self._automaton.depth[self._state]
        if self._best is not None:
            return self._match(stop, num_open, "", self._best)
        self._state, num_emitted, self._num_emitted = _ROOT, self._num_emitted, 0
        return stop[num_emitted:num_open]

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
                if state == _ROOT:  # no open text, so no pending match
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
        safe = _cut(stop, num_open, text, self._num_emitted, num_safe)
        self._state = state
        self._num_emitted = num_safe - num_closed
        self._best = None if best is None else (best[0] - num_closed, best[1] - num_closed)
        return safe

    def _match(self, stop: str, num_open: int, text: str, best: tuple[int, int]) -> str:
        start, end = best
        self.matched = _cut(stop, num_open, text, start, end)
        safe = _cut(stop, num_open, text, self._num_emitted, end if self._include else start)
        self._state, self._num_emitted, self._best = _ROOT, 0, None
        return safe


def _cut(stop: str, num_open: int, text: str, start: int, end: int) -> str:
    """Slice of the open text followed by `text`, without concatenating them (the open text may be long)."""
    if start >= num_open:
        return text[start - num_open : end - num_open]
    return stop[start : min(end, num_open)] + text[: max(0, end - num_open)]
