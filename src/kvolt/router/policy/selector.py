"""Selector: which place a request costs least at, by what each holds and what it is busy with. Pure.

The decision without a runtime, so that a process, a service and somebody else's program can all make it: who the
workers are is said by `set_workers`, who of them may take a request comes with the request, what they hold is asked of
an index that somebody else feeds, time and chance come in. `choose` changes nothing; what is booked is counted from
then on until it is freed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Usage
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.latency import Floats
from kvolt.core.load import LoadReport
from kvolt.core.request import Request, RoutingHints
from kvolt.router.breaker import Breakers
from kvolt.router.index.active_prompts import ActivePrompts, Sharing, sharing_of
from kvolt.router.index.overlap import Holders, Overlap, Overlaps, usable_hashes
from kvolt.router.index.pending_blocks import ExpectedBlocks
from kvolt.router.place import Place
from kvolt.router.policy.affinity import Affinity
from kvolt.router.policy.cost_model import Asked
from kvolt.router.policy.forecast import Forecast
from kvolt.router.policy.learning import Learning, Watch
from kvolt.router.policy.load import Booking, LoadBook, even_out
from kvolt.router.policy.policy import Policy, RequestView, WorkersView, pick, prefer, with_retries
from kvolt.router.policy.roster import Field, Roster
from kvolt.router.policy.shadow import Shadow, Shadowed
from kvolt.router.service.gossip import PlaceBookings
from kvolt.router.stats import RouterStats
from kvolt.runtime.config.router_settings import RouterSettings

_Mask = npt.NDArray[np.bool_]


class Choice(msgspec.Struct, frozen=True):
    """Where a request would go, and what is expected of it there."""

    place: Place
    overlap_blocks: int
    queue_s: float
    prefill_s: float
    is_saturated: bool
    """Every place that could take it has enough to do already; this is the best of them all the same."""
    request: Request
    prefill_tokens: int
    blocks: float
    """That it would hold at its end, prompt and answer."""
    held_blocks: int = 0
    """Of the overlap, what the device holds already; the rest is in a tier below it, or on its way there."""
    most_overlap: int = 0
    """Of any place that it could have gone to."""
    source: Place | None = None
    """Who has more of the prompt, in whatever tier, than it has."""
    source_blocks: int = 0
    is_tiered: bool = False
    """Whether its worker keeps blocks below its device: it may bring more of the prompt than is told."""
    told_s: float = 0.0
    """What the worker's own model says that the prompt takes."""
    room_s: float = 0.0
    """Until there is room for it, where there is none now."""
    transfer_s: float = 0.0
    """Until the KV of a prompt that was computed elsewhere is there."""
    shadowed: Shadowed | None = None
    """What a second policy says of it."""

    @property
    def predicted_s(self) -> float:
        """Until its first token."""
        return max(self.queue_s, self.room_s) + self.prefill_s + self.transfer_s

    @property
    def usable_hashes(self) -> tuple[SequenceHash, ...]:
        return usable_hashes(self.request)


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate for a request with every term of its cost, for people."""

    instance: InstanceId
    dp_rank: int
    cost: float
    is_saturated: bool
    is_chosen: bool
    overlap_blocks: float
    prefill_tokens: float
    blocks: float
    requests: float
    decoding: float
    queue_s: float
    prefill_s: float
    slowdown_s: float
    beside: float
    step_s: float
    copy_s: float
    transfer_s: float
    room_s: float
    total_blocks: float
    affinity: float
    preference: float
    """The weights of its taints that the request prefers."""
    pace: float
    """How many times as long as it says it takes, as far as was seen; the times here are with it."""
    held_blocks: float
    """Of the overlap, what is held already; the rest is on its way there."""
    failure_rate: float = 0.0
    """Share of its recent requests that failed; the cost includes the retry that this leads to."""


class PlaceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a place is busy with, as far as is known here."""

    instance: InstanceId
    dp_rank: int
    requests: float
    decoding: float
    prefill_tokens: float
    blocks: float
    queue_s: float


@dataclass(slots=True)
class _Scored:
    """The candidates for a request, and what each would cost."""

    field: Field
    asked: RequestView
    workers: WorkersView
    costs: Floats
    preference: Floats
    full: _Mask
    """They compute as many requests as they can: what a policy does not know."""
    saturated: _Mask
    """Full, or behind with prompts: a policy knows that, and may find that waiting there is best all the same."""
    is_any_saturated: bool
    overlap: Overlap
    pace: Floats
    failure_rates: Floats
    find_s: float


