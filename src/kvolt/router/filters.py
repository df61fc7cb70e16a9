"""Candidate filter: excluded and failing instances, LoRA adapters, pins, taints and DP ranks.

The first step of every router. Choosing among the candidates is up to the router.
"""

from __future__ import annotations

import asyncio
import logging

from kvolt.core.endpoints import Instance, InstanceState
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.breaker import ALL_FAILING, Attempt, Breakers, BreakerState, BreakerView, Outcome
from kvolt.router.registrations import Registrations
from kvolt.router.worker_rank import ranks_of
from kvolt.runtime.endpoint.client import EndpointClient

log = logging.getLogger(__name__)


class CandidateFilter:
    """Candidate filter of one endpoint; lives as long as its client."""

    def __init__(
        self, client: EndpointClient, role: Role = Role.AGGREGATED, breakers: Breakers | None = None
    ) -> None:
        """`breakers` default to the event loop's clock."""
        self._client = client
        self._role = role
        self.breakers = breakers or Breakers(asyncio.get_running_loop().time)
        """Circuit breakers of these instances. The router reports each attempt and its outcome."""
        self.breakers.on_change = self._log_breaker
        client.on_change(self._drop_breakers)
        self.registrations = Registrations(client)

    def is_unrestricted(self, request: Request, excluded: frozenset[InstanceId]) -> bool:
        """Whether all candidates may take the request."""
        hints = request.routing
        return (
            not excluded
            and not self.breakers.is_any_open
            and not request.lora
            and self._role not in hints.pins
            and not hints.allowed
            and not hints.required_taints
            and hints.pinned_dp_rank is None
        )

    def candidates(self, request: Request, excluded: frozenset[InstanceId]) -> list[Instance]:
        """At least one candidate, in order of id. Raises Unavailable with the reason if there is none."""
        hints, lora = request.routing, request.lora
        capable = self.registrations.candidates_with(lora) if lora else self._client.candidates()
        candidates = [instance for instance in capable if instance.id not in excluded]
        pinned = hints.pins.get(self._role)
        if pinned is not None:
            candidates = [instance for instance in candidates if instance.id == pinned]
        if hints.allowed:
            allowed = frozenset(hints.allowed)
            candidates = [instance for instance in candidates if instance.id in allowed]
        if hints.required_taints:
            candidates = [
                each for each in candidates if self.registrations.has_taints(each.id, hints.required_taints)
            ]
        if hints.pinned_dp_rank is not None:
            infos = self.registrations.infos()
            candidates = [each for each in candidates if hints.pinned_dp_rank in ranks_of(infos.get(each.id))]
        if not candidates:
            raise self._unavailable(hints, lora, excluded)
        return self._without_blocked(candidates, request) if self.breakers.is_any_open else candidates

    def _without_blocked(self, candidates: list[Instance], request: Request) -> list[Instance]:
        """A pinned worker is not blocked; all candidates are blocked only for a prompt that others can compute."""
        has_alternative = (
            self._client.has_fallback and request.prefill_only and self._role not in request.routing.pins
        )
        blocked = self.breakers.blocked((each.id for each in candidates), may_block_all=has_alternative)
        unblocked = [each for each in candidates if each.id not in blocked]
        if not unblocked:
            endpoint = str(self._client.endpoint)
            raise Unavailable(f"all workers of {endpoint} fail", endpoint=endpoint, reason=ALL_FAILING)
        return unblocked

    def exclusion_reason(self, instance: Instance, request: Request) -> str | None:
        """Why a registered instance cannot take the request, for display; None if it can."""
        hints, lora = request.routing, request.lora
        pinned = hints.pins.get(self._role)
        if instance.state is not InstanceState.READY:
            return f"it is {instance.state.value} and accepts no new requests"
        if instance not in self._client.candidates():
            return "it is not reachable"
        if lora and instance not in self.registrations.candidates_with(lora):
            return f"it does not have the adapter {lora!r}"
        if pinned is not None and instance.id != pinned:
            return f"the request is pinned to {pinned}"
        if hints.allowed and instance.id not in hints.allowed:
            return "it is not among the workers that the request allows"
        if hints.required_taints and not self.registrations.has_taints(instance.id, hints.required_taints):
            return f"it does not have {_named('taint', hints.required_taints)}"
        rank = hints.pinned_dp_rank
        if rank is not None and rank not in ranks_of(self.registrations.infos().get(instance.id)):
            return f"it has no data-parallel rank {rank}"
        breaker = self.breakers.views().get(instance.id)
        if breaker is not None and breaker.state is BreakerState.OPEN:
            expected = f"it is expected to fail {breaker.failure_rate:.0%} of its requests"
            return f"its circuit breaker is open: {expected}; next probe in {breaker.retry_in_s:.1f} s"
        return None

    def end_attempt(self, instance_id: InstanceId, attempt: Attempt | None, outcome: Outcome) -> None:
        """Report the outcome of an attempt. A failure of an instance that is deregistered by now is ignored."""
        is_gone = outcome is Outcome.FAILED and not self._client.is_registered(instance_id)
        self.breakers.end_attempt(instance_id, attempt, Outcome.UNKNOWN if is_gone else outcome)

    def _drop_breakers(self) -> None:
        if self.breakers:
            self.breakers.retain(each.id for each in self._client.instances())

    def _log_breaker(self, instance_id: InstanceId, view: BreakerView) -> None:
        if view.state is BreakerState.CLOSED:
            log.info("breaker closed: worker=%s", instance_id)
            return
        log.warning(
            "breaker open: worker=%s failure_rate=%.2f retry_in_s=%.1f",
            instance_id,
            view.failure_rate,
            view.retry_in_s,
        )

    def _unavailable(
        self, hints: RoutingHints, lora: str | None, excluded: frozenset[InstanceId]
    ) -> Unavailable:
        pinned = hints.pins.get(self._role)
        having = f" with the adapter {lora!r}" if lora else ""
        if hints.required_taints:
            having += f" with {_named('taint', hints.required_taints)}"
        if hints.pinned_dp_rank is not None:
            having += f" with the data-parallel rank {hints.pinned_dp_rank}"
        if pinned is not None:
            message, reason = f"the pinned instance {pinned}{having} cannot be reached", "pin"
        elif hints.allowed:
            message = f"none of the allowed instances{having} can be reached"
            reason = "none_allowed"
        elif hints.required_taints or hints.pinned_dp_rank is not None:
            message, reason = f"no instance{having} can be reached", "none_fits"
        elif lora and not self.registrations.candidates_with(lora):
            message, reason = f"no instance that can be reached has the adapter {lora!r}", "no_adapter"
        elif not excluded and not self._client.candidates():
            message = f"no instance of {self._client.endpoint} can be reached"
            reason = "none_reachable" if self._client.instances() else "no_instances"
        else:
            message, reason = f"another instance{having} cannot be reached", "none_left"
        return Unavailable(message, endpoint=str(self._client.endpoint), reason=reason)


def _named(what: str, names: tuple[str, ...]) -> str:
    return f"the {what}{'s' if len(names) > 1 else ''} {', '.join(names)}"
