"""One choice: streamed pieces are the whole text, and log probabilities keep to their tokens."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.delta import Delta, FinishReason, TokenLogprobs
from kvolt.engines.sim.model import EOS, tokenizer_json, word_token_ids
from kvolt.frontend.answers.choice import Choice, ChoiceOutput
from kvolt.frontend.answers.stops import StopMatcher
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.parsers.calls import HermesParser
from kvolt.frontend.parsers.chain import ParserChain
from kvolt.frontend.parsers.port import Content, Reasoning, ToolArguments, ToolStart
from kvolt.frontend.parsers.reasoning import ThinkParser


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer_json())


def encode(text: str) -> tuple[int, ...]:
    return tuple(vocabulary().tokenizer.encode(text, add_special_tokens=False).ids)


def choice(*stops: str, include: bool = False, parser: ParserChain | None = None) -> Choice:
    matcher = StopMatcher(stops, include) if stops else None
    return Choice(vocabulary().detokenizer(), matcher, parser, include)


def text_of(told: list[ChoiceOutput]) -> str:
    return "".join(piece.text for each in told for piece in each.pieces if isinstance(piece, Content))


def logprobs_of(told: list[ChoiceOutput]) -> list[int]:
    return [entry.token_id for each in told for entry in each.logprobs]


def logprobs(tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, -0.5) for token in tokens)


def feed(
    made: Choice, tokens: tuple[int, ...], finish: FinishReason = FinishReason.LENGTH
) -> list[ChoiceOutput]:
    """One delta per token, the last with the end."""
    told: list[ChoiceOutput] = []
    for position, token in enumerate(tokens):
        last = position == len(tokens) - 1
        told += made.feed_delta(Delta((token,), finish=finish if last else None, logprobs=logprobs((token,))))
    return told


TOKENS = st.lists(st.integers(0, vocabulary().size - 1), min_size=1, max_size=40)


@given(TOKENS, st.data())
def test_pieces_joined_are_what_batch_decoding_says_however_deltas_are_cut(
    tokens: list[int], data: st.DataObject
) -> None:
    made = choice()
    told: list[ChoiceOutput] = []
    left = list(tokens)
    while left:
        size = data.draw(st.integers(1, len(left)))
        part, left = tuple(left[:size]), left[size:]
        told += made.feed_delta(Delta(part, finish=None if left else FinishReason.LENGTH))
    assert text_of(told) == vocabulary().decode(tokens)
    assert (made.num_tokens, made.finish) == (len(tokens), FinishReason.LENGTH)


@given(
    st.lists(st.sampled_from([*word_token_ids()[:6], *encode("aé€-")]), min_size=1, max_size=30),
    st.lists(st.sampled_from([" t", "of", "and to", "é", "€a", "e t", "-"]), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_and_log_probabilities(tokens: list[int], stops: list[str], include: bool) -> None:
    made = choice(*stops, include=include)
    told = feed(made, tuple(tokens))
    whole = vocabulary().decode(tokens)
    found = [whole.find(stop) for stop in stops if stop in whole]
    text = text_of(told)
    if not found:
        assert (text, made.finish, made.stop_reason) == (whole, FinishReason.LENGTH, None)
        assert logprobs_of(told) == tokens
        return
    assert made.finish is FinishReason.STOP
    assert made.stop_reason in stops
    assert text == whole[: min(found)] + (str(made.stop_reason) if include else "")
    entries = logprobs_of(told)
    assert entries == tokens[: len(entries)]  # in order, none left out
    detokenizer = vocabulary().detokenizer()
    starts = [0, *accumulate(len(detokenizer.feed(token)) for token in tokens)][:-1]
    # A token that begins where the text was cut off, or after, was taken away with it.
    assert all(start <= len(text) for start in starts[: len(entries)])
    assert all(start >= len(text) for start in starts[len(entries) :])


def test_log_probabilities_of_a_stop_are_never_sent() -> None:
    tokens = encode(" the water of the land")
    made = choice("of the")
    told = feed(made, tokens)
    assert text_of(told) == " the water "
    # " of" begins in the text that was told, " the" does not.
    assert logprobs_of(told) == list(tokens[:3])
    assert made.stop_reason == "of the"
    assert made.num_tokens == 4  # what was needed to see it; the rest is not charged


def test_log_probabilities_wait_with_their_text() -> None:
    tokens = encode(" the water of it")
    made = choice(" water of the")
    first, second, third, fourth = (made.feed(token, *logprobs((token,))) for token in tokens)
    assert (text_of([first]), logprobs_of([first])) == (" the", [tokens[0]])
    assert [second, third] == [ChoiceOutput((), []), ChoiceOutput((), [])]
    assert (text_of([fourth]), logprobs_of([fourth])) == (" water of it", list(tokens[1:]))


def test_the_token_that_ended_it_is_counted_and_not_shown() -> None:
    tokens = (*encode(" the"), EOS)
    made = choice()
    told = feed(made, tokens, FinishReason.STOP)
    assert (text_of(told), logprobs_of(told), made.num_tokens) == (" the", [tokens[0]], 2)
    shown = choice(include=True)
    word = encode(" water")
    assert text_of(feed(shown, (*encode(" the"), *word), FinishReason.STOP)) == " the water"
    hidden = choice()
    assert text_of(feed(hidden, (*encode(" the"), *word), FinishReason.STOP)) == " the"
    length = choice()
    assert text_of(feed(length, (*encode(" the"), *word), FinishReason.LENGTH)) == " the water"


def test_what_the_detokenizer_held_back_can_complete_a_stop_string() -> None:
    half = encode("é")[:1]
    made = choice("a\ufffd")
    told = feed(made, (*encode("xa"), *half))
    assert text_of(told) == "x"
    assert (made.finish, made.stop_reason) == (FinishReason.STOP, "a\ufffd")


def test_what_could_have_become_a_stop_comes_out_at_the_end() -> None:
    made = choice(" water of")
    told = feed(made, encode(" the water"))
    assert text_of(told) == " the water"
    assert (made.finish, made.stop_reason) == (FinishReason.LENGTH, None)
    assert logprobs_of(told) == list(encode(" the water"))


def test_nothing_comes_after_the_end() -> None:
    made = choice("water")
    feed(made, encode(" the water"))
    assert made.finish is FinishReason.STOP
    assert made.feed(encode(" of")[0]) == ChoiceOutput()
    assert made.feed_delta(Delta(encode(" of"), finish=FinishReason.LENGTH)) == []
    assert (made.finish, made.num_tokens) == (FinishReason.STOP, 2)


def test_an_end_without_tokens() -> None:
    made = choice()
    made.feed_delta(Delta(encode(" the")))
    assert text_of(made.feed_delta(Delta(finish=FinishReason.STOP, stop_reason=7))) == ""
    assert (made.finish, made.stop_reason, made.num_tokens) == (FinishReason.STOP, 7, 1)


def test_parsers_get_what_the_stops_let_through() -> None:
    parser = ParserChain(ThinkParser(starts_inside=True), HermesParser())
    made = choice("END", parser=parser)
    said = 'hm</think>ok <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>END more'
    told = feed(made, encode(said))
    pieces = [piece for each in told for piece in each.pieces]
    assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == "hm"
    assert text_of(told) == "ok "
    assert [piece for piece in pieces if isinstance(piece, ToolStart)] == [ToolStart(0, "f")]
    assert "".join(piece.text for piece in pieces if isinstance(piece, ToolArguments)) == '{"a": 1}'
    assert (made.num_tool_calls, made.finish, made.stop_reason) == (1, FinishReason.STOP, "END")
    assert 2 <= made.num_reasoning_tokens <= len(encode("hm</think>"))


def test_what_a_parser_held_back_comes_at_the_end_also_of_a_stop() -> None:
    for stops, finish in (((), FinishReason.LENGTH), (("END",), FinishReason.STOP)):
        made = choice(*stops, parser=ParserChain(None, HermesParser()))
        told = feed(made, encode("a <tool_ca" + ("END" if stops else "")))
        assert text_of(told) == "a <tool_ca"
        assert made.finish is finish


def test_clean_means_that_the_vocabulary_may_speak() -> None:
    made = choice()
    assert made.is_plain
    assert made.is_clean
    half, rest = encode("é")
    made.feed(half)
    assert made.is_plain
    assert not made.is_clean
    made.feed(rest)
    assert made.is_clean
    made.feed_delta(Delta(finish=FinishReason.LENGTH))
    assert made.is_plain
    assert not made.is_clean
    assert not choice("x").is_plain
    assert not choice(parser=ParserChain()).is_clean


def test_a_whole_text_at_once() -> None:
    made = choice()
    assert made.feed_whole("", 1, Delta(finish=FinishReason.STOP, stop_reason=9)) == ChoiceOutput()
    assert (made.num_tokens, made.finish, made.stop_reason) == (1, FinishReason.STOP, 9)
    with pytest.raises(AssertionError):
        choice("x").feed_whole("a", 1, Delta(finish=FinishReason.STOP))
