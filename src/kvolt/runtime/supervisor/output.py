"""Output of a supervisor's children: split into lines, written to log files, shown on the terminal.

Bounds the size of a line, of a log file and of the output that waits for the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import select
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec

from kvolt.core.errors import MALFORMED
from kvolt.runtime.clock import Clock
from kvolt.runtime.logs import JsonFormatter
from kvolt.runtime.supervisor.plan import Level

LINE_LIMIT_BYTES = 64 * 1024

_CUT_MARK = b" ... [cut]"
_UNSHOWN_LIMIT_BYTES = 256 * 1024
_VIEW_RETRY_S = 0.05
_VIEW_END_TIMEOUT_S = 1.0
_LAST_WORDS_CHARS = 500

_NAME_COLOURS = ("36", "35", "34", "32", "96", "95", "94", "92")
_LEVELS = {"warn": Level.WARNING, "warning": Level.WARNING, "error": Level.ERROR, "critical": Level.ERROR}
_ERROR_WORDS = re.compile(
    r"\w(Error|Exception)\b|(?i:\b(error|exception|fatal|panic|abort(ed)?|cannot|failed)\b)|^kvolt: "
)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|\Z)', re.DOTALL)
"""A quoted value, which may lack its end: matching from there again would take quadratic time."""
_SHOWN_KEYS = frozenset(("time", "level", "logger", "process", "message"))
_LEVEL_COLOURS = {Level.WARNING: "33", Level.ERROR: "31"}


class LineCutter:
    """Splits bytes into lines; truncates and marks lines over the limit."""

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._partial = bytearray()
        self._cut = False

    def feed(self, data: bytes) -> list[bytes]:
        *ends, rest = data.split(b"\n")
        lines = []
        for end in ends:
            self._append(end)
            lines.append(self.end_line())
        self._append(rest)
        return lines

    def end_line(self) -> bytes:
        """End the current line and return it."""
        line = bytes(self._partial) + (_CUT_MARK if self._cut else b"")
        self._partial.clear()
        self._cut = False
        return line

    def _append(self, piece: bytes) -> None:
        space = self._limit_bytes - len(self._partial)
        self._partial += piece[:space]
        self._cut = self._cut or len(piece) > space


class LineReader(asyncio.Protocol):
    """Reads the output of one process to its end, line by line."""

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._cutter = LineCutter(limit_bytes)
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.handle_lines(self._cutter.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        if rest := self._cutter.end_line():
            self.handle_lines([rest])
        self.ended.set()

    def handle_lines(self, lines: list[bytes]) -> None:
        """Called with complete lines, perhaps with none."""


class RotatingFile:
    """An append-only file. At the limit it is renamed to `<name>.1`, replacing the previous one."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._file = path.open("ab", buffering=0)
        self._size_bytes = path.stat().st_size

    def write(self, data: bytes) -> None:
        if self._size_bytes and self._size_bytes + len(data) > self._limit_bytes:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            self._size_bytes = 0
        self._size_bytes += self._file.write(data)

    def close(self) -> None:
        self._file.close()


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """The JSON log record of a line; None if it is none."""
    record = None
    if line.startswith(b"{"):
        with contextlib.suppress(*MALFORMED):
            record = msgspec.json.decode(line)
    is_record = isinstance(record, dict) and isinstance(record.get("message"), str) and "level" in record
    return record if is_record else None


def render_line(line: bytes) -> tuple[Level | None, str]:
    """Format a child's line for the terminal: a JSON log record as text, any other line unchanged and without a
    level.

    Of a progress bar that redraws itself, only the last state is kept.
    """
    record = _parse_record(line)
    if record is None:
        return None, line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    name = str(record["level"]).lower()
    text = f"{_time_of_day(record.get('time'))}{name.upper():<7} {record['message']}"
    fields_shown = _QUOTED.sub(
        "", record["message"]
    )  # their values may be rounded or quoted, and quote other fields
    for key, value in record.items():
        if isinstance(value, str) and "\n" in value:  # a traceback
            text += f"\n{value.rstrip()}" if key not in _SHOWN_KEYS else ""
        elif key not in _SHOWN_KEYS and f" {key.rstrip('_')}=" not in fields_shown:
            text += f" {key}={value}"
    return _LEVELS.get(name, Level.INFO), text


def _time_of_day(time: object) -> str:
    if isinstance(time, int | float):
        return datetime.fromtimestamp(time).strftime("%H:%M:%S ")
    if isinstance(time, str) and time[10:11] in ("T", " "):
        return time[11:19] + " "
    return ""


def json_record(clock: Clock, name: str, level: Level | None, text: str) -> bytes:
    """A line of process `name` that is not a log record, as one. Without a level its words decide."""
    level = level or (Level.ERROR if _ERROR_WORDS.search(text) else Level.INFO)
    fields = {"name": "output", "levelname": level, "msg": text}
    return JsonFormatter(name, clock).format(logging.makeLogRecord(fields)).encode() + b"\n"


