"""Deltas: what goes over the wire, and what merging keeps."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.delta import Delta, FinishReason, StageTimes, TokenLogprobs, Usage, merge_deltas, plain_delta

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


@given(st.lists(deltas, min_size=1, max_size=5))
def test_merge_keeps_everything(several: list[Delta]) -> None:
    merged = merge_deltas(several)
    first, last = several[0], several[-1]
    assert merged.token_ids == sum((delta.token_ids for delta in several), ())
    assert (merged.index, merged.finish, merged.stop_reason) == (first.index, last.finish, last.stop_reason)
    assert (merged.logprobs or ()) == sum((delta.logprobs or () for delta in several), ())
    for name in ("usage", "stages"):
        known = [value for delta in several if (value := getattr(delta, name))]
        assert getattr(merged, name) == (known[-1] if known else getattr(merged, name))
    cached = [delta.cached_tokens for delta in several if delta.cached_tokens is not None]
    assert merged.cached_tokens == (cached[0] if cached else None)


def test_merge_changes_none() -> None:
    first, later = Delta((1,)), Delta((2,))
    assert merge_deltas([first, later]) == Delta((1, 2))
    assert (first, later) == (Delta((1,)), Delta((2,)))


def test_plain_deltas_are_shared_and_right() -> None:
    assert plain_delta(7) == Delta((7,))
    assert plain_delta(7) is plain_delta(7)
