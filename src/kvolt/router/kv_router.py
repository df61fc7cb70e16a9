"""KvRouter: a Selector over the workers of an endpoint: who they are, who of them may take a request, and the port.

Counts its own decisions at once, and what workers report on top. Routing itself awaits nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Usage
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import Tier
from kvolt.core.load import LoadReport
from kvolt.core.request import KvSource, Request, Role
from kvolt.router.breaker import Breakers, Outcome
from kvolt.router.filters import Eligible
from kvolt.router.index.overlap import Holders
from kvolt.router.place import Place
from kvolt.router.policy.forecast import Forecast
from kvolt.router.policy.learning import Watch
from kvolt.router.policy.policy import Policy
from kvolt.router.policy.roster import ranks_of
from kvolt.router.policy.selector import Choice, Explained, PlaceLoad, Selector
from kvolt.router.port import Decision
from kvolt.router.service.gossip import PlaceBookings
from kvolt.router.stats import RouterStats
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.address import EndpointAddress, Instance
from kvolt.runtime.endpoint.client import EndpointClient


class KvRouter:
    """See the module; a Router."""

    def __init__(
        self,
        client: EndpointClient,
        holders: Holders,
        policy: Policy,
        now: Callable[[], float],
        rng: random.Random,
        settings: RouterSettings | None = None,
        role: Role = Role.AGGREGATED,
        watch: Watch | None = None,
    ) -> None:
        self._client = client
        self.eligible = Eligible(client, role, Breakers(now))
        self._known_version: int | None = None
        self._givers: tuple[Place, ...] = ()
        """Those that give others what they have."""
        self._everyone: tuple[list[Instance], tuple[InstanceId, ...]] | None = None
        self.on_relief: Callable[[], None] = _nobody_waits
        """Called when a worker may have got room without `begun` or `free`; of who lets requests wait."""
        client.on_change(self._on_change)
        self.selector = Selector(holders, policy, now, rng, settings, watch, self.eligible.breakers)

    @property
    def endpoint(self) -> EndpointAddress:
        return self._client.endpoint

    @property
    def stats(self) -> RouterStats:
        return self.selector.stats

    @property
    def num_under_way(self) -> int:
        """Decisions that are not over."""
        return self.selector.num_under_way

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        """However busy all are: who lets requests wait asks `try_route`."""
        return self._decide(self._choose(request, excluded))

    def try_route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision | None:
        """None when every instance that could take it has enough to do already. Unavailable as `route`."""
        choice = self._choose(request, excluded)
        return None if choice.is_saturated else self._decide(choice)

    def foresee_s(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> float | None:
        """Until its first token, if it were routed now; None where `try_route` would give nothing. Books nothing."""
        choice = self._choose(request, excluded)
        return None if choice.is_saturated else choice.predicted_s

    def forecast(self, request: Request) -> Forecast:
        return self.selector.forecast(request, self._candidates(request, frozenset()))

    def queue_s(self, decision: Decision) -> float:
        """Until the prompts are computed that were sent to its place, this and later ones included; once that time is
        over, what they were to take."""
        return self.selector.queue_s(decision.booking)

    def begun(self, decision: Decision, cached_tokens: int | None) -> None:
        self.eligible.breakers.first_token(decision.instance.id, decision.attempt)
        self.selector.begun(decision.booking, cached_tokens)

    def free(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self.eligible.end_attempt(decision.instance.id, decision.attempt, outcome)
        self.selector.free(decision.booking, usage)

    async def close(self) -> None:
        """What feeds the index is somebody else's."""

    def on_report(self, report: LoadReport) -> None:
        self._look()
        self.selector.on_report(report)
        self.on_relief()

    def _on_change(self) -> None:
        self.on_relief()

    def own_loads(self) -> Sequence[PlaceBookings]:
        """For gossip: what is booked here."""
        return self.selector.own_loads()

    def set_others(self, told: PlaceBookings) -> None:
        """From gossip: what all other routers have booked at a place."""
        self._look()
        self.selector.set_others(told)
        self.on_relief()

    def explain(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> list[Explained]:
        """Every candidate with the terms of its cost, the least costly first."""
        return self.selector.explain(request, self._candidates(request, excluded))

    def left_out(self, request: Request) -> list[tuple[Instance, str]]:
        """Every registered worker that may not take a request, and why, for people."""
        told = [(each, self.eligible.why_not(each, request)) for each in self._client.instances()]
        return [(instance, why) for instance, why in told if why is not None]

    def held_by(self, instance_id: InstanceId) -> str:
        """How it is known what a worker holds, for people."""
        return "index"

    def process_of(self, instance_id: InstanceId) -> str:
        """Of a worker that is registered."""
        return self._client.instance(instance_id).process

    def loads(self) -> list[PlaceLoad]:
        self._look()
        return self.selector.loads()

    # ---

    def _choose(self, request: Request, excluded: frozenset[InstanceId]) -> Choice:
        candidates = self._candidates(request, excluded)  # and who gives is known
        givers = self._givers
        if excluded and givers:  # who has failed this request is not asked for its blocks either
            givers = tuple(place for place in givers if place.instance_id not in excluded)
        return self.selector.choose(request, candidates, givers)

    def _all_ids(self) -> Sequence[InstanceId]:
        """Of those that can be reached; the same tuple as long as they are the same."""
        everyone = self._client.candidates()
        if self._everyone is None or self._everyone[0] is not everyone:
            self._everyone = (everyone, _ids(everyone))
        return self._everyone[1]

    def _decide(self, choice: Choice) -> Decision:
        is_query = choice.request.routing.query_only
        instance_id, dp_rank = choice.place
        infos = self.eligible.registered.infos()
        has_several = len(ranks_of(infos.get(instance_id))) > 1
        return Decision(
            self._client.instance(instance_id),
            choice.overlap_blocks,
            choice.predicted_s * 1e3,
            _sources(choice, infos),
            booking=0 if is_query else self.selector.book(choice),
            dp_rank=dp_rank if has_several else None,
            attempt=None if is_query else self.eligible.breakers.send(instance_id),
        )

    def _candidates(self, request: Request, excluded: frozenset[InstanceId]) -> Sequence[InstanceId]:
        self._look()
        if self.eligible.is_anyone(request, excluded):
            everyone = self._all_ids()
            if everyone:
                return everyone
        return _ids(self.eligible.of(request, excluded))

    def _look(self) -> None:
        registered = self.eligible.registered
        if registered.version != self._known_version:
            self._known_version = registered.version
            infos = registered.infos()
            self.selector.set_workers(infos)
            self._givers = tuple(
                Place(instance_id, dp_rank)
                for instance_id, info in infos.items()
                if info is not None and info.shares_kv
                for dp_rank in ranks_of(info)
            )


def _sources(choice: Choice, infos: Mapping[InstanceId, EngineInfo | None]) -> tuple[KvSource, ...]:
    """Who has more of the prompt than the chosen one, if that one takes it."""
    info = infos.get(choice.place.instance_id)
    if choice.source is None or info is None or not info.shares_kv:
        return ()
    source = choice.source
    return (KvSource(source.instance_id, Tier.HOST, choice.source_blocks, source.dp_rank),)


def _nobody_waits() -> None:
    pass


def _ids(instances: Sequence[Instance]) -> tuple[InstanceId, ...]:
    return tuple(instance.id for instance in instances)
