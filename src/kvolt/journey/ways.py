"""Which way a request goes where some workers compute prompts for others, by what each way would cost. Pure.

A prompt is computed at a prefill worker and answered by a decode worker (SPLIT), computed where it is answered (HERE),
or answered by who computes prompts (THERE), when decode workers have more to do than they have. Each way is priced in
seconds: until the first token, of the answer's steps, and what all others lose by it at the places it touches. One
moment, one owner: what is forecast here is booked before anything else is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.errors import KvoltError, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Handoff, Request, Role, RoutingHints
from kvolt.journey.prefill import Leg, as_prompt
from kvolt.router.forecast import Forecast, Forecasting
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
    """Who chooses. `learn` is told how long KV was on its way."""

    def plan(self, request: Request) -> Plan:
        """Unavailable where its caller says who is to compute its prompt, and that one is not there."""
        ...

    def learn(self, request: Request, stages: StageTimes) -> None: ...


class OneWay:
    """Where every worker computes its own prompts."""

    def plan(self, request: Request) -> Plan:
        if (pinned := request.routing.pins.get(Role.PREFILL)) is not None:
            raise _not_there(pinned, "nobody computes prompts for the workers of this model")
        return _HERE

    def learn(self, request: Request, stages: StageTimes) -> None:
        """Nothing moves."""


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


class WayWeights(msgspec.Struct, frozen=True, kw_only=True):
    others: float = 1.0
    """What a second of somebody else's answer counts beside a second of this one's."""
    waiting: float = 0.3
    """What a second of the prompt counts for each that waits there; see `LatencyWeights.waiting`."""
    margin: float = 0.2
    """How much of the time to the first token another way must save before it is taken in place of SPLIT: workers have
    their roles for reasons that no forecast of one request knows."""


def costs(
    here: Forecast, handed: Forecast, there: Forecast, transfer_s: float, weights: WayWeights
) -> dict[Way, float]:
    """`here`: at a decode worker, prompt and all; `handed`: the same with the prompt's KV; `there`: at a prefill
    worker, answered there as well."""
    return {
        Way.SPLIT: _prompt(there, weights) + transfer_s + _answer(handed, weights),
        Way.HERE: _prompt(here, weights) + _answer(here, weights),
        Way.THERE: _prompt(there, weights) + _answer(there, weights),
    }


def _prompt(at: Forecast, weights: WayWeights) -> float:
    """All that are being answered there wait for its chunks; as many as wait now will wait behind it."""
    disturbed = weights.others * at.decoding + weights.waiting * at.waiting
    return at.queue_s + at.prefill_s * (1.0 + disturbed)


def _answer(at: Forecast, weights: WayWeights) -> float:
    return at.output_tokens * at.step_s + weights.others * at.decoding * at.slowdown_s


class Promise:
    """Whether all prompts are computed apart with every promise kept, or could be again.

    Asked of the load as it is, not of one request, whose way changes little. While all are, the queue at the prefill
    workers shows it; while they are not, a short queue says nothing, and is worked out: as of random arrivals, one
    after the other. All answers that are being given would share the decode workers.
    """

    def __init__(self, rule: WayRule, prompts: Recent, now: Callable[[], float]) -> None:
        """`prompts`: the seconds that each takes a prefill worker, wherever it went."""
        self._ttft_s = rule.ttft_s
        self._itl_s = rule.itl_s
        self._prompts = prompts
        self._waits = Recent(now, _SEEN_S)
        self._is_kept = True

    @property
    def is_given(self) -> bool:
        return self._ttft_s is not None or self._itl_s is not None

    def is_kept(self, handed: Forecast, there: Forecast) -> bool:
        """Once for each request. Lost and found again at different loads, so that it does not waver."""
        self._waits.add(there.first_token_s)
        limit = 1.0 if self._is_kept else _AGAIN
        is_quick = self._itl_s is None or _step_s(handed, there) <= limit * _STEADY * self._itl_s
        self._is_kept = is_quick and self._is_early(there, limit)
        return self._is_kept

    def _is_early(self, there: Forecast, limit: float) -> bool:
        if self._ttft_s is None:
            return True
        if self._waits.mean > _SEEN_SHARE * self._ttft_s:
            return False
        if self._is_kept:
            return True
        busy = self._prompts.per_second / there.num_places
        if busy >= limit:
            return False
        mean_s = there.prefill_s * busy / (2.0 * (1.0 - busy) * there.num_places)
        return there.prefill_s + _NEARLY_ALL * mean_s <= self._ttft_s


def _step_s(handed: Forecast, there: Forecast) -> float:
    """Of an answer, if all that are being given were so by the decode workers, as many by each."""
    each = (handed.all_decoding + there.all_decoding) / handed.num_places
    return handed.step_s + max(each - handed.decoding, 0.0) * handed.more_s


class Recent:
    """Values as they come, of which those longer ago count less."""

    def __init__(self, now: Callable[[], float], half_life_s: float) -> None:
        self._now = now
        self._half_life_s = half_life_s
        self._sum = self._count = 0.0
        self._at = self._since = -math.inf

    def add(self, value: float) -> None:
        now = self._now()
        if self._count:
            left = math.exp2((self._at - now) / self._half_life_s)
            self._sum, self._count = self._sum * left, self._count * left
        else:
            self._since = now
        self._at = now
        self._sum += value
        self._count += 1.0

    @property
    def mean(self) -> float:
        return self._sum / self._count if self._count else 0.0

    @property
    def per_second(self) -> float:
        """Their sum, as of the last one."""
        # Over a short time less than all of the weight is there yet; over a very short one it is none to judge by.
        age_s = max(self._at - self._since, self._half_life_s / 4)
        weight_s = self._half_life_s / math.log(2) * (1.0 - math.exp2(-age_s / self._half_life_s))
        return self._sum / weight_s


class TransferPace:
    """How long KV is on its way, learned from the handoffs that went well."""

    def __init__(self) -> None:
        self._num_bytes = 0.0
        self._seconds = 0.0
        self._bytes_per_token = _GUESSED_BYTES_PER_TOKEN
        self._is_guess = True

    def learn(self, request: Request, stages: StageTimes) -> None:
        num_bytes, took_ms = stages.transfer_bytes, stages.transfer_ms
        if not num_bytes or not took_ms or not request.num_prompt_tokens:
            return
        self._num_bytes = _FADING * self._num_bytes + num_bytes
        self._seconds = _FADING * self._seconds + took_ms / 1e3
        # Of a prompt that was there in part less was moved: the most is the size of a token.
        per_token = num_bytes / request.num_prompt_tokens
        self._bytes_per_token = per_token if self._is_guess else max(per_token, self._bytes_per_token)
        self._is_guess = False

    def time_s(self, num_tokens: int) -> float:
        bytes_per_s = self._num_bytes / self._seconds if self._seconds else _GUESSED_BYTES_PER_S
        return num_tokens * self._bytes_per_token / bytes_per_s


_GUESSED_BYTES_PER_TOKEN = 131_072.0
"""An 8B model's in bfloat16; until the first handoff tells."""
_GUESSED_BYTES_PER_S = 5e9
_FADING = 0.9
DEMAND_S = 15.0
"""After which a prompt counts half."""
_SEEN_S = 3.0
"""After which a wait counts half."""
_SEEN_SHARE = 0.75
"""Of the limit, the mean wait that is too long: some wait longer."""
_NEARLY_ALL = 3.0
"""Times the mean wait: waits fall off about as an exponential does."""
_STEADY = 0.9
"""Of the limit between tokens: a step that is as long as the limit leaves nothing for a handoff's arrival."""
_MOST_BUSY = 0.95
"""With prompts; more leaves nothing to reckon with."""
_AGAIN = 0.8
"""Of every limit, from where on a promise that was lost is held to be kept again."""
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
        weights: WayWeights | None = None,
        *,
        now: Callable[[], float],
    ) -> None:
        self._answering = answering
        self._leg = leg
        self._block_size = block_size
        self._rule = rule or WayRule()
        self._weights = weights or WayWeights()
        self._pace = TransferPace()
        self._prompts = Recent(now, DEMAND_S)
        self._promise = Promise(self._rule, self._prompts, now)
        self.counts = dict.fromkeys(Way, 0)
        """For metrics: how often each was taken while there was a choice."""

    def learn(self, request: Request, stages: StageTimes) -> None:
        self._pace.learn(request, stages)

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
        handed = answering.forecast(msgspec.structs.replace(request, handoff=_COMPUTED))
        if self._promise.is_given and self._promise.is_kept(handed, there):
            return Way.SPLIT
        return self._cheapest(request, here, handed, there, Way.SPLIT)

    def _cheapest(
        self, request: Request, here: Forecast, handed: Forecast, there: Forecast, meant: Way
    ) -> Way:
        """The way it is meant to go, unless another one is much better."""
        busy = self._prompts.per_second / (here.num_places + there.num_places)
        transfer_s = self._pace.time_s(handed.lacking_tokens)
        priced = costs(here, handed, _among(busy, there), transfer_s, self._weights)
        if meant is Way.HERE:  # there is nothing to move
            del priced[Way.SPLIT]
        if _says_who(request.routing):
            del priced[Way.THERE]
        best = min(priced, key=priced.__getitem__)
        saved_s = priced[meant] - priced[best]
        return best if saved_s > self._weights.margin * there.first_token_s else meant


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
