"""Small things of the edge that clients see: special tokens, late headers, prompt log probabilities, parsers."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, NAMESPACE, Frontend, Lab, RunningWorker, sim
from tests.unit.frontend.serving import TOOL, saying, served
from tokenizers import Tokenizer, processors

from kvolt.core.errors import ConfigError
from kvolt.engines.sim.model import sim_card, tokenizer_json
from kvolt.frontend.answers import streaming
from kvolt.frontend.model import ModelOptions
from kvolt.frontend.models import Models
from kvolt.frontend.tokenization.preprocess import CardProcessor, ParserNames, ProcessorSpec, check_parsers
from kvolt.runtime.clock import ThreadBlocking
from kvolt.testing import run_virtual


def processor(**card: Any) -> CardProcessor:
    made = replace(sim_card("m", 1024, 16), **card)
    return CardProcessor(made, ProcessorSpec(blocking=ThreadBlocking(1), cache_bytes=1 << 20))


async def test_a_bare_text_gets_the_tokens_that_the_tokenizer_puts_around_it() -> None:
    tokenizer = Tokenizer.from_buffer(tokenizer_json())
    special = [("<|endoftext|>", 0), ("<|im_end|>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A <|im_end|>", special_tokens=special
    )
    wrapping = processor(tokenizer_json=tokenizer.to_str().encode())
    (bare,) = await wrapping.encode(["the water"], "prompt")
    assert await wrapping.encode(["the water"], "prompt", with_special=True) == [(0, *bare, 2)]
    assert await processor().encode(["the water"], "prompt", with_special=True) == [bare]


def test_add_special_tokens_reaches_completions_and_tokenize() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        (model,) = edge.models.ready()
        model.processor._around = ([0], [])  # type: ignore[attr-defined]
        base = len((await model.processor.encode(["the water"], "prompt"))[0])
        for asked, more in (({}, 1), ({"add_special_tokens": True}, 1), ({"add_special_tokens": False}, 0)):
            usage = (await edge.complete(prompt="the water", **asked)).json["usage"]
            assert usage["prompt_tokens"] == base + more
            told = await edge.ask("/tokenize", {"prompt": "the water", **asked})
            assert told.json["count"] == base + more

    served(body)


@pytest.mark.parametrize("stream", [False, True])
def test_timing_headers_when_asked_for(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.chat({"x-kvolt-timing": "1"}, max_tokens=3, stream=stream)
        assert answer.status == 200
        assert "ttft;dur=" in answer.headers["server-timing"]
        assert "server-timing" not in (await edge.chat(max_tokens=3, stream=stream)).headers

    served(body)


def test_prompt_logprobs_come_with_each_choice() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.complete(prompt="the water", prompt_logprobs=1, n=2)
        for choice in answer.json["choices"]:
            first, *others = choice["prompt_logprobs"]
            assert first is None
            assert len(others) == answer.json["usage"]["prompt_tokens"] - 1
            assert all(entry["logprob"] <= 0 for place in others for entry in place.values())
        assert "prompt_logprobs" not in (await edge.complete(prompt="the water")).json["choices"][0]

    served(body)


def test_after_the_reasoning_tokens_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    settle = streaming.StreamingReceiver.leave_fast_path

    def watched(receiver: streaming.StreamingReceiver) -> None:
        written.append(len(receiver.token_ids) - receiver.states[0].choice.num_tokens)
        settle(receiver)

    monkeypatch.setattr(streaming.StreamingReceiver, "leave_fast_path", watched)

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.chat(max_tokens=100, stream=True)
        assert answer.text() == "the water of the sea and the land"
        assert max(written) >= 6

    served(body, saying("<think>well</think>the water of the sea and the land"))


@pytest.mark.parametrize(("names", "kept"), [((None, None), False), (("none", "none"), True)])
def test_parsers_can_be_turned_off(names: tuple[str | None, str | None], kept: bool) -> None:
    text = "<think>well</think>so"

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        message = (await edge.chat(max_tokens=100)).json["choices"][0]["message"]
        assert (message["content"] == text) == kept
        assert ("reasoning_content" in message) != kept

    served(body, saying(text), model_options=ModelOptions(parsers=ParserNames(*names)))


def test_an_unknown_parser_is_found_at_the_start() -> None:
    check_parsers(ParserNames("none", "qwen3"))
    with pytest.raises(ConfigError, match="hermes"):
        check_parsers(ParserNames("hermis", None))


def test_models_of_several_namespaces() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0", sim(replace(ARGUMENTS), model="one"), namespace=NAMESPACE)
            await lab.worker("w1", sim(replace(ARGUMENTS), model="two"), namespace="other")
            runtime = await lab.runtime("edge")
            models = Models(runtime, [NAMESPACE, "other", NAMESPACE])
            models.start()
            await models.wait_settled(5.0)
            assert [model.card.name for model in models.ready()] == ["one", "two"]
            assert models.get("two").client.endpoint.namespace == "other"
            await models.close()

    run_virtual(scenario)


def test_a_call_cut_by_a_stop_string_is_no_call_to_make() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for stop, finish in (([], "tool_calls"), (["Par"], "stop")):
            (choice,) = (await edge.chat(max_tokens=200, tools=[TOOL], stop=stop)).json["choices"]
            assert choice["message"]["tool_calls"]
            assert choice["finish_reason"] == finish

    served(body, saying(text, context_length=4096, kv_blocks=1024))
