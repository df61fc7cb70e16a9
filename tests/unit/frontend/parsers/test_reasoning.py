"""What is reasoning and what is the answer."""

from __future__ import annotations

import pytest

from kvolt.frontend.parsers.port import Content, Piece, Reasoning
from kvolt.frontend.parsers.reasoning import MAX_SPACE, ThinkParser


def parse(text: str, *, starts_inside: bool = False) -> list[Piece]:
    parser = ThinkParser(starts_inside=starts_inside)
    return parser.feed(text) + parser.finish()


@pytest.mark.parametrize(
    "text",
    [
        "<think>\nHm.\n</think>\n\nYes.",
        "<think>Hm.</think>Yes.",
        "\n <think>\n\n\nHm.\n\n\n</think>\nYes.",
    ],
)
@pytest.mark.parametrize("starts_inside", [False, True])
def test_a_leading_tag_opens(text: str, starts_inside: bool) -> None:
    assert parse(text, starts_inside=starts_inside) == [Reasoning("Hm."), Content("Yes.")]


def test_the_prompt_opened() -> None:
    assert parse("\nHm.\n</think>\n\nYes.", starts_inside=True) == [Reasoning("Hm."), Content("Yes.")]


@pytest.mark.parametrize("text", ["Yes.", " \n", "<thin", "<", "See <think>x</think>.", "x</think>y"])
def test_without_a_leading_tag_all_is_content(text: str) -> None:
    assert parse(text) == [Content(text)]


@pytest.mark.parametrize("text", ["Hm. <tool_call>", "<", "Hm.</thin", "Hm.\n\n"])
def test_what_is_never_closed_stays_reasoning(text: str) -> None:
    parser = ThinkParser(starts_inside=True)
    pieces = parser.feed(text) + parser.finish()
    assert all(isinstance(piece, Reasoning) for piece in pieces)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == text


def test_reasoning_does_not_open_again() -> None:
    answer = "The tag is <think>, and </think> ends it."
    assert parse(f"<think>Hm.</think>{answer}") == [Reasoning("Hm."), Content(answer)]


def test_empty_reasoning_says_nothing() -> None:
    assert parse("<think>\n\n</think>\n\nYes.") == [Content("Yes.")]
    assert parse("\n</think>\n", starts_inside=True) == []
    assert parse("", starts_inside=True) == []


def test_only_newlines_belong_to_a_tag() -> None:
    assert parse("<think> \n a\n b \n</think> \n c") == [Reasoning(" \n a\n b "), Content(" \n c")]


def test_nothing_waits_that_is_no_tag() -> None:
    parser = ThinkParser(starts_inside=True)
    assert parser.feed("a") == [Reasoning("a")]
    assert parser.feed("b\n") == [Reasoning("b")]
    assert parser.feed("c<") == [Reasoning("\nc")]
    assert parser.feed("d</think") == [Reasoning("<d")]
    assert parser.feed(">") == []
    assert parser.feed("e") == [Content("e")]
    assert parser.feed("<") == [Content("<")]


def test_a_long_run_of_newlines_does_not_wait() -> None:
    parser = ThinkParser(starts_inside=True)
    parser.feed("a")
    assert parser.feed("\n" * (MAX_SPACE + 3)) == [Reasoning("\n" * 3)]
    parser = ThinkParser(starts_inside=False)
    space = " " * (MAX_SPACE + 1)
    assert parser.feed(space) == [Content(space)]
    assert parser.feed("<think>") == [Content("<think>")]
