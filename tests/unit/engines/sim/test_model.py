"""The simulated model: a tokenizer that any text survives, a chat template, tokens by seed and position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvolt.core.card import card_hash
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.model import (
    CHAT_TEMPLATE,
    SPECIAL,
    WORDS,
    generated_model,
    model_with_tokenizer,
    sim_card,
    tokenizer_json,
    word_token_ids,
)
from kvolt.engines.sim.script import answer_tokens, fold, next_state, prompt_state

CARD = sim_card("m", 1000, 16)
TOKENIZER = Tokenizer.from_buffer(tokenizer_json())


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


# --- the generated tokenizer


def test_the_card_is_the_same_on_every_machine() -> None:
    tokenizer_json.cache_clear()
    assert card_hash(sim_card("m", 1000, 16)) == card_hash(CARD) == "83d0b3ceb4cacf8afb94e8c8774fb376"


def test_every_word_is_one_token() -> None:
    ids = word_token_ids()
    assert len(ids) == len(WORDS)
    for word, token in zip(WORDS, ids, strict=True):
        assert encode(f" {word}") == (token,)


def test_special_tokens_come_first() -> None:
    assert [encode(token) for token in SPECIAL] == [(0,), (1,), (2,)]


PROMPTS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30)


@given(PROMPTS, st.integers(-(2**64), 2**64), st.integers(0, 30), st.data())
def test_an_answer_goes_on_from_any_of_its_tokens(
    prompt: list[int], seed: int, num_tokens: int, data: st.DataObject
) -> None:
    words = generated_model(CARD).words
    answer = answer_tokens(prompt, seed, num_tokens, words)
    assert set(answer) <= set(word_token_ids())
    assert max(words) < generated_model(CARD).vocabulary_size == TOKENIZER.get_vocab_size()
    cut = data.draw(st.integers(0, num_tokens))
    state = fold(prompt_state(prompt, seed), answer[:cut])
    for token in answer[cut:]:
        assert words[state % len(words)] == token
        state = next_state(state, token)


def test_a_token_follows_from_all_before_it() -> None:
    words = word_token_ids()
    prompt = list(range(3, 40))
    answer = answer_tokens(prompt, 1, 200, words)
    assert len(set(answer)) > 80
    histories = [
        answer,
        answer_tokens(prompt, 2, 200, words),
        answer_tokens(prompt[::-1], 1, 200, words),
        answer_tokens([4, *prompt[1:]], 1, 200, words),
        answer_tokens(prompt[:-1], 1, 200, words),
    ]
    assert len({tuple(each[:12]) for each in histories}) == len(histories)
    reversed_state = fold(prompt_state(prompt, 1), answer[1::-1])
    assert reversed_state != fold(prompt_state(prompt, 1), answer[:2])


# --- the chat template


def render(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    values = {"add_generation_prompt": True, **kwargs}
    return environment.from_string(CHAT_TEMPLATE).render(messages=messages, **values)


SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_a_plain_conversation() -> None:
    told = render([SYSTEM, USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "é"}])
    assert told == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render([USER], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert render([]) == "<|im_start|>assistant\n"


def test_no_tools_are_as_none() -> None:
    assert render([SYSTEM, USER], tools=None) == render([SYSTEM, USER], tools=[]) == render([SYSTEM, USER])


@pytest.mark.parametrize(("before", "words"), [([], ""), ([SYSTEM], "be kind\n\n")])
def test_tools_stand_in_one_system_block(before: list[dict[str, Any]], words: str) -> None:
    told = render([*before, USER], tools=[TOOL, TOOL])
    assert told.startswith(f"<|im_start|>system\n{words}# Tools\n\nYou may call")
    tool = json.dumps(TOOL)
    assert f"<tools>\n{tool}\n{tool}\n</tools>\n\nFor each" in told
    assert told.endswith(
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert told.count("<|im_start|>system") == 1


@pytest.mark.parametrize("arguments", ['{"city": "Köln"}', {"city": "Köln"}], ids=["text", "object"])
@pytest.mark.parametrize("content", [None, "", "wait"])
def test_calls_and_their_results(arguments: Any, content: str | None) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", "content": content, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": "sun"},
        {"role": "user", "content": "so?"},
    ]
    said = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert render(messages) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant"
        + ("\nwait" if content else "")
        + said * 2
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>"
        "\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_can_be_turned_off() -> None:
    assert render([USER], enable_thinking=True) == render([USER])
    assert render([USER], enable_thinking=False) == render([USER]) + "<think>\n\n</think>\n\n"


# --- another model's tokenizer


def other_tokenizer(*vocabulary: str, special: str = "</s>") -> bytes:
    tokens = {token: index for index, token in enumerate((special, *vocabulary))}
    added = {"id": 0, "content": special, "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": special}
    return json.dumps({"version": "1.0", "added_tokens": [{**added, **flags}], "model": model}).encode()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(other_tokenizer("<s>", "Ġx", "Ġhello", "▁there", "plain", "Ġ12", "Ġgood!"))
    return path


def test_a_foreign_tokenizer_goes_into_the_card(other: Path) -> None:
    model = model_with_tokenizer(CARD, str(other), "</s>", "<s>")
    assert model.card.tokenizer_json == other.read_bytes()
    assert (model.card.eos_token_ids, model.card.bos_token_id) == ((0,), 1)
    assert model.words == (3, 4)  # words with a space before them
    assert model.vocabulary_size == 8
    assert model_with_tokenizer(CARD, str(other), "</s>", None).card.bos_token_id is None


def test_words_without_a_mark_if_there_are_no_others(other: Path) -> None:
    other.write_bytes(other_tokenizer("x", "12", "hello"))
    assert model_with_tokenizer(CARD, str(other), "</s>", None).words == (3,)


def test_the_generated_tokenizer_as_a_foreign_one(other: Path) -> None:
    other.write_bytes(tokenizer_json())
    model = model_with_tokenizer(CARD, str(other), "<|im_end|>", None)
    assert model.card == CARD
    assert model.vocabulary_size == generated_model(CARD).vocabulary_size
    assert len(model.words) == len(WORDS)


def test_the_arguments_reach_the_card(other: Path, tmp_path: Path) -> None:
    def card(**arguments: Any) -> Any:
        return SimEngine(EngineSpec(model="m", role=Role.AGGREGATED), SimArguments(**arguments)).card

    assert card() == sim_card("m", 32_768, 16)
    assert (card().tool_parser, card().reasoning_parser) == (None, None)
    parsers = card(tool_parser="hermes", reasoning_parser="qwen3")
    assert (parsers.tool_parser, parsers.reasoning_parser) == ("hermes", "qwen3")
    assert card(chat_template="{{ messages }}").chat_template == "{{ messages }}"
    (tmp_path / "chat.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    assert card(chat_template=str(tmp_path / "chat.jinja")).chat_template == "{{ 'é' }}"
    assert card(model_tokenizer=str(other), eos_token="</s>").eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"model_tokenizer": "DIR/none.json", "eos_token": "</s>"}, "args.model_tokenizer"),
        ({"model_tokenizer": "DIR", "eos_token": "</s>"}, "args.model_tokenizer"),
        ({"model_tokenizer": "DIR/\0", "eos_token": "</s>"}, "args.model_tokenizer"),
        ({"model_tokenizer": "DIR/garbage", "eos_token": "</s>"}, "args.model_tokenizer"),
        ({"model_tokenizer": "DIR/numbers.json", "eos_token": "</s>"}, "args.model_tokenizer"),
        ({"model_tokenizer": "DIR/tokenizer.json", "eos_token": "<end>"}, "args.eos_token"),
        ({"model_tokenizer": "DIR/tokenizer.json", "eos_token": "</s>", "bos_token": "?"}, "args.bos_token"),
        ({"chat_template": "DIR/none.jinja"}, "args.chat_template"),
        ({"chat_template": "DIR/garbage"}, "args.chat_template"),
    ],
)
def test_files_that_cannot_be_used(other: Path, arguments: dict[str, str], key: str) -> None:
    (other.parent / "garbage").write_bytes(b"\xff{")
    (other.parent / "numbers.json").write_bytes(other_tokenizer("1", "2"))
    placed = {name: value.replace("DIR", str(other.parent)) for name, value in arguments.items()}
    with pytest.raises(ConfigError) as caught:
        SimEngine(EngineSpec(model="m", role=Role.AGGREGATED), SimArguments(**placed))  # type: ignore[arg-type]
    assert caught.value.fields["key"] == key
