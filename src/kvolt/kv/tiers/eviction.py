"""Which block goes when a tier is full: the rules that can be chosen. Pure.

Each keeps an order over what could go from a cache, by its own memory of what was asked for. `evict` asks of each
candidate whether it may; one that may not, since it is being read, stays and is looked at again later: few are.
`docs/tiers.md` has what they reach on real traces, beside the best that is possible.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from kvolt.core.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)
MayGo = Callable[[Key], bool]

_LOOKS = 256
"""Candidates in a row that may not go, after which any that may is taken."""


class Eviction(Protocol[Key]):
    """See the module. A key is in it from `admit` to `drop`, or until `evict` gives it."""

    def __len__(self) -> int: ...

    def admit(self, key: Key, *, is_old: bool = False) -> None:
        """It could go from now on; `is_old`: as soon as any other."""
        ...

    def touch(self, key: Key) -> None:
        """It was asked for."""
        ...

    def drop(self, key: Key) -> None:
        """It has gone for another reason."""
        ...

    def evict(self, may_go: MayGo[Key]) -> Key | None:
        """One that goes now; None when none may."""
        ...

    def resize(self, capacity: int) -> None:
        """The cache holds so many from now on."""
        ...


class Lru(Generic[Key]):
    """Who was asked for longest ago."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._order)

    def admit(self, key: Key, *, is_old: bool = False) -> None:
        self._order[key] = None
        if is_old:
            self._order.move_to_end(key, last=False)

    def touch(self, key: Key) -> None:
        self._order.move_to_end(key)

    def drop(self, key: Key) -> None:
        del self._order[key]

    def evict(self, may_go: MayGo[Key]) -> Key | None:
        for key in self._order:
            if may_go(key):
                del self._order[key]
                return key
        return None

    def resize(self, capacity: int) -> None:
        pass


class S3Fifo(Generic[Key]):
    """Two queues in the order of arrival: most come and go through a small one; who is asked for there, or comes back
    soon after it went, is let into the main one, from where it goes once it is not asked for any more. (Yang et al.,
    FIFO queues are all you need for cache eviction, SOSP 2023.)"""

    _SMALL = 0.1
    """Of the capacity."""
    _MOST = 3
    """Times that it counts to be asked for."""

    def __init__(self, capacity: int) -> None:
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        """With how often each was asked for."""
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        """Those that have gone from the small queue."""
        self.resize(capacity)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def admit(self, key: Key, *, is_old: bool = False) -> None:
        queue = self._main if key in self._ghosts else self._small
        self._ghosts.pop(key, None)
        queue[key] = 0
        if is_old:
            queue.move_to_end(key, last=False)

    def touch(self, key: Key) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, self._MOST)

    def drop(self, key: Key) -> None:
        queue = self._small if key in self._small else self._main
        del queue[key]

    def evict(self, may_go: MayGo[Key]) -> Key | None:
        looks = _LOOKS + self._MOST * len(self)
        while looks > 0 and len(self):
            looks -= 1
            if self._small and (len(self._small) >= self._num_small or not self._main):
                key, count = self._small.popitem(last=False)
                if count:
                    self._main[key] = 0
                elif may_go(key):
                    self._remember(key)
                    return key
                else:
                    self._small[key] = 0
                continue
            key, count = self._main.popitem(last=False)
            if not count and may_go(key):
                return key
            self._main[key] = max(count - 1, 0)
        return None

    def resize(self, capacity: int) -> None:
        self._num_small = max(int(capacity * self._SMALL), 1)
        self._num_ghosts = max(capacity - self._num_small, 1)
        self._forget()

    def _remember(self, key: Key) -> None:
        self._ghosts[key] = None
        self._forget()

    def _forget(self) -> None:
        while len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)


