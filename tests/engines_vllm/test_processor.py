"""The processor `vllm` with vLLM's own code: what it renders and reads is what `vllm serve` would."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from kvolt.core.card import ModelCard
from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.frontend.openai_api.checks import parse_chat
from kvolt.frontend.openai_api.templating import TemplateInput, build_template_input
from kvolt.frontend.parsers.port import (
    Content,
    Piece,
    Reasoning,
    TextParser,
    ToolArguments,
    ToolStart,
    joined,
)
from kvolt.frontend.processors.registry import find_processor
from kvolt.frontend.processors.vllm_symbols import REQUIREMENT, check_vllm
from kvolt.frontend.tokenization.preprocess import (
    ParserNames,
    ParserSpec,
    Processor,
    ProcessorSpec,
    RenderedChat,
)
from kvolt.models.checkpoint import model_card, open_checkpoint
from kvolt.models.fetch_progress import ProgressLog
from kvolt.models.folder_export import folder_of
from kvolt.models.resolve import resolve
from kvolt.runtime.clock import SystemClock, ThreadBlocking

TEMPLATES = Path(__file__).parents[1] / "unit" / "frontend" / "templates" / "jinja"
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
NONE = ParserNames(None, None)
READY_S = 600.0

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
        },
    },
}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "How is it"}, {"type": "text", "text": "in Zürich?"}],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Zürich"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "user", "content": "And tomorrow?"},
]

ALL_GIVEN = (
    "{{ tools }} {{ enable_thinking }} {{ reasoning_effort }} {{ bos_token }}{{ eos_token }}"
    "{% for each in messages %}{{ each | tojson }}{{ each.content }}{% endfor %}"
)
PARTS_GIVEN = (
    "{% for each in messages %}{{ each | tojson }}"
    "{% for part in each.content %}{{ part.text }}{% endfor %}{% endfor %}"
)
"""Templates that hide nothing, of content as text and of content in parts."""

CALLS = (
    'Sure, < wait. <tool_call>\n{"name": "weather", "arguments": {"city": "Zürich </b>", "days": [1, 2]}}\n'
    '</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)
XML_CALLS = (
    "Sure. <tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n[1, 2]\n"
    "</parameter>\n</function>\n</tool_call>"
)
THOUGHT = "Let me see: <b> is </b>, hm.\n</think>\n\nIt is sunny, a < b."


# --- what is told


class Read(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def read(parser: TextParser, parts: Iterable[str]) -> Read:
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    pieces = joined(pieces + parser.finish())
    names = [piece.name for piece in pieces if isinstance(piece, ToolStart)]
    arguments = [""] * len(names)
    for piece in pieces:
        if isinstance(piece, ToolArguments):
            arguments[piece.index] += piece.text
    return Read(
        "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        "".join(piece.text for piece in pieces if isinstance(piece, Content)),
        list(zip(names, arguments, strict=True)),
    )


def splits(text: str) -> Iterator[list[str]]:
    """In two at every place, by characters, and some at random."""
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    rng = random.Random(7)
    for _ in range(50):
        cuts = sorted({0, len(text), *(rng.randrange(len(text)) for _ in range(rng.randrange(12)))})
        yield [text[start:end] for start, end in pairwise(cuts)]


# --- models


@pytest.fixture(scope="module")
def folder() -> Path:
    return folder_of(resolve("smollm2-135m", ProgressLog(SystemClock())))


@pytest.fixture(scope="module")
def smollm2(folder: Path) -> ModelCard:
    check_vllm(NONE)
    return model_card("smollm2", open_checkpoint(folder), 32)


@pytest.fixture(scope="module")
def marked(smollm2: ModelCard) -> ModelCard:
    """With tokens for reasoning and calls, as models have them that were taught so."""
    tokenizer = Tokenizer.from_buffer(smollm2.tokenizer_json)
    assert tokenizer.add_tokens(MARKERS) == len(MARKERS)
    template = (TEMPLATES / "qwen3.jinja").read_text()
    return replace(smollm2, tokenizer_json=tokenizer.to_str().encode(), chat_template=template)


def processor(card: ModelCard, tools: str | None = None, reasoning: str | None = None) -> Processor:
    spec = ProcessorSpec(
        blocking=ThreadBlocking(1), cache_bytes=1 << 20, parsers=ParserNames(tools, reasoning)
    )
    return find_processor("vllm").build(card, spec)


def given(**fields: Any) -> TemplateInput:
    body = {"model": "m", "messages": HISTORY, **fields}
    return build_template_input(parse_chat(json.dumps(body).encode()).request)


def reading(made: Processor, prompt: str = "", **fields: Any) -> ParserSpec:
    ids = made.vocabulary.tokenizer.encode(prompt, add_special_tokens=False).ids
    wanted = given(**fields)
    return made.parser_spec(RenderedChat(wanted, prompt, ids, bool(wanted.tools)))


def new_parser(made: Processor, prompt: str = "", **fields: Any) -> TextParser:
    parser = reading(made, prompt, **fields).new_parser()
    assert parser is not None
    return parser


# --- prompts


@pytest.fixture(scope="module")
def vllm_config(folder: Path) -> Any:
    return AsyncEngineArgs(model=str(folder), dtype="float32", max_model_len=1024).create_engine_config()


@pytest.fixture(scope="module")
def renderer(vllm_config: Any) -> Any:
    return renderer_from_config(vllm_config)


async def rendered_by_vllm(renderer: Any, template: str | None, body: dict[str, Any]) -> list[int]:
    """As its server does, from what a client sent."""
    online = OnlineRenderer(
        renderer.model_config,
        renderer,
        request_logger=None,
        chat_template=template,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="hermes",
    )
    request = ChatCompletionRequest.model_validate(json.loads(json.dumps(body)))
    result = await online.render_chat(request)
    assert isinstance(result, tuple), result
    return list(result[1][0]["prompt_token_ids"])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high"},
        {"add_generation_prompt": False},
        {
            "messages": [*HISTORY, {"role": "assistant", "content": "Tomorrow"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]},
        {
            "messages": [
                *HISTORY[:-1],
                {"role": "assistant", "content": "x", "reasoning_content": "hm"},
                HISTORY[-1],
            ]
        },
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "template", [None, "qwen3.jinja", "qwen2_5.jinja", "parts.jinja", ALL_GIVEN, PARTS_GIVEN]
)
async def test_a_prompt_is_the_one_that_vllm_serve_makes(
    smollm2: ModelCard, renderer: Any, template: str | None, fields: dict[str, Any]
) -> None:
    text = (TEMPLATES / template).read_text() if template and template.endswith(".jinja") else template
    made = processor(smollm2 if text is None else replace(smollm2, chat_template=text))
    body = {"model": "m", "messages": HISTORY, **fields}
    wanted = await rendered_by_vllm(renderer, text, body)
    (found,) = await made.encode([await made.render(given(**fields))], "messages")
    assert made.vocabulary.decode(found, False) == made.vocabulary.decode(wanted, False)
    assert list(found) == wanted


async def test_a_bare_text_has_the_tokens_that_vllm_gives_it(smollm2: ModelCard, renderer: Any) -> None:
    tokenizer = renderer.get_tokenizer()
    for text in ("", "the water\n\n  is <|im_end|> 日本", "x" * 20_000):
        (found,) = await processor(smollm2).encode([text], "prompt", with_special=True)
        assert list(found) == tokenizer(text, add_special_tokens=True).input_ids


async def test_what_vllm_or_a_template_refuses_is_the_clients(smollm2: ModelCard) -> None:
    refusing = replace(smollm2, chat_template="{{ raise_exception('no system role here') }}")
    with pytest.raises(InvalidRequest, match="no system role here") as caught:
        await processor(refusing).render(given())
    assert caught.value.fields["param"] == "messages"
    with pytest.raises(InvalidRequest, match="chat template"):
        await processor(replace(smollm2, chat_template=" ")).render(given())
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
    with pytest.raises(InvalidRequest, match="text only"):
        await processor(smollm2).render(given()._replace(messages=[image]))


# --- answers


@pytest.mark.parametrize("parser", ["hermes", "qwen3_json"])
@pytest.mark.parametrize("with_markers", [True, False])
def test_calls_are_the_same_however_the_text_comes(
    smollm2: ModelCard, marked: ModelCard, parser: str, with_markers: bool
) -> None:
    made = processor(marked if with_markers else smollm2, tools=parser)
    wanted = read(new_parser(made, tools=[TOOL]), [CALLS])
    assert wanted.content.startswith("Sure, < wait.")
    assert [(name, json.loads(text)) for name, text in wanted.calls] == [
        ("weather", {"city": "Zürich </b>", "days": [1, 2]}),
        ("weather", {}),
    ]
    for parts in splits(CALLS):
        assert read(new_parser(made, tools=[TOOL]), parts) == wanted, parts


def test_a_format_that_only_vllm_can_read(marked: ModelCard) -> None:
    made = processor(marked, tools="qwen3-coder")
    wanted = read(new_parser(made, tools=[TOOL]), [XML_CALLS])
    assert [(name, json.loads(text)) for name, text in wanted.calls] == [
        ("weather", {"city": "Zürich", "days": [1, 2]})
    ]
    for parts in splits(XML_CALLS):
        found = read(new_parser(made, tools=[TOOL]), parts)
        assert found.content.strip() == wanted.content.strip() == "Sure."
        assert found.calls == wanted.calls, parts


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_reasoning_is_the_same_however_the_text_comes(marked: ModelCard, parser: str) -> None:
    made = processor(marked, reasoning=parser)
    for before in ("", "<think>"):
        wanted = read(new_parser(made), [before + THOUGHT])
        assert wanted.reasoning.strip() == "Let me see: <b> is </b>, hm."
        assert wanted.content.strip() == "It is sunny, a < b."
        for parts in splits(before + THOUGHT):
            assert read(new_parser(made), parts) == wanted, parts


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_the_prompt_says_whether_the_answer_begins_with_reasoning(marked: ModelCard, parser: str) -> None:
    made = processor(marked, reasoning=parser)
    closed = new_parser(made, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert read(closed, ["It is ", "sunny."]) == Read("", "It is sunny.", [])
    still = new_parser(made, "<|im_start|>assistant\n<think>\n")
    assert read(still, ["It is ", "sunny."]).content == ""


def by_tokens(made: Processor, parser: Any, request: Any, ids: Sequence[int]) -> Read:
    """As vLLM's server reads a stream: a token at a time, the last one with the end."""
    detokenizer = made.vocabulary.detokenizer(request.skip_special_tokens)
    reasoning = content = ""
    calls: dict[int, tuple[str, str]] = {}
    for number, token_id in enumerate(ids):
        finished = number == len(ids) - 1
        delta = parser.parse_delta(detokenizer.feed(token_id), [token_id], request, [1], finished=finished)
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for call in delta.tool_calls:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = name or call.function.name or "", arguments + (call.function.arguments or "")
    return Read(reasoning, content, list(calls.values()))


