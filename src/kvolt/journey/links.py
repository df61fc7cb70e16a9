"""KV transfer speed between prefill and decode workers, learned from handoffs. Pure.

A link's estimate blends its own measurements, weighted by age, with the average of all links. The average decays
towards a default, so a link that was slow once is tried again. One measurement changes the average at most tenfold: a
stalled or lying worker cannot stop all handoffs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.ids import InstanceId
from kvolt.core.request import LinkCosts, Request

_DEFAULT_BYTES_PER_TOKEN = 131_072.0
"""Default until the first handoff: an 8B model in bfloat16."""
_DEFAULT_BYTES_PER_S = 5e9
_DECAY = 0.9
"""Weight of the past against a new measurement."""
_HALF_LIFE_S = 30.0
_AVERAGE_HALF_LIFE_S = 300.0
_MAX_TRANSFER_MS = 600_000.0
"""Longer transfers are ignored; their deadline ends them earlier."""
_MAX_SLOWDOWN = 10.0
"""Measurements slower than this multiple of the average are clipped."""
_MAX_BYTES_PER_TOKEN = 8 << 20
"""Eight times the KV of the largest models in float32."""
_SIZE_DECAY = 0.99
"""Decay per handoff of the largest token size seen, so that a wrong size is corrected."""
_MAX_LINKS = 16_384


class _LinkStats:
    """Transfers measured on one link, or on all."""

    __slots__ = ("at", "num", "num_bytes", "seconds")

    def __init__(self) -> None:
        self.num = self.num_bytes = self.seconds = 0.0
        self.at = -math.inf

    def add(self, num_bytes: float, seconds: float, now: float) -> None:
        self.num = _DECAY * self.num + 1.0
        self.num_bytes = _DECAY * self.num_bytes + num_bytes
        self.seconds = _DECAY * self.seconds + seconds
        self.at = now

    def byte_s(self, average_s: float, now: float) -> float:
        """Seconds per byte. A measurement made now counts as much as the average of all links."""
        weight = self.num * math.exp2((self.at - now) / _HALF_LIFE_S)
        return (weight * self.seconds / self.num_bytes + average_s) / (weight + 1.0)


class KvLinkSpeeds:
    """See the module."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._all = _LinkStats()
        self._links: dict[tuple[InstanceId, InstanceId], _LinkStats] = {}
        """By source and target, most recently measured last."""
        self._from: dict[InstanceId, dict[InstanceId, _LinkStats]] = {}
        self._to: dict[InstanceId, dict[InstanceId, _LinkStats]] = {}
        self._bytes_per_token = 0.0

    def observe(self, request: Request, stages: StageTimes, source: InstanceId, target: InstanceId) -> None:
        """Record a handoff as measured by the target."""
        num_bytes, took_ms = stages.transfer_bytes or 0, stages.transfer_ms or 0.0
        if num_bytes <= 0 or not 0.0 < took_ms < _MAX_TRANSFER_MS or not request.num_prompt_tokens:
            return
        seconds, now = took_ms / 1e3, self._now()
        if self._all.num:
            seconds = min(seconds, _MAX_SLOWDOWN * num_bytes * self._average_s(now))
        # A partial transfer underestimates the bytes per token: keep the maximum.
        size = min(num_bytes / request.num_prompt_tokens, _MAX_BYTES_PER_TOKEN)
        self._bytes_per_token = max(size, _SIZE_DECAY * self._bytes_per_token)
        self._all.add(num_bytes, seconds, now)
        link = self._links.pop((source, target), None) or _LinkStats()
        link.add(num_bytes, seconds, now)
        self._links[source, target] = link
        self._from.setdefault(source, {})[target] = link
        self._to.setdefault(target, {})[source] = link
        if len(self._links) > _MAX_LINKS:
            self._remove(*next(iter(self._links)))

    def costs_from(self, source: InstanceId) -> LinkCosts:
        """Costs for routing to a decode worker."""
        return self._costs(self._from.get(source, {}))

    def costs_to(self, target: InstanceId) -> LinkCosts:
        """Costs for routing to a prefill worker."""
        return self._costs(self._to.get(target, {}))

    def _costs(self, links: dict[InstanceId, _LinkStats]) -> LinkCosts:
        now = self._now()
        average_s = self._average_s(now)
        size = self._bytes_per_token or _DEFAULT_BYTES_PER_TOKEN
        by_peer = {peer: size * link.byte_s(average_s, now) for peer, link in links.items()}
        return LinkCosts(token_s=size * average_s, by_peer=by_peer)

    def _average_s(self, now: float) -> float:
        """Seconds per byte over all links."""
        if not self._all.num:
            return 1.0 / _DEFAULT_BYTES_PER_S
        share = math.exp2((self._all.at - now) / _AVERAGE_HALF_LIFE_S)
        return share * self._all.seconds / self._all.num_bytes + (1.0 - share) / _DEFAULT_BYTES_PER_S

    def _remove(self, source: InstanceId, target: InstanceId) -> None:
        del self._links[source, target]
        for ends, near, far in ((self._from, source, target), (self._to, target, source)):
            del ends[near][far]
            if not ends[near]:
                del ends[near]


def with_link_costs(request: Request, costs: LinkCosts | None) -> Request:
    """The request with link costs for a router."""
    if costs is None:
        return request
    return msgspec.structs.replace(
        request, routing=msgspec.structs.replace(request.routing, link_costs=costs)
    )
