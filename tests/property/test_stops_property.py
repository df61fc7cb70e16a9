"""Stop strings against a search of the whole text, for all cuts of short texts and some of long ones."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvolt.frontend.answers.stops import StopMatcher

quick = settings(deadline=None, max_examples=80)

stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=5)
short_texts = st.text("abc", max_size=7)


def search(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Start and end of the first occurrence, the shortest at its start."""
    found = [(text.find(stop), text.find(stop) + len(stop)) for stop in stops if stop in text]
    return min(found, default=None)


def num_open(text: str, stops: list[str]) -> int:
    """Characters at the end that begin a stop string and are not one yet."""
    starts = {stop[:end] for stop in stops for end in range(1, len(stop))}
    return max((size for size in range(1, len(text) + 1) if text[-size:] in starts), default=0)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    found = search(text, stops)
    if found is None:
        return text, None
    start, end = found
    return text[: end if include else start], text[start:end]


def cuts(text: str) -> list[list[str]]:
    """Every way to cut a text in pieces."""
    if not text:
        return [[]]
    return [[text[:end], *rest] for end in range(1, len(text) + 1) for rest in cuts(text[end:])]


def check(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    given_out = "".join(map(matcher.feed, pieces)) + matcher.finish()
    assert (given_out, matcher.matched) == expected("".join(pieces), stops, include)
    assert matcher.num_held == 0
    if matcher.matched is not None:
        assert matcher.feed("more") == matcher.finish() == ""


@quick
@given(short_texts, stop_lists, st.booleans())
@example("abab", ["bab", "abaa", "ab"], True)
@example("aaab", ["aab", "aaaa"], False)
@example("abaac", ["abaab", "ba", "baa"], True)
def test_any_cut_gives_what_the_whole_gives(text: str, stops: list[str], include: bool) -> None:
    for pieces in cuts(text):
        check(pieces, stops, include)


@quick
@given(
    st.lists(st.text("ab", max_size=9), max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=12) | st.just("a" * 40 + "b"), max_size=32),
    st.booleans(),
)
def test_long_texts_and_many_stop_strings(pieces: list[str], stops: list[str], include: bool) -> None:
    check(pieces, stops, include)


@quick
@given(
    st.lists(st.text("🎉é日 \n", max_size=6), max_size=12),
    st.lists(st.text("🎉é日 \n", min_size=1, max_size=4), max_size=6),
    st.booleans(),
)
def test_characters_of_any_width(pieces: list[str], stops: list[str], include: bool) -> None:
    check(pieces, stops, include)


@quick
@given(st.text("abc", max_size=20), stop_lists)
def test_exactly_what_may_become_a_stop_string_waits(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out = ""
    for end in range(1, len(text) + 1):
        given_out += matcher.feed(text[end - 1])
        so_far = text[:end]
        found = search(so_far, stops)
        waiting = num_open(so_far, stops)
        if found is not None and found[0] <= end - waiting:
            assert matcher.matched == so_far[found[0] : found[1]]
            assert given_out == so_far[: found[0]]
            return
        assert matcher.matched is None
        assert matcher.num_held == waiting
        assert given_out == so_far[: end - waiting]


@quick
@given(st.text("abc", max_size=20), stop_lists)
def test_an_included_stop_string_waits_only_behind_a_possible_match(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, include=True)
    given_out = ""
    for end in range(1, len(text) + 1):
        given_out += matcher.feed(text[end - 1])
        found = search(text[:end], stops)
        assert given_out == text[:end] if found is None else given_out == text[: found[1]]
        if matcher.matched is not None:
            return
        assert matcher.num_held == end - len(given_out)
