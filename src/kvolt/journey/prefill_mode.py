"""Which way a request goes where some workers compute prompts for others, by what each way would cost. Pure.

A prompt is computed at a prefill worker and answered by a decode worker (SPLIT), computed where it is answered (HERE),
or answered by who computes prompts (THERE), when decode workers have more to do than they have. Each way is priced in
seconds: until the first token, of the answer's steps, and what all others lose by it at the places it touches. One
moment, one owner: what is forecast here is booked before anything else is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.errors import KvoltError, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Handoff, LinkCosts, Request, Role, RoutingHints
from kvolt.journey.links import LinkSpeeds, with_links
from kvolt.journey.prefill import Leg, as_prompt
from kvolt.journey.slo_gate import Promise, Recent
from kvolt.router.policy.forecast import Forecast, Forecasting
from kvolt.router.port import Router


class Way(StrEnum):
    HERE = "here"
    SPLIT = "split"
    THERE = "there"


class Plan(NamedTuple):
    way: Way
    leg: Leg | None
    """To those who compute prompts; None where that is nobody."""


class Ways(Protocol):
    """Who chooses, and what is known of the links that KV takes."""

    def plan(self, request: Request) -> Plan:
        """Unavailable where its caller says who is to compute its prompt, and that one is not there."""
        ...

    def learn(self, request: Request, stages: StageTimes, source: InstanceId, target: InstanceId) -> None:
        """How long the KV of its prompt took between these two."""
        ...

    def links_from(self, source: InstanceId) -> LinkCosts | None: ...

    def links_to(self, target: InstanceId) -> LinkCosts | None: ...


class OneWay:
    """Where every worker computes its own prompts."""

    def plan(self, request: Request) -> Plan:
        if (pinned := request.routing.pins.get(Role.PREFILL)) is not None:
            raise _not_there(pinned, "nobody computes prompts for the workers of this model")
        return _HERE

    def learn(self, request: Request, stages: StageTimes, source: InstanceId, target: InstanceId) -> None:
        """Nothing moves."""

    def links_from(self, source: InstanceId) -> None:
        """There are none."""

    def links_to(self, target: InstanceId) -> None:
        """There are none."""


class WayRule(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set about the choice."""

    is_predicted: bool = True
    """By cost; else whatever is above the least length and finds a queue below the most is split."""
    min_tokens: int = 0
    """Prompts of so many tokens or fewer that a decode worker lacks are computed there."""
    max_queue_s: float | None = None
    """With a longer queue at the prefill workers a prompt is computed where it is answered."""
    ttft_s: float | None = None
    """Until a first token, at most, where that was promised: then the way is taken that breaks least of it."""
    itl_s: float | None = None
    """Between two tokens of an answer, on average, at most, where that was promised."""


def costs(here: Forecast, handed: Forecast, there: Forecast) -> dict[Way, float]:
    """`here`: at a decode worker, prompt and all; `handed`: the same with the prompt's KV, which must be moved there;
    `there`: at a prefill worker, answered there as well."""
    return {
        Way.SPLIT: _prompt(there) + handed.transfer_s + _answer(handed),
        Way.HERE: _prompt(here) + _answer(here),
        Way.THERE: _prompt(there) + _answer(there),
    }


def _prompt(at: Forecast) -> float:
    """All that are being answered there wait for its chunks, and those that come before it is computed wait for it."""
    return at.queue_s + at.prefill_s * (1.0 + at.decoding + at.arriving)


def _answer(at: Forecast) -> float:
    return at.output_tokens * at.step_s + at.decoding * at.slowdown_s


_MARGIN = 0.2
"""How much of the time to the first token another way must save before it is taken in place of the one that is meant:
workers have their roles for reasons that no forecast of one request knows."""
DEMAND_S = 15.0
"""After which a prompt counts half."""
_MOST_BUSY = 0.95
"""With prompts; more leaves nothing to reckon with."""
_HERE = Plan(Way.HERE, None)
_COMPUTED = Handoff(ticket=b"", prefill_instance=InstanceId(""))
"""For the forecast of a request whose prompt somebody else has computed."""


