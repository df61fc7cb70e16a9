"""Prompts that come as vectors: answered as their tokens would be, and refused where vLLM would not take them."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.vllm import stand_in
from tests.unit.engines.vllm.lab import ARGUMENTS, MOVING, Harness, running, with_args

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request, Sampling, StopConditions

QUIET = with_args(replace(ARGUMENTS, kv_events=False), enable_prompt_embeds=True)
PROMPT = tuple(range(100, 120))


def asked(name: str, **fields: Any) -> Request:
    given: dict[str, Any] = {
        "token_ids": (0,) * len(PROMPT),
        "stop": StopConditions(max_tokens=8, ignore_eos=True),
        "sampling": Sampling(seed=3),
        "extra": {"prompt_embeds": vectors()},
    }
    return Request(request_id=RequestId(name), model="tiny", **given | fields)


def vectors(tokens: tuple[int, ...] = PROMPT) -> str:
    return base64.b64encode(json.dumps([[token] for token in tokens]).encode()).decode()


async def test_they_are_answered_as_their_tokens(model: str) -> None:
    async with running(Harness(model, QUIET)) as (run, _):
        told = await run.answer(asked("tokens", token_ids=PROMPT, extra={}))
        assert (await run.answer(asked("vectors"))).tokens == told.tokens
        rest = await run.answer(asked("rest", prior_tokens=tuple(told.tokens[0][:3])))
        assert rest.tokens[0] == told.tokens[0][3:]


@pytest.mark.parametrize(("embeds", "words"), [(vectors(PROMPT[1:]), "19 rows for 20"), ("~", "refuses")])
async def test_what_is_no_such_tensor(model: str, embeds: Any, words: str) -> None:
    """Told as the request's end: it is read beside the loop."""
    async with running(Harness(model, QUIET)) as (run, core):
        answer = run.submit(asked("r", extra={"prompt_embeds": embeds}), may_fail=True)
        await run.until(lambda: answer.done)
        assert answer.error is not None
        assert (answer.error.code, answer.error.fields["param"]) == ("invalid_request", "prompt_embeds")
        assert words in answer.error.message
        assert core.received == []


async def test_what_is_no_text_is_not_even_read(model: str) -> None:
    async with running(Harness(model, QUIET)) as (run, _):
        with pytest.raises(InvalidRequest, match="must be base64"):
            run.engine.submit(asked("r", extra={"prompt_embeds": 7}))


async def test_memory_that_is_not_there_is_one_requests_failure(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*given: Any) -> Any:
        raise MemoryError

    async with running(Harness(model, QUIET)) as (run, _):
        monkeypatch.setattr(sys.modules["vllm.renderers.embed_utils"], "safe_load_prompt_embeds", none_left)
        answer = run.submit(asked("r"), may_fail=True)
        await run.finish(answer)
        assert answer.error is not None
        assert (answer.error.code, answer.error.message) == (
            "engine_failed",
            "reading prompt_embeds failed (MemoryError)",
        )
        assert (await run.answer(asked("tokens", token_ids=PROMPT, extra={}))).done
    assert "prompt embeds unreadable" in caplog.text


async def test_reading_vectors_delays_no_other_request(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered meanwhile; one that is aborted before they are read never comes to vLLM."""
    may_go_on = threading.Event()
    loads = stand_in.safe_load_prompt_embeds

    def slow(*given: Any) -> Any:
        assert may_go_on.wait(20)
        return loads(*given)

    async with running(Harness(model, QUIET)) as (run, core):
        monkeypatch.setattr(sys.modules["vllm.renderers.embed_utils"], "safe_load_prompt_embeds", slow)
        gone = run.submit(asked("gone"))
        slowly = asyncio.ensure_future(run.answer(asked("slow")))
        told = await run.answer(asked("tokens", token_ids=PROMPT, extra={}))
        run.abort(gone)
        assert not slowly.done()
        may_go_on.set()
        assert (await slowly).tokens == told.tokens
        assert not [each for each in core.received if each.request_id.startswith("gone")]


async def test_a_vllm_that_does_not_take_them(model: str) -> None:
    async with running(Harness(model)) as (run, _):
        with pytest.raises(Unsupported, match="enable_prompt_embeds") as caught:
            run.engine.submit(asked("r"))
        assert caught.value.fields["feature"] == "prompt_embeds"


async def test_what_does_not_go_with_them(model: str) -> None:
    handoff = Handoff(ticket=b"", prefill_instance=InstanceId("p"), first_tokens=(7,))
    async with running(Harness(model, with_args(MOVING, enable_prompt_embeds=True))) as (run, core):
        engine: Any = run.engine
        with pytest.raises(Unsupported, match="logprobs"):
            engine.submit(asked("r", sampling=Sampling(prompt_logprobs=1)))
        with pytest.raises(Unsupported, match="do not support remote prefill"):
            engine.submit(asked("r", handoff=handoff))
        with pytest.raises(Unsupported, match="do not support remote prefill"):
            await engine.prefill(asked("r"))
        assert core.received == []