@pytest.mark.parametrize(
    ("tools", "reasoning", "text"),
    [
        ("hermes", None, CALLS),
        ("hermes", "deepseek_r1", THOUGHT + CALLS),
        ("qwen3_coder", "qwen3", THOUGHT + XML_CALLS),
        ("qwen3_coder", None, XML_CALLS),
        (None, "deepseek_r1", THOUGHT),
        (None, "qwen3", THOUGHT),
    ],
)
def test_an_answer_is_read_as_vllm_reads_its_tokens(
    marked: ModelCard, tools: str | None, reasoning: str | None, text: str
) -> None:
    made = processor(marked, tools, reasoning)
    fields = {"tools": [TOOL]} if tools else {}
    ours = new_parser(made, "x", **fields)
    ids = made.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    theirs = new_parser(made, "x", **fields)
    wanted = by_tokens(made, theirs._parser, theirs._request, ids)  # type: ignore[attr-defined]
    detokenizer = made.vocabulary.detokenizer(False)
    assert read(ours, [*map(detokenizer.feed, ids), detokenizer.finish()]) == wanted


def test_special_tokens_are_shown_to_parsers_that_look_for_them(marked: ModelCard) -> None:
    made = processor(marked, tools="hermes")
    assert reading(made, tools=[TOOL]).keep_special_tokens
    assert not reading(made).keep_special_tokens
    assert read(new_parser(made), [CALLS]) == Read("", CALLS, [])  # a model without tools