class Chooser:
    """Ways over the router of those who answer and the leg to those who compute prompts, while there are any.

    Routers that cannot forecast leave the rule: the length.
    """

    def __init__(
        self,
        answering: Router,
        leg: Callable[[], Leg | None],
        block_size: int,
        rule: WayRule | None = None,
        *,
        now: Callable[[], float],
    ) -> None:
        self._answering = answering
        self._leg = leg
        self._block_size = block_size
        self._rule = rule or WayRule()
        self._links = LinkSpeeds(now)
        self._prompts = Recent(now, DEMAND_S)
        self._promise = Promise(self._rule.ttft_s, self._rule.itl_s, now)
        self.counts = dict.fromkeys(Way, 0)
        """For metrics: how often each was taken while there was a choice."""

    def learn(self, request: Request, stages: StageTimes, source: InstanceId, target: InstanceId) -> None:
        self._links.learn(request, stages, source, target)

    def links_from(self, source: InstanceId) -> LinkCosts:
        return self._links.out_of(source)

    def links_to(self, target: InstanceId) -> LinkCosts:
        return self._links.into(target)

    def plan(self, request: Request) -> Plan:
        leg = self._leg()
        pinned = request.routing.pins.get(Role.PREFILL)
        if pinned is not None:
            _check_pinned(pinned, leg)
        if leg is None or not leg.candidates() or self._must_be_here(request):
            return _HERE
        try:
            way = Way.SPLIT if pinned is not None else self._way(request, leg.router)
        except KvoltError:  # nobody can take it now: the way it is meant to go says why
            way = Way.SPLIT
        if not request.routing.query_only:
            self.counts[way] += 1
        return Plan(way, leg)

    def _must_be_here(self, request: Request) -> bool:
        # Of what does not fill a block nothing could be handed over; a single token needs no second worker. Log
        # probabilities of a prompt are told by who answers, who would have to compute all of it again.
        is_short = request.num_prompt_tokens <= self._block_size or request.stop.max_tokens == 1
        return is_short or request.sampling.prompt_logprobs is not None

    def _way(self, request: Request, prefilling: Router) -> Way:
        rule, answering = self._rule, self._answering
        if not isinstance(answering, Forecasting) or not isinstance(prefilling, Forecasting):
            return Way.SPLIT if request.num_prompt_tokens > rule.min_tokens else Way.HERE
        here, there = answering.forecast(request), prefilling.forecast(as_prompt(request))
        if here.lacking_tokens <= rule.min_tokens:
            return Way.HERE
        if rule.max_queue_s is not None and there.queue_s > rule.max_queue_s:
            return Way.HERE
        is_moved = here.lacking_tokens > self._block_size
        # Of guesses nothing is worked out; and what is only asked about changes nothing that is learned.
        is_worked_out = here.is_told and there.is_told and not request.routing.query_only
        if not rule.is_predicted or not is_worked_out:
            return Way.SPLIT if is_moved else Way.HERE
        self._prompts.add(there.prefill_s)
        if not is_moved:
            return self._cheapest(request, here, here, there, Way.HERE)
        moved = with_links(request, self._links.out_of(there.instance))
        handed = answering.forecast(msgspec.structs.replace(moved, handoff=_COMPUTED))
        if not self._promise.is_given:
            return self._cheapest(request, here, handed, there, Way.SPLIT)
        if self._promise.is_kept(handed, there):
            return Way.SPLIT
        return self._among_alike(request, here, handed, there)

    def _cheapest(
        self, request: Request, here: Forecast, handed: Forecast, there: Forecast, meant: Way
    ) -> Way:
        """The way it is meant to go, unless another one is much better."""
        busy = self._prompts.per_second / (here.num_places + there.num_places)
        priced = costs(here, handed, _among(busy, there))
        if meant is Way.HERE:  # there is nothing to move
            del priced[Way.SPLIT]
        if _says_who(request.routing):
            del priced[Way.THERE]
        best = min(priced, key=priced.__getitem__)
        saved_s = priced[meant] - priced[best]
        return best if saved_s > _MARGIN * there.first_token_s else meant

    def _among_alike(self, request: Request, here: Forecast, handed: Forecast, there: Forecast) -> Way:
        """Where all workers do whatever there is: the cheapest of them, unless to share it among two is much better."""
        priced = costs(here, handed, there)
        whole = (Way.HERE,) if _says_who(request.routing) else (Way.HERE, Way.THERE)
        best = min(whole, key=priced.__getitem__)
        saved_s = priced[best] - priced[Way.SPLIT]
        return Way.SPLIT if saved_s > _MARGIN * there.first_token_s else best


def _says_who(routing: RoutingHints) -> bool:
    """Whether the caller has named who is to answer: nobody else does, whatever it would save."""
    return (
        bool(routing.pins or routing.allowed or routing.allowed_prefill) or routing.pinned_dp_rank is not None
    )


def _check_pinned(pinned: InstanceId, leg: Leg | None) -> None:
    """Unavailable unless that worker could compute a prompt now."""
    if leg is not None and any(each.id == pinned for each in leg.candidates()):
        return
    if leg is not None and pinned in leg.unfit():
        raise _not_there(pinned, "its KV would be of no use to who answers")
    raise _not_there(pinned, "it cannot be reached")


def _not_there(pinned: InstanceId, why: str) -> Unavailable:
    return Unavailable(f"the pinned prefill worker {pinned} computes no prompts here: {why}", reason="pin")


def _among(busy: float, there: Forecast) -> Forecast:
    """Where prompts are computed, which take so much of the time, an answer takes the longer for it.

    `busy` is not how busy that place is: who computes all prompts has no time for an answer, but would have if they
    were everybody's.
    """
    return msgspec.structs.replace(there, step_s=there.step_s / (1.0 - min(busy, _MOST_BUSY)))
