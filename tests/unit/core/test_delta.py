"""Deltas: what goes over the wire, and what merging keeps."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.delta import Delta, FinishReason, StageTimes, TokenLogprobs, Usage, plain_delta

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.Decoder(Delta).decode

logprobs = st.builds(TokenLogprobs, st.integers(0, 9), st.floats(-9, 0))
deltas = st.builds(
    Delta,
    token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    index=st.integers(0, 1),
    finish=st.none() | st.sampled_from(list(FinishReason)),
    logprobs=st.none() | st.lists(logprobs, max_size=2).map(tuple),
    prompt_logprobs=st.none() | st.lists(st.none() | logprobs, max_size=2).map(tuple),
    cached_tokens=st.none() | st.integers(0, 99),
    usage=st.none() | st.builds(Usage, st.integers(0, 9), st.integers(0, 9)),
    stages=st.none() | st.builds(StageTimes, st.floats(0, 9)),
    stop_reason=st.none() | st.integers(0, 9) | st.text(max_size=3),
)


@given(deltas)
def test_round_trip(delta: Delta) -> None:
    assert decode(encode(delta)) == delta


def test_a_plain_token_is_small() -> None:
    assert len(encode(Delta((5,)))) == 5
    assert len(encode(Delta((100_000,)))) == 9


@given(deltas, deltas)
def test_merge_keeps_everything(first: Delta, later: Delta) -> None:
    merged = first.merge(later)
    if first.index != later.index or first.finish is not None:
        assert merged is None
        return
    assert merged is not None
    assert merged.token_ids == first.token_ids + later.token_ids
    assert (merged.index, merged.finish, merged.stop_reason) == (first.index, later.finish, later.stop_reason)
    assert (merged.logprobs or ()) == (first.logprobs or ()) + (later.logprobs or ())
    for name in ("usage", "stages"):
        assert getattr(merged, name) == (getattr(later, name) or getattr(first, name))
    if first.cached_tokens is not None:
        assert merged.cached_tokens == first.cached_tokens
    else:
        assert merged.cached_tokens == later.cached_tokens


def test_merge_changes_neither() -> None:
    first, later = Delta((1,)), Delta((2,))
    assert first.merge(later) == Delta((1, 2))
    assert (first, later) == (Delta((1,)), Delta((2,)))


def test_nothing_comes_after_a_finish() -> None:
    assert Delta((1,), finish=FinishReason.STOP).merge(Delta((2,))) is None


@pytest.mark.parametrize("index", [1, 5])
def test_choices_do_not_mix(index: int) -> None:
    assert Delta((1,)).merge(Delta((2,), index=index)) is None


def test_plain_deltas_are_shared_and_right() -> None:
    assert plain_delta(7) == Delta((7,))
    assert plain_delta(7) is plain_delta(7)
