"""Pieces of one kind become one."""

from __future__ import annotations

from kvolt.frontend.parsers.port import Content, Piece, Reasoning, ToolArguments, ToolStart, joined


def test_neighbours_of_one_kind_are_joined() -> None:
    pieces: list[Piece] = [
        Content(""),
        Content("a"),
        Content("b"),
        Reasoning("c"),
        Content("d"),
        ToolStart(0, "f"),
        ToolArguments(0, "{"),
        ToolArguments(0, "}"),
        ToolArguments(1, "{}"),
        ToolStart(2, "g"),
        ToolStart(3, "h"),
    ]
    assert joined(pieces) == [
        Content("ab"),
        Reasoning("c"),
        Content("d"),
        ToolStart(0, "f"),
        ToolArguments(0, "{}"),
        ToolArguments(1, "{}"),
        ToolStart(2, "g"),
        ToolStart(3, "h"),
    ]


def test_nothing_comes_of_nothing() -> None:
    assert joined([]) == joined([Content("")]) == []
    assert joined([Content("a")]) == [Content("a")]
