"""Choice of where a prompt is computed, by predicted cost. Pure.

REMOTE: prefill worker, then decode worker. LOCAL: the decode worker computes the prompt. PREFILL_WORKER: the prefill
worker also decodes, when decode workers are overloaded. Cost in seconds: time to first token, decode steps, and the
slowdown of other requests on the workers involved. Forecasts are followed by the reservation without an await, so they
stay valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.errors import KvoltError, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Handoff, LinkCosts, Request, Role, RoutingHints
from kvolt.journey.links import KvLinkSpeeds, with_link_costs
from kvolt.journey.prefill import RoleTarget, as_prefill_request
from kvolt.journey.slo_gate import DecayingAverage, SloGate
from kvolt.router.breaker import ALL_FAILING
from kvolt.router.port import Router
from kvolt.router.selection.forecast import Forecast, SupportsForecast


class PrefillMode(StrEnum):
    LOCAL = "local"
    REMOTE = "remote"
    PREFILL_WORKER = "prefill_worker"


class PrefillPlan(NamedTuple):
    mode: PrefillMode
    target: RoleTarget | None
    """Prefill workers; None in mode LOCAL."""


class _Forecasts(NamedTuple):
    local: Forecast
    """Prompt and answer on a decode worker."""
    prefill: Forecast
    """Prompt and answer on a prefill worker."""


class PrefillModeView(NamedTuple):
    """A choice for display, with what it was compared with."""

    mode: PrefillMode
    target: RoleTarget
    """Prefill workers."""
    costs: dict[PrefillMode, float]
    """Predicted cost in seconds; empty if the costs are not compared."""


class PrefillModePolicy:
    """Chooses the prefill mode and tracks transfer costs between workers. As it is: for models without prefill
    workers."""

    def plan(self, request: Request) -> PrefillPlan:
        """Choose the mode. Unavailable if a pinned prefill worker is not available."""
        if (pinned_id := request.routing.pins.get(Role.PREFILL)) is not None:
            raise _pin_unavailable(pinned_id, "this model has no prefill workers")
        return _LOCAL

    def explain(self, request: Request) -> PrefillModeView | None:
        """The choice for this request; counts nothing. None without prefill workers. Errors as of `plan`."""
        return None

    def observe_transfer(
        self, request: Request, stages: StageTimes, source: InstanceId, target: InstanceId
    ) -> None:
        """Record how long a prompt's KV took between two workers."""

    def link_costs_from(self, source: InstanceId) -> LinkCosts | None:
        return None

    def link_costs_to(self, target: InstanceId) -> LinkCosts | None:
        return None


class PrefillModeRules(msgspec.Struct, frozen=True, kw_only=True):
    """Operator settings of the choice."""

    is_predicted: bool = True
    """Choose by predicted cost; otherwise by `min_tokens` and `max_queue_s` alone."""
    min_tokens: int = 0
    """Prompts with at most this many uncached tokens on the decode worker are computed there."""
    max_queue_s: float | None = None
    """Prompts are computed on the decode worker if the prefill queue is longer than this."""
    ttft_s: float | None = None
    """TTFT target. With a target, the mode that violates it least is chosen."""
    itl_s: float | None = None
    """Target for the mean inter-token latency."""


def mode_costs(local: Forecast, remote: Forecast, prefill: Forecast) -> dict[PrefillMode, float]:
    """Cost per mode. `local`: prompt and answer on a decode worker; `remote`: the answer on a decode worker after a KV
    transfer; `prefill`: prompt and answer on a prefill worker."""
    return {
        PrefillMode.REMOTE: _prefill_cost(prefill) + remote.transfer_s + _decode_cost(remote),
        PrefillMode.LOCAL: _prefill_cost(local) + _decode_cost(local),
        PrefillMode.PREFILL_WORKER: _prefill_cost(prefill) + _decode_cost(prefill),
    }


def _prefill_cost(at: Forecast) -> float:
    """Prefill delays the requests that decode on the worker and those that arrive before it is done."""
    return at.queue_s + at.prefill_s * (1.0 + at.decoding + at.num_arriving)


def _decode_cost(at: Forecast) -> float:
    return at.output_tokens * at.step_s + at.decoding * at.slowdown_s


_MARGIN = 0.2
"""Share of the time to first token that another mode must save to replace the default mode."""
DEMAND_S = 15.0
"""Half-life of the demand estimate."""
_MAX_UTILIZATION = 0.95
"""Upper bound of the utilization in cost estimates."""
_LOCAL = PrefillPlan(PrefillMode.LOCAL, None)
_PLACEHOLDER_HANDOFF = Handoff(ticket=b"", prefill_instance=InstanceId(""))
"""Marks a forecast as decode-only."""


