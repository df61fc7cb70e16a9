"""Prefill workers whose KV the decode workers of a model could not take: they are not asked for prompts.

Workers see to that themselves when they register (`worker.kv_compatibility`); this is for those that missed each
other then.
Worked out once per change of the workers, not once per request.
"""

from __future__ import annotations

import logging
from collections import Counter

from kvolt.core.card import KvSlabs
from kvolt.core.ids import InstanceId
from kvolt.journey.prefill import Leg
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.worker.kv_compatibility import slabs_of, why_unfit

log = logging.getLogger(__name__)


class KvPairs:
    """Of one model's prefill and decode workers, for as long as both clients live."""

    def __init__(self, prefill: EndpointClient, decode: EndpointClient) -> None:
        self._prefill = prefill
        self._decode = decode
        self._seen: tuple[list[Instance], list[Instance]] = ([], [])
        """Candidates that `_unfit` was worked out from: a client makes new lists when they change."""
        self._unfit: frozenset[InstanceId] = frozenset()
        self._told: set[InstanceId] = set()
        self._slabs: dict[InstanceId, tuple[Instance, KvSlabs | None]] = {}
        """As they were read from each registration."""

    def unfit(self) -> frozenset[InstanceId]:
        """Prefill workers that do not fit half of the decode workers: a prompt is computed before, or while, it is
        decided who answers it, and who cannot take its KV computes it again."""
        prefill, decode = seen = self._prefill.candidates(), self._decode.candidates()
        if prefill is not self._seen[0] or decode is not self._seen[1]:
            self._seen = seen
            self._unfit = self._look(prefill, decode)
        return self._unfit

    def _look(self, prefill: list[Instance], decode: list[Instance]) -> frozenset[InstanceId]:
        self._slabs = {each.id: (each, self._slabs_of(each)) for each in (*prefill, *decode)}
        self._told &= {each.id for each in self._prefill.instances()}
        one_of_each = {self._slabs[each.id][1]: each for each in decode}  # most are alike
        numbers = Counter(self._slabs[each.id][1] for each in decode)
        found: set[InstanceId] = set()
        for instance in prefill:
            reasons = {theirs: why_unfit(self._slabs[instance.id][1], theirs) for theirs in one_of_each}
            misfits = [theirs for theirs, reason in reasons.items() if reason is not None]
            if misfits and 2 * sum(numbers[theirs] for theirs in misfits) > len(decode):
                found.add(instance.id)
                self._tell(instance, one_of_each[misfits[0]], reasons[misfits[0]] or "")
        return frozenset(found)

    def _slabs_of(self, instance: Instance) -> KvSlabs | None:
        known, slabs = self._slabs.get(instance.id, (None, None))
        return slabs if known is instance else slabs_of(instance)

    def _tell(self, prefill: Instance, decode: Instance, reason: str) -> None:
        """Once for each."""
        if prefill.id not in self._told:
            self._told.add(prefill.id)
            log.error(
                "the prefill worker %s (%s) is asked for no prompts: it cannot exchange KV with the decode worker "
                "%s (%s): %s",
                prefill.process,
                prefill.id,
                decode.process,
                decode.id,
                reason,
            )


def paired(leg: Leg, decode: EndpointClient) -> Leg:
    """The leg to prefill workers, for the prompts of these decode workers."""
    return Leg(leg.router, leg.client, KvPairs(leg.client, decode).unfit)
