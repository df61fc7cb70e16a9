"""The HTTP edge as a client sees it: every route, every refusal, through a real worker to the sim engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, MODEL, Frontend, Lab, RunningWorker, ScriptedEngine, sim, until
from tests.unit.frontend.serving import TOOL, served

from kvolt.core.card import EngineInfo, ModelCard, card_hash
from kvolt.runtime.http.server import HttpLimits
from kvolt.testing import run_virtual


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "the water"}]}


# --- models and health


def test_models_health_and_the_rest() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        models = (await edge.ask("/v1/models")).json
        assert models["object"] == "list"
        (model,) = models["data"]
        assert (model["id"], model["object"], model["context_window"]) == (MODEL, "model", 512)
        assert model["workers"] == {"aggregated": 1}
        assert (await edge.ask(f"/v1/models/{MODEL}")).json == model
        ready = await edge.ask(f"/v1/models/{MODEL}/ready")
        assert (ready.status, ready.json["ready"]) == (200, True)
        assert ready.json["namespaces"]["test"] == {
            "ready": True,
            "workers": {"aggregated": 1},
            "missing": [],
        }
        for path in ("/health", "/ready"):
            answer = await edge.ask(path)
            assert answer.status == 200
            assert answer.json == {
                "status": "ready",
                "models": [MODEL],
                "workers": {MODEL: 1},
                "roles": {MODEL: {"aggregated": 1}},
                "missing": {},
            }
        assert (await edge.ask("/live")).status == 200
        metrics = await edge.ask("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert b"kvolt_frontend_requests_total" in metrics.body
        document = (await edge.ask("/openapi.json")).json
        assert document["openapi"].startswith("3.")
        docs = await edge.ask("/docs")
        assert docs.headers["content-type"] == "text/html; charset=utf-8"
        assert b"<html" in docs.body

    served(body)


def test_without_workers() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        await running.runtime.close()
        await until(lambda: not edge.models.ready())
        health = await edge.ask("/health")
        assert (health.status, health.json["models"]) == (503, [])
        assert health.json["missing"] == {MODEL: ["aggregated"]}
        assert (await edge.ask("/ready")).status == 503
        assert (await edge.ask("/live")).status == 200
        assert (await edge.ask("/v1/models")).json["data"] == []
        ready = await edge.ask(f"/v1/models/{MODEL}/ready")
        assert ready.status == 503
        assert ready.json["namespaces"]["test"]["missing"] == ["aggregated"]
        for stream in (False, True):
            answer = await edge.chat(stream=stream)
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json["error"]["type"] == "server_error"
        assert (await edge.ask(f"/v1/models/{MODEL}")).status == 503
        assert (await edge.ask("/tokenize", {"model": MODEL, "prompt": "a"})).status == 503

    served(body)


@pytest.mark.parametrize("path", ["/v1/models/nobody", "/v1/models/nobody/ready", "/v1/models/a/b/c"])
def test_a_model_that_does_not_exist(path: str) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.ask(path)
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")

    served(body)


def test_a_name_with_slashes_encoded_or_not() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0", sim(model="some/org/model-8B"))
            edge = await lab.frontend()
            await edge.ready("some/org/model-8B")
            for name in ("some/org/model-8B", "some%2Forg%2Fmodel-8B"):
                assert (await edge.ask(f"/v1/models/{name}")).json["id"] == "some/org/model-8B"
                assert (await edge.ask(f"/v1/models/{name}/ready")).json["ready"] is True

    run_virtual(scenario)


class Aliased(ScriptedEngine):
    @property
    def card(self) -> ModelCard:
        return replace(self._inner.card, aliases=("nick",))

    async def start(self) -> EngineInfo:
        return replace(await self._inner.start(), card=card_hash(self.card))


# --- tokens


def test_tokenize_and_detokenize() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        told = (await edge.ask("/tokenize", {"model": MODEL, "prompt": "the water é"})).json
        assert told["count"] == len(told["tokens"]) > 3
        assert told["max_model_len"] == 512
        named = (await edge.ask("/tokenize", {"prompt": "the water é", "return_token_strs": True})).json
        assert named["tokens"] == told["tokens"]
        assert "".join(named["token_strs"][:4]) == "the water"
        back = await edge.ask("/detokenize", {"model": MODEL, "tokens": told["tokens"]})
        assert back.json == {"prompt": "the water é"}
        messages = [{"role": "user", "content": "hi"}]
        chat = (await edge.ask("/tokenize", {"model": MODEL, "messages": messages})).json
        shown = (await edge.ask("/detokenize", {"tokens": chat["tokens"]})).json["prompt"]
        assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        bare = {"messages": messages, "add_generation_prompt": False}
        assert (await edge.ask("/tokenize", bare)).json["count"] < chat["count"]
        asked = await edge.chat(messages=messages, max_tokens=1)
        assert asked.json["usage"]["prompt_tokens"] == chat["count"]

    served(body)


@pytest.mark.parametrize(
    ("path", "asked", "status", "param"),
    [
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, 400, "prompt"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"model": "nobody", "prompt": "a"}, 404, "model"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [70] * 2049}, 400, "tokens"),
        ("/detokenize", {"model": "nobody", "tokens": []}, 404, "model"),
        ("/busy_threshold", {"model": "nobody"}, 404, "model"),
        ("/busy_threshold", {"model": MODEL, "active_decode_blocks_threshold": 2}, 400, None),
        ("/busy_threshold", {}, 400, None),
    ],
    ids=str,
)
def test_what_the_other_endpoints_refuse(
    path: str, asked: dict[str, Any], status: int, param: str | None
) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.ask(path, asked)
        assert answer.status == status
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        if param is not None:
            assert answer.json["error"]["param"] == param

    served(body)


def test_without_a_name_there_must_be_one_model() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        assert (await edge.ask("/tokenize", {"prompt": "a"})).status == 200
        await lab.worker("w1", sim(model="another"))
        await edge.ready("another", MODEL)
        answer = await edge.ask("/tokenize", {"prompt": "a"})
        assert (answer.status, answer.json["error"]["param"]) == (400, "model")

    served(body)


# --- thresholds


def test_busy_thresholds_are_read_set_and_kept() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        listed = (await edge.ask("/busy_threshold")).json["thresholds"]
        assert [each["model"] for each in listed] == [MODEL]
        assert listed[0]["active_decode_blocks_threshold"] is None
        first = {"model": MODEL, "active_decode_blocks_threshold": 0.5}
        await edge.ask("/busy_threshold", first)
        second = {"model": MODEL, "active_prefill_tokens_threshold": 9}
        told = (await edge.ask("/busy_threshold", second)).json
        assert told["active_decode_blocks_threshold"] == 0.5
        assert told["active_prefill_tokens_threshold"] == 9
        assert (await edge.ask("/busy_threshold")).json["thresholds"] == [told]
        assert (await edge.ask("/busy_threshold", {"model": MODEL})).json == told

    served(body)


def test_a_threshold_by_an_alias_is_the_model_s() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        nick = (await edge.ask("/v1/models/nick")).json
        assert (nick["id"], nick["root"]) == ("nick", MODEL)
        told = await edge.ask("/busy_threshold", {"model": "nick", "active_decode_blocks_threshold": 0.5})
        assert told.json["model"] == MODEL
        listed = (await edge.ask("/busy_threshold")).json["thresholds"]
        assert listed[0]["active_decode_blocks_threshold"] == 0.5

    served(body, Aliased)


# --- refusals of the server


def test_methods_paths_media_types_and_sizes() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        missing = await edge.ask("/v1/nothing")
        assert (missing.status, missing.json["error"]["type"]) == (404, "invalid_request_error")
        wrong = await edge.ask("/v1/chat/completions")
        assert (wrong.status, wrong.headers["allow"]) == (405, "post")  # the lab reads headers in lower case
        assert (await edge.ask("/v1/models", b"", method="DELETE")).status == 405
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"):
            for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
                answer = await edge.ask(path, CHAT, {"content-type": kind})
                assert (answer.status, answer.json["error"]["code"]) == (415, "unsupported_media_type")
        for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
            answer = await edge.ask("/v1/chat/completions", {**CHAT, "max_tokens": 1}, {"content-type": kind})
            assert answer.status == 200
        large = await edge.ask("/v1/chat/completions", b"x" * 10_001)
        assert (large.status, large.json["error"]["code"]) == (413, "payload_too_large")
        for answer in (missing, wrong, large):
            assert answer.headers["x-request-id"]

    served(body, limits=HttpLimits(max_body_bytes=10_000))


def test_bytes_that_are_no_request_are_a_400() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        paths = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/busy_threshold")
        for path in paths:
            for raw in (b"", b"{", b"\xff", b"[" * 50_000, b"null", b'{"model": 1}'):
                answer = await edge.ask(path, raw)
                assert answer.status == 400
                assert answer.json["error"]["type"] == "invalid_request_error"

    served(body)


def test_what_has_no_mechanism_is_a_501_with_its_name() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for fields, name in (
            ({"response_format": {"type": "json_object"}}, "grammar"),
            ({"nvext": {"prefill_dp_rank": 1}}, "prefill_dp_rank"),
            ({"tools": [TOOL], "tool_choice": "required"}, "grammar"),
        ):
            for stream in (False, True):
                answer = await edge.chat(stream=stream, max_tokens=5, **fields)
                assert answer.status == 501
                assert name in answer.json["error"]["message"]
                assert answer.headers["x-should-retry"] == "false"

    served(body, lambda: sim(ARGUMENTS))
