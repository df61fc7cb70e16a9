"""What another worker is asked, and what of its answer is news."""

from __future__ import annotations

from msgspec.structs import replace
from tests.unit.engines.lab import make_request

from kvolt.core.delta import Delta, FinishReason, TokenLogprobs, Usage
from kvolt.journey.migration import (
    ReceivedTokens,
    are_choices_finished,
    migrated_request,
    missing_finishes,
    splice_delta,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_a_request_from_where_it_broke_off() -> None:
    request = make_request(choices=1)
    assert migrated_request(request, [[300, 301]]) == replace(request, prior_tokens=(300, 301))
    assert migrated_request(replace(request, prior_tokens=(299,)), [[300]]).prior_tokens == (299, 300)


def test_each_of_several_choices_from_where_it_broke_off() -> None:
    request = make_request(choices=3)
    rest = migrated_request(request, [[300], None, []])
    assert rest == replace(request, prior_tokens_by_choice=((300,), None, ()))
    again = migrated_request(rest, [[301], None, [302]])
    assert (again.prior_tokens, again.prior_tokens_by_choice) == ((), ((300, 301), None, (302,)))


def test_hearing_keeps_the_tokens_of_what_is_not_over() -> None:
    hearing = ReceivedTokens(3)
    for delta in (
        Delta((300, 301)),
        Delta((302,), index=1, finish=STOP),
        Delta((303,), index=1),  # of a worker that does not know that it is over
        Delta((304,)),
    ):
        hearing.add_delta(delta)
    assert hearing.received_tokens() == [[300, 301, 304], None, []]
    assert not are_choices_finished(hearing.received_tokens())
    hearing.add_delta(Delta(finish=LENGTH))
    hearing.add_delta(Delta(index=2, finish=LENGTH))
    assert are_choices_finished(hearing.received_tokens())


def test_ends_that_were_lost() -> None:
    request = make_request(tokens=3, choices=5)
    request = replace(request, stop=replace(request.stop, stop_token_ids=(9,)))
    heard = [[300, 301, 302], [300, 7], [9], [300], None]
    assert missing_finishes(request, heard, (7,)) == [
        Delta(index=0, finish=LENGTH, usage=Usage(20, 3)),
        Delta(index=1, finish=STOP, usage=Usage(20, 2)),
        Delta(index=2, finish=STOP, stop_reason=9, usage=Usage(20, 1)),
    ]
    ignoring = replace(request, stop=replace(request.stop, ignore_eos=True))
    assert [delta.index for delta in missing_finishes(ignoring, heard, (7,))] == [0, 2]
    assert missing_finishes(request, [[], None, [], [], []], (7,)) == []
    resumed = replace(make_request(tokens=3), prior_tokens=(299,))
    assert missing_finishes(resumed, [[300, 301]], ()) == [Delta(finish=LENGTH, usage=Usage(20, 3))]


def test_what_was_said_of_the_prompt_is_not_said_again() -> None:
    logprobs = (TokenLogprobs(300, -0.5),)
    plain = Delta((300,), logprobs=logprobs)
    assert splice_delta(plain, 16) is plain
    assert splice_delta(Delta((300,), cached_tokens=32, logprobs=logprobs), 16) == plain
    last = Delta((301,), finish=LENGTH, usage=Usage(20, 9, 32))
    assert splice_delta(last, 16) == replace(last, usage=Usage(20, 9, 16))
    other = Delta((301,), index=1, finish=LENGTH, usage=Usage(20, 9, 32))
    assert splice_delta(other, 16) == other, "it has found the prompt of the first"
    never_told = Delta((300,), cached_tokens=32)
    assert splice_delta(never_told, None) is never_told