class PrefillModeSelector(PrefillModePolicy):
    """Prefill mode policy over a decode router and the prefill workers, while there are any.

    With routers that cannot forecast, only `min_tokens` decides.
    """

    def __init__(
        self,
        decode_router: Router,
        target: Callable[[], RoleTarget | None],
        block_size: int,
        rule: PrefillModeRules | None = None,
        *,
        now: Callable[[], float],
    ) -> None:
        self._decode_router = decode_router
        self._prefill_target = target
        self._block_size = block_size
        self._rule = rule or PrefillModeRules()
        self._links = KvLinkSpeeds(now)
        self._prompts = DecayingAverage(now, DEMAND_S)
        self._slo_gate = SloGate(self._rule.ttft_s, self._rule.itl_s, now)
        self.counts = dict.fromkeys(PrefillMode, 0)
        """Requests per mode while a remote prefill was possible, for metrics."""

    def observe_transfer(
        self, request: Request, stages: StageTimes, source: InstanceId, target: InstanceId
    ) -> None:
        self._links.observe(request, stages, source, target)

    def link_costs_from(self, source: InstanceId) -> LinkCosts:
        return self._links.costs_from(source)

    def link_costs_to(self, target: InstanceId) -> LinkCosts:
        return self._links.costs_to(target)

    def plan(self, request: Request) -> PrefillPlan:
        target = self._prefill_target()
        pinned_id = request.routing.pins.get(Role.PREFILL)
        if pinned_id is not None:
            _check_pinned(pinned_id, target)
        if target is None or not target.candidates() or self._must_prefill_locally(request):
            return _LOCAL
        try:
            mode = PrefillMode.REMOTE if pinned_id is not None else self._choose_mode(request, target.router)
        except KvoltError as error:  # no worker has room now: the default mode reports why
            if error.fields.get("reason") == ALL_FAILING:
                return _LOCAL
            mode = PrefillMode.REMOTE
        if not request.routing.query_only:
            self.counts[mode] += 1
        return PrefillPlan(mode, target)

    def explain(self, request: Request) -> PrefillModeView | None:
        target = self._prefill_target()
        if target is None or not target.candidates():
            return None
        query = msgspec.structs.replace(
            request, routing=msgspec.structs.replace(request.routing, query_only=True)
        )
        mode = self.plan(query).mode
        costs: dict[PrefillMode, float] = {}
        with contextlib.suppress(KvoltError):  # no worker has room now: `plan` chose the default mode
            forecasts = self._forecasts(query, target.router)
            if forecasts is not None:
                costs = self._compared_costs(query, forecasts)
        return PrefillModeView(mode, target, costs)

    def _must_prefill_locally(self, request: Request) -> bool:
        # A prompt shorter than a block cannot be transferred; a single output token needs no second worker; prompt
        # logprobs are reported by the decode worker, which would recompute the prompt.
        is_short = request.num_prompt_tokens <= self._block_size or request.stop.max_tokens == 1
        return is_short or request.sampling.prompt_logprobs is not None

    def _choose_mode(self, request: Request, prefill_router: Router) -> PrefillMode:
        rule = self._rule
        forecasts = self._forecasts(request, prefill_router)
        if forecasts is None:
            return PrefillMode.REMOTE if request.num_prompt_tokens > rule.min_tokens else PrefillMode.LOCAL
        local, prefill = forecasts
        if local.missing_tokens <= rule.min_tokens:
            return PrefillMode.LOCAL
        if rule.max_queue_s is not None and prefill.queue_s > rule.max_queue_s:
            return PrefillMode.LOCAL
        is_moved = local.missing_tokens > self._block_size
        if not self._is_comparable(forecasts):
            return PrefillMode.REMOTE if is_moved else PrefillMode.LOCAL
        if not request.routing.query_only:
            self._prompts.add(prefill.prefill_s)
        if not is_moved:
            return self._cheapest(request, local, None, prefill, PrefillMode.LOCAL)
        remote = self._remote_forecast(request, prefill)
        if not self._slo_gate.is_configured:
            return self._cheapest(request, local, remote, prefill, PrefillMode.REMOTE)
        is_query = request.routing.query_only
        if self._slo_gate.was_met if is_query else self._slo_gate.is_met(remote, prefill):
            return PrefillMode.REMOTE
        return self._choose_one_worker(request, local, remote, prefill)

    def _forecasts(self, request: Request, prefill_router: Router) -> _Forecasts | None:
        """None if a router cannot forecast."""
        decode_router = self._decode_router
        if not isinstance(decode_router, SupportsForecast) or not isinstance(
            prefill_router, SupportsForecast
        ):
            return None
        return _Forecasts(
            decode_router.forecast(request), prefill_router.forecast(as_prefill_request(request))
        )

    def _remote_forecast(self, request: Request, prefill: Forecast) -> Forecast:
        """Forecast of the answer on a decode worker, after a KV transfer from that prefill worker."""
        assert isinstance(self._decode_router, SupportsForecast)
        moved = with_link_costs(request, self._links.costs_from(prefill.instance))
        return self._decode_router.forecast(msgspec.structs.replace(moved, handoff=_PLACEHOLDER_HANDOFF))

    def _is_comparable(self, forecasts: _Forecasts) -> bool:
        """Whether costs decide: only workers with a latency model of their own, also an estimated one, are compared."""
        has_own_models = forecasts.local.has_own_model and forecasts.prefill.has_own_model
        return self._rule.is_predicted and has_own_models

    def _compared_costs(self, request: Request, forecasts: _Forecasts) -> dict[PrefillMode, float]:
        """Cost of each mode that the choice considers; empty if costs do not decide."""
        local, prefill = forecasts
        if not self._is_comparable(forecasts) or self._must_prefill_locally(request):
            return {}
        if local.missing_tokens <= self._rule.min_tokens:
            return {}
        if local.missing_tokens <= self._block_size:
            return self._costs(request, local, None, prefill)
        return self._costs(request, local, self._remote_forecast(request, prefill), prefill)

    def _costs(
        self, request: Request, local: Forecast, remote: Forecast | None, prefill: Forecast
    ) -> dict[PrefillMode, float]:
        """Cost of each allowed mode. `remote`: None if there is no KV to move."""
        utilization = self._prompts.per_second / (local.num_worker_ranks + prefill.num_worker_ranks)
        cost_by_mode = mode_costs(local, remote or local, _with_prefill_load(utilization, prefill))
        if remote is None:
            del cost_by_mode[PrefillMode.REMOTE]
        if _restricts_workers(request.routing):
            del cost_by_mode[PrefillMode.PREFILL_WORKER]
        return cost_by_mode

    def _cheapest(
        self,
        request: Request,
        local: Forecast,
        remote: Forecast | None,
        prefill: Forecast,
        default: PrefillMode,
    ) -> PrefillMode:
        """The default mode, unless another one is much cheaper."""
        cost_by_mode = self._costs(request, local, remote, prefill)
        best = min(cost_by_mode, key=cost_by_mode.__getitem__)
        saved_s = cost_by_mode[default] - cost_by_mode[best]
        return best if saved_s > _MARGIN * prefill.first_token_s else default

    def _choose_one_worker(
        self, request: Request, local: Forecast, remote: Forecast, prefill: Forecast
    ) -> PrefillMode:
        """The targets are missed: the cheaper one-worker mode, unless REMOTE is much cheaper."""
        cost_by_mode = mode_costs(local, remote, prefill)
        one_worker_modes = (
            (PrefillMode.LOCAL,)
            if _restricts_workers(request.routing)
            else (PrefillMode.LOCAL, PrefillMode.PREFILL_WORKER)
        )
        best = min(one_worker_modes, key=cost_by_mode.__getitem__)
        saved_s = cost_by_mode[best] - cost_by_mode[PrefillMode.REMOTE]
        return PrefillMode.REMOTE if saved_s > _MARGIN * prefill.first_token_s else best


