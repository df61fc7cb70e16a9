"""Gossip: what other routers have under way at the workers that we send to as well. Pure.

Routers that share workers and no router process tell each other their own bookings: each the whole of its own, place by
place, numbered. What is told is a state and no change, so the next word heals the loss of any before it: who has
anything booked tells so every period. A router that has just come says so, over and over at first, and knows all when
a period has passed since it was heard; one that has heard of nobody only sends heartbeats. Who falls silent is
forgotten after the time that came with its last word.

    ours      Teller: when to tell, and what          -> LoadVector ->
    theirs    OtherLoads: the latest of each, summed  <- LoadVector <-
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvolt.core.ids import InstanceId
from kvolt.router.place import Place

MAX_REPLICAS = 256
MAX_PLACES = 16_384
"""Of one vector; about a megabyte."""
_MAX_LASTS_S = 60.0
"""However long a replica says that its word lasts."""

_Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class PlaceBookings(msgspec.Struct, frozen=True, array_like=True):
    """What one router has under way at one place."""

    instance: InstanceId
    dp_rank: int = 0
    requests: _Amount = 0.0
    decoding: _Amount = 0.0
    prefill_tokens: _Amount = 0.0
    """Of prompts that are not computed yet."""
    blocks: _Amount = 0.0
    context_tokens: _Amount = 0.0
    """Of the requests that decode."""
    queue_s: _Amount = 0.0
    """Until the prompts would be computed that this router has sent there."""

    @property
    def place(self) -> Place:
        return Place(self.instance, self.dp_rank)


class LoadVector(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that one router has under way at the workers of one endpoint. A place that is not named has nothing."""

    endpoint: str
    replica: str
    epoch: int
    """Grows with each life of the replica."""
    version: int
    """Grows with each word of a life."""
    lasts_s: Annotated[float, msgspec.Meta(ge=0.0)]
    """It counts for so long without another; 0 takes leave."""
    places: Annotated[tuple[PlaceBookings, ...], msgspec.Meta(max_length=MAX_PLACES)] = ()


class GossipOptions(msgspec.Struct, frozen=True, kw_only=True):
    period_s: float = 0.1
    """Between two words at least; and at most, while anything is booked."""
    heartbeat_s: float = 1.0
    """Between two words of a router with nothing booked, or nobody to tell it to."""
    greetings: int = 20
    """So many words come one after the other when a router is new: the first may find nobody who listens yet."""
    lasting_periods: int = 10
    """A router that was silent for so long is gone."""
    repeats: int = 2
    """How often it is told that nothing is booked any more before the heartbeats take over: any may be lost."""


class Teller:
    """What we tell of ourselves. `due` once a period."""

    def __init__(self, endpoint: str, replica: str, epoch: int, options: GossipOptions) -> None:
        self._endpoint = endpoint
        self._replica = replica
        self._epoch = epoch
        self._options = options
        self._version = 0
        self._repeats_left = options.greetings
        self._told_at = 0.0

    @property
    def is_greeting(self) -> bool:
        """Whether the next word is due whatever is booked."""
        return self._repeats_left > 0

    def due(self, loads: Sequence[PlaceBookings], now: float, is_alone: bool = False) -> LoadVector | None:
        """The word to send now, if any. Of more than MAX_PLACES the busiest are told."""
        options = self._options
        lasts_s = 3 * options.heartbeat_s
        if loads and not is_alone:
            self._repeats_left = max(self._repeats_left, 2 + options.repeats)  # this one and the first end
            lasts_s = options.lasting_periods * options.period_s
        elif not self._repeats_left and now < self._told_at + options.heartbeat_s:
            return None
        self._repeats_left = max(self._repeats_left - 1, 0)
        self._told_at = now
        if len(loads) > MAX_PLACES:
            loads = sorted(loads, key=lambda load: -load.requests)[:MAX_PLACES]
        return self._word(tuple(loads), lasts_s)

    def leave(self) -> LoadVector:
        """The last word."""
        return self._word((), 0.0)

    def _word(self, loads: tuple[PlaceBookings, ...], lasts_s: float) -> LoadVector:
        self._version += 1
        return LoadVector(self._endpoint, self._replica, self._epoch, self._version, lasts_s, loads)


@dataclass(slots=True)
class _Replica:
    """The latest word of another router."""

    epoch: int
    version: int
    heard_at: float
    until: float
    loads: dict[Place, PlaceBookings]


class OtherLoads:
    """What the others told last. Bounded by MAX_REPLICAS vectors of MAX_PLACES places each."""

    def __init__(self, own: str, max_replicas: int = MAX_REPLICAS) -> None:
        self._own = own
        self._max_replicas = max_replicas
        self._replicas: dict[str, _Replica] = {}
        self._changed: dict[Place, None] = {}
        self.num_heard = 0
        self.num_old = 0
        """Words that came after a later one."""
        self.num_refused = 0
        """Words of more routers than are listened to."""

    @property
    def num_replicas(self) -> int:
        """Others that are alive."""
        return len(self._replicas)

    def hear(self, vector: LoadVector, now: float) -> None:
        if vector.replica == self._own:
            return
        known = self._replicas.get(vector.replica)
        if known is not None and (vector.epoch, vector.version) <= (known.epoch, known.version):
            self.num_old += 1
            return
        if known is None and len(self._replicas) >= self._max_replicas:
            self.num_refused += 1
            return
        self.num_heard += 1
        lasts_s = min(vector.lasts_s, _MAX_LASTS_S)
        if lasts_s == 0.0:
            self._forget(vector.replica)
            return
        loads = {load.place: load for load in vector.places}
        before = known.loads if known is not None else {}
        self._note(place for place in before if place not in loads)
        self._note(place for place, load in loads.items() if before.get(place) != load)
        self._replicas[vector.replica] = _Replica(vector.epoch, vector.version, now, now + lasts_s, loads)

    def expire(self, now: float) -> list[str]:
        """Who was silent for too long, and is none of them any more."""
        silent = [name for name, replica in self._replicas.items() if now >= replica.until]
        for name in silent:
            self._forget(name)
        return silent

    def of(self, place: Place, now: float) -> PlaceBookings:
        """All that the others have under way there."""
        requests = decoding = prefill_tokens = blocks = context_tokens = queue_s = 0.0
        for replica in self._replicas.values():
            load = replica.loads.get(place)
            if load is not None:
                requests += load.requests
                decoding += load.decoding
                prefill_tokens += load.prefill_tokens
                blocks += load.blocks
                context_tokens += load.context_tokens
                queue_s += max(load.queue_s - (now - replica.heard_at), 0.0)
        return PlaceBookings(*place, requests, decoding, prefill_tokens, blocks, context_tokens, queue_s)

    def take_changed(self) -> list[Place]:
        """Places of which something else was told since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def change_all(self) -> None:
        """Whoever looks knows other workers than before: every place counts as changed."""
        for replica in self._replicas.values():
            self._note(replica.loads)

    def _forget(self, name: str) -> None:
        replica = self._replicas.pop(name, None)
        if replica is not None:
            self._note(replica.loads)

    def _note(self, places: Iterable[Place]) -> None:
        self._changed.update(dict.fromkeys(places))
