"""Forecast: each value, and that it reserves nothing."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, Lab, make_request, sim, until
from tests.unit.router.queue.test_queue_router import Rooms, asking
from tests.unit.router.selection.test_selector import BLOCK, PRICE, A, B, Held, Scene, prompt, worker

from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Handoff, Request
from kvolt.router.balancing import RoundRobinRouter
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.policy.policy import latency
from kvolt.router.port import RouterContext
from kvolt.router.queue.queue_router import QueueRouter
from kvolt.router.selection.forecast import Forecast, SupportsForecast
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.testing import run_virtual

LONG = prompt(*range(1, 41))
COMPUTED = replace(LONG, handoff=Handoff(ticket=b"", prefill_instance=A))


def forecast(scene: Scene, request: Request = LONG) -> Forecast:
    return scene.selector.forecast(request, scene.allowed)


def test_an_idle_worker_has_no_queue_and_no_other_requests() -> None:
    predicted = forecast(Scene({A: worker()}))
    assert (predicted.queue_s, predicted.num_arriving, predicted.decoding, predicted.total_decoding) == (
        0.0,
        0.0,
        0.0,
        0.0,
    )
    assert predicted.missing_tokens == LONG.num_prompt_tokens
    assert predicted.prefill_s >= PRICE.prefill_token_s * LONG.num_prompt_tokens
    assert predicted.first_token_s == predicted.prefill_s
    assert predicted.step_s > 0
    assert predicted.num_worker_ranks == 1


def test_the_forecast_is_of_the_chosen_worker() -> None:
    scene = Scene({A: worker(), B: worker()}, Held(b=range(1, 31)))
    predicted = forecast(scene)
    assert scene.where(LONG) == (B, 0)
    assert predicted.missing_tokens == LONG.num_prompt_tokens - 30 * BLOCK
    assert predicted.num_worker_ranks == 2


def test_prompts_ahead_are_a_queue_and_answers_are_others() -> None:
    scene = Scene({A: worker()})
    idle = forecast(scene)
    ticket = scene.book(prompt(*range(100, 140)))
    behind = forecast(scene)
    assert behind.queue_s > idle.queue_s
    assert behind.decoding == 0.0
    assert behind.num_arriving > idle.num_arriving, "others come while this one waits"
    scene.time_s = 10.0
    scene.selector.mark_first_token(ticket, None)
    beside = forecast(scene)
    assert (beside.queue_s, beside.decoding, beside.total_decoding) == (0.0, 1.0, 1.0)


def test_decoding_requests_of_all_candidates_count() -> None:
    scene = Scene({A: worker(), B: worker()})
    for number in range(4):
        scene.selector.mark_first_token(scene.book(prompt(*range(1000 * number, 1000 * number + 9))), None)
    predicted = forecast(scene)
    assert (predicted.total_decoding, predicted.decoding) == (4.0, 2.0)


def test_a_prompt_computed_at_another_worker_takes_no_prefill() -> None:
    scene = Scene({A: worker()})
    full, handed_off = forecast(scene), forecast(scene, COMPUTED)
    assert handed_off.prefill_s == pytest.approx(PRICE.base_s + PRICE.prefill_token_s), "a last token's step"
    assert handed_off.prefill_s < full.prefill_s
    assert handed_off.missing_tokens == full.missing_tokens, "it is to be moved"


def test_a_prompt_for_others_is_answered_by_a_token() -> None:
    scene = Scene({A: worker()})
    assert forecast(scene, replace(LONG, prefill_only=True)).output_tokens == 1.0
    assert forecast(scene).output_tokens > 1.0


def test_one_more_makes_each_step_longer_by_its_share() -> None:
    model = replace(PRICE, batch_s=0.001, context_token_s=1e-6)
    predicted = forecast(Scene({A: replace(worker(), latency=model)}))
    tokens = len(LONG.token_ids) + predicted.output_tokens / 2.0
    assert predicted.base_step_s == pytest.approx(model.base_s)
    assert predicted.added_step_s == pytest.approx(0.001 + 1e-6 * tokens)


def test_a_forecast_reserves_nothing() -> None:
    scene = Scene({A: worker(seqs=1)})
    first = forecast(scene)
    assert [forecast(scene) for _ in range(5)] == [first] * 5


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(Unavailable):
        Scene({}).selector.forecast(LONG, ())


# --- routers


class FullRooms(Rooms):
    def forecast(self, request: Request) -> Forecast:
        return forecast(Scene({A: worker()}))


def test_behind_a_queue_it_waits_for_all_that_wait() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        router = QueueRouter(inner := FullRooms(a=1), loop.time)
        alone = router.forecast(asking())
        first = await router.route(asking("first"))
        second = loop.create_task(router.route(asking("second", prompt=1000)))
        await asyncio.sleep(1.0)
        router.release(first, None)
        inner.on_capacity_freed()
        third = loop.create_task(router.route(asking("third", prompt=1000)))
        await asyncio.sleep(1.0)
        assert (second.done(), third.done()) == (True, False)
        behind = router.forecast(asking())
        assert behind.queue_s > alone.queue_s
        assert replace(behind, queue_s=alone.queue_s) == alone
        router.release(second.result(), None)
        inner.on_capacity_freed()
        router.release(await third, None)
        assert router.forecast(asking()) == alone
        await router.close()

    run_virtual(scenario)


def test_a_kv_router_forecasts_and_round_robin_does_not() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", sim(ARGUMENTS))
            runtime = await lab.runtime("edge")
            client = await runtime.client(running.endpoint)
            await until(lambda: bool(client.candidates()))
            router = EventFedRouter(RouterContext(client, runtime, 16, RouterSettings()), latency())
            assert isinstance(router, SupportsForecast)
            assert not isinstance(RoundRobinRouter(client), SupportsForecast)
            predicted = router.forecast(make_request(prompt=40))
            assert (predicted.num_worker_ranks, predicted.missing_tokens) == (1, 40)
            await router.close()

    run_virtual(scenario)


def test_a_pinned_worker_is_the_one_in_the_forecast() -> None:
    scene = Scene({A: worker(), B: worker()}, Held(a=range(1, 41)))
    assert scene.selector.forecast(LONG, (InstanceId("b"),)).missing_tokens == LONG.num_prompt_tokens