class Selector:
    """See the module."""

    def __init__(
        self,
        holders: Holders,
        policy: Policy,
        now: Callable[[], float],
        rng: random.Random,
        settings: RouterSettings | None = None,
        watch: Watch | None = None,
        breakers: Breakers | None = None,
    ) -> None:
        """Who looks on is told what becomes of requests. `breakers`: how often workers fail; without, they never do."""
        self._policy = policy
        self._now = now
        self._rng = rng
        self._settings = settings = settings or RouterSettings()
        self._book = LoadBook()
        self._expected = ExpectedBlocks()
        self._active = ActivePrompts()
        self._overlaps = Overlaps(holders, self._expected, settings)
        self._learning = Learning(watch, settings.correct_times)
        self._roster = Roster(self._book, self._add_row, self._drop_row, self._learning.drop_row)
        self._affinity = Affinity(settings.affinity_half_life_s, settings.affinity_sessions)
        self._under_way: dict[int, Choice] = {}
        self._tiered: frozenset[InstanceId] = frozenset()
        self._breakers = breakers
        self.shadow: Shadow | None = None
        """A second policy that is asked beside and decides nothing."""

    @property
    def num_under_way(self) -> int:
        """Bookings that are not over."""
        return self._book.num_bookings

    @property
    def stats(self) -> RouterStats:
        return self._learning.stats

    @property
    def num_sessions(self) -> int:
        """That are remembered."""
        return self._affinity.num_sessions

    def set_workers(self, infos: Mapping[InstanceId, EngineInfo | None]) -> None:
        """These are there and no others; what was booked at others is forgotten. None: nothing is known of it."""
        self._roster.set_workers(infos)
        self._learning.watch.workers(infos)
        self._tiered = frozenset(each for each, info in infos.items() if info is not None and info.has_tiers)

    # --- decisions

    def choose(
        self, request: Request, allowed: Sequence[InstanceId], givers: tuple[Place, ...] = ()
    ) -> Choice:
        """The best place at one of these workers. Unavailable when there is none. Nothing is booked. `givers`: whose
        blocks it could have there.

        Give the same tuples as long as the same are allowed: then nothing is worked out again.
        """
        started_at = self._now()
        scored = self._score(request, allowed)
        index, is_saturated = self._pick(request.routing, scored)
        asked, workers = scored.asked, scored.workers
        overlap = int(workers.overlap_blocks[index])
        prefill_s = float(workers.prefill_s[index])
        place = scored.field.places[index]
        source, source_blocks = self._overlaps.farthest(scored.overlap, givers)
        if (
            source is None
            or source_blocks <= scored.overlap.reach[index]
            or source.instance_id == place.instance_id
        ):
            source, source_blocks = None, 0
        choice = Choice(
            place,
            overlap,
            float(workers.queue_s[index]),
            prefill_s,
            is_saturated,
            request,
            asked.prompt_tokens - overlap * asked.block_size,
            asked.num_blocks + asked.output_tokens / asked.block_size,
            int(scored.overlap.held[index]),
            int(_most(workers.overlap_blocks)),
            source,
            source_blocks,
            place.instance_id in self._tiered,
            prefill_s / float(scored.pace[index]),
            float(workers.room_s[index]),
            0.0 if request.prefill_only else float(workers.transfer_s[index]),
            None if self.shadow is None else _shadowed(self.shadow, scored, index),
        )
        self.stats.took(scored.find_s, self._now() - started_at)
        return choice

    def forecast(self, request: Request, allowed: Sequence[InstanceId]) -> Forecast:
        """What it would come to at the best place. Nothing is booked."""
        scored = self._score(request, allowed)
        index, _ = self._pick(request.routing, scored)
        asked, workers = scored.asked, scored.workers
        rows = scored.field.at
        decoding, context = self._book.decoding[rows], self._book.context_tokens[rows]
        prices, pace = scored.field.prices, float(scored.pace[index])
        step_s = scored.pace * prices.decode_s(decoding + 1.0, context + asked.prompt_tokens)
        base_s, more_s = prices.parts(asked.prompt_tokens, asked.output_tokens, index)
        queue_s = max(float(workers.queue_s[index]), float(workers.room_s[index]))
        prefill_s = float(workers.prefill_s[index])
        return Forecast(
            instance=scored.field.places[index].instance_id,
            queue_s=queue_s,
            prefill_s=prefill_s,
            transfer_s=float(workers.transfer_s[index]),
            arriving=asked.arrivals_per_s * (queue_s + prefill_s),
            decoding=float(decoding[index]),
            step_s=float(step_s[index]),
            slowdown_s=float(workers.slowdown_s[index]),
            output_tokens=asked.output_tokens,
            lacking_tokens=max(asked.prompt_tokens - int(scored.overlap.held[index]) * asked.block_size, 0),
            is_told=prices.is_told[index],
            num_places=len(decoding),
            all_decoding=float(decoding.sum()),
            base_s=pace * base_s,
            more_s=pace * more_s,
        )

    def book(self, choice: Choice) -> int:
        """A ticket for `begun` and `free`. Unavailable when the place is gone."""
        row = self._roster.places.get(choice.place)
        if row is None:
            raise Unavailable(f"{choice.place.instance_id} is gone", reason="gone")
        request, now = choice.request, self._now()
        own_s = max(float(self._book.idle_at[row]) - now, 0.0)
        ticket = self._book.book(
            row,
            request.num_given_tokens,
            choice.prefill_tokens,
            choice.blocks,
            choice.prefill_s,
            now,
        )
        self._expected.send(row, ticket, request.sequence_hashes)
        self._book.share(row, self._active.add(row, ticket, request.sequence_hashes))
        self._under_way[ticket] = choice
        if self.shadow is not None:
            self.shadow.count(choice.shadowed)
        self._learning.booked(ticket, choice, row, own_s, now)
        return ticket

    def begun(self, ticket: int, cached_tokens: int | None) -> None:
        """Its first token has come."""
        now = self._now()
        booking = self._book.begin(ticket, now)
        self._compute(ticket, booking)
        if booking is not None:
            self._learning.begun(ticket, cached_tokens, now)
        choice = self._under_way.get(ticket)
        if choice is not None:
            self._affinity.served(choice.request.routing, choice.place, now)

    def free(self, ticket: int, usage: Usage | None) -> None:
        """It is over, however that came. Not an error for one that is over already."""
        booking = self._book.free(ticket, self._now())
        self._compute(ticket, booking)
        if booking is not None:
            self._book.share(booking.row, -self._active.remove(ticket))
        self._under_way.pop(ticket, None)
        self._learning.freed(ticket, usage)

    def on_report(self, report: LoadReport) -> None:
        """Of a worker's rank; of one that is not known it is passed over."""
        row = self._roster.places.get(Place(InstanceId(report.instance), report.load.dp_rank))
        if row is not None:
            self._book.on_report(row, report.load)

    def queue_s(self, ticket: int) -> float:
        """Until all prompts are computed that we sent to where it is booked; 0 for one that is not booked."""
        choice = self._under_way.get(ticket)
        row = None if choice is None else self._roster.places.get(choice.place)
        return 0.0 if row is None else self._book.left_s(row, self._now())

    # --- with other routers

    def own_loads(self) -> list[PlaceBookings]:
        """What is booked here, of the places where there is anything: to be told to others."""
        return self._book.own(self._roster.places, self._now()) if self._book.num_bookings else []

    def set_others(self, told: PlaceBookings) -> None:
        """What all other routers have booked at a place; of one that is not known it is passed over."""
        row = self._roster.places.get(Place(told.instance, told.dp_rank))
        if row is not None:
            self._book.set_others(row, told, self._now())

    # --- for people

    def explain(self, request: Request, allowed: Sequence[InstanceId]) -> list[Explained]:
        """Every candidate, the least costly first."""
        scored = self._score(request, allowed)
        chosen, _ = self._pick(request.routing, scored)
        workers = scored.workers
        told = [
            Explained(
                instance=place.instance_id,
                dp_rank=place.dp_rank,
                cost=float(scored.costs[index]),
                is_saturated=bool(scored.saturated[index]),
                is_chosen=index == chosen,
                preference=float(scored.preference[index]),
                pace=float(scored.pace[index]),
                failure_rate=float(scored.failure_rates[index]),
                held_blocks=float(scored.overlap.held[index]),
                **{name: float(getattr(workers, name)[index]) for name in workers.__struct_fields__},
            )
            for index, place in enumerate(scored.field.places)
        ]
        return sorted(told, key=lambda each: (each.cost, each.instance, each.dp_rank))

    def expected_output_tokens(self, request: Request) -> float:
        return self._learning.output_tokens(request)

    def loads(self) -> list[PlaceLoad]:
        """Every place, in order."""
        book, now = self._book, self._now()
        return [
            PlaceLoad(
                instance=place.instance_id,
                dp_rank=place.dp_rank,
                requests=float(book.requests[row]),
                decoding=float(book.decoding[row]),
                prefill_tokens=float(book.prefill_tokens[row]),
                blocks=float(book.blocks[row]),
                queue_s=max(float(book.idle_at[row]) - now, 0.0)
                + max(float(book.others_idle_at[row]) - now, 0.0),
            )
            for place, row in sorted(self._roster.places.items())
        ]

    # ---

    def _score(self, request: Request, allowed: Sequence[InstanceId]) -> _Scored:
        hints = request.routing
        field = self._roster.field(allowed, hints.pinned_dp_rank)
        if not field.places:
            raise _nowhere(hints)
        now = self._now()
        sharing = sharing_of(self._active.sharing(usable_hashes(request)))
        asked = RequestView(
            request.num_given_tokens,
            request.block_size or 1,
            1.0 if request.prefill_only else self._learning.output_tokens(request),
            hints.weights,
            self._book.arrivals_per_s(now) / len(field.places),
        )
        overlap = self._overlaps.of(request, field)
        find_s = self._now() - now
        pace = self._learning.pace(field.at, now)
        affinity = self._affinities(hints, field, now)
        transfer_s = _transfer_s(request, overlap, field)
        workers = self._look(asked, overlap, sharing, pace, field, affinity, transfer_s, now)
        costs = self._policy(asked, workers)
        failure_rates = self._failure_rates(field)
        if failure_rates is not field.nothing:
            costs = with_retries(costs, failure_rates)
        preference = field.nothing
        if hints.preferred_taints:
            preference = _preference(field, hints.preferred_taints)
            costs = prefer(costs, preference)
        full, saturated, is_any = self._busy(field, workers)
        return _Scored(
            field,
            asked,
            workers,
            costs,
            preference,
            full,
            saturated,
            is_any,
            overlap,
            pace,
            failure_rates,
            find_s,
        )

    def _failure_rates(self, field: Field) -> Floats:
        """`field.nothing` itself where no worker has failed lately."""
        if not self._breakers:
            return field.nothing
        rates = self._breakers.failure_rates([place.instance_id for place in field.places])
        return field.nothing if rates is None else np.array(rates)

    def _pick(self, hints: RoutingHints, scored: _Scored) -> tuple[int, bool]:
        """The index of the best, and whether all are saturated. Who is full counts only while all are."""
        temperature = self._settings.temperature if hints.temperature is None else hints.temperature
        if not scored.is_any_saturated:
            return pick(scored.costs, self._rng, temperature), False
        is_saturated = bool(scored.saturated.all())
        if scored.full.any():
            (left,) = np.nonzero(~scored.full)
            if len(left):
                return int(left[pick(scored.costs[left], self._rng, temperature)]), is_saturated
        return pick(scored.costs, self._rng, temperature), is_saturated

    def _busy(self, field: Field, workers: WorkersView) -> tuple[_Mask, _Mask, bool]:
        """Who is full, who is saturated, and whether anybody is."""
        most_requests, most_tokens = self._limits(field)
        full: _Mask = workers.requests >= most_requests
        saturated = full | (workers.prefill_tokens > most_tokens)
        is_any = bool(_most(saturated))
        if is_any:
            # Where nothing is ours all that is known is what others said, perhaps long ago: it must not keep us away.
            has_own = self._book.has_own(field.at)
            return full & has_own, saturated & has_own, is_any
        return full, saturated, is_any

    def _limits(self, field: Field) -> tuple[Floats, Floats]:
        """Requests and prompt tokens that are enough for each candidate."""
        if field.limits is None:
            settings = self._settings
            field.limits = (
                field.max_seqs * settings.saturated_seqs,
                field.max_batch_tokens * settings.saturated_batches,
            )
        return field.limits

    def _look(
        self,
        asked: RequestView,
        overlap: Overlap,
        sharing: Sharing,
        pace: Floats,
        field: Field,
        affinity: Floats,
        transfer_s: Floats,
        now: float,
    ) -> WorkersView:
        book, rows, prices = self._book, field.at, field.prices
        decoding, context, requests = book.decoding[rows], book.context_tokens[rows], book.requests[rows]
        under_way = book.under_way_tokens[rows]
        joined = np.full(len(field.places), asked.prompt_tokens + asked.output_tokens / 2.0)
        if prices.unread is not None:
            spared = prices.unread * asked.block_size
            shared = spared * book.shared_blocks[rows]
            context = np.maximum(context - shared, 0.0)
            under_way = np.maximum(under_way - shared, 0.0)
            joined -= spared * np.minimum(overlap.worth, sharing.depth)
        beside, reading = even_out(requests, under_way)
        steps = self._learning.tokens_beside_others(asked.output_tokens)
        prefill_s, step_s, slowdown_s = prices.look(
            Asked(asked.prompt_tokens, asked.block_size, steps, overlap.worth, joined),
            pace,
            decoding,
            context,
            beside,
            reading,
        )
        lacking = book.used_blocks[rows] + asked.num_blocks - overlap.roomed - field.total_blocks
        return WorkersView(
            overlap_blocks=overlap.worth,
            prefill_tokens=book.prefill_tokens[rows],
            blocks=book.blocks[rows],
            requests=requests,
            decoding=decoding,
            queue_s=book.queue_s(rows, now),
            prefill_s=prefill_s,
            slowdown_s=slowdown_s,
            beside=beside,
            step_s=step_s,
            copy_s=self._copy_s(asked, overlap, sharing, step_s, slowdown_s, field, now),
            transfer_s=transfer_s,
            room_s=field.nothing
            if _most(lacking) <= 0.0
            else _room_s(lacking, field.total_blocks, asked, pace * prices.decode_s(decoding, context)),
            total_blocks=field.total_blocks,
            affinity=affinity,
        )

    def _copy_s(
        self,
        asked: RequestView,
        overlap: Overlap,
        sharing: Sharing,
        step_s: Floats,
        slowdown_s: Floats,
        field: Field,
        now: float,
    ) -> Floats:
        """What a copy of the hot prefix saves those that come, where it lacks.

        As many come with that prefix while an answer lasts as are under way. Each saves the difference to the holder
        with the fewest requests, in its own answer and in those beside it: for fewer requests, and for fewer prompts
        that answers wait for. Half of that, as the difference shrinks with each.
        """
        lacks = overlap.worth < sharing.hot_depth
        if not sharing.hot_depth or not _most(lacks) or lacks.all():
            return field.nothing
        requests = self._book.requests[field.at]
        holder = int(np.where(lacks, np.inf, requests).argmin())
        answers_s = asked.output_tokens * step_s / (1.0 - self._book.prefill_share(field.at, now))
        saved_s = answers_s[holder] - answers_s
        saved_s += 2.0 * slowdown_s[holder] * (requests[holder] - requests)
        return np.where(lacks, 0.5 * sharing.reuse * np.maximum(saved_s, 0.0), 0.0)

    def _affinities(self, hints: RoutingHints, field: Field, now: float) -> Floats:
        last = self._affinity.of(hints, now)
        index = None if last is None else field.index_of.get(last[0])
        if last is None or index is None:
            return field.nothing
        affinity = np.zeros(len(field.places))
        affinity[index] = last[1]
        return affinity

    def _add_row(self, row: int) -> None:
        self._expected.add_row(row)
        self._learning.add_row(row)

    def _drop_row(self, row: int) -> None:
        self._expected.drop_row(row)
        self._active.drop_row(row)
        self._learning.drop_row(row)

    def _compute(self, ticket: int, booking: Booking | None) -> None:
        """Its prompt is computed, or never will be."""
        if booking is not None:
            self._expected.end(booking.row, ticket)


