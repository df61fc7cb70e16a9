"""vLLM's pre- and postprocessing behind our port, with a stand-in for vLLM; the real one: tests/engines_vllm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import Frontend, Lab, RunningWorker
from tests.unit.frontend.processors import vllm_stand_in
from tests.unit.frontend.serving import TOOL, Answering, saying, served
from tokenizers import Tokenizer

from kvolt.core.delta import Delta, FinishReason
from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.engines.sim.model import sim_card
from kvolt.frontend.model import ModelOptions
from kvolt.frontend.openai_api.templating import TemplateInput
from kvolt.frontend.parsers.port import Content, Piece, Reasoning, ToolArguments, ToolStart
from kvolt.frontend.processors.vllm_parser import VllmParser
from kvolt.frontend.processors.vllm_processor import VllmProcessor
from kvolt.frontend.tokenization.preprocess import CardProcessor, ParserNames, ProcessorSpec, RenderedChat
from kvolt.testing import InlineBlocking, run_virtual

MARKERS = ["(hm)", "[weather {]", "[ }]", "[other {}]"]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "ü"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vllm_stand_in.install(monkeypatch, tmp_path)


def spec(tools: str | None = None, reasoning: str | None = None) -> ProcessorSpec:
    return ProcessorSpec(
        blocking=InlineBlocking(), cache_bytes=1 << 20, parsers=ParserNames(tools, reasoning)
    )


def processor(tools: str | None = None, reasoning: str | None = None, **card: Any) -> VllmProcessor:
    made = sim_card("m", 2048, 16)
    tokenizer = Tokenizer.from_buffer(made.tokenizer_json)
    tokenizer.add_tokens(MARKERS)
    made = replace(made, tokenizer_json=tokenizer.to_str().encode())
    return VllmProcessor(replace(made, **card), spec(tools, reasoning))


def given(tools: list[dict[str, Any]] | None = None, **kwargs: Any) -> TemplateInput:
    return TemplateInput(MESSAGES, tools, True, False, kwargs)


def parser(made: VllmProcessor, max_calls: int | None = None, **kwargs: Any) -> Any:
    return made.parser_spec(RenderedChat(given([TOOL], **kwargs), "", (7, 8), True, max_calls)).new_parser()


# --- prompts


def test_a_chat_reaches_vllm_as_the_client_wrote_it() -> None:
    made = processor(bos_token_id=0)
    text = run_virtual(lambda: made.render(given([TOOL], reasoning_effort="high")))
    assert "'arguments': '{\"x\": \"ü\"}'" in text
    assert "'content': None" in text
    assert "'dumped': True" in text
    assert text.endswith("<|endoftext|> <|im_end|>")
    assert MESSAGES[1]["content"] == ""  # which others are given, too


@pytest.mark.parametrize(
    ("fields", "messages", "told"),
    [
        ({"chat_template": "refuses"}, MESSAGES, "no system role here"),
        ({"chat_template": "  "}, MESSAGES, "no chat template"),
        ({}, [{"role": "pirate"}], "no such role"),
        ({}, [{"role": "user", "content": [{"type": "image_url"}]}], "supports text only"),
    ],
)
def test_what_is_refused_is_the_clients(fields: Any, messages: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        run_virtual(lambda: processor(**fields).render(given()._replace(messages=messages)))
    assert caught.value.fields["param"] == "messages"


def test_text_becomes_tokens_as_with_our_own() -> None:
    async def scenario() -> None:
        made, card = processor(), sim_card("m", 2048, 16)
        own = CardProcessor(card, spec())
        assert await made.encode(["the water"], "prompt") == await own.encode(["the water"], "prompt")
        assert made.stats.misses > 0
        assert made.supports_tools
        assert not processor(chat_template="{{ messages }}").supports_tools

    run_virtual(scenario)


# --- which parsers


def test_the_operators_names_override_the_cards(caplog: pytest.LogCaptureFixture) -> None:
    assert processor("hermes", tool_parser="granite-20b-fc", reasoning_parser="deepseek-r1").parsers == (
        "hermes",
        "deepseek_r1",
    )
    assert caplog.messages == []
    assert processor().parsers == (None, None)  # though the template shows both
    assert [line.partition("try ")[2] for line in caplog.messages] == [
        "--tool-parser hermes",
        "--reasoning-parser qwen3",
    ]
    caplog.clear()
    assert processor("none", "none").parsers == (None, None)
    assert caplog.messages == []


def test_a_parser_that_does_not_go_with_the_model() -> None:
    with pytest.raises(ConfigError, match="cannot be used with this tokenizer") as caught:
        processor(None, "unfit")
    assert caught.value.fields["key"] == "reasoning_parser"


def test_no_parser_without_a_name() -> None:
    reading = processor().parser_spec(RenderedChat(given([TOOL]), "", (), may_call=True))
    assert reading.new_parser() is None
    assert not reading.keep_special_tokens


def test_parsers_know_whether_the_model_may_call() -> None:
    made = processor("hermes")
    for may_call, choice in ((True, "auto"), (False, "none")):
        reader = made.parser_spec(RenderedChat(given([TOOL]), "", (), may_call)).new_parser()
        assert isinstance(reader, VllmParser)
        assert reader._request.fields["tool_choice"] == choice


def test_special_tokens_are_shown_where_vllm_says_so() -> None:
    tools, none = RenderedChat(given([TOOL]), "", (), may_call=True), RenderedChat(given(), "", ())
    assert processor("hermes").parser_spec(tools).keep_special_tokens
    assert not processor("hermes").parser_spec(none).keep_special_tokens  # the parser is not used then
    assert processor("hermes", "deepseek_r1").parser_spec(none).keep_special_tokens
    assert not processor(None, "deepseek_r1").parser_spec(tools).keep_special_tokens


def test_a_chat_that_the_parsers_refuse() -> None:
    with pytest.raises(InvalidRequest, match="not so"):
        parser(processor("hermes"), refuse=True)


# --- answers


def test_pieces() -> None:
    made = processor("hermes", "deepseek_r1")
    reader = parser(made)
    assert isinstance(reader, VllmParser)
    assert not reader.passes_all
    assert reader.feed("(hm") == []
    assert reader.feed(")so ") == [Reasoning("hm"), Content("so ")]
    assert reader.feed("[weather {]") == [ToolStart(0, "weather"), ToolArguments(0, "{")]
    assert reader.feed("[ }]") == [ToolArguments(0, "}")]
    assert reader.feed("[weather {]") == [ToolArguments(0, "{")]  # a name that is repeated
    assert reader.finish() == [Content("the end")]


def test_token_ids_passed_to_vllm() -> None:
    made = processor("hermes")
    reader = parser(made)
    reader.feed("the water(hm")
    reader.feed(")")
    reader.finish()
    token_id = made.vocabulary.token_id
    text_ids = made.vocabulary.tokenizer.encode("the water", add_special_tokens=False).ids
    assert reader._parser.seen == [
        ("the water", text_ids, [7, 8], False),
        ("(hm)", [token_id("(hm)")], None, False),
        ("", [], None, True),
    ]


def test_arguments_before_a_name_are_nobodys() -> None:
    assert parser(processor("hermes")).feed("[ }]") == []


def test_a_parser_that_fails_leaves_the_text(caplog: pytest.LogCaptureFixture) -> None:
    reader = parser(processor("hermes"))
    pieces: list[Piece] = reader.feed("one ")
    pieces += reader.feed("crash (hm)") + reader.feed("two (h") + reader.finish()
    assert pieces == [Content("one "), Content("crash (hm)"), Content("two "), Content("(h")]
    assert [line for line in caplog.messages if "failed" in line] == [
        "vLLM parser failed; the rest of the response is not parsed"
    ]


def test_at_most_so_many_calls() -> None:
    reader = parser(processor("hermes"), max_calls=0)
    assert reader.feed("[weather {]") == []
    assert reader.feed("so") == [Content("so")]


# --- through the edge


def test_over_http() -> None:
    options = ModelOptions(parsers=ParserNames("hermes", "deepseek_r1"), new_processor=VllmProcessor)

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        (model,) = edge.models.ready()
        assert isinstance(model.processor, VllmProcessor)
        answer = (await edge.chat(tools=[TOOL], max_tokens=40)).json
        assert answer["choices"][0]["message"]["content"] == "so it isthe end"
        assert answer["choices"][0]["finish_reason"] == "stop"
        tokens = (await edge.ask("/tokenize", {"messages": MESSAGES[:1]})).json["tokens"]
        text = (await edge.ask("/detokenize", {"tokens": tokens})).json["prompt"]
        assert "'role': 'user'" in text  # as the stand-in renders

    served(body, saying("so it is"), model_options=options)


def test_over_http_special_tokens_are_in_the_text_that_parsers_read() -> None:
    deltas = (Delta((300,)), Delta((1,)), Delta((301,), finish=FinishReason.LENGTH))

    async def content(edge: Frontend, **fields: Any) -> str:
        answer = (await edge.chat(max_tokens=3, **fields)).json
        return str(answer["choices"][0]["message"]["content"])

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        (model,) = edge.models.ready()
        first, last = (model.processor.vocabulary.decode([token_id]) for token_id in (300, 301))
        assert await content(edge, tools=[TOOL]) == f"{first}<|im_start|>{last}the end"
        assert await content(edge) == f"{first}{last}the end"

    options = ModelOptions(parsers=ParserNames("hermes", None), new_processor=VllmProcessor)
    served(body, lambda: Answering(*deltas), model_options=options)
