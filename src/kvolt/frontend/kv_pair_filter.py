"""Excludes prefill workers whose KV layout is incompatible with the decode workers of a model.

Workers check compatibility when they register (`worker.kv.compatibility`); this covers workers that missed each other
then. Evaluated once per change of the workers, not per request.
"""

from __future__ import annotations

import logging
from collections import Counter

from kvolt.core.card import KvSlabs
from kvolt.core.endpoints import Instance
from kvolt.core.ids import InstanceId
from kvolt.journey.prefill import RoleTarget
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.worker.kv.compatibility import find_mismatch, slabs_of

log = logging.getLogger(__name__)


class KvPairFilter:
    """Compatibility of one model's prefill and decode workers."""

    def __init__(self, prefill: EndpointClient, decode: EndpointClient) -> None:
        self._prefill = prefill
        self._decode = decode
        self._candidates: tuple[list[Instance], list[Instance]] = ([], [])
        """Candidate lists for which `_incompatible` was computed; a client creates new lists on a change."""
        self._incompatible: frozenset[InstanceId] = frozenset()
        self._logged: set[InstanceId] = set()
        self._slabs: dict[InstanceId, tuple[Instance, KvSlabs | None]] = {}
        """Decoded layout of each registration."""

    def incompatible_prefill(self) -> frozenset[InstanceId]:
        """Prefill workers incompatible with more than half of the decode workers.

        The decode worker is selected after or during prefill; if it cannot import the KV it prefills again.
        """
        prefill, decode = candidates = self._prefill.candidates(), self._decode.candidates()
        if prefill is not self._candidates[0] or decode is not self._candidates[1]:
            self._candidates = candidates
            self._incompatible = self._find_incompatible(prefill, decode)
        return self._incompatible

    def _find_incompatible(self, prefill: list[Instance], decode: list[Instance]) -> frozenset[InstanceId]:
        self._slabs = {each.id: (each, self._slabs_of(each)) for each in (*prefill, *decode)}
        self._logged &= {each.id for each in self._prefill.instances()}
        decode_by_slabs = {self._slabs[each.id][1]: each for each in decode}  # most are alike
        counts = Counter(self._slabs[each.id][1] for each in decode)
        incompatible: set[InstanceId] = set()
        for instance in prefill:
            reasons = {
                decode_slabs: find_mismatch(self._slabs[instance.id][1], decode_slabs)
                for decode_slabs in decode_by_slabs
            }
            mismatched = [decode_slabs for decode_slabs, reason in reasons.items() if reason is not None]
            if mismatched and 2 * sum(counts[decode_slabs] for decode_slabs in mismatched) > len(decode):
                incompatible.add(instance.id)
                self._log_once(instance, decode_by_slabs[mismatched[0]], reasons[mismatched[0]] or "")
        return frozenset(incompatible)

    def _slabs_of(self, instance: Instance) -> KvSlabs | None:
        known, slabs = self._slabs.get(instance.id, (None, None))
        return slabs if known is instance else slabs_of(instance)

    def _log_once(self, prefill: Instance, decode: Instance, reason: str) -> None:
        if prefill.id not in self._logged:
            self._logged.add(prefill.id)
            log.error(
                "prefill worker excluded: process=%s id=%s cannot exchange KV with decode process=%s id=%s: %s",
                prefill.process,
                prefill.id,
                decode.process,
                decode.id,
                reason,
            )


def with_kv_filter(prefill_target: RoleTarget, decode: EndpointClient) -> RoleTarget:
    """Exclude prefill workers that are incompatible with these decode workers."""
    return RoleTarget(
        prefill_target.router,
        prefill_target.client,
        KvPairFilter(prefill_target.client, decode).incompatible_prefill,
    )