def test_no_parser_without_a_name(marked: ModelCard) -> None:
    assert reading(processor(marked), tools=[TOOL]).new_parser() is None


def test_at_most_so_many_calls(marked: ModelCard) -> None:
    made = processor(marked, tools="hermes")
    asked = RenderedChat(given(tools=[TOOL]), "", (), may_call=True, max_calls=1)
    parser = made.parser_spec(asked).new_parser()
    assert parser is not None
    assert len(read(parser, [CALLS]).calls) == 1


def test_a_parser_that_fails_leaves_the_text(marked: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = new_parser(processor(marked, tools="hermes"), tools=[TOOL])
    pieces = parser.feed("one ")

    def fail(*arguments: Any, **named: Any) -> None:
        raise KeyError("arguments")

    monkeypatch.setattr(parser._parser, "parse_delta", fail)  # type: ignore[attr-defined]
    pieces += parser.feed("two <tool_call>") + parser.feed(" three <to") + parser.finish()
    assert joined(pieces) == [Content("one two <tool_call> three <to")]


# --- what cannot work


def test_names_that_vllm_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"no tool parser 'hermis'; known: .*hermes"):
        check_vllm(ParserNames("hermis", None))
    with pytest.raises(ConfigError, match=r"no reasoning parser 'r1'; known: .*deepseek_r1"):
        check_vllm(ParserNames(None, "r1"))
    check_vllm(ParserNames("none", "Deepseek-R1"))


