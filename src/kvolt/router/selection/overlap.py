"""OverlapFinder: cached prefix of a prompt at each candidate: device, lower tiers and pending blocks. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvolt.core.kv_events import TIER_LEVEL, Tier
from kvolt.core.request import Request
from kvolt.router.choice import usable_hashes
from kvolt.router.index.pending_blocks import PendingBlocks
from kvolt.router.index.prefix_index import PrefixIndex
from kvolt.router.policy.cost_model import Floats
from kvolt.router.selection.lookup import SlotLookup, SlotLookups
from kvolt.router.selection.roster import CandidateSet
from kvolt.router.worker_rank import WorkerDpRank
from kvolt.runtime.config.router_settings import RouterSettings


class Overlap(NamedTuple):
    """Leading blocks of the prompt, by candidate."""

    effective_blocks: Floats
    """Blocks that need no computation. A block below the device counts less by its onboarding cost."""
    device_blocks: Floats
    """Blocks on the device now."""
    local_blocks: Floats
    """Blocks in all tiers of the worker."""
    resident_blocks: Floats
    """Blocks that will need no further space on the device."""
    blocks_by_slot: npt.NDArray[np.int32] | None
    """Local blocks of all workers by index slot, not only of the candidates."""


class OverlapFinder:
    """See the module."""

    def __init__(
        self, prefix_index: PrefixIndex, pending_blocks: PendingBlocks, settings: RouterSettings
    ) -> None:
        self._prefix_index = prefix_index
        self._pending_blocks = pending_blocks
        self._lower_tiers = (
            (TIER_LEVEL[Tier.HOST], settings.host_weight),
            (TIER_LEVEL[Tier.DISK], settings.disk_weight),
        )
        """Tiers of each worker and the weight of a block there. A tier shared by all workers would not affect
        the choice."""
        self._source_lookup: tuple[tuple[WorkerDpRank, ...], int, SlotLookup] | None = None

    def overlap_of(self, request: Request, candidates: CandidateSet) -> Overlap:
        hashes = usable_hashes(request)
        if not hashes:
            return Overlap(candidates.zeros, candidates.zeros, candidates.zeros, candidates.zeros, None)
        lookups = self._lookups(candidates)
        by_tier = self._prefix_index.find_local_tiers(hashes)
        if by_tier is None:
            blocks_by_slot = self._prefix_index.find(hashes)
            device = local = effective = lookups.prefix.read(blocks_by_slot)
        else:
            device = local = effective = lookups.prefix.read(by_tier[0])
            for level, weight in self._lower_tiers:
                blocks_by_slot = by_tier[level]
                deeper = lookups.prefix.read(blocks_by_slot)
                effective = effective + weight * (deeper - local)
                local = deeper
        if request.handoff is not None or request.rendezvous is not None:
            # It fetches missing blocks wherever it goes.
            whole_prompt = np.full(len(candidates.worker_ranks), float(len(hashes)))
            return Overlap(whole_prompt, device, local, whole_prompt, blocks_by_slot)
        pending, resident = self._pending_blocks.find(hashes), device
        if pending is not None:
            pending_depth = lookups.pending.read(pending)
            effective, resident = np.maximum(effective, pending_depth), np.maximum(device, pending_depth)
        return Overlap(effective, device, local, resident, blocks_by_slot)

    def best_source(
        self, overlap: Overlap, sources: tuple[WorkerDpRank, ...]
    ) -> tuple[WorkerDpRank | None, int]:
        """The source with the longest prefix, and its length. Pass the same tuple while the sources are the same."""
        if overlap.blocks_by_slot is None or not sources:
            return None, 0
        version = self._prefix_index.slots_version
        if (
            self._source_lookup is None
            or self._source_lookup[0] is not sources
            or self._source_lookup[1] != version
        ):
            lookup = SlotLookup(
                self._prefix_index.slot_of(rank.instance_id, rank.dp_rank) for rank in sources
            )
            self._source_lookup = (sources, version, lookup)
        local = self._source_lookup[2].read(overlap.blocks_by_slot)
        index = int(local.argmax())
        return sources[index], int(local[index])

    def _lookups(self, candidates: CandidateSet) -> SlotLookups:
        version = self._prefix_index.slots_version
        if candidates.lookups is None or candidates.lookups.version != version:
            candidates.lookups = SlotLookups(
                version,
                SlotLookup(
                    self._prefix_index.slot_of(rank.instance_id, rank.dp_rank)
                    for rank in candidates.worker_ranks
                ),
                SlotLookup(self._pending_blocks.slot_of(row) for row in candidates.rows.tolist()),
            )
        return candidates.lookups
