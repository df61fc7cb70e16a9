"""Router wrapper that checks that journeys and routers follow the Router port."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvolt.core.delta import Usage
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Request
from kvolt.router.breaker import Outcome
from kvolt.router.port import Decision, Router
from kvolt.router.selection.forecast import Forecast, SupportsForecast
from kvolt.runtime.endpoint.client import EndpointClient


class CheckedRouter:
    """Wraps a router and calls `fail` for each violation of these rules:

    - an instance that failed a request does not get its next attempt;
    - an unreachable instance gets no request while another is reachable;
    - each reservation is released exactly once; its first token is reported at most once, before the release.
    """

    forecast: Callable[[Request], Forecast]

    def __init__(self, inner: Router, client: EndpointClient, fail: Callable[[str], None]) -> None:
        self.inner = inner
        self._client = client
        self._fail = fail
        self._routed: dict[int, Decision] = {}
        """Open reservations by identity."""
        self._released: dict[int, Decision] = {}
        self._with_first_token: dict[int, Decision] = {}
        self._attempts: dict[RequestId, Decision] = {}
        """Latest decision of each request."""
        self.num_routed: Counter[RequestId] = Counter()
        if isinstance(inner, SupportsForecast):
            self.forecast = inner.forecast

    @property
    def num_reserved(self) -> int:
        return len(self._routed)

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        # Excluded in the first call after a failure; later it may be reachable again.
        previous = self._attempts.pop(request.request_id, None)
        if previous is not None and id(previous) in self._released and not excluded:
            self._fail(f"{request.request_id} is routed again without excluding the worker that failed it")
        decision = await self.inner.route(request, excluded)
        self._routed[id(decision)] = decision
        self._attempts[request.request_id] = decision
        self.num_routed[request.request_id] += 1
        if decision.instance.id in excluded:
            self._fail(f"{request.request_id} is routed to {decision.instance.id}, which has failed it")
        reachable = {each.id for each in self._client.candidates()}
        if reachable and decision.instance.id not in reachable:
            self._fail(f"{request.request_id} is routed to {decision.instance.id}, which is unreachable")
        return decision

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        if id(decision) in self._with_first_token or id(decision) in self._released:
            self._fail(
                f"reservation {decision.reservation_id} got its first token twice or after its release"
            )
        self._with_first_token[id(decision)] = decision
        self.inner.mark_first_token(decision, cached_tokens)

    def release(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        if id(decision) in self._released:
            self._fail(f"reservation {decision.reservation_id} is released twice")
        self._routed.pop(id(decision), None)
        self._released[id(decision)] = decision
        self.inner.release(decision, usage, outcome)

    async def close(self) -> None:
        await self.inner.close()
