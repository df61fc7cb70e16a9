"""MixedHolders: what each worker holds by the best that there is of it: its events, or our own decisions.

Exact where a worker's KV events are taken and agree with what it reports; approximate where it tells none, where its
events are of no use (another block size, another hash scheme), where they turned out wrong, or for all if so set. One
router has both kinds at once. Owns who is which, and tells of every change in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvolt.core.card import EngineInfo
from kvolt.core.ids import InstanceId
from kvolt.router.index.approximate import MAX_PLACES, ApproximateHolders, ApproximateOptions
from kvolt.router.index.health import Promise, TrustBook, TrustChange, TrustOptions
from kvolt.router.place import Place
from kvolt.router.policy.roster import ranks_of

if TYPE_CHECKING:
    from kvolt.router.policy.selector import Choice

log = logging.getLogger(__name__)

_NOTHING: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class ExactHolders(Protocol):
    """An index that is fed by events."""

    @property
    def slots_version(self) -> int: ...

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]: ...

    def find_below(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None: ...

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None: ...

    def resync(self, instance_id: InstanceId) -> None:
        """Ask the worker for all that it holds."""
        ...


class MixedHolders:
    """See the module: Holders of a Selector, and its Watch."""

    def __init__(
        self,
        exact: ExactHolders | None,
        now: Callable[[], float],
        options: ApproximateOptions | None = None,
        trust: TrustOptions | None = None,
    ) -> None:
        """Without an exact index all are approximate."""
        self._exact = exact
        self._now = now
        self.approximate = ApproximateHolders(options)
        self.trust = TrustBook(trust)
        self._infos: Mapping[InstanceId, EngineInfo | None] = {}
        self._exact_version = -1
        self._own_version = 0
        self._is_full = False
        self._promises: dict[int, Promise] = {}
        """By ticket, what the index says of workers that it is not asked about."""

    # --- Holders

    @property
    def slots_version(self) -> int:
        if self._exact is not None and self._exact.slots_version != self._exact_version:
            self._sort_out()
        return self._own_version

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        exact = _NOTHING if self._exact is None else self._exact.find(hashes)
        if not self.approximate.num_slots:
            return exact
        return np.concatenate([self.approximate.find(hashes, self._now()), exact])

    def find_below(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        """Of who tells nothing no more is known than what is on its device."""
        exact = None if self._exact is None else self._exact.find_below(hashes)
        if exact is None or not self.approximate.num_slots:
            return exact
        guessed = self.approximate.find(hashes, self._now())
        return np.concatenate([np.broadcast_to(guessed, (len(exact), len(guessed))), exact], axis=1)

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        """The approximate places come first."""
        approximate = self.approximate.slot_of(instance_id, dp_rank)
        if approximate is not None:
            return approximate
        exact = self._exact_slot(instance_id, dp_rank)
        return None if exact is None else exact + self.approximate.num_slots

    # --- Watch

    def workers(self, infos: Mapping[InstanceId, EngineInfo | None]) -> None:
        for instance_id in self._infos.keys() - infos.keys():
            self.trust.drop(instance_id)
        self._infos = dict(infos)
        self._sort_out()

    def booked(self, ticket: int, choice: Choice) -> None:
        """The index goes on to be held against the reports of those that it is not believed about."""
        place = choice.place
        slot = self._exact_slot(*place)
        if self._exact is not None and slot is not None and not self.trust.is_trusted(place.instance_id):
            held = int(self._exact.find(choice.usable_hashes)[slot])
            self._promises[ticket] = _promise(held, choice)

    def begun(self, ticket: int, choice: Choice, cached_tokens: int | None, now: float) -> None:
        request, place = choice.request, choice.place
        if cached_tokens is not None and self._exact_slot(*place) is not None:
            promise = self._promises.get(ticket) or _promise(choice.held_blocks, choice)
            cached_blocks = cached_tokens // (request.block_size or 1)
            self._judge(place, promise, cached_blocks, now)
        self.approximate.computed(*place, request.sequence_hashes, now)

    def freed(self, ticket: int) -> None:
        self._promises.pop(ticket, None)

    # ---

    def is_approximate(self, instance_id: InstanceId) -> bool:
        """Of a known worker."""
        info = self._infos.get(instance_id)
        return any(self.approximate.slot_of(instance_id, rank) is not None for rank in ranks_of(info))

    def _exact_slot(self, instance_id: InstanceId, dp_rank: int) -> int | None:
        return None if self._exact is None else self._exact.slot_of(instance_id, dp_rank)

    def _judge(self, place: Place, promise: Promise, cached_blocks: int, now: float) -> None:
        change = self.trust.report(place.instance_id, promise, cached_blocks, now)
        if change is TrustChange.FLAGGED:
            log.warning(
                "%s reports other cached tokens than its KV events promise: it is asked for all that it holds, and"
                " routed to by our own decisions until they agree (is its engine's prefix cache on?)",
                place.instance_id,
            )
            assert self._exact is not None
            self._exact.resync(place.instance_id)
        elif change is TrustChange.CLEARED:
            log.info("the KV events of %s agree with its reports again", place.instance_id)
        if change is not None:
            self._sort_out()

    def _sort_out(self) -> None:
        """Who is held exactly and who is not."""
        self._exact_version = -1 if self._exact is None else self._exact.slots_version
        self._own_version += 1
        wanted = {
            Place(instance_id, rank): 0 if info is None else info.capacity.kv_total_blocks
            for instance_id, info in self._infos.items()
            for rank in ranks_of(info)
            if self._exact_slot(instance_id, rank) is None or not self.trust.is_trusted(instance_id)
        }
        for key in self.approximate.places:
            if key not in wanted:
                self.approximate.drop(*key)
        has_room = [self.approximate.add(*place, total_blocks=room) for place, room in sorted(wanted.items())]
        if not all(has_room) and not self._is_full:
            log.warning(
                "there is room for %d workers without KV events: the others are routed to by load alone",
                MAX_PLACES,
            )
        self._is_full = not all(has_room)


def _promise(held: int, choice: Choice) -> Promise:
    """More than its device has may be there by then: on its way, or, where there are tiers, brought."""
    most = len(choice.request.sequence_hashes) if choice.is_tiered else choice.overlap_blocks
    return Promise(held, max(held, most))
