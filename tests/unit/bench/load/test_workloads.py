"""Prompts of the wanted lengths, shared where they should be and nowhere else, the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.bench.load.workloads import (
    Chats,
    FromTrace,
    Lengths,
    Prompt,
    PromptShape,
    Synthetic,
    UserSession,
    parse_lengths,
)
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord


def only_ask(session: UserSession | None) -> Prompt:
    assert session is not None
    ask = session.next(None)
    assert ask is not None
    assert session.next("an answer") is None
    return ask


def tokens(ask: Prompt) -> Sequence[int]:
    [message] = ask.messages
    assert not isinstance(message.content, str)
    return message.content


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 2**40), st.integers(0, 10**6))
def test_synthetic_prompts(num_own: int, num_shared: int, seed: int, number: int) -> None:
    lengths = Lengths(num_shared + num_own, num_shared + num_own)
    shape = PromptShape(input=lengths, output=Lengths(3, 9), shared_prefix=num_shared, vocabulary=(50, 60))
    asks = [only_ask(Synthetic(shape, seed).session(each)) for each in (number, number, number + 1)]
    assert asks[0] == asks[1]
    assert (
        [len(tokens(ask)) for ask in asks] == [ask.input_tokens for ask in asks] == [num_shared + num_own] * 3
    )
    assert tokens(asks[0])[:num_shared] == tokens(asks[2])[:num_shared]
    assert set(tokens(asks[0])) <= set(range(50, 60))
    assert all(3 <= ask.output_tokens <= 9 for ask in asks)


def test_prompts_are_their_own_behind_the_prefix() -> None:
    workload = Synthetic(PromptShape(input=Lengths(40, 40), output=Lengths(1, 1), shared_prefix=8), 0)
    assert len({tuple(tokens(only_ask(workload.session(number)))[8:]) for number in range(500)}) == 500


def test_groups_have_a_prefix_each() -> None:
    shape = PromptShape(input=Lengths(40, 40), output=Lengths(1, 1), shared_prefix=20, num_prefixes=3)
    prefixes = [tuple(tokens(only_ask(Synthetic(shape, 0).session(number)))[:20]) for number in range(9)]
    assert prefixes[:3] == prefixes[3:6] == prefixes[6:]
    assert len(set(prefixes)) == 3


def test_lengths_spread_over_the_range() -> None:
    workload = Synthetic(PromptShape(input=Lengths(10, 19), output=Lengths(1, 1)), 0)
    assert {only_ask(workload.session(number)).input_tokens for number in range(300)} == set(range(10, 20))


def test_a_chat_sends_its_history_again() -> None:
    shape = PromptShape(input=Lengths(12, 12), output=Lengths(5, 5), shared_prefix=4)
    session = Chats(shape, num_turns=3, think_s=1.5, seed=0).session(7)
    assert session is not None
    assert session.wants_text
    first = session.next(None)
    second = session.next("one")
    assert session.wants_text
    third = session.next("two")
    assert first is not None
    assert second is not None
    assert third is not None
    assert [said.role for said in first.messages] == ["system", "user"]
    assert second.messages[:2] == first.messages
    assert [said.content for said in third.messages if said.role == "assistant"] == ["one", "two"]
    assert [first.input_tokens, second.input_tokens, third.input_tokens] == [12, 25, 38]
    assert not session.wants_text  # nobody asks about the last answer
    assert session.next("three") is None
    assert session.think_s == 1.5


def test_a_trace_keeps_its_lengths_and_shared_beginnings() -> None:
    records = [
        TraceRecord(timestamp=0, input_length=10, output_length=3, hash_ids=(1, 2, 3), block_size=4),
        TraceRecord(timestamp=0, input_length=9, output_length=0, hash_ids=(1, 2, 4), block_size=4),
        TraceRecord(timestamp=0, input_length=6, output_length=1),
        TraceRecord(timestamp=0, input_length=6, output_length=1),
    ]
    workload = FromTrace(records, seed=0, vocabulary=(1000, 2000))
    asks = [only_ask(workload.session(number)) for number in range(4)]
    assert [(len(tokens(ask)), ask.output_tokens) for ask in asks] == [(10, 3), (9, 1), (6, 1), (6, 1)]
    assert tokens(asks[0])[:8] == tokens(asks[1])[:8]
    assert tokens(asks[0])[8] != tokens(asks[1])[8]
    assert tokens(asks[2]) != tokens(asks[3])
    assert all(1000 <= token < 2000 for ask in asks for token in tokens(ask))
    assert workload.session(4) is None


@pytest.mark.parametrize("text", ["", "x", "0", "9-3", "-5", "1-2-3", "1.5"])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_lengths(text, "input")


def test_lengths_as_written() -> None:
    assert (parse_lengths("512", "input"), parse_lengths("2 - 9", "input")) == (
        Lengths(512, 512),
        Lengths(2, 9),
    )


@pytest.mark.parametrize(
    "shape",
    [
        PromptShape(input=Lengths(4, 9), output=Lengths(1, 1), shared_prefix=5),
        PromptShape(input=Lengths(4, 9), output=Lengths(1, 1), num_prefixes=0),
        PromptShape(input=Lengths(4, 9), output=Lengths(1, 1), vocabulary=(5, 5)),
    ],
)
def test_shapes_that_cannot_be(shape: PromptShape) -> None:
    with pytest.raises(ConfigError):
        Synthetic(shape, 0)
