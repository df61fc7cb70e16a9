"""Standalone: a complete router for one model without kvolt's workers, runtime or event loop. Pure.

The caller registers workers, posts their KV events and load reports, and asks for decisions; time and randomness are
injected. A reservation lasts until it is released or, with a TTL, until that has passed without a renewal.

    router = Standalone(block_size=16, policy=latency(), now=time.monotonic, rng=random.Random())
    router.register(InstanceId("a"), worker_info(block_size=16))
    choice = router.choose(prompt_of(token_ids, block_size=16))  # reserves nothing
    reservation = router.reserve(choice, ttl_s=60)
    ...                                          # the first token has arrived
    router.mark_first_token(reservation.id, cached_tokens=None)
    router.release(reservation.id, usage=None)
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
from kvolt.router.choice import CandidateCost, WorkerChoice
from kvolt.router.index.approximate import ApproximateOptions
from kvolt.router.index.hybrid import HybridIndex
from kvolt.router.policy.policy import Policy
from kvolt.router.selection.selector import Selector
from kvolt.router.service.standalone_state import StandaloneEvent, StandaloneIndex
from kvolt.router.worker_rank import WorkerRankLoad, ranks_of
from kvolt.runtime.config.router_settings import RouterSettings

_ID_BITS = 64


class StandaloneOptions(msgspec.Struct, frozen=True, kw_only=True):
    max_workers: int = 4096
    max_reservations: int = 1_000_000


@dataclass(slots=True)
class Reservation:
    """One request at one worker rank."""

    id: str
    selector_id: int
    choice: WorkerChoice
    expires_at: float | None
    attempt: Attempt | None = None
    """State kept by the circuit breaker."""


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
        self.event_index = StandaloneIndex(settings.index_max_bytes)
        self.prefix_index = HybridIndex(
            self.event_index,
            now,
            ApproximateOptions(ttl_s=settings.approximate_ttl_s, max_bytes=settings.approximate_max_bytes),
        )
        self.breakers = Breakers(now)
        self.selector = Selector(
            self.prefix_index, policy, now, rng, settings, self.prefix_index, self.breakers
        )
        self._infos: dict[InstanceId, EngineInfo] = {}
        self._worker_ids: tuple[InstanceId, ...] = ()
        self._reservations: dict[str, Reservation] = {}
        self._leases: list[tuple[float, str]] = []
        """Heap of (expires_at, reservation id). A renewed reservation has several entries; the last one counts."""
        self.num_expired = 0

    # --- workers

    @property
    def workers(self) -> Mapping[InstanceId, EngineInfo]:
        return self._infos

    def register(self, worker: InstanceId, info: EngineInfo) -> None:
        """Add or update a worker. A known one keeps blocks and reservations. Raises InvalidRequest if not
        comparable."""
        if info.hash_scheme != HASH_SCHEME:
            raise InvalidRequest(
                f"this router hashes blocks by {HASH_SCHEME!r}, not by {info.hash_scheme!r}",
                param="hash_scheme",
            )
        if info.block_size != self.block_size:
            raise InvalidRequest(
                f"blocks of this model have {self.block_size} tokens here, not {info.block_size}",
                param="block_size",
            )
        if worker not in self._infos and len(self._infos) >= self._options.max_workers:
            limit = self._options.max_workers
            raise Overloaded(f"there are {limit} workers already", queue="workers", limit=limit)
        if info.publishes_kv_events:
            try:
                self.event_index.add_worker(worker, ranks_of(info))
            except ValueError as error:
                raise Overloaded(str(error), queue="workers") from None
        else:
            self.event_index.drop_worker(worker)
        self._infos[worker] = info
        self._update_workers()

    def unregister(self, worker: InstanceId) -> None:
        """Remove a worker with its blocks and reservations."""
        self._info_of(worker)
        del self._infos[worker]
        self.event_index.drop_worker(worker)
        for each in [
            each for each in self._reservations.values() if each.choice.worker_rank.instance_id == worker
        ]:
            self.release(each.id, None)
        self._update_workers()

    def post(self, worker: InstanceId, events: Sequence[StandaloneEvent]) -> int:
        """Apply KV events; return how many were new. See StandaloneIndex."""
        self._check_has_events(worker)
        return self.event_index.post(worker, events)

    def replace_blocks(
        self,
        worker: InstanceId,
        blocks: Mapping[tuple[int, Tier], bytes],
        epoch: int | None = None,
        next_id: int = 0,
    ) -> None:
        """Replace all blocks of a worker. See StandaloneIndex."""
        self._check_has_events(worker)
        self.event_index.replace(worker, blocks, epoch, next_id)

    def on_report(self, report: LoadReport) -> None:
        self._info_of(InstanceId(report.instance))
        self.selector.on_report(report)

    # --- decisions

    def choose(self, request: Request, excluded: Collection[InstanceId] = ()) -> WorkerChoice:
        """Choose a worker without a reservation. Raises Unavailable if none can take the request."""
        self.expire()
        return self.selector.choose(request, self._allowed(request, excluded))

    def explain(self, request: Request, excluded: Collection[InstanceId] = ()) -> list[CandidateCost]:
        """All candidates with their cost terms, cheapest first."""
        self.expire()
        return self.selector.explain(request, self._allowed(request, excluded))

    def worker_loads(self) -> list[WorkerRankLoad]:
        self.expire()
        return self.selector.worker_loads()

    # --- reservations

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def has_reservation(self, reservation_id: str) -> bool:
        self.expire()
        return reservation_id in self._reservations

    def reserve(self, choice: WorkerChoice, ttl_s: float | None = None) -> Reservation:
        """Reserve a choice until its release or, with a TTL, until that has passed without a renewal."""
        limit = self._options.max_reservations
        if len(self._reservations) >= limit:
            raise Overloaded(
                f"there are {limit} reservations: release those that have ended, or set a ttl_s",
                queue="reservations",
                limit=limit,
            )
        selector_id = self.selector.reserve(choice)
        attempt = self.breakers.start_attempt(choice.worker_rank.instance_id)
        reservation = Reservation(
            f"{self._rng.getrandbits(_ID_BITS):016x}", selector_id, choice, None, attempt
        )
        self._reservations[reservation.id] = reservation
        self._lease(reservation, ttl_s)
        return reservation

    def renew(self, reservation_id: str, ttl_s: float | None) -> Reservation:
        reservation = self._reservation(reservation_id)
        self._lease(reservation, ttl_s)
        return reservation

    def mark_first_token(self, reservation_id: str, cached_tokens: int | None) -> None:
        reservation = self._reservation(reservation_id)
        self.breakers.mark_first_token(reservation.choice.worker_rank.instance_id, reservation.attempt)
        self.selector.mark_first_token(reservation.selector_id, cached_tokens)

    def release(self, reservation_id: str, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        """Raises NotFound for a reservation that was released, has expired, or whose worker is gone."""
        self._release(self._reservation(reservation_id), usage, outcome)

    def expire(self) -> int:
        """Release expired reservations; return their number."""
        now, num_expired = self._now(), 0
        while self._leases and self._leases[0][0] <= now:
            expires_at, reservation_id = heapq.heappop(self._leases)
            reservation = self._reservations.get(reservation_id)
            if reservation is not None and reservation.expires_at == expires_at:
                self._release(reservation, None, Outcome.UNKNOWN)
                num_expired += 1
        self.num_expired += num_expired
        return num_expired

    # ---

    def _release(self, reservation: Reservation, usage: Usage | None, outcome: Outcome) -> None:
        del self._reservations[reservation.id]
        self.breakers.end_attempt(reservation.choice.worker_rank.instance_id, reservation.attempt, outcome)
        self.selector.release(reservation.selector_id, usage)

    def _lease(self, reservation: Reservation, ttl_s: float | None) -> None:
        reservation.expires_at = None if ttl_s is None else self._now() + ttl_s
        if reservation.expires_at is not None:
            heapq.heappush(self._leases, (reservation.expires_at, reservation.id))
        if len(self._leases) > 2 * len(self._reservations) + 64:  # renewed repeatedly
            self._leases = [
                (each.expires_at, each.id)
                for each in self._reservations.values()
                if each.expires_at is not None
            ]
            heapq.heapify(self._leases)

    def _reservation(self, reservation_id: str) -> Reservation:
        if not self.has_reservation(reservation_id):
            raise NotFound(
                f"there is no reservation {reservation_id!r}", kind="reservation", name=reservation_id
            )
        return self._reservations[reservation_id]

    def _info_of(self, worker: InstanceId) -> EngineInfo:
        info = self._infos.get(worker)
        if info is None:
            raise NotFound(f"there is no worker {worker!r}: register it first", kind="worker", name=worker)
        return info

    def _check_has_events(self, worker: InstanceId) -> None:
        if not self._info_of(worker).publishes_kv_events:
            raise InvalidRequest(f"worker {worker!r} is registered without KV events", param="kv_events")

    def _update_workers(self) -> None:
        self._worker_ids = tuple(sorted(self._infos))
        self.breakers.retain(self._worker_ids)
        self.selector.set_workers(self._infos)

    def _allowed(self, request: Request, excluded: Collection[InstanceId]) -> tuple[InstanceId, ...]:
        hints, lora = request.routing, request.lora
        pinned = hints.pins.get(Role.AGGREGATED)
        if not (excluded or lora or pinned or hints.allowed or hints.required_taints):
            return self._unblocked(self._worker_ids)
        candidates = tuple(
            worker
            for worker in self._worker_ids
            if worker not in excluded
            and (pinned is None or worker == pinned)
            and (not hints.allowed or worker in hints.allowed)
            and (not lora or lora in self._infos[worker].loras)
            and set(hints.required_taints) <= set(self._infos[worker].taints)
        )
        if not candidates:
            raise Unavailable("no registered worker may take the request", reason="none_fits")
        return self._unblocked(candidates)

    def _unblocked(self, workers: tuple[InstanceId, ...]) -> tuple[InstanceId, ...]:
        """Workers whose breaker is closed or half-open; all of them if none is."""
        blocked = self.breakers.blocked(workers)
        return tuple(each for each in workers if each not in blocked) if blocked else workers
