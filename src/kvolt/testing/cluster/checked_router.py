"""CheckedRouter: a router of a virtual frontend, and the check that journeys and routers keep to the port."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvolt.core.delta import Usage
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Request
from kvolt.router.breaker import Outcome
from kvolt.router.policy.forecast import Forecast, Forecasting
from kvolt.router.port import Decision, Router
from kvolt.runtime.endpoint.client import EndpointClient


class CheckedRouter:
    """See the module. `fail` is called with a sentence for each rule that is broken.

    - no instance that failed a request gets it again in the next attempt;
    - no instance that cannot be reached gets one while another can;
    - every reservation is released exactly once, and its first token reported at most once, before that.
    """

    forecast: Callable[[Request], Forecast]

    def __init__(self, inner: Router, client: EndpointClient, fail: Callable[[str], None]) -> None:
        self.inner = inner
        self._client = client
        self._fail = fail
        self._routed: dict[int, Decision] = {}
        """Reservations that are not released, by identity."""
        self._released: dict[int, Decision] = {}
        self._begun: dict[int, Decision] = {}
        self._attempts: dict[RequestId, Decision] = {}
        """The latest of each request, until it is routed again."""
        self.num_routed: Counter[RequestId] = Counter()
        if isinstance(inner, Forecasting):
            self.forecast = inner.forecast

    @property
    def num_reserved(self) -> int:
        return len(self._routed)

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        # Excluded in the first call after a failure; after that it may be back in reach.
        before = self._attempts.pop(request.request_id, None)
        if before is not None and id(before) in self._released and not excluded:
            self._fail(f"{request.request_id} is routed again, and the worker that failed it is not excluded")
        decision = await self.inner.route(request, excluded)
        self._routed[id(decision)] = decision
        self._attempts[request.request_id] = decision
        self.num_routed[request.request_id] += 1
        if decision.instance.id in excluded:
            self._fail(f"{request.request_id} goes to {decision.instance.id}, which has failed it")
        reachable = {each.id for each in self._client.candidates()}
        if reachable and decision.instance.id not in reachable:
            self._fail(f"{request.request_id} goes to {decision.instance.id}, which cannot be reached")
        return decision

    def begun(self, decision: Decision, cached_tokens: int | None) -> None:
        if id(decision) in self._begun or id(decision) in self._released:
            self._fail(f"reservation {decision.booking} has its first token twice, or after its end")
        self._begun[id(decision)] = decision
        self.inner.begun(decision, cached_tokens)

    def free(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        if id(decision) in self._released:
            self._fail(f"reservation {decision.booking} is released twice")
        self._routed.pop(id(decision), None)
        self._released[id(decision)] = decision
        self.inner.free(decision, usage, outcome)

    async def close(self) -> None:
        await self.inner.close()
