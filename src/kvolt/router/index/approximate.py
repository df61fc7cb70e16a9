"""ApproximateHolders: what workers hold as far as this router's own decisions tell. Pure: time comes with each call.

For workers that tell no KV events, or whose events are of no use. A prompt that a worker has computed is held there
for a while (`ttl_s`, as long as Dynamo's), unless the worker has been sent more since than it has room for. Entries are
made when an answer begins: until then `expected` knows of the prompt, and one that never began was not computed. The
blocks of answers are not known here: nobody hashes what an engine says.

Nothing is timed block by block. A place has a slot of the index for each of a few generations; what is used goes, as a
whole, into the newest, and the oldest is emptied when a new one begins. So an entry lives between three quarters of
its time and all of it, a renewal is a store, and expiry is one clear of many blocks:

    generation   0         1         2         3 (the newest)
                 emptied   kept      kept      computed and renewed blocks go here
                 next

A generation also ends when it has a third of the worker's blocks: an engine that forgets what was used longest ago
holds about what the generations hold together.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.ids import InstanceId
from kvolt.router.index.prefix_index import MAX_SLOTS, BlockIndex
from kvolt.router.index.prefix_index_python import Hashes

GENERATIONS = 4
MAX_PLACES = MAX_SLOTS // GENERATIONS

DEFAULT_TTL_S = 120.0
DEFAULT_MAX_BYTES = 256 << 20


class ApproximateOptions(msgspec.Struct, frozen=True, kw_only=True):
    ttl_s: float = DEFAULT_TTL_S
    """For which a block counts as held after its last use."""
    max_bytes: int = DEFAULT_MAX_BYTES
    """Beyond it those go that were used longest ago, of one prompt the deepest first."""


@dataclass(slots=True)
class _Place:
    """One rank of a worker."""

    number: int
    most_blocks: int
    """Of one generation; 0 where the worker did not say what it has room for."""
    newest: int = 0
    ends_at: float | None = None
    """When the newest generation ends; None while the place is empty."""

    def slot(self, generation: int) -> int:
        return self.number * GENERATIONS + generation


class ApproximateHolders:
    """See the module. A place's slot, as `find` counts them, is its number."""

    def __init__(self, options: ApproximateOptions | None = None) -> None:
        self._options = options or ApproximateOptions()
        self._generation_s = self._options.ttl_s / GENERATIONS
        self._index = BlockIndex(self._options.max_bytes)
        self._places: dict[tuple[InstanceId, int], _Place] = {}
        self._by_number: dict[int, _Place] = {}
        self._num_slots = 0
        self._ends: list[tuple[float, int]] = []
        """When which place's newest generation ends, as a heap. One that has ended early is passed over."""

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    @property
    def num_entries(self) -> int:
        """Blocks at workers; one that was used again lately may count up to once in each generation."""
        return self._index.num_pairs

    @property
    def num_places(self) -> int:
        return len(self._places)

    @property
    def num_slots(self) -> int:
        """How many `find` answers for: slots are never fewer than they were."""
        return self._num_slots

    @property
    def places(self) -> list[tuple[InstanceId, int]]:
        return list(self._places)

    # --- places

    def add(self, instance_id: InstanceId, dp_rank: int = 0, total_blocks: int = 0) -> bool:
        """Whether there was room: a known place is no error, one beyond MAX_PLACES is left out."""
        key = (instance_id, dp_rank)
        if key in self._places:
            return True
        if len(self._places) == MAX_PLACES:
            return False
        # Slots come and go by generations only, and the lowest that are free first: a place's lie side by side.
        slots = [self._index.add_worker() for _ in range(GENERATIONS)]
        most = -(-total_blocks // (GENERATIONS - 1))
        place = self._places[key] = _Place(slots[0] // GENERATIONS, most)
        self._by_number[place.number] = place
        self._num_slots = max(self._num_slots, place.number + 1)
        return True

    def drop(self, instance_id: InstanceId, dp_rank: int = 0) -> None:
        """The worker is gone, or is known exactly from now on. Not an error for one that is not here."""
        place = self._places.pop((instance_id, dp_rank), None)
        if place is None:
            return
        del self._by_number[place.number]
        for generation in range(GENERATIONS):
            self._index.remove_worker(place.slot(generation))

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        """None where nothing is counted."""
        place = self._places.get((instance_id, dp_rank))
        return None if place is None else place.number

    # --- blocks

    def computed(self, instance_id: InstanceId, dp_rank: int, hashes: Hashes, now: float) -> None:
        """The worker has these blocks of a prompt, from the first on, since this moment; used or new."""
        place = self._places.get((instance_id, dp_rank))
        if place is None or not len(hashes):
            return
        self._end_generations(now)
        if place.ends_at is None:
            self._begin(place, now)
        self._index.store(place.slot(place.newest), hashes)
        num_newest, _ = self._index.digest(place.slot(place.newest))
        if place.most_blocks and num_newest >= place.most_blocks:
            self._turn(place)
            self._begin(place, now)

    def find(self, hashes: Hashes, now: float) -> npt.NDArray[np.int32]:
        """How many blocks of a prompt, from the first on, each place holds; by the places' slots."""
        self._end_generations(now)
        if not self._num_slots:
            return np.zeros(0, dtype=np.int32)
        # A prompt went into one generation as a whole, so its longest part is in one of them.
        found: npt.NDArray[np.int32] = self._index.find(hashes).reshape(-1, GENERATIONS).max(axis=1)
        return found

    # --- generations

    def _begin(self, place: _Place, now: float) -> None:
        place.ends_at = now + self._generation_s
        heappush(self._ends, (place.ends_at, place.number))

    def _turn(self, place: _Place) -> None:
        place.newest = (place.newest + 1) % GENERATIONS
        self._index.clear(place.slot(place.newest))

    def _end_generations(self, now: float) -> None:
        """Of every place that has something: at most once for each generation, however late this is called."""
        while self._ends and self._ends[0][0] <= now:
            ended_at, number = heappop(self._ends)
            place = self._by_number.get(number)
            if place is None or place.ends_at != ended_at:
                continue
            self._turn(place)
            if any(self._index.digest(place.slot(each))[0] for each in range(GENERATIONS)):
                self._begin(place, ended_at)
            else:
                place.ends_at = None

    def check_integrity(self) -> None:
        """AssertionError if its parts disagree. For tests: costs all of the index."""
        self._index.check_integrity()
        live = {(place.ends_at, place.number) for place in self._by_number.values()}
        for place in self._by_number.values():
            is_empty = not any(self._index.digest(place.slot(each))[0] for each in range(GENERATIONS))
            if not is_empty and (place.ends_at, place.number) not in self._ends:
                raise AssertionError("a place with blocks has no end")
        if len(live) != len(self._places):
            raise AssertionError("two places share a number")
