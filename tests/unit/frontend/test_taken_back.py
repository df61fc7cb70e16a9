"""A request that its worker gives back though it has begun it, as engines of others do: who holds its prompt then."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import MODEL, Lab, until
from tests.unit.frontend.serving import WHOLE, Answering

from kvolt.core.card import EngineInfo
from kvolt.core.delta import StepOutput
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Stored
from kvolt.core.request import Request
from kvolt.frontend.admin.explain import RouteExplainer
from kvolt.frontend.model import ModelOptions
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.tasks import Scope
from kvolt.testing import run_virtual

PROMPT = list(range(5, 85))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


class Computing(Answering):
    """Computes every prompt at once, and publishes its blocks. The first of them says nothing more, and is given back
    when it is asked for: SGLang and vLLM know no better, as long as a request has said nothing."""

    answers = False

    def __init__(self) -> None:
        super().__init__(*WHOLE)

    async def start(self) -> EngineInfo:
        return replace(await super().start(), features=("KvEvents",), kv_events=True)

    def submit(self, request: Request) -> None:
        held = StepOutput(kv_changes=(Stored.from_hashes(request.sequence_hashes, None),))
        if Computing.answers:
            super().submit(request)
        else:
            Computing.answers = True  # the next worker answers
            self.submitted.append(request)
        self.put(held)

    async def withdraw(self, request_id: RequestId) -> bool:
        return True


@pytest.mark.parametrize(("moves", "num_holders"), [(2, 2), (0, 1)])
def test_both_hold_what_one_has_answered(
    monkeypatch: pytest.MonkeyPatch, moves: int, num_holders: int
) -> None:
    """Seen with two real SGLangs and six prompts at once. Nothing is wrong with it: both have computed the prompt."""
    monkeypatch.setattr(Computing, "answers", False)
    settings = ModelOptions(router=RouterSettings(withdraw_max_moves=moves))

    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(name, Computing()) for name in ("w0", "w1")]
            edge = await lab.frontend(router="latency", model_options=settings)
            await edge.ready()
            await until(lambda: len(edge.models.ready()[0].candidates()) == 2)
            asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 3}
            explainer = RouteExplainer(edge.models, "edge")

            async def held() -> list[float]:
                told = await explainer.explain(msgspec.json.encode({"model": MODEL, **asked}))
                return [each.terms.held_blocks for each in told.candidates]

            async with Scope("test") as scope:
                headers = {"x-kvolt-timeout-ms": "5000"}
                first = scope.start(edge.complete(headers=headers, **asked), "first")
                for number in range(
                    4
                ):  # when others come and go, it is looked whether it is where it should be
                    await asyncio.sleep(0.5)
                    other = [100 + number] * 20
                    assert (await edge.complete(prompt=other, max_tokens=3)).status == 200
                assert (await first).status == (200 if moves else 504)
            holders = [each for each in workers if PROMPT in map(list, _prompts(each.engine))]
            assert len(holders) == num_holders
            assert sum(number > 0 for number in await held()) == num_holders

    run_virtual(scenario)


def _prompts(engine: Computing) -> list[tuple[int, ...]]:
    return [request.token_ids for request in engine.submitted]