def _most(values: npt.NDArray[Any]) -> Any:
    """As `max` and `any`, at half their cost: of short arrays that is spent before the first element."""
    return values[values.argmax()]


def _shadowed(shadow: Shadow, scored: _Scored, chosen: int) -> Shadowed | None:
    closed = scored.full if scored.full.any() and not scored.full.all() else None
    return shadow.look(scored.asked, scored.workers, scored.preference, closed, chosen)


def _room_s(lacking: Floats, total: Floats, asked: RequestView, decode_s: Floats) -> Floats:
    """A cache that is full is given back, all of it, in about the time of an answer."""
    share = np.maximum(lacking, 0.0) / np.maximum(total, 1.0)
    return np.where(total > 0, share * asked.output_tokens * decode_s, 0.0)


def _transfer_s(request: Request, overlap: Overlap, field: Field) -> Floats:
    """Who answers fetches what it lacks; what is fetched from who computes the prompt is taken for all of it."""
    links = request.routing.links
    if links is None:
        return field.nothing
    token_s = np.array([links.by_peer.get(place.instance_id, links.token_s) for place in field.places])
    if request.prefill_only:
        return token_s * request.num_given_tokens
    return token_s * np.maximum(request.num_given_tokens - overlap.held * (request.block_size or 1), 0.0)


def _preference(field: Field, wanted: Mapping[str, float]) -> Floats:
    return np.array(
        [
            sum(weight for taint, weight in wanted.items() if taint in taints) if taints else 0.0
            for taints in field.taints
        ]
    )


def _nowhere(hints: RoutingHints) -> Unavailable:
    if hints.pinned_dp_rank is not None:
        return Unavailable(
            f"no instance that may take the request has the data-parallel rank {hints.pinned_dp_rank}",
            reason="no_rank",
        )
    return Unavailable("no instance may take the request", reason="no_instances")
