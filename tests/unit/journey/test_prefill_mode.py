"""Which way a request goes: what each costs, what was promised, what an operator has set, and who can say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import make_request

from kvolt.core.delta import StageTimes, Usage
from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import LinkCosts, Request, Role, RoutingHints, Sampling
from kvolt.journey.prefill import RoleTarget
from kvolt.journey.prefill_mode import (
    PrefillMode,
    PrefillModePolicy,
    PrefillModeRules,
    PrefillModeSelector,
    mode_costs,
)
from kvolt.router.port import Decision
from kvolt.router.selection.forecast import Forecast

BLOCK = 16
P0, D0 = InstanceId("p0"), InstanceId("d0")
REQUEST = make_request(prompt=400, tokens=100)
CALM = Forecast(
    instance=InstanceId("w0"),
    queue_s=0.0,
    prefill_s=0.1,
    num_arriving=0.0,
    decoding=4.0,
    step_s=0.01,
    slowdown_s=0.01,
    output_tokens=100.0,
    missing_tokens=400,
    num_worker_ranks=1,
    total_decoding=4.0,
    base_step_s=0.0095,
    added_step_s=0.0001,
)
IDLE = replace(CALM, decoding=0.0, total_decoding=0.0)
HANDED = replace(CALM, prefill_s=0.0, transfer_s=0.001)
"""At a decode worker, with the prompt's KV."""
SHARED = replace(IDLE, decoding=2.0, slowdown_s=0.5)
"""At a prefill worker that answers some."""
BUSY = replace(CALM, decoding=64.0, total_decoding=64.0, step_s=0.04)


# --- what each way costs


def cheapest(here: Forecast = CALM, handed: Forecast = HANDED, there: Forecast = IDLE) -> PrefillMode:
    priced = mode_costs(here, handed, there)
    assert set(priced) == set(PrefillMode)
    return min(priced, key=priced.__getitem__)


def test_a_prompt_that_would_hold_up_answers_is_computed_apart() -> None:
    assert cheapest(there=SHARED) is PrefillMode.REMOTE


@pytest.mark.parametrize(
    "change",
    [
        {"there": replace(IDLE, queue_s=2.0)},
        {"there": replace(IDLE, prefill_s=2.0)},
        {"there": replace(IDLE, num_arriving=12.0)},
        {"there": replace(IDLE, decoding=9.0, slowdown_s=1.0)},
        {"handed": replace(HANDED, transfer_s=2.0), "there": replace(IDLE, step_s=0.05)},
    ],
    ids=["a queue there", "a slow place", "who would wait", "who is being answered there", "a slow way"],
)
def test_what_makes_the_prompt_dear_elsewhere_keeps_it_here(change: dict[str, object]) -> None:
    assert cheapest(**change) is PrefillMode.LOCAL  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "handed",
    [replace(HANDED, step_s=0.05), replace(HANDED, slowdown_s=1.0)],
    ids=["slow steps", "others get slower"],
)
def test_who_computes_prompts_answers_while_those_who_answer_have_too_much(handed: Forecast) -> None:
    here = replace(handed, prefill_s=0.1)
    assert cheapest(here=here, handed=handed) is PrefillMode.PREFILL_WORKER


# --- routers by hand


class Blind:
    """A router that cannot forecast."""

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        raise AssertionError("nothing is routed here")

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None: ...

    def release(self, decision: Decision, usage: Usage | None, outcome: object = None) -> None: ...

    async def close(self) -> None: ...


class Seer(Blind):
    """One that says what it was told to."""

    def __init__(self, forecast: Forecast, handed: Forecast | None = None) -> None:
        self.told = forecast
        self.handed = handed
        self.links: LinkCosts | None = None
        """Of what was asked last."""
        self.error: Unavailable | None = None

    def forecast(self, request: Request) -> Forecast:
        if self.error is not None:
            raise self.error
        self.links = links = request.routing.link_costs
        if request.handoff is not None and self.handed is not None:
            if links is None:
                return self.handed
            moved_s = links.by_peer.get(self.handed.instance, links.token_s) * self.handed.missing_tokens
            return replace(self.handed, transfer_s=moved_s)
        return self.told


class Reached:
    """A client that reaches somebody, or nobody."""

    def __init__(self, num: int = 1) -> None:
        self.num = num

    def candidates(self) -> list[int]:
        return list(range(self.num))


