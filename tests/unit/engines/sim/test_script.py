"""What simulated answers say: scripts to the letter, words where there are none, figures that could be real."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, is_empty, make_request, sim
from tokenizers import Tokenizer

from kvolt.core.delta import Delta, FinishReason, plain_delta
from kvolt.core.errors import InvalidRequest
from kvolt.core.request import Request
from kvolt.engines.sim.engine import SimArguments
from kvolt.engines.sim.model import EOS, SPECIAL, tokenizer_json, word_token_ids
from kvolt.engines.sim.script import MAX_LOGPROBS, answer_tokens, fold, prompt_state, scripted_texts
from kvolt.runtime.tasks import Scope
from kvolt.testing import run_virtual

TOKENIZER = Tokenizer.from_buffer(tokenizer_json())
BY_PROMPT = replace(ARGUMENTS, answer_from_prompt=True, context_length=4096)

TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


def saying(text: str) -> SimArguments:
    return replace(ARGUMENTS, answer_text=text, context_length=4096)


@dataclass
class Told:
    """All that came of one request."""

    deltas: list[Delta] = field(default_factory=list)
    num_plain: int = 0

    def tokens(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]

    def end(self, index: int = 0) -> tuple[FinishReason | None, int | str | None]:
        last = [delta for delta in self.deltas if delta.index == index][-1]
        return last.finish, last.stop_reason

    def text(self, index: int = 0) -> str:
        return str(TOKENIZER.decode(self.tokens(index)))


def tell(arguments: SimArguments, request: Request) -> Told:
    """Run one request to its end; the engine is empty then."""
    told = Told()

    async def main() -> None:
        engine = sim(arguments)

        async def read() -> None:
            async for step in engine.steps():
                told.deltas += [delta for _, delta in step.deltas]
                told.deltas += [plain_delta(token) for token in step.plain_tokens]
                told.num_plain += len(step.plain_tokens)
                if is_empty(engine):
                    await engine.close()

        engine.submit(request)
        async with Scope("engine") as scope:
            scope.start(read(), "read")

    run_virtual(main)
    return told


def ask(prompt: str = "hi", tokens: int = 500, **sampling: Any) -> Request:
    request = make_request(tokens=tokens)
    ids = tuple(TOKENIZER.encode(prompt, add_special_tokens=False).ids)
    return replace(request, token_ids=ids, sampling=replace(request.sampling, **sampling))


def with_stop(request: Request, **stop: Any) -> Request:
    return replace(request, stop=replace(request.stop, **stop))


# --- scripts


@settings(max_examples=50)
@given(TEXT)
@example("")
@example("héllo 日本語 🎉 👩‍👩‍👧 the water")
@example("<think>\nso\n</think>\n\n<tool_call>\n{}\n</tool_call>")
@example("all of " + " ".join(SPECIAL))
@example("\x00\u0301 \r\n\t  ")
def test_a_text_is_said_to_the_letter_and_then_eos(text: str) -> None:
    told = tell(saying(text), ask())
    assert told.text() == text
    assert told.tokens()[-1] == EOS
    assert EOS not in told.tokens()[:-1]
    assert told.end() == (FinishReason.STOP, None)
    usage = told.deltas[-1].usage
    assert usage is not None
    assert usage.completion_tokens == len(told.tokens())


@settings(max_examples=50)
@given(TEXT.filter(lambda text: not any(part in text for part in ("<say>", "<or/>", "</say>"))))
@example("<|im_end|> é 🎉")
def test_a_prompt_can_hold_its_answer(text: str) -> None:
    told = tell(BY_PROMPT, ask(f"<|im_start|>user\nplease <say>{text}</say> now<|im_end|>\n"))
    assert told.text() == text
    assert told.end() == (FinishReason.STOP, None)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("", None),
        ("say it", None),
        ("<say>never closed", None),
        ("</say>never opened", None),
        ("</say><say>", None),
        ("<say></say>", ("",)),
        ("<say>a</say>", ("a",)),
        ("<say>a</say> then <say>b</say> end", ("b",)),
        ("<say>a</say> then <say>open", ("a",)),
        ("<say>a</say> stray </say>", ("a",)),
        ("<say>a<say>b</say>", ("b",)),
        ("<say>a<or/>b<or/></say>", ("a", "b", "")),
        ("a<or/>b", None),
        ("<say>two\nlines</say>", ("two\nlines",)),
    ],
)
def test_the_last_span_counts(prompt: str, texts: tuple[str, ...] | None) -> None:
    assert scripted_texts(prompt) == texts


def test_without_a_span_answers_are_as_ever() -> None:
    plain = tell(ARGUMENTS, ask(tokens=9))
    assert plain.tokens() == answer_tokens(ask().token_ids, 1, 9, word_token_ids())
    assert tell(BY_PROMPT, ask(tokens=9)) == plain
    assert plain.end() == (FinishReason.LENGTH, None)


def test_a_span_goes_before_the_text_of_all() -> None:
    arguments = replace(BY_PROMPT, answer_text="all")
    assert tell(arguments, ask("hi")).text() == "all"
    assert tell(arguments, ask("<say>this</say>")).text() == "this"


def test_without_the_argument_a_span_is_only_words() -> None:
    request = ask("<say>this</say>", tokens=9)
    assert tell(ARGUMENTS, request).tokens() == answer_tokens(request.token_ids, 1, 9, word_token_ids())


def test_choices_take_turns_with_the_alternatives() -> None:
    told = tell(BY_PROMPT, ask("<say>a<or/>longer 🎉<or/></say>", num_choices=4))
    assert [told.text(index) for index in range(4)] == ["a", "longer 🎉", "", "a"]
    ends = {delta.index: delta for delta in told.deltas if delta.finish is not None}
    assert [ends[index].finish for index in range(4)] == [FinishReason.STOP] * 4
    usage = [ends[index].usage for index in range(4)]
    assert [part and part.completion_tokens for part in usage] == [2, 12, 1, 2]


def test_a_script_is_plain_but_for_its_first_and_last_token() -> None:
    told = tell(saying(" the water"), ask())
    assert (len(told.deltas), told.num_plain) == (3, 1)
    long = tell(saying("é" * 50), ask())
    assert (len(long.deltas), long.num_plain) == (101, 99)


def test_max_tokens_cut_a_script() -> None:
    told = tell(saying("abcdef"), ask(tokens=3))
    assert (told.text(), told.end()) == ("abc", (FinishReason.LENGTH, None))
    assert told.num_plain == 1


def test_a_script_of_a_foreign_tokenizer(tmp_path: Path) -> None:
    document = json.loads(tokenizer_json())
    document["added_tokens"] = [{**token, "id": token["id"] + 5000} for token in document["added_tokens"]]
    for token in SPECIAL:
        document["model"]["vocab"][token] += 5000
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    arguments = replace(saying("é"), model_tokenizer=str(path), eos_token="<|im_end|>")
    assert tell(arguments, ask()).tokens() == [*TOKENIZER.encode("é").ids, 5002]
    words = tell(replace(arguments, answer_text=None), ask(tokens=20))
    assert len(words.tokens()) == 20
    assert words.text().replace(" ", "").isalpha()


# --- ends


def test_where_eos_may_not_be_said_words_go_on() -> None:
    request = ask(tokens=10)
    script = TOKENIZER.encode("abc").ids
    words: list[int] = []
    state = fold(prompt_state(request.token_ids, 1), script)
    for _ in range(7):
        words.append(word_token_ids()[state % len(word_token_ids())])
        state = fold(state, words[-1:])
    ignored = tell(saying("abc"), with_stop(request, ignore_eos=True))
    assert (ignored.tokens(), ignored.end()) == (script + words, (FinishReason.LENGTH, None))
    minimum = tell(saying("abc"), with_stop(request, min_tokens=7))
    assert (minimum.tokens(), minimum.end()) == ([*script, *words[:4], EOS], (FinishReason.STOP, None))
    for num_tokens in (0, 2, 3):
        assert tell(saying("abc"), with_stop(request, min_tokens=num_tokens)).tokens() == [*script, EOS]


def test_eos_that_is_ignored_can_still_be_a_stop_token() -> None:
    told = tell(saying("abc"), with_stop(ask(), ignore_eos=True, stop_token_ids=(EOS,)))
    assert (told.text(), told.end()) == ("abc", (FinishReason.STOP, EOS))


def test_a_stop_token_in_a_script() -> None:
    stop = TOKENIZER.encode("b").ids[0]
    told = tell(saying("abcabc"), with_stop(ask(), stop_token_ids=(stop,)))
    assert (told.text(), told.end()) == ("ab", (FinishReason.STOP, stop))
    later = tell(saying("abcabc"), with_stop(ask(), stop_token_ids=(stop,), min_tokens=2))
    assert (later.text(), later.end()) == ("abcab", (FinishReason.STOP, stop))


# --- sampling


def test_allowed_tokens_are_all_that_is_said() -> None:
    allowed = (300, 301, 302)
    told = tell(saying("abc"), ask(tokens=40, allowed_token_ids=allowed))
    assert set(told.tokens()) == set(allowed)
    assert told.end() == (FinishReason.LENGTH, None)
    assert tell(ARGUMENTS, ask(allowed_token_ids=(EOS,))).tokens() == [EOS]


def test_what_has_no_effect_has_none() -> None:
    plain = tell(ARGUMENTS, ask(tokens=9))
    loaded = ask(
        tokens=9,
        temperature=0.0,
        top_p=0.1,
        top_k=1,
        min_p=0.5,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias={300: 100.0},
    )
    assert tell(ARGUMENTS, loaded) == plain


def test_seeds_choose_the_words() -> None:
    answers = [tell(ARGUMENTS, ask(tokens=9, seed=seed)).tokens() for seed in (1, 1, 2, -1, 2**70)]
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers}) == 4


@given(st.integers(0, MAX_LOGPROBS), st.integers(0, 2**64 - 1))
@settings(max_examples=30)
def test_logprobs_are_a_distribution_with_the_token_on_top(num_top: int, seed: int) -> None:
    told = tell(saying(" the é"), ask(logprobs=num_top, seed=seed, num_choices=2))
    assert told.num_plain == 0
    for delta in told.deltas:
        assert delta.logprobs is not None
        (entry,) = delta.logprobs
        assert (entry.token_id,) == delta.token_ids
        assert len(entry.top) == num_top
        assert [token for token, _ in entry.top[:1]] == [entry.token_id][:num_top]
        assert {token for token, _ in entry.top[1:]} <= set(word_token_ids())
        assert sum(math.exp(logprob) for _, logprob in entry.top) < 1
    again = tell(saying(" the é"), ask(logprobs=num_top, seed=seed, num_choices=2))
    assert again == told


def test_prompt_logprobs_do_not_depend_on_the_answer() -> None:
    one = tell(ARGUMENTS, ask("the water", tokens=2, prompt_logprobs=3)).deltas[0].prompt_logprobs
    other = tell(saying("x"), ask("the water", prompt_logprobs=3, seed=9)).deltas[0].prompt_logprobs
    assert one == other
    assert one is not None
    assert [entry and entry.token_id for entry in one] == [None, *TOKENIZER.encode("the water").ids[1:]]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (ask(logprobs=-1), "logprobs"),
        (ask(logprobs=MAX_LOGPROBS + 1), "logprobs"),
        (ask(prompt_logprobs=-1), "prompt_logprobs"),
        (ask(prompt_logprobs=MAX_LOGPROBS + 1), "prompt_logprobs"),
        (ask(allowed_token_ids=()), "allowed_token_ids"),
        (ask(allowed_token_ids=(-1,)), "allowed_token_ids"),
        (ask(allowed_token_ids=(3, TOKENIZER.get_vocab_size())), "allowed_token_ids"),
        (with_stop(ask(tokens=3), min_tokens=4), "min_tokens"),
        (with_stop(ask(), min_tokens=-1), "min_tokens"),
        (replace(ask(), token_ids=(2**32,)), "tokens"),
        (replace(ask(), token_ids=(-1,)), "tokens"),
    ],
)
async def test_what_no_answer_could_keep_to_is_refused(request_: Request, param: str) -> None:
    engine = sim(BY_PROMPT)
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(request_)
    assert caught.value.fields["param"] == param
    assert is_empty(engine)


def test_tokens_that_are_in_no_vocabulary_do_no_harm() -> None:
    assert len(tell(BY_PROMPT, replace(ask(tokens=5), token_ids=(3, 2**32 - 1))).tokens()) == 5
