"""What only some workers take, from HTTP to the worker: prompts of vectors, and vLLM's extra arguments."""

from __future__ import annotations

import base64
import io
import logging
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.unit.engines.lab import Frontend, Lab, RunningWorker, until
from tests.unit.frontend.serving import WHOLE, Answering, served

from kvolt.core.card import EngineInfo
from kvolt.testing import run_virtual


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


class Taking(Answering):
    """Says that it takes these."""

    def __init__(self, *extras: str) -> None:
        super().__init__(*WHOLE)
        self.extras = extras

    async def start(self) -> EngineInfo:
        return replace(await super().start(), extras=self.extras)


def vectors(num_rows: int, value: float = 0.0) -> str:
    file = io.BytesIO()
    torch.save(torch.full((num_rows, 4), value), file)
    return base64.b64encode(file.getvalue()).decode()


def test_a_prompt_of_vectors_goes_to_the_worker_as_it_came() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        given = vectors(20)
        answer = await edge.complete(prompt="", prompt_embeds=given, max_tokens=3, cache_salt="mine")
        assert answer.status == 200, answer.json
        assert answer.json["usage"]["prompt_tokens"] == 20
        [request] = running.engine.submitted
        assert request.extra == {"prompt_embeds": given}
        assert len(request.token_ids) == request.num_prompt_tokens == 20
        assert request.routing.allowed == ()

    served(body, lambda: Taking("prompt_embeds"))


def test_vectors_that_differ_are_different_prefixes() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        given = [vectors(20), vectors(20), vectors(20, 1.0)]
        answer = await edge.complete(prompt=None, prompt_embeds=given, max_tokens=3)
        assert [each["index"] for each in answer.json["choices"]] == [0, 1, 2]
        by_number = sorted(running.engine.submitted, key=lambda request: request.request_id)
        one, same, other = (request.sequence_hashes for request in by_number)
        assert one == same != other
        await edge.complete(prompt=[0] * 20, max_tokens=3)
        assert running.engine.submitted[-1].sequence_hashes not in (one, other)

    served(body, lambda: Taking("prompt_embeds"))


def test_long_ones_are_read_beside_the_loop() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        given = base64.b64encode(_saved(torch.zeros(200, 1024))).decode()
        answer = await edge.complete(prompt=None, prompt_embeds=given, max_tokens=3)
        assert (answer.status, answer.json["usage"]["prompt_tokens"]) == (200, 200)

    served(body, lambda: Taking("prompt_embeds"))


def _saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("given", "code"),
    [("AAAA", None), (vectors(100_000), "context_length_exceeded")],
)
def test_what_cannot_be_a_prompt_is_refused_before_anybody_has_it(given: str, code: str | None) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.complete(prompt=None, prompt_embeds=given, max_tokens=3)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "prompt_embeds"
        if code:
            assert answer.json["error"]["code"] == code
        assert running.engine.submitted == []

    served(body, lambda: Taking("prompt_embeds"))


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"prompt": None, "prompt_embeds": vectors(5)}, "enable_prompt_embeds"),
        ({"prompt": "hi", "vllm_xargs": {"a": 1}}, "--engine vllm"),
    ],
)
def test_workers_that_do_not_take_it(fields: dict[str, Any], remedy: str) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.complete(max_tokens=3, **fields)
        [name] = {"prompt_embeds", "vllm_xargs"} & set(fields)
        assert answer.status == 400
        assert answer.json["error"]["param"] == name
        assert remedy in answer.json["error"]["message"]
        assert running.engine.submitted == []

    served(body, Taking)


@pytest.mark.parametrize("given", [None, {}])
def test_nothing_for_vllm_is_no_affair_of_others(given: Any) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.complete(prompt="hi", max_tokens=3, vllm_xargs=given)
        assert answer.status == 200
        assert running.engine.submitted[-1].extra == {}

    served(body, Taking)


def test_extra_arguments_of_vllm_of_both_endpoints() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        given = {"a": "b", "c": [1, 0.5]}
        assert (await edge.complete(prompt="hi", max_tokens=3, vllm_xargs=given)).status == 200
        assert (await edge.chat(max_tokens=3, vllm_xargs=given)).status == 200
        assert [each.extra for each in running.engine.submitted] == [{"vllm_xargs": given}] * 2

    served(body, lambda: Taking("vllm_xargs"))


def test_only_those_who_take_it_are_asked() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            plain = await lab.worker("plain", Taking())
            taking = await lab.worker("taking", Taking("vllm_xargs"))
            edge = await lab.frontend()
            await edge.ready()
            await until(lambda: len(edge.models.ready()[0].candidates()) == 2)
            asked = {"prompt": "hi", "max_tokens": 3, "vllm_xargs": {"a": 1}}
            for _ in range(4):
                assert (await edge.complete(**asked)).status == 200
            assert (len(plain.engine.submitted), len(taking.engine.submitted)) == (0, 4)
            for running, status in ((plain, 400), (taking, 200)):
                allowed = {"x-kvolt-allowed-instance-ids": running.worker._instance}
                assert (await edge.complete(headers=allowed, **asked)).status == status
            assert lab.errors == []

    run_virtual(scenario)
