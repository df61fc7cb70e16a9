"""Overlaps: how much of a prompt each candidate has, on its device, below it, or on the way there. Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.kv_events import TIER_LEVEL, Tier
from kvolt.core.latency import Floats
from kvolt.core.request import Request
from kvolt.router.index.lookup import Lookup, Lookups
from kvolt.router.index.pending_blocks import ExpectedBlocks
from kvolt.router.place import Place
from kvolt.router.policy.roster import Field
from kvolt.runtime.config.router_settings import RouterSettings


class Holders(Protocol):
    """Which worker holds which blocks."""

    @property
    def slots_version(self) -> int:
        """Another one whenever somebody's slot has changed."""
        ...

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """How many blocks of a prompt, from the first on, each slot holds on its device."""
        ...

    def find_below(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        """The same by tier, the device first, each with the faster ones; None where nobody tells of one below it."""
        ...

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        """None where nothing is known of it."""
        ...


class NoHolders:
    """Nobody holds anything: whoever has no index routes by load."""

    slots_version = 0

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return np.zeros(0, dtype=np.int32)

    def find_below(self, hashes: tuple[int, ...]) -> None:
        return None

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        return None


class Overlap(NamedTuple):
    """Blocks of each candidate, from the prompt's first on."""

    worth: Floats
    """That need not be computed by then. One below the device counts less by what it takes to bring it."""
    held: Floats
    """On its device now."""
    reach: Floats
    """In all tiers of its own."""
    roomed: Floats
    """That take no more room on its device by then."""
    found: npt.NDArray[np.int32] | None
    """The reach of everybody, by the slots of the holders."""


class Overlaps:
    """See the module."""

    def __init__(self, holders: Holders, expected: ExpectedBlocks, settings: RouterSettings) -> None:
        self._holders = holders
        self._expected = expected
        self._below = (
            (TIER_LEVEL[Tier.HOST], settings.host_weight),
            (TIER_LEVEL[Tier.DISK], settings.disk_weight),
        )
        """Tiers of a worker's own, and what a block there counts. What all reach alike decides nothing."""
        self._asked: tuple[tuple[Place, ...], int, Lookup] | None = None

    def of(self, request: Request, field: Field) -> Overlap:
        hashes = usable_hashes(request)
        if not hashes:
            return Overlap(field.nothing, field.nothing, field.nothing, field.nothing, None)
        lookups = self._lookups(field)
        below = self._holders.find_below(hashes)
        if below is None:
            found = self._holders.find(hashes)
            held = reach = worth = lookups.held.read(found)
        else:
            held = reach = worth = lookups.held.read(below[0])
            for level, weight in self._below:
                found = below[level]
                deeper = lookups.held.read(found)
                worth = worth + weight * (deeper - reach)
                reach = deeper
        if request.handoff is not None or request.rendezvous is not None:
            # It fetches what it lacks, wherever it goes.
            all_of_it = np.full(len(field.places), float(len(hashes)))
            return Overlap(all_of_it, held, reach, all_of_it, found)
        soon, roomed = self._expected.find(hashes), held
        if soon is not None:
            coming = lookups.expected.read(soon)
            worth, roomed = np.maximum(worth, coming), np.maximum(held, coming)
        return Overlap(worth, held, reach, roomed, found)

    def farthest(self, overlap: Overlap, givers: tuple[Place, ...]) -> tuple[Place | None, int]:
        """Who of these has most of the prompt, and how much. Give the same tuple as long as it is the same."""
        if overlap.found is None or not givers:
            return None, 0
        version = self._holders.slots_version
        if self._asked is None or self._asked[0] is not givers or self._asked[1] != version:
            lookup = Lookup(self._holders.slot_of(place.instance_id, place.dp_rank) for place in givers)
            self._asked = (givers, version, lookup)
        reach = self._asked[2].read(overlap.found)
        index = int(reach.argmax())
        return givers[index], int(reach[index])

    def _lookups(self, field: Field) -> Lookups:
        version = self._holders.slots_version
        if field.lookups is None or field.lookups.version != version:
            field.lookups = Lookups(
                version,
                Lookup(self._holders.slot_of(place.instance_id, place.dp_rank) for place in field.places),
                Lookup(self._expected.slot_of(row) for row in field.rows.tolist()),
            )
        return field.lookups


def usable_hashes(request: Request) -> tuple[SequenceHash, ...]:
    """Less the last block where it is all there: an engine computes the last token anyway."""
    return request.sequence_hashes[: (request.num_given_tokens - 1) // (request.block_size or 1)]
