"""A model's preprocessing, from its card alone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.frontend.serving import TOOL

from kvolt.core.card import ModelCard
from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.engines.sim.model import sim_card
from kvolt.frontend.openai_api.templating import TemplateInput
from kvolt.frontend.parsers.port import Content, Reasoning, TextParser, ToolStart
from kvolt.frontend.tokenization import preprocess
from kvolt.frontend.tokenization.preprocess import (
    CardProcessor,
    ParserNames,
    ProcessorSpec,
    RenderedChat,
    check_parsers,
)
from kvolt.runtime.clock import ThreadBlocking
from kvolt.testing import InlineBlocking, run_virtual

CARD = sim_card("m", 2048, 16)
NONE = ParserNames(None, None)
MESSAGES = [{"role": "user", "content": "the water"}]


class Counting(InlineBlocking):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    async def run(self, call: Any, timeout_s: float) -> Any:
        self.calls += 1
        return await super().run(call, timeout_s)


def given(tools: list[dict[str, Any]] | None = None, begins: bool = True, **kwargs: Any) -> TemplateInput:
    return TemplateInput(MESSAGES, tools, begins, False, kwargs)


async def one(made: CardProcessor, text: str, param: str) -> tuple[int, ...]:
    (ids,) = await made.encode([text], param)
    return ids


def processor(card: ModelCard = CARD, override: ParserNames = NONE, **fields: Any) -> CardProcessor:
    spec = ProcessorSpec(blocking=Counting(), cache_bytes=1 << 20, parsers=override)
    return CardProcessor(replace(card, **fields), spec)


def parser(made: CardProcessor, prompt: str, *limits: Any) -> TextParser | None:
    return made.parser_spec(RenderedChat(given(), prompt, (), *limits)).new_parser()


# --- which parsers


def test_parsers_by_template_card_and_operator() -> None:
    assert processor().parsers == ParserNames("hermes", "qwen3")  # by its template
    assert processor(chat_template="{{ messages }}").parsers == NONE
    named = processor(tool_parser="llama3_json", reasoning_parser="qwen3")
    assert named.parsers == ParserNames("llama3_json", "qwen3")
    beaten = processor(CARD, ParserNames("hermes", "deepseek_r1"), tool_parser="llama3_json")
    assert beaten.parsers == ParserNames("hermes", "deepseek_r1")


@pytest.mark.parametrize("names", [ParserNames("nobody", None), ParserNames(None, "nobody")], ids=str)
def test_an_unknown_name_is_reported_at_start(names: ParserNames) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        check_parsers(names)
    with pytest.raises(ConfigError):
        processor(CARD, names)
    check_parsers(NONE)


def test_a_parser_only_where_there_is_something_to_find() -> None:
    made = processor(chat_template="{{ messages }}", tool_parser="hermes")
    assert parser(made, "prompt") is None
    tools = parser(made, "prompt", True, 1)
    assert tools is not None
    assert tools is not parser(made, "prompt", True, 1)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    pieces = tools.feed(call + call) + tools.finish()
    assert [piece for piece in pieces if isinstance(piece, ToolStart)] == [ToolStart(0, "f")]


def test_the_prompt_says_whether_the_answer_begins_with_reasoning() -> None:
    made = processor(reasoning_parser="qwen3")
    inside = parser(made, "user<think>\n")
    outside = parser(made, "user<think>\n\n</think>\n\n")
    assert inside is not None
    assert outside is not None
    assert (inside.feed("hm</think>ok") + inside.finish()) == [Reasoning("hm"), Content("ok")]
    assert (outside.feed("hm, ok") + outside.finish()) == [Content("hm, ok")]


# --- text and tokens


def rendered(made: CardProcessor, chat: TemplateInput) -> str:
    return run_virtual(lambda: made.render(chat))


def test_a_conversation_becomes_text() -> None:
    made = processor()
    plain = rendered(made, given())
    assert plain == "<|im_start|>user\nthe water<|im_end|>\n<|im_start|>assistant\n"
    quiet = rendered(made, given(enable_thinking=False))
    assert quiet.endswith("<think>\n\n</think>\n\n")
    tools = rendered(made, given(tools=[TOOL]))
    assert '"weather"' in tools
    with pytest.raises(InvalidRequest) as caught:
        rendered(processor(chat_template="{{ raise_exception('no system role') }}"), given(begins=False))
    assert caught.value.fields["param"] == "messages"


def test_templates_know_the_tokens_that_begin_and_end_a_sequence() -> None:
    template = "[{{ bos_token }}][{{ eos_token }}]"
    assert rendered(processor(chat_template=template), given(begins=False)) == "[][<|im_end|>]"
    with_bos = processor(chat_template=template, bos_token_id=0, eos_token_ids=())
    assert rendered(with_bos, given(begins=False)) == "[<|endoftext|>][]"


def test_short_texts_are_tokenized_here_and_long_ones_in_a_thread() -> None:
    async def scenario() -> None:
        made = processor(context_length=1 << 16)
        blocking = made._blocking
        assert isinstance(blocking, Counting)
        text = " the water" * 10
        assert await one(made, text, "prompt") == tuple(
            made.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        )
        assert blocking.calls == 0
        long = " the water" * (preprocess._INLINE_CHARACTERS // 10 + 1)
        assert len(await one(made, long, "prompt")) == len(long) // 5
        assert blocking.calls == 1
        assert made.stats.misses > 0

    run_virtual(scenario)


def test_large_texts_leave_the_shared_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    started: list[int] = []

    def slow(self: CardProcessor, texts: list[str], param: str) -> list[tuple[int, ...]]:
        if len(texts[0]) > preprocess._SHARED_CHARACTERS:
            started.append(threading.get_ident())
            gate.wait(20)
        return [(1,)]

    monkeypatch.setattr(CardProcessor, "_encode_all", slow)

    async def scenario() -> None:
        blocking = ThreadBlocking(1)
        made = CardProcessor(
            replace(CARD, context_length=1 << 20), ProcessorSpec(blocking=blocking, cache_bytes=1 << 20)
        )
        large = [asyncio.ensure_future(one(made, "x" * 300_000, "prompt")) for _ in range(4)]
        try:
            async with asyncio.timeout(20):
                while len(started) < 2:
                    await asyncio.sleep(0.001)
                assert await one(made, "x" * 20_000, "prompt") == (1,), "of medium length"
                assert await blocking.run(lambda: "free", 20.0) == "free"
                assert len(started) == 2, "the others wait for them"
                gate.set()
                assert await asyncio.gather(*large) == [(1,)] * 4
            assert len(set(started)) == 2
        finally:
            gate.set()
            blocking.close()

    asyncio.run(scenario())


def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    async def scenario() -> None:
        made = processor(context_length=10)
        with pytest.raises(InvalidRequest) as caught:
            await one(made, "x" * 10**7, "messages")
        assert caught.value.fields == {"param": "messages", "code": "context_length_exceeded"}
        assert "10000000" in caught.value.message
        assert "10 tokens" in caught.value.message
        assert made.stats.misses == 0
        # Ten tokens of the longest kind still pass.
        assert len(await one(made, " important" * 10, "prompt")) == 10

    run_virtual(scenario)


def test_a_text_of_many_contexts_is_refused_before_it_is_tokenized() -> None:
    async def scenario() -> None:
        made = processor(context_length=2048)
        for text in ("zq" * 30_000, "\u00e9" * 60_000, " " * 60_000):
            with pytest.raises(InvalidRequest) as caught:
                await made.encode([text], "prompt")
            assert caught.value.fields == {"param": "prompt", "code": "context_length_exceeded"}
            assert "context length is 2048 tokens; the text has more than 8192" in caught.value.message
        assert made.stats.misses == 0
        # Slightly too long: the error has the exact number.
        [ids] = await made.encode([" important" * 4000], "prompt")
        assert len(ids) == 4000

    run_virtual(scenario)


def test_no_prompt_of_a_batch_is_read_after_one_that_is_too_long() -> None:
    async def scenario() -> None:
        made = processor(context_length=2048)
        with pytest.raises(InvalidRequest) as caught:
            await made.encode([" water", " important" * 3000, " land"], "prompt")
        assert caught.value.fields == {"param": "prompt", "code": "context_length_exceeded"}
        assert "2048 tokens; one of the prompts has 3000" in caught.value.message
        assert made.stats.misses == 2

    run_virtual(scenario)
