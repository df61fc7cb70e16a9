"""How a choice ends, and the names of its blocks."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduler.scheduler_lab import EOS, request

from kvolt.core.block_key import BlockKeyChain, BlockKeyContext
from kvolt.core.delta import ChoiceEnd, FinishReason
from kvolt.core.errors import InvalidRequest
from kvolt.core.hashing import MediaExtent, SequenceHasher, request_seed
from kvolt.core.request import MediaSpan, Request
from kvolt.kv import BlockName
from kvolt.scheduler.sequence import Sequence, TokenNaming

CONTEXT = BlockKeyContext(weights_hash="w", dtype="f4", block_size=4, layout="l")


def sequence(request: Request, index: int = 0) -> Sequence:
    eos = frozenset() if request.stop.ignore_eos else frozenset((EOS, 6))
    return Sequence(request, index, TokenNaming(request, CONTEXT), eos)


def pushed(one: Sequence, tokens: tuple[int, ...]) -> list[ChoiceEnd | None]:
    return [one.append_token(token) for token in tokens]


STOP, LENGTH = ChoiceEnd(FinishReason.STOP), ChoiceEnd(FinishReason.LENGTH)


def test_it_ends_at_eos_at_a_stop_token_or_at_its_length() -> None:
    answer = request("a", max_tokens=3, ignore_eos=False, stop=(4,))
    assert pushed(sequence(answer), (1, EOS)) == [None, STOP]
    assert pushed(sequence(answer), (6,)) == [STOP]
    assert pushed(sequence(answer), (1, 4)) == [None, ChoiceEnd(FinishReason.STOP, 4)]
    assert pushed(sequence(answer), (1, 2, 3)) == [None, None, LENGTH]


def test_a_last_token_that_also_stops_is_a_stop() -> None:
    answer = request("a", max_tokens=1, ignore_eos=False, stop=(4,))
    assert pushed(sequence(answer), (EOS,)) == [STOP]
    assert pushed(sequence(answer), (4,)) == [ChoiceEnd(FinishReason.STOP, 4)]


def test_eos_among_stop_ids_is_eos_unless_ignored() -> None:
    assert pushed(sequence(request("a", ignore_eos=False, stop=(EOS,))), (EOS,)) == [STOP]
    ignored = sequence(request("a", ignore_eos=True, stop=(EOS,)))
    assert pushed(ignored, (6, EOS)) == [None, ChoiceEnd(FinishReason.STOP, EOS)]


def test_nothing_stops_it_with_fewer_than_min_tokens_before() -> None:
    answer = request("a", max_tokens=4, ignore_eos=False, min_tokens=2, stop=(4,))
    one = sequence(answer)
    banned = []
    for token in (EOS, 4):
        banned.append(one.banned_ids)
        assert one.append_token(token) is None
    assert banned == [{EOS, 6, 4}, {EOS, 6, 4}]
    assert one.banned_ids == frozenset()
    assert one.append_token(4) == ChoiceEnd(FinishReason.STOP, 4)


def test_min_tokens_does_not_lift_the_length() -> None:
    answer = request("a", max_tokens=2, ignore_eos=False, min_tokens=2)
    assert pushed(sequence(answer), (EOS, EOS)) == [None, LENGTH]


def test_tokens_of_before_count() -> None:
    answer = request("a", (1, 2), max_tokens=4, ignore_eos=False, min_tokens=2, prior_tokens=(5, 5, 5))
    one = sequence(answer)
    assert one.tokens == [1, 2, 5, 5, 5]
    assert (one.num_prompt, one.num_initial, one.num_output, one.has_output) == (2, 5, 3, False)
    assert one.append_token(1) == LENGTH
    assert (one.num_output, one.has_output) == (4, True)
    assert pushed(sequence(answer), (EOS,)) == [STOP]


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(0, 6),
    st.sets(st.integers(0, 7), max_size=2),
    st.booleans(),
)
def test_it_ends_by_the_words_of_the_contract(
    tokens: list[int], max_tokens: int, min_tokens: int, stop: set[int], ignore_eos: bool
) -> None:
    answer = request(
        "a", max_tokens=max_tokens, min_tokens=min_tokens, stop=tuple(stop), ignore_eos=ignore_eos
    )
    one = sequence(answer)
    for position, token in enumerate(tokens[:max_tokens]):
        expected = LENGTH if position + 1 == max_tokens else None
        if position >= min_tokens and token in stop:
            expected = ChoiceEnd(FinishReason.STOP, token)
        if position >= min_tokens and token in (EOS, 6) and not ignore_eos:
            expected = STOP
        assert one.append_token(token) == expected
        if expected is not None:
            break


@pytest.mark.parametrize(("resume", "index", "spoke"), list(product(((), (5,)), (0, 1), (False, True))))
def test_prompt_logits_are_needed_once_by_the_first_choice(
    resume: tuple[int, ...], index: int, spoke: bool
) -> None:
    one = sequence(request("a", prompt_logprobs=0, prior_tokens=resume), index)
    if spoke:
        one.append_token(1)
    assert one.needs_prompt_logits == (not resume and not index and not spoke)
    assert not sequence(request("a")).needs_prompt_logits


@pytest.mark.parametrize("media", [(MediaSpan(2, 5, b"d" * 16),), ()], ids=["media", "text"])
def test_names_are_both_identities_of_each_full_block_however_they_are_reached(
    media: tuple[MediaSpan, ...],
) -> None:
    answer = request("a", salt="tenant")
    answer = Request(
        request_id=answer.request_id,
        model="m",
        token_ids=tuple(range(14)),
        stop=answer.stop,
        salt="tenant",
        lora="tuned",
        media=media,
    )
    tokens = list(answer.token_ids)
    context = BlockKeyContext(weights_hash="w", dtype="f4", block_size=4, layout="l", salt="tenant")
    extents = [MediaExtent(span.start, span.length, span.digest) for span in media]
    keys = BlockKeyChain(context, extents).extend(tokens)
    hashes = SequenceHasher(4, request_seed("tuned", "tenant"), extents).extend(tokens)
    expected = [BlockName(key, chained) for key, chained in zip(keys, hashes, strict=True)]
    for ways in ((1, 1, 3, 2), (3,), (1, 2, 3), (2, 3)):
        naming = TokenNaming(answer, context)
        for num_blocks in ways:
            naming.reach(tokens, num_blocks)
        assert list(naming.names) == expected


def test_what_is_no_token_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        TokenNaming(request("a"), CONTEXT).reach([1, 2, 3, -1], 1)
