"""Stop strings: which one wins, what waits, what comes out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvolt.frontend.answers.stops import StopMatcher


def outputs(matcher: StopMatcher, pieces: Sequence[str]) -> list[str]:
    return [*map(matcher.feed, pieces), matcher.finish()]


@pytest.mark.parametrize("stops", [[], ["", ""]])
def test_without_stop_strings_text_goes_through(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert outputs(matcher, ["any", "", "text"]) == ["any", "", "text", ""]
    assert matcher.matched is None


def test_a_stop_string_split_over_pieces_does_not_leak() -> None:
    matcher = StopMatcher(["</tool>"])
    assert outputs(matcher, ["done <", "/", "to", "ol", "> more", "even more"]) == [
        "done ",
        "",
        "",
        "",
        "",
        "",
        "",
    ]
    assert matcher.matched == "</tool>"
    assert matcher.num_held == 0


def test_only_what_may_become_a_stop_string_waits() -> None:
    matcher = StopMatcher(["STOP", "OPEN"])
    assert matcher.feed("go to ST") == "go to "
    assert matcher.num_held == 2
    assert matcher.feed("OP") == ""
    assert matcher.matched == "STOP"
    matcher = StopMatcher(["STOP", "OPEN"])
    assert [matcher.feed(piece) for piece in ("STO", "R", "O", "P", "ERA")] == ["", "STOR", "", "", "OPERA"]
    assert matcher.num_held == 0
    assert matcher.matched is None


def test_what_waits_comes_out_at_the_end() -> None:
    matcher = StopMatcher(["\n\n"])
    assert outputs(matcher, ["a", "\n"]) == ["a", "", "\n"]
    assert matcher.matched is None
    assert matcher.num_held == 0
    assert matcher.finish() == ""


def test_the_first_start_wins_even_if_it_ends_later() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert [matcher.feed(piece) for piece in ("xabc", "d")] == ["x", ""]
    assert matcher.matched == "abcd"


@pytest.mark.parametrize("end", [["e"], []], ids=["other text", "the end"])
def test_a_later_start_wins_when_the_earlier_one_comes_to_nothing(end: list[str]) -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert "".join(outputs(matcher, ["xabc", *end])) == "xa"
    assert matcher.matched == "bc"


def test_of_two_with_one_start_the_shorter_is_not_kept_waiting() -> None:
    matcher = StopMatcher(["stop it", "stop"], include=True)
    assert matcher.feed("please stop it") == "please stop"
    assert matcher.matched == "stop"


def test_an_included_stop_string_need_not_wait() -> None:
    matcher = StopMatcher(["###"], include=True)
    assert outputs(matcher, ["a#", "b#", "#", "#c", "d"]) == ["a#", "b#", "#", "#", "", ""]
    assert matcher.matched == "###"


def test_text_after_a_possible_match_waits_even_when_it_is_included() -> None:
    matcher = StopMatcher(["bc", "abcde"], include=True)
    assert [matcher.feed(piece) for piece in ("ab", "c", "d")] == ["ab", "c", ""]
    assert matcher.num_held == 1
    assert matcher.feed("!") == ""
    assert matcher.matched == "bc"


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert outputs(matcher, ["one. two", "three.", "four"]) == ["one", "", "", ""]


def test_matchers_with_the_same_stop_strings_do_not_share_state() -> None:
    one, other = StopMatcher(["ab"]), StopMatcher(["ab"])
    assert [one.feed("xa"), other.feed("b"), one.feed("b"), other.feed("a")] == ["x", "b", "", ""]
    assert (one.matched, other.matched) == ("ab", None)


class CountedList(list[str]):
    num_reads = 0

    def __getitem__(self, at: int) -> str:  # type: ignore[override]
        self.num_reads += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("period", ["a", "ab", "aab" * 20])
def test_text_that_almost_matches_costs_no_square(period: str) -> None:
    stops = [period * (400 // len(period)) + end for end in "0123456789"] + [
        period * (4000 // len(period)) + "!"
    ]
    matcher = StopMatcher(stops)
    matcher.feed(period)
    automaton = matcher._automaton
    assert automaton is not None
    counted = automaton.straight = CountedList(automaton.straight)
    text = period * (9_000 // len(period)) + "?"
    given = "".join(map(matcher.feed, text))
    assert period + text == given + matcher.finish()
    assert counted.num_reads < 3 * len(text)