class Scene:
    def __init__(
        self,
        here: Blind | None = None,
        there: Blind | None = None,
        rule: PrefillModeRules | None = None,
        num_there: int = 1,
    ) -> None:
        self.time_s = 0.0
        self.here = here or Seer(CALM, HANDED)
        self.there = there or Seer(IDLE)
        self.target: RoleTarget | None = RoleTarget(self.there, Reached(num_there))  # type: ignore[arg-type]
        self.chooser = PrefillModeSelector(
            self.here, lambda: self.target, BLOCK, rule, now=lambda: self.time_s
        )

    def way(self, request: Request = REQUEST) -> PrefillMode:
        return self.chooser.plan(request).mode


# --- whether there is a choice


def test_where_every_worker_computes_its_own_there_is_one_way() -> None:
    ways = PrefillModePolicy()
    ways.observe_transfer(REQUEST, StageTimes(transfer_bytes=1, transfer_ms=1.0), P0, D0)
    assert ways.link_costs_from(P0) is None
    assert ways.link_costs_to(D0) is None
    assert ways.plan(REQUEST) == (PrefillMode.LOCAL, None)


def test_prefill_is_local_without_prefill_workers() -> None:
    scene = Scene(num_there=0)
    assert scene.chooser.plan(REQUEST) == (PrefillMode.LOCAL, None)
    scene.target = None
    assert scene.chooser.plan(REQUEST) == (PrefillMode.LOCAL, None)
    assert not any(scene.chooser.counts.values()), "there was no choice"


@pytest.mark.parametrize(
    ("request_", "is_here"),
    [
        (make_request(prompt=BLOCK, tokens=100), True),
        (make_request(prompt=BLOCK + 1, tokens=100), False),
        (make_request(prompt=400, tokens=1), True),
        (make_request(prompt=400, tokens=2), False),
        (replace(REQUEST, sampling=Sampling(prompt_logprobs=0)), True),
    ],
    ids=["one block", "more than one", "one token", "two tokens", "log probabilities of the prompt"],
)
def test_request_errors_are_not_retried(request_: Request, is_here: bool) -> None:
    scene = Scene(rule=PrefillModeRules(is_predicted=False))
    assert scene.way(request_) is (PrefillMode.LOCAL if is_here else PrefillMode.REMOTE)


@pytest.mark.parametrize("who", ["here", "there"])
def test_default_mode_reports_why_no_worker_fits(who: str) -> None:
    scene = Scene(here=(here := Seer(BUSY)), there=(there := Seer(IDLE)))
    {"here": here, "there": there}[who].error = Unavailable("all are full")
    assert scene.chooser.plan(REQUEST) == (PrefillMode.REMOTE, scene.target)


@pytest.mark.parametrize(
    ("here", "there"), [(Blind(), Blind()), (Blind(), Seer(IDLE)), (Seer(CALM), Blind())]
)
def test_routers_that_cannot_forecast_leave_the_length(here: Blind, there: Blind) -> None:
    scene = Scene(here, there, PrefillModeRules(min_tokens=300, max_queue_s=0.0))
    assert [scene.way(make_request(prompt=prompt)) for prompt in (300, 301)] == [
        PrefillMode.LOCAL,
        PrefillMode.REMOTE,
    ]


# --- who was named


class Named(Reached):
    """A client that reaches workers p0, p1, ..."""

    def candidates(self) -> list[Instance]:  # type: ignore[override]
        endpoint = EndpointAddress("test", "prefill", "generate")
        return [
            Instance(id=InstanceId(f"p{number}"), endpoint=endpoint, address="there:1")
            for number in range(self.num)
        ]


def pinned(who: str, request: Request = REQUEST) -> Request:
    return replace(request, routing=RoutingHints(pins={Role.PREFILL: InstanceId(who)}))


def test_a_pinned_prompt_is_computed_apart_whatever_that_costs() -> None:
    scene = Scene(there=Seer(replace(BUSY, queue_s=100.0)), rule=PrefillModeRules(min_tokens=1000))
    scene.target = RoleTarget(scene.there, Named(2))  # type: ignore[arg-type]
    assert scene.way() is PrefillMode.LOCAL
    assert scene.chooser.plan(pinned("p1")) == (PrefillMode.REMOTE, scene.target)
    assert scene.way(pinned("p1", make_request(prompt=BLOCK))) is PrefillMode.LOCAL, (
        "there is nothing to hand over"
    )
    assert scene.chooser.counts[PrefillMode.REMOTE] == 1


