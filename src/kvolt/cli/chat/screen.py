"""Terminal output of a conversation.

The answer goes to one stream, all other text to another (the same one in interactive mode), so that
`kvolt chat QUESTION > file` writes only the answer.
"""

from __future__ import annotations

from typing import TextIO

from kvolt.cli.chat.stream import CallPiece, Piece, one_line

_DIM = "2"
_RED = "31"
_CONTROLS = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), "\N{REPLACEMENT CHARACTER}")
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]


class Screen:
    def __init__(self, answer: TextIO, aside: TextIO, colour: bool) -> None:
        self._answer = answer
        self._aside = aside
        self._colour = colour
        self._part: str | None = None
        """Part that is being written; its last line may be incomplete."""
        self._stream = answer
        self._at_line_start = True
        self._calls: set[int] = set()

    def show(self, piece: Piece) -> None:
        """Write a piece of the answer."""
        if piece.reasoning:
            if self._begin("reasoning", self._aside):
                self._aside.write(self._code(_DIM) if self._painted(self._aside) else "(thinking) ")
            self._write(piece.reasoning)
        if piece.content:
            self._begin("content", self._answer)
            self._write(piece.content)
        for call in piece.calls:
            self._show_call(call)

    def _show_call(self, call: CallPiece) -> None:
        if self._begin(f"call {call.index}", self._answer):
            self._write("tool call " if call.index not in self._calls else "... ")
            self._calls.add(call.index)
        self._write(call.name + (" " if call.name else "") + call.arguments)

    def end(self) -> None:
        """Finish the answer: end its line and reset colours."""
        if self._part == "reasoning" and self._painted(self._stream):
            self._stream.write("\x1b[0m")
        if self._part is not None and not self._at_line_start:
            self._stream.write("\n")
        self._stream.flush()
        self._part = None
        self._at_line_start = True
        self._calls.clear()

    def say(self, text: str) -> None:
        """Write the result of a command."""
        self._aside.write(f"{_clean(text)}\n")
        self._aside.flush()

    def note(self, text: str) -> None:
        """Write a dimmed remark."""
        self._aside.write(f"{self._paint(_clean(text), _DIM)}\n")
        self._aside.flush()

    def problem(self, text: str) -> None:
        self._aside.write(f"{self._paint(one_line(text), _RED)}\n")
        self._aside.flush()

    def _begin(self, part: str, stream: TextIO) -> bool:
        if self._part == part:
            return False
        calls = set(self._calls)
        self.end()
        self._calls = calls
        self._part, self._stream = part, stream
        return True

    def _write(self, text: str) -> None:
        if not text:
            return
        # Control characters must not reach a terminal; a file gets the text unchanged.
        self._stream.write(_clean(text) if self._stream.isatty() else text)
        self._at_line_start = text.endswith("\n")
        self._stream.flush()

    def _painted(self, stream: TextIO) -> bool:
        return self._colour and stream.isatty()

    def _paint(self, text: str, code: str) -> str:
        return f"{self._code(code)}{text}\x1b[0m" if self._painted(self._aside) else text

    def _code(self, code: str) -> str:
        return f"\x1b[{code}m"


def _clean(text: str) -> str:
    return text.translate(_CONTROLS)
