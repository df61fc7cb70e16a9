"""One call, as it streams: when it starts, and what its arguments are."""

from __future__ import annotations

import pytest

from kvolt.frontend.parsers.arguments import CallReader, ParseStatus
from kvolt.frontend.parsers.port import Piece, ToolArguments, ToolStart, joined


def read(reader: CallReader, text: str) -> list[Piece]:
    pieces: list[Piece] = []
    assert reader.feed(text, pieces) == len(text)
    return joined(pieces)


def call(text: str, closing: str = "") -> tuple[str, str]:
    """Name and arguments of a call that is done."""
    reader = CallReader(0, closing=closing)
    pieces: list[Piece] = []
    reader.feed(text, pieces)
    assert reader.status is ParseStatus.DONE
    start, arguments = joined(pieces)
    assert isinstance(start, ToolStart)
    assert isinstance(arguments, ToolArguments)
    return start.name, arguments.text


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    reader = CallReader(2)
    assert read(reader, '\n{"name": "get_wea') == []
    assert read(reader, 'ther"') == [ToolStart(2, "get_weather")]
    assert read(reader, ', "arguments": ') == []
    assert read(reader, '{"ci') == [ToolArguments(2, '{"ci')]
    assert read(reader, 'ty": "Pa}r') == [ToolArguments(2, 'ty": "Pa}r')]
    assert read(reader, 'is"}') == [ToolArguments(2, 'is"}')]
    assert read(reader, "\n") == []
    assert reader.status is ParseStatus.READING
    assert read(reader, "}") == []
    assert reader.status is ParseStatus.DONE


def test_arguments_wait_for_the_name() -> None:
    reader = CallReader(0)
    assert read(reader, '{"arguments": {"a": 1}, ') == []
    assert reader.held == '{"arguments": {"a": 1}, '
    assert read(reader, '"name": "f"') == [ToolStart(0, "f"), ToolArguments(0, '{"a": 1}')]
    assert reader.held == ""


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": { "b" : 1.50, "a":\n[] }}', '{ "b" : 1.50, "a":\n[] }'),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}', '{"a": 1}'),
        ('{"id": "x", "type": {"a": ["}"]}, "n": -1e5, "name": "f", "arguments": {}, "x": null}', "{}"),
        (r'{"name": "f", "arguments": {"a": "\"}\\"}}', r'{"a": "\"}\\"}'),
        (r'{"n\u0061me": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": [1, 2]}', "[1, 2]"),
        ('{"name": "f", "arguments": 12}', "12"),
        ('{"name": "f", "arguments": nulls}', "nulls"),
        ('{"name": "f", "arguments": nul}', "nul"),
        ('{"name": "f", "arguments": {"a": 1},}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": nope, }}', '{"a": nope, }'),
    ],
)
def test_the_text_of_the_arguments(text: str, arguments: str) -> None:
    assert call(text) == ("f", arguments)


@pytest.mark.parametrize(
    ("string", "arguments"),
    [
        (r"{\"a\": \"x\\n\", \"b\": \/}", r'{"a": "x\n", "b": /}'),
        (r"\u00e9\ud83c\uDF89\t", "é🎉\t"),
        (r"\ud83c.\udf89\ud83c\u0041", "\ufffd.\ufffd\ufffdA"),
        (r"\q\u12g\u", r"\q\u12g\u"),
        ("line\nbreak <b>", "line\nbreak <b>"),
    ],
)
def test_arguments_as_a_string_are_unescaped(string: str, arguments: str) -> None:
    assert call(f'{{"name": "f", "arguments": "{string}"}}', "</call>") == ("f", arguments)


def test_a_closing_marker_ends_arguments_but_not_a_string() -> None:
    text = '{"name": "f", "arguments": {"a": "</call>", "b": '
    assert call(f"{text}</call>", "</call>") == ("f", '{"a": "</call>", "b": ')
    text = '{"name": "f", "arguments": {"a": "never closed\n<b>'
    assert call(f"{text}</call>", "</call>") == ("f", '{"a": "never closed\n<b>')
    text = '{"name": "f", "arguments": "never closed\n<b>'
    assert call(f"{text}</call>", "</call>") == ("f", "never closed\n<b>")


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ('{"name": "f", "arguments": {"a": 1}</call>', "</call>"),
        ('{"name": "f", "arguments": {"a": 1} junk', "junk"),
        ('{"name": "f", "arguments": {"a": 1}, junk', "junk"),
        ('{"name": "f", "arguments": {"a": 1}}junk', "junk"),
    ],
)
def test_what_follows_the_arguments_is_left(text: str, rest: str) -> None:
    reader = CallReader(0, closing="</call>")
    pieces: list[Piece] = []
    used = reader.feed(text, pieces)
    assert (reader.status, text[used:]) == (ParseStatus.DONE, rest)
    assert pieces[1:] == [ToolArguments(0, '{"a": 1}')]