@pytest.mark.parametrize("request_", [REQUEST, make_request(prompt=BLOCK)], ids=["long", "short"])
def test_a_pinned_prefill_worker_must_be_there(request_: Request) -> None:
    scene = Scene()
    for target, who in (
        (RoleTarget(scene.there, Named(2)), "p2"),  # type: ignore[arg-type]
        (RoleTarget(scene.there, Named(2), lambda: frozenset((InstanceId("p1"),))), "p1"),  # type: ignore[arg-type]
        (None, "p0"),
    ):
        scene.target = target
        with pytest.raises(Unavailable, match=f"pinned prefill worker {who}") as caught:
            scene.chooser.plan(pinned(who, request_))
        assert caught.value.fields["reason"] == "pin"
    with pytest.raises(Unavailable, match="this model has no prefill workers"):
        PrefillModePolicy().plan(pinned("p0", request_))


def test_those_that_do_not_fit_are_as_if_they_were_not_there() -> None:
    scene = Scene(rule=PrefillModeRules(is_predicted=False))
    unfit = {InstanceId("p0")}
    scene.target = RoleTarget(scene.there, Named(2), lambda: frozenset(unfit))  # type: ignore[arg-type]
    assert scene.way() is PrefillMode.REMOTE
    unfit.add(InstanceId("p1"))
    assert scene.chooser.plan(REQUEST) == (PrefillMode.LOCAL, None)


@pytest.mark.parametrize(
    "hints",
    [
        RoutingHints(allowed=(InstanceId("d0"),)),
        RoutingHints(allowed_prefill=(InstanceId("p0"),)),
        RoutingHints(pins={Role.DECODE: InstanceId("d0")}),
        RoutingHints(pinned_dp_rank=0),
    ],
)
def test_only_allowed_workers_answer(hints: RoutingHints) -> None:
    scene = Scene(here=Seer(BUSY, replace(BUSY, prefill_s=0.0)), there=Seer(IDLE))
    assert scene.way() is PrefillMode.PREFILL_WORKER
    assert scene.way(replace(REQUEST, routing=hints)) is not PrefillMode.PREFILL_WORKER


def test_each_role_is_asked_about_those_of_it_that_are_allowed() -> None:
    seen: dict[str, RoutingHints] = {}

    class Noting(Seer):
        def __init__(self, name: str) -> None:
            super().__init__(CALM)
            self.name = name

        def forecast(self, request: Request) -> Forecast:
            seen[self.name] = request.routing
            return super().forecast(request)

    hints = RoutingHints(allowed=(InstanceId("d0"),), allowed_prefill=(InstanceId("p0"),), pinned_dp_rank=1)
    Scene(Noting("here"), Noting("there")).way(replace(REQUEST, routing=hints))
    assert (seen["here"].allowed, seen["here"].pinned_dp_rank) == (("d0",), 1)
    assert (seen["there"].allowed, seen["there"].pinned_dp_rank) == (("p0",), None)


# --- the threshold


@pytest.mark.parametrize(("lacking", "way"), [(100, PrefillMode.LOCAL), (101, PrefillMode.REMOTE)])
def test_short_is_what_a_decode_worker_lacks_little_of(lacking: int, way: PrefillMode) -> None:
    rule = PrefillModeRules(is_predicted=False, min_tokens=100)
    assert Scene(Seer(replace(CALM, missing_tokens=lacking)), rule=rule).way() is way


@pytest.mark.parametrize(("lacking", "way"), [(BLOCK, PrefillMode.LOCAL), (BLOCK + 1, PrefillMode.REMOTE)])
@pytest.mark.parametrize("is_predicted", [True, False])
def test_of_a_prompt_that_is_here_but_for_a_block_nothing_is_moved(
    lacking: int, way: PrefillMode, is_predicted: bool
) -> None:
    here = replace(CALM, missing_tokens=lacking)
    there = Seer(replace(SHARED, decoding=1.0, step_s=0.02))
    rule = PrefillModeRules(is_predicted=is_predicted)
    assert Scene(Seer(here, replace(here, prefill_s=0.0)), there, rule).way() is way


def test_it_is_answered_there_while_those_who_answer_have_too_much() -> None:
    scene = Scene(Seer(replace(BUSY, missing_tokens=1)), Seer(IDLE))
    assert scene.way() is PrefillMode.PREFILL_WORKER


@pytest.mark.parametrize(("queue_s", "way"), [(0.5, PrefillMode.REMOTE), (0.6, PrefillMode.LOCAL)])
def test_a_long_queue_of_prompts_keeps_them_here(queue_s: float, way: PrefillMode) -> None:
    rule = PrefillModeRules(is_predicted=False, max_queue_s=0.5)
    assert Scene(there=Seer(replace(IDLE, queue_s=queue_s)), rule=rule).way() is way


