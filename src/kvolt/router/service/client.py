"""Router port of a process with a router process: decides there, one RemoteRouter per model.

While the router process is unreachable the frontend decides locally, and returns to the router process when it
responds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.endpoints import Instance, InstanceState
from kvolt.core.errors import Unavailable, from_info
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.breaker import ALL_FAILING, Outcome
from kvolt.router.explanation import Explanation, explain_route
from kvolt.router.port import Decision, Router, RouterContext, WithdrawHook
from kvolt.router.registry import NewRouter
from kvolt.router.selection.forecast import Forecast, SupportsForecast
from kvolt.router.service.link import RemoteReservation, RouterLink
from kvolt.router.service.messages import RouteRequest, to_route_request
from kvolt.runtime.endpoint.client import EndpointClient

_MAX_ATTEMPTS = 2


def remote_router(link: RouterLink, local: NewRouter) -> NewRouter:
    """Wrap a router factory: decides in the router process, and with a `local` router while that is unreachable."""

    def make(context: RouterContext) -> RemoteRouter:
        return RemoteRouter(link, context.client, local(context), context.block_size, context.role)

    return make


class RemoteRouter:
    """Router port of one component: decides in the router process, or with `local` while that is unreachable."""

    forecast: Callable[[Request], Forecast]
    """Present if `local` has one. Based on reported load; the local index knows local decisions only, so
    cached prompts may count as uncached."""

    def __init__(
        self,
        link: RouterLink,
        client: EndpointClient,
        local: Router,
        block_size: int = 0,
        role: Role = Role.AGGREGATED,
    ) -> None:
        self._link = link
        self._client = client
        self._local = local
        self._block_size = block_size
        self._role = role
        if isinstance(local, SupportsForecast):
            self.forecast = local.forecast
        self._endpoint = str(client.endpoint)
        self._candidates_by_id: tuple[list[Instance], dict[InstanceId, Instance]] = ([], {})
        """Cache: candidate list, and the same by id."""
        self._num_reserved = 0
        self._reserved: dict[int, RemoteReservation | Decision] = {}
        """Reservations of the router process, or decisions of `local`, by own reservation id."""

    @property
    def num_in_flight(self) -> int:
        return len(self._reserved)

    async def explain(self, request: Request) -> Explanation:
        """Explanation by the router process, or by `local` while that is unreachable."""
        explanation = await self._link.explain(self._route_request(request, frozenset()))
        return explanation or explain_route(self._local, request, "this frontend (no router process)")

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        excluded_now = excluded
        for _ in range(_MAX_ATTEMPTS):
            remote = await self._link.route(self._route_request(request, excluded_now))
            if remote is None:
                break
            response = remote.response
            if response.refused is not None:
                error = from_info(response.refused)
                if not isinstance(error, Unavailable) or error.fields.get("reason") == ALL_FAILING:
                    raise error
                if response.refused.fields.get("reason") == "no_session":
                    remote.session.close()
                    continue
                break  # the router knows no worker; the local router may
            instance = self._candidate(response.instance)
            if instance is not None:
                return self._accept(instance, remote)
            # One of the two has not seen the latest change of the worker yet.
            remote.release(None)
            self._link.stats.fallbacks["unusable_instance"] += 1
            excluded_now = excluded_now | self._unusable() | {response.instance or InstanceId("")}
        decision = await self._local.route(request, excluded)
        # Without the hook: `local` would pass decisions with its own reservation ids.
        return self._reserve(msgspec.structs.replace(decision, withdraw_hook=None), decision)

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        match self._reserved.get(decision.reservation_id):
            case RemoteReservation() as remote:
                remote.mark_first_token(cached_tokens)
            case Decision() as local_decision:
                self._local.mark_first_token(local_decision, cached_tokens)

    def release(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        match self._reserved.pop(decision.reservation_id, None):
            case RemoteReservation() as remote:
                remote.release(usage, outcome)
            case Decision() as local_decision:
                self._local.release(local_decision, usage, outcome)

    async def close(self) -> None:
        """The link is shared and stays open."""
        await self._local.close()

    def reroute(self, decision: Decision, remote: RemoteReservation) -> None:
        """Handle a RerouteNotice: offer the new worker to the request, or release it."""
        hook = decision.withdraw_hook
        instance = self._candidate(remote.response.instance)
        if instance is None or hook is None or hook.try_move is None:
            remote.release(None)
            return
        decision_elsewhere = self._accept(instance, remote)
        if not hook.try_move(decision_elsewhere):
            self.release(decision_elsewhere, None)

    def _route_request(self, request: Request, excluded: frozenset[InstanceId]) -> RouteRequest:
        return to_route_request(self._endpoint, request, excluded, self._block_size, self._role)

    def _accept(self, instance: Instance, remote: RemoteReservation) -> Decision:
        response = remote.response
        decision = Decision(
            instance,
            response.overlap_blocks,
            response.predicted_ms,
            response.kv_sources,
            dp_rank=response.dp_rank,
            withdraw_hook=WithdrawHook() if response.can_move else None,
        )
        reserved = self._reserve(decision, remote)
        if response.can_move:
            remote.session.on_reroute(remote.ticket, partial(self.reroute, reserved))
        return reserved

    def _reserve(self, decision: Decision, source: RemoteReservation | Decision) -> Decision:
        self._num_reserved += 1
        self._reserved[self._num_reserved] = source
        return msgspec.structs.replace(decision, reservation_id=self._num_reserved)

    def _candidate(self, instance_id: InstanceId | None) -> Instance | None:
        candidates = self._client.candidates()
        if self._candidates_by_id[0] is not candidates:
            self._candidates_by_id = (candidates, {instance.id: instance for instance in candidates})
        return None if instance_id is None else self._candidates_by_id[1].get(instance_id)

    def _unusable(self) -> frozenset[InstanceId]:
        usable = {instance.id for instance in self._client.candidates()}
        return frozenset(
            instance.id
            for instance in self._client.instances()
            if instance.state is InstanceState.READY and instance.id not in usable
        )