@pytest.mark.parametrize(
    ("after_the_name", "arguments"),
    [
        (', {"a": 1}}', '{"a": 1}}'),
        (" oops", "oops"),
        (', "arg\numents": 3', '\numents": 3'),
        (', "arguments" {}', "{}"),
        (', "arguments": ?', "?"),
    ],
)
def test_when_the_name_is_out_bad_text_is_arguments_up_to_the_closing_marker(
    after_the_name: str, arguments: str
) -> None:
    text = f'{{"name": "f"{after_the_name}<b>'
    assert call(f"{text}</call>", "</call>") == ("f", f"{arguments}<b>")
    reader = CallReader(0)
    assert read(reader, text)[1:] == [ToolArguments(0, f"{arguments}<b>")]
    assert read(reader, "</call>") == [ToolArguments(0, "</call>")], "with no marker, all of it"


def test_an_object_that_must_prove_to_be_a_call() -> None:
    reader = CallReader(0, needs_arguments=True)
    assert read(reader, '{"type": "function", "name": "f", "parameters": ') == []
    assert read(reader, "{") == [ToolStart(0, "f"), ToolArguments(0, "{")]
    assert read(reader, '}, "more": 1}') == [ToolArguments(0, "}")]
    assert reader.status is ParseStatus.DONE


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('{"title', '": "x"}'),
        ('{"name": "f", "age', '": 3}'),
        ('{"name": "f", "parameters": ', "[1]}"),
        ('{"name": "f", "parameters": "', 'tall"}'),
        ('{"name": "f", "parameters": ', "7}"),
        ('{"name": "f", "parameters": null', "}"),
        ('{"parameters": {}', "}"),
        ('{"name": "f"', "}"),
    ],
)
def test_an_object_that_is_no_call_is_given_up_early(good: str, bad: str) -> None:
    reader = CallReader(0, needs_arguments=True)
    pieces: list[Piece] = []
    assert reader.feed(good + bad, pieces) == len(good)
    assert (reader.status, reader.held, pieces) == (ParseStatus.NOT_A_CALL, good, [])


def test_too_long_without_a_name() -> None:
    reader = CallReader(0, max_held=20)
    pieces: list[Piece] = []
    text = '{"arguments": {"a": "xxxxxxxxxxxxxxxxxx"}, "name": "f"}'
    assert reader.feed(text, pieces) == 20
    assert (reader.status, reader.held, pieces) == (ParseStatus.NOT_A_CALL, text[:20], [])


def test_a_named_call_may_be_long() -> None:
    reader = CallReader(0, max_held=20)
    pieces: list[Piece] = []
    value = "x" * 100
    text = f'{{"name": "f", "arguments": {{"a": "{value}"}}}}'
    used = reader.feed(text, pieces)
    reader.feed(text[used:], pieces)
    assert reader.status is ParseStatus.DONE
    assert (
        "".join(piece.text for piece in pieces[1:] if isinstance(piece, ToolArguments))
        == f'{{"a": "{value}"}}'
    )


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "x\\', '{"a": "x\\'),
        ('{"name": "f", "arguments": {"a": 1 </ca', '{"a": 1 </ca'),
        ('{"name": "f", "arguments": "{\\', "{"),
        ('{"name": "f", "arguments": nul', "nul"),
        ('{"name": "f", oops </ca', "oops </ca"),
    ],
)
def test_cut_short(text: str, arguments: str) -> None:
    reader = CallReader(0, closing="</call>")
    pieces: list[Piece] = []
    used = reader.feed(text, pieces)
    reader.finish(text[used:], pieces)
    assert "".join(piece.text for piece in pieces[1:] if isinstance(piece, ToolArguments)) == arguments
