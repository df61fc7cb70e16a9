"""A model with a mind: SmolLM2, out of the GGUF file that its package has, served by a real vLLM."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kept import SMALL, Kept, VllmHarness
from tokenizers import Tokenizer

from kvolt.core.ids import RequestId
from kvolt.core.request import Grammar, GrammarKind, Request, Role, Sampling, StopConditions
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.frontend.templates.template import ChatTemplate
from kvolt.testing.engines.harness import engine_run

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
async def smollm2() -> AsyncIterator[Kept]:
    kept = Kept(Role.AGGREGATED, VllmArguments(engine_args=dict(SMALL)), Path("smollm2-135m"))
    await kept.make_ready()
    yield kept
    await kept.close()


async def answer_to(kept: Kept, question: str, **fields: Any) -> str:
    assert kept.launched is not None
    card = kept.launched.card
    tokenizer = Tokenizer.from_buffer(card.tokenizer_json)
    text = ChatTemplate(card.chat_template).render([{"role": "user", "content": question}])
    async with engine_run(VllmHarness(kept)) as run:
        request = Request(
            request_id=RequestId("r"),
            model=card.name,
            token_ids=tuple(tokenizer.encode(text, add_special_tokens=False).ids),
            stop=StopConditions(max_tokens=40),
            sampling=Sampling(temperature=0.0),
            **fields,
        )
        answer = await run.answer(request)
    return str(tokenizer.decode(answer.tokens[0]))


async def test_it_knows_what_it_should(smollm2: Kept) -> None:
    assert "Paris" in await answer_to(smollm2, "What is the capital of France?")


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (
            Grammar(GrammarKind.CHOICE, '["good day", "good night"]'),
            lambda text: text in ("good day", "good night"),
        ),
        (Grammar(GrammarKind.REGEX, "[0-9]{3}-[0-9]{2}"), lambda text: len(text) == 6 and text[3] == "-"),
        (
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
            lambda text: set(json.loads(text)) == {"name", "big"},
        ),
        (Grammar(GrammarKind.EBNF, 'root ::= "yes" | "no"'), lambda text: text in ("yes", "no")),
    ],
    ids=["choice", "regex", "json_schema", "ebnf"],
)
async def test_a_grammar_is_followed(smollm2: Kept, grammar: Grammar, fits: Any) -> None:
    text = await answer_to(smollm2, "Tell me about a city.", grammar=grammar)
    assert fits(text), text
