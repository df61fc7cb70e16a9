"""Who may take a request at all: neither failed it, nor lacks its adapter or a taint, nor is passed over by its caller.

What every router begins with; which of them it takes is its own affair.
"""

from __future__ import annotations

import asyncio
import logging

from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.adapters import Adapters
from kvolt.router.breaker import Attempt, Breakers, BreakerState, BreakerView, Outcome
from kvolt.router.policy.roster import ranks_of
from kvolt.router.registrations import Registered
from kvolt.runtime.endpoint.address import Instance, InstanceState
from kvolt.runtime.endpoint.client import EndpointClient

log = logging.getLogger(__name__)


class Eligible:
    """Of one endpoint, for as long as its client lives."""

    def __init__(
        self, client: EndpointClient, role: Role = Role.AGGREGATED, breakers: Breakers | None = None
    ) -> None:
        """`breakers`: on the loop's time unless they are given."""
        self._client = client
        self._role = role
        self.breakers = breakers or Breakers(asyncio.get_running_loop().time)
        """Of these instances, as this router sees them. Routers say what they send, and how it ended."""
        self.breakers.on_change = self._log_breaker
        client.on_change(self._drop_breakers)
        self._adapters = Adapters(client)
        self.registered = Registered(client)

    def is_anyone(self, request: Request, excluded: frozenset[InstanceId]) -> bool:
        """Whether every candidate will do."""
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

    def of(self, request: Request, excluded: frozenset[InstanceId]) -> list[Instance]:
        """At least one, in order of id; Unavailable says why there is none."""
        hints, lora = request.routing, request.lora
        able = self._adapters.holders(lora) if lora else self._client.candidates()
        left = [instance for instance in able if instance.id not in excluded]
        pinned = hints.pins.get(self._role)
        if pinned is not None:
            left = [instance for instance in left if instance.id == pinned]
        if hints.allowed:
            allowed = frozenset(hints.allowed)
            left = [instance for instance in left if instance.id in allowed]
        if hints.required_taints:
            left = [each for each in left if self.registered.has_taints(each.id, hints.required_taints)]
        if hints.pinned_dp_rank is not None:
            infos = self.registered.infos()
            left = [each for each in left if hints.pinned_dp_rank in ranks_of(infos.get(each.id))]
        if not left:
            raise self._nobody(hints, lora, excluded)
        blocked = self.breakers.blocked(each.id for each in left)
        return [each for each in left if each.id not in blocked] if blocked else left

    def why_not(self, instance: Instance, request: Request) -> str | None:
        """Why a registered instance may not take a request, for people; None for one that may."""
        hints, lora = request.routing, request.lora
        pinned = hints.pins.get(self._role)
        if instance.state is not InstanceState.READY:
            return f"it is {instance.state.value} and takes no new requests"
        if instance not in self._client.candidates():
            return "it cannot be reached now"
        if lora and instance not in self._adapters.holders(lora):
            return f"it does not have the adapter {lora!r}"
        if pinned is not None and instance.id != pinned:
            return f"the request is pinned to {pinned}"
        if hints.allowed and instance.id not in hints.allowed:
            return "it is none of those that the request allows"
        if hints.required_taints and not self.registered.has_taints(instance.id, hints.required_taints):
            return f"it does not have {_named('taint', hints.required_taints)}"
        rank = hints.pinned_dp_rank
        if rank is not None and rank not in ranks_of(self.registered.infos().get(instance.id)):
            return f"it has no data-parallel rank {rank}"
        breaker = self.breakers.views().get(instance.id)
        if breaker is not None and breaker.state is BreakerState.OPEN:
            expected = f"it is expected to fail {breaker.failure_rate:.0%} of its requests"
            return f"its circuit breaker is open: {expected}; next probe in {breaker.retry_in_s:.1f} s"
        return None

    def end_attempt(self, instance_id: InstanceId, attempt: Attempt | None, outcome: Outcome) -> None:
        """A request is over that a router sent. What a worker did that is gone by now matters no more."""
        is_gone = outcome is Outcome.FAILED and not self._client.is_registered(instance_id)
        self.breakers.end(instance_id, attempt, Outcome.UNKNOWN if is_gone else outcome)

    def _drop_breakers(self) -> None:
        if self.breakers:
            self.breakers.keep(each.id for each in self._client.instances())

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

    def _nobody(self, hints: RoutingHints, lora: str | None, excluded: frozenset[InstanceId]) -> Unavailable:
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
        elif lora and not self._adapters.holders(lora):
            message, reason = f"no instance that can be reached has the adapter {lora!r}", "no_adapter"
        elif not excluded and not self._client.candidates():
            message = f"no instance of {self._client.endpoint} can be reached"
            reason = "none_reachable" if self._client.instances() else "no_instances"
        else:
            message, reason = f"another instance{having} cannot be reached", "none_left"
        return Unavailable(message, endpoint=str(self._client.endpoint), reason=reason)


def _named(what: str, names: tuple[str, ...]) -> str:
    return f"the {what}{'s' if len(names) > 1 else ''} {', '.join(names)}"