def _restricts_workers(routing: RoutingHints) -> bool:
    """Whether the caller restricts the workers; a prefill worker may then not decode."""
    return (
        bool(routing.pins or routing.allowed or routing.allowed_prefill) or routing.pinned_dp_rank is not None
    )


def _check_pinned(pinned_id: InstanceId, target: RoleTarget | None) -> None:
    """Unavailable unless that worker can take prefill requests now."""
    if target is not None and any(each.id == pinned_id for each in target.candidates()):
        return
    if target is not None and pinned_id in target.incompatible():
        raise _pin_unavailable(pinned_id, "its KV is not compatible with the decode workers")
    raise _pin_unavailable(pinned_id, "it cannot be reached")


def _pin_unavailable(pinned_id: InstanceId, why: str) -> Unavailable:
    return Unavailable(f"the pinned prefill worker {pinned_id} cannot take this prompt: {why}", reason="pin")


def _with_prefill_load(utilization: float, prefill: Forecast) -> Forecast:
    """The forecast with decode steps slowed down by the prefill load.

    `utilization` is the load if all workers shared it: with the load of prefill workers alone they could never decode.
    """
    return msgspec.structs.replace(
        prefill, step_s=prefill.step_s / (1.0 - min(utilization, _MAX_UTILIZATION))
    )