class TinyLfu(Generic[Key]):
    """Who was asked for least often lately: newcomers pass through a small queue, and whoever leaves it stays only in
    the place of one that is asked for less. How often is counted for keys that are not here as well, in few bits, and
    halved now and then. (Einziger et al., TinyLFU, ACM ToS 2017.)"""

    _WINDOW = 0.01
    """Of the capacity."""
    _MOST = 15
    _SAMPLE = 10
    """Counts after which all are halved, in capacities."""

    def __init__(self, capacity: int) -> None:
        self._window: OrderedDict[Key, None] = OrderedDict()
        self._main: OrderedDict[Key, None] = OrderedDict()
        self._counts: OrderedDict[Key, int] = OrderedDict()
        self._num_counted = 0
        self.resize(capacity)

    def __len__(self) -> int:
        return len(self._window) + len(self._main)

    def admit(self, key: Key, *, is_old: bool = False) -> None:
        if is_old:
            self._main[key] = None
            self._main.move_to_end(key, last=False)
        else:
            self._count(key)
            self._window[key] = None

    def touch(self, key: Key) -> None:
        self._count(key)
        (self._window if key in self._window else self._main).move_to_end(key)

    def drop(self, key: Key) -> None:
        queue = self._window if key in self._window else self._main
        del queue[key]

    def evict(self, may_go: MayGo[Key]) -> Key | None:
        while len(self._window) > self._num_window:
            candidate, _ = self._window.popitem(last=False)
            victim = next((key for key in islice(self._main, _LOOKS) if may_go(key)), None)
            if len(self) + 1 < self._capacity or victim is None:
                self._main[candidate] = None
                continue
            if self._frequency(candidate) > self._frequency(victim) or not may_go(candidate):
                del self._main[victim]
                self._main[candidate] = None
                return victim
            return candidate
        for queue in (self._main, self._window):
            for key in queue:
                if may_go(key):
                    del queue[key]
                    return key
        return None

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_window = max(int(capacity * self._WINDOW), 1)

    def _frequency(self, key: Key) -> int:
        return self._counts.get(key, 0)

    def _count(self, key: Key) -> None:
        """Exactly, of as many keys as four caches hold: the names are here anyway, and a sketch of them would be no
        smaller in Python."""
        self._counts[key] = min(self._counts.get(key, 0) + 1, self._MOST)
        self._counts.move_to_end(key)
        self._num_counted += 1
        if self._num_counted >= self._SAMPLE * self._capacity:
            self._num_counted //= 2
            self._counts = OrderedDict(
                (each, count // 2) for each, count in self._counts.items() if count > 1
            )
        while len(self._counts) > 4 * self._capacity:
            self._counts.popitem(last=False)


EVICTIONS: dict[str, Callable[[int], Eviction[Hashable]]] = {"lru": Lru, "s3fifo": S3Fifo, "tinylfu": TinyLfu}


def new_eviction(name: str, capacity: int) -> Eviction[Hashable]:
    """ConfigError for a name that there is not."""
    make = EVICTIONS.get(name)
    if make is None:
        raise ConfigError(
            f"there is no eviction rule {name!r}",
            key="eviction",
            remedy=f"choose one of {', '.join(EVICTIONS)}",
        )
    return make(capacity)


class TouchFilter(Generic[Key]):
    """Whether something is worth a place that wears out: when it is seen for the second time within a while.

    Sightings fade: each `decay` further ones count one less. Bounded in the keys that it knows.
    """

    def __init__(self, least: int, most_keys: int, decay: int) -> None:
        self._least = least
        self._most_keys = most_keys
        self._decay = decay
        self._seen: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        """How often, and at which sighting of all the last was."""
        self._num_sightings = 0

    def __len__(self) -> int:
        return len(self._seen)

    def sees(self, key: Key) -> bool:
        """One more sighting; whether it is enough."""
        if self._least <= 1:
            return True
        self._num_sightings += 1
        count, at = self._seen.pop(key, (0, self._num_sightings))
        count = max(count - (self._num_sightings - at) // self._decay, 0) + 1
        self._seen[key] = count, self._num_sightings
        if len(self._seen) > self._most_keys:
            self._seen.popitem(last=False)
        return count >= self._least