class TerminalView:
    """All children's lines in one stream, each prefixed with its child's name, or as JSON records that name it.

    A terminal that does not read (Ctrl-S, a pager) must not block the children: lines wait up to a limit, beyond
    which the oldest are dropped and counted. `quiet` hides records below warning; lines that are not log records have
    no level and are always shown, because they may be a traceback.
    """

    def __init__(
        self,
        out: TextIO,
        names: Sequence[str],
        quiet: bool = False,
        colour: bool | None = None,
        json_clock: Clock | None = None,
    ) -> None:
        """`json_clock`: write JSON records; a line that is none gets its time from this clock."""
        self._out = out
        self._json_clock = json_clock
        self._quiet = quiet
        self._colour = out.isatty() if colour is None else colour
        self._colours = {name: _NAME_COLOURS[index % len(_NAME_COLOURS)] for index, name in enumerate(names)}
        self._width = max(len(name) for name in (*names, "kvolt"))
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._num_dropped = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._retry: asyncio.TimerHandle | None = None
        out.flush()  # earlier output first: from here on the stream's buffer is bypassed
        try:
            self._fd: int | None = out.fileno()
        except (OSError, ValueError):
            self._fd = None

    def show(self, name: str, line: bytes) -> None:
        """Show a line of a child."""
        level, text = render_line(line)
        if self._quiet and level is Level.INFO:
            return
        if self._json_clock is None or level is None:
            self._put(name, level, text)
            return
        record = _parse_record(line)
        assert record is not None
        is_own = record.get("process") == name
        self._enqueue((line if is_own else msgspec.json.encode(record | {"process": name})) + b"\n")

    def show_own(self, level: Level, text: str) -> None:
        """Show a line of the supervisor."""
        if not (self._quiet and level is Level.INFO):
            self._put("kvolt", level, text)

    async def close(self) -> None:
        """Wait briefly for the terminal to accept the remaining lines."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_VIEW_END_TIMEOUT_S):
                await self._empty.wait()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _put(self, name: str, level: Level | None, text: str) -> None:
        if self._json_clock is not None:
            self._enqueue(json_record(self._json_clock, name, level, text))
            return
        prefix = self._paint(f"{name:<{self._width}} |", self._colours.get(name, "1"))
        body = self._paint(text, _LEVEL_COLOURS[level]) if level in _LEVEL_COLOURS else text
        self._enqueue("".join(f"{prefix} {line}\n" for line in body.split("\n")).encode())

    def _enqueue(self, data: bytes) -> None:
        self._waiting.append(data)
        self._num_waiting_bytes += len(data)
        self._empty.clear()
        while self._num_waiting_bytes > _UNSHOWN_LIMIT_BYTES and len(self._waiting) > 1:
            self._num_waiting_bytes -= len(self._waiting.popleft())
            self._num_dropped += 1
        if self._retry is None:
            self._flush()

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colour else text

    def _flush(self) -> None:
        self._retry = None
        while self._waiting:
            if self._num_dropped:
                text, self._num_dropped = f"... {self._num_dropped} lines not shown", 0
                note = f"{text}\n".encode()
                if self._json_clock is not None:
                    note = json_record(self._json_clock, "kvolt", Level.WARNING, text)
                self._waiting.appendleft(note)
                self._num_waiting_bytes += len(note)
            data = self._waiting[0]
            num_written = self._write(data)
            if num_written == 0:
                self._retry = asyncio.get_running_loop().call_later(_VIEW_RETRY_S, self._flush)
                return
            self._num_waiting_bytes -= num_written
            if num_written < len(data):
                self._waiting[0] = data[num_written:]
            else:
                self._waiting.popleft()
        self._empty.set()

    def _write(self, data: bytes) -> int:
        """Write without blocking; returns the bytes written. A writable descriptor accepts PIPE_BUF bytes."""
        if self._fd is None:
            self._out.write(data.decode(errors="replace"))
            return len(data)
        try:
            if not select.select([], [self._fd], [], 0)[1]:
                return 0
            return os.write(self._fd, data[: select.PIPE_BUF])
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the terminal was closed: keep serving


class ChildOutput(LineReader):
    """Output of a supervisor's child: to its log file and to the terminal."""

    def __init__(self, name: str, log_file: RotatingFile, view: TerminalView) -> None:
        super().__init__()
        self._name = name
        self._log_file = log_file
        self._view = view
        self._log_is_broken = False
        self._last_line = b""
        self._in_traceback = False
        self._ends_traceback = False

    @property
    def last_words(self) -> str:
        """Last line of the process if it is an error, else an empty string: it would be mistaken for the cause. Empty
        also for an error message of the kvolt command: it has been shown, and has its remedy."""
        level, text = render_line(self._last_line)
        is_error = level is Level.ERROR or (level is None and _ERROR_WORDS.search(text) is not None)
        if level is None and text.startswith("kvolt: "):
            return ""
        return text.strip()[:_LAST_WORDS_CHARS] if is_error or self._ends_traceback else ""

    def handle_lines(self, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            self._log_file.write(b"\n".join(lines) + b"\n")
        except OSError as error:  # a full disk must not affect the child
            if not self._log_is_broken:
                self._view.show_own(Level.WARNING, f"cannot write the log of {self._name}: {error}")
            self._log_is_broken = True
        for line in lines:
            if line.strip():
                self._track_traceback(line)
            self._view.show(self._name, line)

    def _track_traceback(self, line: bytes) -> None:
        # The error of a traceback is the first line after it that is not indented.
        indented = line[:1].isspace()
        self._ends_traceback = self._in_traceback and not indented
        self._in_traceback = line.startswith(b"Traceback (") or (self._in_traceback and indented)
        self._last_line = line