def test_the_threshold_asks_for_no_cost() -> None:
    there = Seer(replace(BUSY, queue_s=100.0))
    assert Scene(there=there, rule=PrefillModeRules(is_predicted=False)).way() is PrefillMode.REMOTE
    assert Scene(there=there).way() is PrefillMode.LOCAL


# --- by cost


def test_each_way_is_taken_and_counted() -> None:
    scene = Scene(here=(here := Seer(CALM, HANDED)), there=(there := Seer(SHARED)))
    assert scene.way() is PrefillMode.REMOTE
    there.told = replace(SHARED, queue_s=5.0)
    assert scene.way() is PrefillMode.LOCAL
    here.told, here.handed, there.told = BUSY, replace(BUSY, prefill_s=0.0), IDLE
    assert scene.chooser.plan(REQUEST) == (PrefillMode.PREFILL_WORKER, scene.target)
    assert scene.chooser.counts == {
        PrefillMode.LOCAL: 1,
        PrefillMode.REMOTE: 1,
        PrefillMode.PREFILL_WORKER: 1,
    }


@pytest.mark.parametrize(
    ("step_s", "way"), [(0.0101, PrefillMode.REMOTE), (0.011, PrefillMode.PREFILL_WORKER)]
)
def test_another_way_must_save_more_than_the_margin(step_s: float, way: PrefillMode) -> None:
    """A hundred steps at a tenth of a millisecond save 10 ms, of a first token in 100 ms: not a fifth of it."""
    handed = replace(HANDED, decoding=0.0, step_s=step_s)
    scene = Scene(Seer(replace(handed, prefill_s=0.5), handed), Seer(IDLE))
    scene.chooser.observe_transfer(REQUEST, StageTimes(transfer_bytes=400_000, transfer_ms=0.001), P0, D0)
    assert scene.way() is way


def test_kv_that_takes_long_to_come_is_learned() -> None:
    here, there = replace(CALM, decoding=0.0), replace(IDLE, step_s=0.011)
    scene = Scene(Seer(here, replace(here, prefill_s=0.0)), Seer(there))
    assert scene.way() is PrefillMode.REMOTE
    for _ in range(5):
        scene.chooser.observe_transfer(
            REQUEST, StageTimes(transfer_bytes=400_000, transfer_ms=3000.0), P0, D0
        )
    assert scene.way() is PrefillMode.LOCAL


@pytest.mark.parametrize(("every_s", "way"), [(1.0, PrefillMode.PREFILL_WORKER), (0.06, PrefillMode.REMOTE)])
def test_who_has_prompts_to_compute_all_the_time_answers_slowly(every_s: float, way: PrefillMode) -> None:
    """A tenth of a second of them, at two places: at most five sixths of the time."""
    handed = replace(HANDED, decoding=0.0, step_s=0.02)
    scene = Scene(Seer(replace(handed, prefill_s=0.5), handed), Seer(IDLE))
    for _ in range(100):
        scene.time_s += every_s
        last = scene.way()
    assert last is way
    scene.time_s += 100.0
    assert scene.way() is PrefillMode.PREFILL_WORKER, "they were long ago"


# --- what was promised


def test_while_it_is_kept_all_prompts_are_computed_apart() -> None:
    """However cheap it would be to do otherwise for one of them."""
    here, there = Seer(replace(CALM, prefill_s=0.01), HANDED), Seer(replace(IDLE, queue_s=0.5))
    assert Scene(here, there).way() is PrefillMode.LOCAL
    scene = Scene(here, there, PrefillModeRules(ttft_s=1.0, itl_s=0.02))
    assert scene.way() is PrefillMode.REMOTE
    there.told = replace(IDLE, queue_s=5.0)
    for _ in range(10):
        scene.time_s += 1.0
        last = scene.way()
    assert last is PrefillMode.LOCAL


@pytest.mark.parametrize(
    ("here", "there", "way"),
    [
        (replace(CALM, decoding=2.0), replace(CALM, decoding=3.0), PrefillMode.LOCAL),
        (replace(CALM, decoding=3.0), replace(CALM, decoding=2.0), PrefillMode.PREFILL_WORKER),
    ],
    ids=["fewer here", "fewer there"],
)
def test_when_it_is_lost_all_workers_are_alike(here: Forecast, there: Forecast, way: PrefillMode) -> None:
    """It goes where it costs least as a whole; to no two of them, however little that would cost more."""
    rule = PrefillModeRules(ttft_s=0.01)  # which nobody keeps
    scene = Scene(Seer(here, replace(here, prefill_s=0.0)), Seer(there), rule)
    for _ in range(40):
        scene.time_s += 0.05
        last = scene.way()
    assert last is way