def test_a_parser_that_does_not_go_with_the_tokenizer(smollm2: ModelCard) -> None:
    with pytest.raises(ConfigError, match="think start/end tokens"):
        processor(smollm2, reasoning="deepseek_r1")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(REQUIREMENT, symbols=(*REQUIREMENT.symbols, "vllm.parser:Nonesuch"))
    monkeypatch.setattr("kvolt.frontend.processors.vllm_symbols.REQUIREMENT", other)
    with pytest.raises(ConfigError, match=r"vllm\.parser:Nonesuch") as caught:
        check_vllm(NONE)
    assert caught.value.fields["key"] == "processor"


# --- as a user starts it


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("serve")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = "<think>hm" + THOUGHT[THOUGHT.index("\n</think>") :] + XML_CALLS
    processor = ("--set", "frontend.processor=vllm")
    command = [sys.executable, "-m", "kvolt", "serve", "sim-tiny", "--port", str(port), *processor]
    command += [
        "--tool-parser",
        "qwen3_coder",
        "--reasoning-parser",
        "qwen3",
        "--arg",
        f"answer_text={json.dumps(said)}",
    ]
    places = {
        "KVOLT_DISCOVERY_PATH": str(folder / "discovery"),
        "KVOLT_SUPERVISOR_LOG_DIR": str(folder / "logs"),
    }
    log = folder / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | places, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + READY_S
    try:
        while not _is_ready(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/v1/models", timeout=5).json()["data"])
    except (httpx.HTTPError, ValueError):
        return False


def test_over_http(edge: str) -> None:
    body: dict[str, Any] = {"model": "sim-tiny", "messages": HISTORY, "tools": [TOOL], "max_tokens": 900}
    whole = httpx.post(f"{edge}/v1/chat/completions", json=body, timeout=60).json()
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "hm"
    assert message["content"].strip() == "It is sunny, a < b.Sure."
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich", "days": [1, 2]}
    assert whole["choices"][0]["finish_reason"] == "tool_calls"

    streamed = Read("", "", [])
    name = arguments = ""
    with httpx.stream(
        "POST", f"{edge}/v1/chat/completions", json={**body, "stream": True}, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                delta = choice["delta"]
                streamed = streamed._replace(
                    reasoning=streamed.reasoning + (delta.get("reasoning_content") or ""),
                    content=streamed.content + (delta.get("content") or ""),
                )
                for call in delta.get("tool_calls") or ():
                    name += call["function"].get("name") or ""
                    arguments += call["function"].get("arguments") or ""
    assert streamed.reasoning == message["reasoning_content"]
    assert streamed.content == message["content"]
    assert name == "weather"
    assert arguments == message["tool_calls"][0]["function"]["arguments"]


def test_over_http_a_prompt_is_rendered_by_vllm(edge: str) -> None:
    body = {"model": "sim-tiny", "messages": HISTORY, "tools": [TOOL]}
    tokens = httpx.post(f"{edge}/tokenize", json=body, timeout=60).json()["tokens"]
    text = httpx.post(f"{edge}/detokenize", json={"model": "sim-tiny", "tokens": tokens}, timeout=60).json()[
        "prompt"
    ]
    assert '"description": null' in text  # kvolt's own leaves it out
