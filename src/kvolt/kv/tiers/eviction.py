"""Eviction policies of tiers. Pure.

Each keeps an order of eviction candidates by its own access history. `evict` checks each candidate with `can_evict`;
candidates that are being read are skipped. `docs/tiers.md` compares their hit rates on traces with the optimum.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from kvolt.core.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)
CanEvict = Callable[[Key], bool]

_MAX_SCAN = 256
"""Limit on consecutive candidates that cannot be evicted."""


class Eviction(Protocol[Key]):
    """See the module. A key is a candidate from `admit` until `drop` or until `evict` returns it."""

    def __len__(self) -> int: ...

    def admit(self, key: Key, *, is_old: bool = False) -> None:
        """Add a candidate; `is_old`: at the eviction end of the order."""
        ...

    def touch(self, key: Key) -> None:
        """Record an access."""
        ...

    def drop(self, key: Key) -> None:
        """Remove a candidate that was not evicted."""
        ...

    def evict(self, can_evict: CanEvict[Key]) -> Key | None:
        """Remove and return the next candidate; None if none can be evicted."""
        ...

    def resize(self, capacity: int) -> None:
        """Change the capacity of the cache."""
        ...


class Lru(Generic[Key]):
    """Least recently used."""

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

    def evict(self, can_evict: CanEvict[Key]) -> Key | None:
        for key in self._order:
            if can_evict(key):
                del self._order[key]
                return key
        return None

    def resize(self, capacity: int) -> None:
        pass


class S3Fifo(Generic[Key]):
    """S3-FIFO: a small and a main queue. Keys accessed in the small queue, or readmitted soon after eviction from it,
    move to the main queue and are evicted from there once no longer accessed. (Yang et al., FIFO queues are all you
    need for cache eviction, SOSP 2023.)"""

    _SMALL = 0.1
    """Share of the capacity."""
    _MAX_COUNT = 3
    """Accesses counted per key."""

    def __init__(self, capacity: int) -> None:
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        """Access count by key."""
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        """Keys recently evicted from the small queue."""
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
        queue[key] = min(queue[key] + 1, self._MAX_COUNT)

    def drop(self, key: Key) -> None:
        queue = self._small if key in self._small else self._main
        del queue[key]

    def evict(self, can_evict: CanEvict[Key]) -> Key | None:
        num_steps = _MAX_SCAN + self._MAX_COUNT * len(self)
        while num_steps > 0 and len(self):
            num_steps -= 1
            if self._small and (len(self._small) >= self._num_small or not self._main):
                key, count = self._small.popitem(last=False)
                if count:
                    self._main[key] = 0
                elif can_evict(key):
                    self._remember(key)
                    return key
                else:
                    self._small[key] = 0
                continue
            key, count = self._main.popitem(last=False)
            if not count and can_evict(key):
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
    """W-TinyLFU: new keys pass through a small window; a key that leaves it replaces the next victim only if accessed
    more often. Access counts are small, include absent keys and are halved periodically. (Einziger et al., TinyLFU, ACM
    ToS 2017.)"""

    _WINDOW = 0.01
    """Share of the capacity."""
    _MAX_COUNT = 15
    _SAMPLE = 10
    """Accesses between halvings, as a multiple of the capacity."""

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

    def evict(self, can_evict: CanEvict[Key]) -> Key | None:
        while len(self._window) > self._num_window:
            candidate, _ = self._window.popitem(last=False)
            victim = next((key for key in islice(self._main, _MAX_SCAN) if can_evict(key)), None)
            if len(self) + 1 < self._capacity or victim is None:
                self._main[candidate] = None
                continue
            if self._frequency(candidate) > self._frequency(victim) or not can_evict(candidate):
                del self._main[victim]
                self._main[candidate] = None
                return victim
            return candidate
        for queue in (self._main, self._window):
            for key in queue:
                if can_evict(key):
                    del queue[key]
                    return key
        return None

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_window = max(int(capacity * self._WINDOW), 1)

    def _frequency(self, key: Key) -> int:
        return self._counts.get(key, 0)

    def _count(self, key: Key) -> None:
        """Exact counts for up to four times the capacity; a sketch would not be smaller in Python."""
        self._counts[key] = min(self._counts.get(key, 0) + 1, self._MAX_COUNT)
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
    """ConfigError for an unknown name."""
    policy = EVICTIONS.get(name)
    if policy is None:
        raise ConfigError(
            f"unknown eviction policy {name!r}",
            key="eviction",
            remedy=f"choose one of {', '.join(EVICTIONS)}",
        )
    return policy(capacity)


class TouchFilter(Generic[Key]):
    """Admits a key once it was seen `min_touches` times recently, to limit writes.

    Each `decay` sightings of any keys reduce a key's count by one. Bounded number of keys.
    """

    def __init__(self, min_touches: int, max_keys: int, decay: int) -> None:
        self._min_touches = min_touches
        self._max_keys = max_keys
        self._decay = decay
        self._seen: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        """Count, and global number of the last sighting, by key."""
        self._num_sightings = 0

    def __len__(self) -> int:
        return len(self._seen)

    def record_sighting(self, key: Key) -> bool:
        """Count a sighting; return whether the key is admitted."""
        if self._min_touches <= 1:
            return True
        self._num_sightings += 1
        count, at = self._seen.pop(key, (0, self._num_sightings))
        count = max(count - (self._num_sightings - at) // self._decay, 0) + 1
        self._seen[key] = count, self._num_sightings
        if len(self._seen) > self._max_keys:
            self._seen.popitem(last=False)
        return count >= self._min_touches