def test_when_it_is_lost_two_share_a_request_where_that_saves_much() -> None:
    here = replace(CALM, decoding=40.0, step_s=0.01)
    there = replace(IDLE, decoding=20.0, step_s=0.05, slowdown_s=1.0)
    scene = Scene(Seer(here, HANDED), Seer(there), PrefillModeRules(ttft_s=0.01))
    for _ in range(40):
        scene.time_s += 0.05
        last = scene.way()
    assert last is PrefillMode.REMOTE


# --- what a request says of its workers


def test_who_is_to_answer_is_not_answered_by_a_prefill_worker() -> None:
    scene = Scene(Seer(BUSY, BUSY), Seer(IDLE))
    assert scene.way() is PrefillMode.PREFILL_WORKER
    pinned = replace(REQUEST.routing, pins={Role.DECODE: InstanceId("d7")})
    assert scene.way(replace(REQUEST, routing=pinned)) is not PrefillMode.PREFILL_WORKER
    assert (
        scene.way(replace(REQUEST, routing=replace(REQUEST.routing, pinned_dp_rank=1)))
        is not PrefillMode.PREFILL_WORKER
    )


def test_what_is_only_asked_about_is_not_counted() -> None:
    scene = Scene(Seer(BUSY, BUSY), Seer(IDLE))
    query = replace(REQUEST, routing=replace(REQUEST.routing, query_only=True))
    assert scene.way(query) is PrefillMode.PREFILL_WORKER
    assert not any(scene.chooser.counts.values())
    assert scene.chooser._prompts.per_second == 0.0
    assert scene.way() is PrefillMode.PREFILL_WORKER, "as for the query"


def test_the_choice_is_explained_with_the_costs_that_it_compared() -> None:
    scene = Scene(Seer(BUSY, BUSY), Seer(IDLE))
    view = scene.chooser.explain(REQUEST)
    assert view is not None
    assert view.mode is PrefillMode.PREFILL_WORKER
    assert view.target is scene.target
    without_transfer = mode_costs(BUSY, BUSY, IDLE)
    assert view.costs.pop(PrefillMode.REMOTE) > without_transfer.pop(PrefillMode.REMOTE)
    assert view.costs == without_transfer
    assert not any(scene.chooser.counts.values())
    assert PrefillModePolicy().explain(REQUEST) is None
    assert Scene(num_there=0).chooser.explain(REQUEST) is None


@pytest.mark.parametrize(
    ("scene", "mode"),
    [
        (Scene(Blind(), Blind()), PrefillMode.REMOTE),
        (Scene(Seer(BUSY, BUSY), Seer(replace(IDLE, has_own_model=False))), PrefillMode.REMOTE),
        (Scene(rule=PrefillModeRules(is_predicted=False)), PrefillMode.REMOTE),
        (Scene(rule=PrefillModeRules(min_tokens=400)), PrefillMode.LOCAL),
    ],
    ids=["no forecasts", "guesses", "by threshold", "a short prompt"],
)
def test_costs_that_did_not_decide_are_not_explained(scene: Scene, mode: PrefillMode) -> None:
    view = scene.chooser.explain(REQUEST)
    assert view is not None
    assert (view.mode, view.costs) == (mode, {})


def test_a_prompt_without_kv_to_move_has_no_remote_cost() -> None:
    view = Scene(Seer(replace(CALM, missing_tokens=BLOCK))).chooser.explain(REQUEST)
    assert view is not None
    assert set(view.costs) == {PrefillMode.LOCAL, PrefillMode.PREFILL_WORKER}


def test_a_query_gets_the_verdict_on_the_last_request() -> None:
    scene = Scene(Seer(CALM, replace(HANDED, step_s=9.0)), Seer(IDLE), PrefillModeRules(itl_s=0.001))
    query = replace(REQUEST, routing=replace(REQUEST.routing, query_only=True))
    assert scene.way(query) is PrefillMode.REMOTE, "no request has missed the target"
    mode = scene.way()
    assert mode is not PrefillMode.REMOTE
    assert scene.way(query) is mode


def test_of_guesses_nothing_is_worked_out() -> None:
    guessed = replace(IDLE, has_own_model=False)
    assert Scene(Seer(BUSY, BUSY), Seer(guessed)).way() is PrefillMode.REMOTE
