"""Standalone: a whole router for one model without kvolt's workers, runtime or loop. Pure: time and chance come in.

Workers are registered by hand, their KV events and load reports are posted, decisions are asked for. A reservation
lasts until it is freed, or, where whoever made it chose a time, until that has passed without being renewed: there is
no stream that it could hang on.

    router = Standalone(block_size=16, policy=latency(), now=time.monotonic, rng=random.Random())
    router.register(InstanceId("a"), worker_info(block_size=16))
    choice = router.choose(prompt_of(token_ids, block_size=16))  # nothing is booked
    reservation = router.reserve(choice, ttl_s=60)
    ...                                          # the first token has come
    router.begun(reservation.id, cached_tokens=None)
    router.free(reservation.id, usage=None)
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvolt.core.card import HASH_SCHEME, EngineInfo
from kvolt.core.delta import Usage
from kvolt.core.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import Tier
from kvolt.core.load import LoadReport
from kvolt.core.request import Request, Role
from kvolt.router.breaker import Attempt, Breakers, Outcome
from kvolt.router.index.approximate import ApproximateOptions
from kvolt.router.index.hybrid import MixedHolders
from kvolt.router.policy.policy import Policy
from kvolt.router.policy.roster import ranks_of
from kvolt.router.policy.selector import Choice, Explained, PlaceLoad, Selector
from kvolt.router.service.standalone_state import PostedEvent, PostedIndex
from kvolt.runtime.config.router_settings import RouterSettings

_ID_BITS = 64


class StandaloneOptions(msgspec.Struct, frozen=True, kw_only=True):
    max_workers: int = 4096
    max_reservations: int = 1_000_000


@dataclass(slots=True)
class Reservation:
    """One request at one place."""

    id: str
    ticket: int
    choice: Choice
    expires_at: float | None
    attempt: Attempt | None = None
    """What the breaker of its worker keeps of it."""


class Standalone:
    """See the module."""

    def __init__(
        self,
        block_size: int,
        policy: Policy,
        now: Callable[[], float],
        rng: random.Random,
        settings: RouterSettings | None = None,
        options: StandaloneOptions | None = None,
    ) -> None:
        settings = settings or RouterSettings()
        self.block_size = block_size
        self._now = now
        self._rng = rng
        self._options = options or StandaloneOptions()
        self.posted = PostedIndex(settings.index_max_bytes)
        self.holders = MixedHolders(
            self.posted,
            now,
            ApproximateOptions(ttl_s=settings.approximate_ttl_s, max_bytes=settings.approximate_max_bytes),
        )
        self.breakers = Breakers(now)
        self.selector = Selector(self.holders, policy, now, rng, settings, self.holders, self.breakers)
        self._infos: dict[InstanceId, EngineInfo] = {}
        self._everyone: tuple[InstanceId, ...] = ()
        self._reservations: dict[str, Reservation] = {}
        self._leases: list[tuple[float, str]] = []
        """As a heap; one that was renewed is in it more than once, and the last counts."""
        self.num_expired = 0

    # --- workers

    @property
    def workers(self) -> Mapping[InstanceId, EngineInfo]:
        return self._infos

    def register(self, worker: InstanceId, info: EngineInfo) -> None:
        """Known, it keeps its blocks and its bookings. InvalidRequest where its blocks cannot be compared."""
        if info.hash_scheme != HASH_SCHEME:
            raise InvalidRequest(
                f"blocks are named by {HASH_SCHEME!r} here, not by {info.hash_scheme!r}", param="hash_scheme"
            )
        if info.block_size != self.block_size:
            raise InvalidRequest(
                f"blocks of this model have {self.block_size} tokens here, not {info.block_size}",
                param="block_size",
            )
        if worker not in self._infos and len(self._infos) >= self._options.max_workers:
            limit = self._options.max_workers
            raise Overloaded(f"there are {limit} workers already", queue="workers", limit=limit)
        if info.tells_kv:
            try:
                self.posted.add(worker, ranks_of(info))
            except ValueError as error:
                raise Overloaded(str(error), queue="workers") from None
        else:
            self.posted.drop(worker)
        self._infos[worker] = info
        self._tell()

    def unregister(self, worker: InstanceId) -> None:
        """With all that it holds and all that is reserved there."""
        self._known(worker)
        del self._infos[worker]
        self.posted.drop(worker)
        for each in [each for each in self._reservations.values() if each.choice.place.instance_id == worker]:
            self.free(each.id, None)
        self._tell()

    def post(self, worker: InstanceId, events: Sequence[PostedEvent]) -> int:
        """How many were new; see PostedIndex."""
        self._with_events(worker)
        return self.posted.post(worker, events)

    def replace_blocks(
        self,
        worker: InstanceId,
        blocks: Mapping[tuple[int, Tier], bytes],
        epoch: int | None = None,
        next_id: int = 0,
    ) -> None:
        """All that it holds; see PostedIndex."""
        self._with_events(worker)
        self.posted.replace(worker, blocks, epoch, next_id)

    def on_report(self, report: LoadReport) -> None:
        self._known(InstanceId(report.instance))
        self.selector.on_report(report)

    # --- decisions

    def choose(self, request: Request, excluded: Collection[InstanceId] = ()) -> Choice:
        """Nothing is booked. Unavailable when nobody can take it."""
        self.expire()
        return self.selector.choose(request, self._allowed(request, excluded))

    def explain(self, request: Request, excluded: Collection[InstanceId] = ()) -> list[Explained]:
        """Every candidate with the terms of its cost."""
        self.expire()
        return self.selector.explain(request, self._allowed(request, excluded))

    def loads(self) -> list[PlaceLoad]:
        self.expire()
        return self.selector.loads()

    # --- reservations

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def has_reservation(self, reservation_id: str) -> bool:
        self.expire()
        return reservation_id in self._reservations

    def reserve(self, choice: Choice, ttl_s: float | None = None) -> Reservation:
        """Counted from now on, until it is freed or was not renewed for so long."""
        limit = self._options.max_reservations
        if len(self._reservations) >= limit:
            raise Overloaded(
                f"there are {limit} reservations: free those that are over, or give them a ttl_s",
                queue="reservations",
                limit=limit,
            )
        ticket = self.selector.book(choice)
        attempt = self.breakers.send(choice.place.instance_id)
        reservation = Reservation(f"{self._rng.getrandbits(_ID_BITS):016x}", ticket, choice, None, attempt)
        self._reservations[reservation.id] = reservation
        self._lease(reservation, ttl_s)
        return reservation

    def renew(self, reservation_id: str, ttl_s: float | None) -> Reservation:
        reservation = self._reserved(reservation_id)
        self._lease(reservation, ttl_s)
        return reservation

    def begun(self, reservation_id: str, cached_tokens: int | None) -> None:
        reservation = self._reserved(reservation_id)
        self.breakers.first_token(reservation.choice.place.instance_id, reservation.attempt)
        self.selector.begun(reservation.ticket, cached_tokens)

    def free(self, reservation_id: str, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        """NotFound for one that is over: freed, expired, or its worker is gone."""
        self._end(self._reserved(reservation_id), usage, outcome)

    def expire(self) -> int:
        """Reservations whose time is over; how many."""
        now, num_expired = self._now(), 0
        while self._leases and self._leases[0][0] <= now:
            expires_at, reservation_id = heapq.heappop(self._leases)
            known = self._reservations.get(reservation_id)
            if known is not None and known.expires_at == expires_at:
                self._end(known, None, Outcome.UNKNOWN)
                num_expired += 1
        self.num_expired += num_expired
        return num_expired

    # ---

    def _end(self, reservation: Reservation, usage: Usage | None, outcome: Outcome) -> None:
        del self._reservations[reservation.id]
        self.breakers.end(reservation.choice.place.instance_id, reservation.attempt, outcome)
        self.selector.free(reservation.ticket, usage)

    def _lease(self, reservation: Reservation, ttl_s: float | None) -> None:
        reservation.expires_at = None if ttl_s is None else self._now() + ttl_s
        if reservation.expires_at is not None:
            heapq.heappush(self._leases, (reservation.expires_at, reservation.id))
        if len(self._leases) > 2 * len(self._reservations) + 64:  # renewed over and over
            self._leases = [
                (each.expires_at, each.id)
                for each in self._reservations.values()
                if each.expires_at is not None
            ]
            heapq.heapify(self._leases)

    def _reserved(self, reservation_id: str) -> Reservation:
        if not self.has_reservation(reservation_id):
            raise NotFound(
                f"there is no reservation {reservation_id!r}", kind="reservation", name=reservation_id
            )
        return self._reservations[reservation_id]

    def _known(self, worker: InstanceId) -> EngineInfo:
        info = self._infos.get(worker)
        if info is None:
            raise NotFound(f"there is no worker {worker!r}: register it first", kind="worker", name=worker)
        return info

    def _with_events(self, worker: InstanceId) -> None:
        if not self._known(worker).tells_kv:
            raise InvalidRequest(f"worker {worker!r} is registered without KV events", param="kv_events")

    def _tell(self) -> None:
        self._everyone = tuple(sorted(self._infos))
        self.breakers.keep(self._everyone)
        self.selector.set_workers(self._infos)

    def _allowed(self, request: Request, excluded: Collection[InstanceId]) -> tuple[InstanceId, ...]:
        hints, lora = request.routing, request.lora
        pinned = hints.pins.get(Role.AGGREGATED)
        if not (excluded or lora or pinned or hints.allowed or hints.required_taints):
            return self._closed(self._everyone)
        left = tuple(
            worker
            for worker in self._everyone
            if worker not in excluded
            and (pinned is None or worker == pinned)
            and (not hints.allowed or worker in hints.allowed)
            and (not lora or lora in self._infos[worker].loras)
            and set(hints.required_taints) <= set(self._infos[worker].taints)
        )
        if not left:
            raise Unavailable("no registered worker may take the request", reason="none_fits")
        return self._closed(left)

    def _closed(self, workers: tuple[InstanceId, ...]) -> tuple[InstanceId, ...]:
        """Those whose breaker lets a request pass; all of them where none does."""
        blocked = self.breakers.blocked(workers)
        return tuple(each for each in workers if each not in blocked) if blocked else workers
