"""Links: how fast KV moves between the workers that compute prompts and those that answer. Pure.

Learned from handoffs, for each pair of workers. A link counts by its own measurements, the older they are the less, and
for the rest by the average of all links, which itself fades towards a guess: what was slow once is tried again. One
measurement moves the average at most tenfold, so that a stalled or lying worker does not end all handoffs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.ids import InstanceId
from kvolt.core.request import LinkCosts, Request

_GUESSED_BYTES_PER_TOKEN = 131_072.0
"""An 8B model's in bfloat16; until the first handoff."""
_GUESSED_BYTES_PER_S = 5e9
_FADING = 0.9
"""What a measurement counts for once another one is there."""
_HALF_LIFE_S = 30.0
_AVERAGE_HALF_LIFE_S = 300.0
_MOST_MS = 600_000.0
"""No transfer takes longer: its deadline ends it before."""
_MOST_SLOWER = 10.0
"""Than the average: what is slower counts as this."""
_MOST_BYTES_PER_TOKEN = 8 << 20
"""Eight times that of the largest models in float32."""
_SIZE_FADING = 0.99
"""Of the size of a token with each handoff, so that a wrong size is corrected."""
_MAX_LINKS = 16_384


class _Measured:
    """What was measured on one link, or on all."""

    __slots__ = ("at", "num", "num_bytes", "seconds")

    def __init__(self) -> None:
        self.num = self.num_bytes = self.seconds = 0.0
        self.at = -math.inf

    def add(self, num_bytes: float, seconds: float, now: float) -> None:
        self.num = _FADING * self.num + 1.0
        self.num_bytes = _FADING * self.num_bytes + num_bytes
        self.seconds = _FADING * self.seconds + seconds
        self.at = now

    def byte_s(self, average_s: float, now: float) -> float:
        """Seconds for a byte; a measurement made now counts as much as the average of all links."""
        weight = self.num * math.exp2((self.at - now) / _HALF_LIFE_S)
        return (weight * self.seconds / self.num_bytes + average_s) / (weight + 1.0)


class LinkSpeeds:
    """See the module."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._all = _Measured()
        self._links: dict[tuple[InstanceId, InstanceId], _Measured] = {}
        """By source and target, those measured last at the end."""
        self._from: dict[InstanceId, dict[InstanceId, _Measured]] = {}
        self._to: dict[InstanceId, dict[InstanceId, _Measured]] = {}
        self._bytes_per_token = 0.0

    def learn(self, request: Request, stages: StageTimes, source: InstanceId, target: InstanceId) -> None:
        """A handoff between these two, as the target has measured it."""
        num_bytes, took_ms = stages.transfer_bytes or 0, stages.transfer_ms or 0.0
        if num_bytes <= 0 or not 0.0 < took_ms < _MOST_MS or not request.num_prompt_tokens:
            return
        seconds, now = took_ms / 1e3, self._now()
        if self._all.num:
            seconds = min(seconds, _MOST_SLOWER * num_bytes * self._average_s(now))
        # Of a prompt that was there in part less was moved: the most is the size of a token.
        size = min(num_bytes / request.num_prompt_tokens, _MOST_BYTES_PER_TOKEN)
        self._bytes_per_token = max(size, _SIZE_FADING * self._bytes_per_token)
        self._all.add(num_bytes, seconds, now)
        link = self._links.pop((source, target), None) or _Measured()
        link.add(num_bytes, seconds, now)
        self._links[source, target] = link
        self._from.setdefault(source, {})[target] = link
        self._to.setdefault(target, {})[source] = link
        if len(self._links) > _MAX_LINKS:
            self._forget(*next(iter(self._links)))

    def out_of(self, source: InstanceId) -> LinkCosts:
        """For who chooses where the KV of a prompt goes."""
        return self._costs(self._from.get(source, {}))

    def into(self, target: InstanceId) -> LinkCosts:
        """For who chooses where a prompt is computed."""
        return self._costs(self._to.get(target, {}))

    def _costs(self, links: dict[InstanceId, _Measured]) -> LinkCosts:
        now = self._now()
        average_s = self._average_s(now)
        size = self._bytes_per_token or _GUESSED_BYTES_PER_TOKEN
        by_peer = {peer: size * link.byte_s(average_s, now) for peer, link in links.items()}
        return LinkCosts(token_s=size * average_s, by_peer=by_peer)

    def _average_s(self, now: float) -> float:
        """Seconds for a byte over all links."""
        if not self._all.num:
            return 1.0 / _GUESSED_BYTES_PER_S
        share = math.exp2((self._all.at - now) / _AVERAGE_HALF_LIFE_S)
        return share * self._all.seconds / self._all.num_bytes + (1.0 - share) / _GUESSED_BYTES_PER_S

    def _forget(self, source: InstanceId, target: InstanceId) -> None:
        del self._links[source, target]
        for ends, near, far in ((self._from, source, target), (self._to, target, source)):
            del ends[near][far]
            if not ends[near]:
                del ends[near]


def with_links(request: Request, costs: LinkCosts | None) -> Request:
    """As a router gets it."""
    if costs is None:
        return request
    return msgspec.structs.replace(request, routing=msgspec.structs.replace(request.routing, links=costs))
