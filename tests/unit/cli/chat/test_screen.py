"""What an answer looks like, in a terminal and in a file."""

from __future__ import annotations

import io

from kvolt.cli.chat.screen import Screen
from kvolt.cli.chat.stream import CallPiece, Piece


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


PIECES = [
    Piece(reasoning="let me "),
    Piece(reasoning="see"),
    Piece(content="It "),
    Piece(content="is."),
    Piece(
        calls=(CallPiece(0, "a", "get"), CallPiece(0, arguments='{"x": 1}'), CallPiece(1, "b", "put", "{}"))
    ),
    Piece(calls=(CallPiece(0, arguments="!"),)),
]


def show(screen: Screen) -> None:
    for piece in PIECES:
        screen.show(piece)
    screen.end()


def test_in_a_terminal() -> None:
    tty = Tty()
    screen = Screen(tty, tty, colour=True)
    show(screen)
    assert tty.getvalue() == (
        '\x1b[2mlet me see\x1b[0m\nIt is.\ntool call get {"x": 1}\ntool call put {}\n... !\n'
    )
    screen.note("n")
    screen.problem("bad\nthing")
    screen.say("s")
    assert tty.getvalue().endswith("\x1b[2mn\x1b[0m\n\x1b[31mbad thing\x1b[0m\ns\n")


def test_without_colour() -> None:
    tty = Tty()
    screen = Screen(tty, tty, colour=False)
    show(screen)
    screen.note("n")
    assert tty.getvalue().startswith("(thinking) let me see\nIt is.\n")
    assert "\x1b" not in tty.getvalue()


def test_a_file_gets_the_answer_and_nothing_else() -> None:
    answer, aside = io.StringIO(), io.StringIO()
    screen = Screen(answer, aside, colour=True)
    show(screen)
    screen.note("n")
    assert answer.getvalue() == 'It is.\ntool call get {"x": 1}\ntool call put {}\n... !\n'
    assert aside.getvalue() == "(thinking) let me see\nn\n"


def test_a_model_cannot_drive_the_terminal() -> None:
    tty, file = Tty(), io.StringIO()
    for out in (tty, file):
        screen = Screen(out, out, colour=True)
        screen.show(Piece(content="a\x1b]0;title\x07\x9b31m\r\tb\n"))
        screen.end()
    assert tty.getvalue() == "a\ufffd]0;title\ufffd\ufffd31m\ufffd\tb\n"
    assert file.getvalue() == "a\x1b]0;title\x07\x9b31m\r\tb\n"


def test_the_next_answer_starts_afresh() -> None:
    out = io.StringIO()
    screen = Screen(out, out, colour=False)
    for _ in range(2):
        screen.show(Piece(calls=(CallPiece(0, "a", "get"),)))
        screen.end()
        screen.end()
    assert out.getvalue() == "tool call get \ntool call get \n"
