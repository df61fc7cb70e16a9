"""Log lines for people and for machines, and the ids they carry."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.errors import ErrorInfo
from kvolt.runtime.logs import (
    HumanFormatter,
    JsonFormatter,
    Trace,
    bind,
    bind_context,
    current_context,
    format_traceparent,
    parse_traceparent,
    setup_logs,
)

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class FixedClock:
    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1_700_000_000.1239


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(message: str = "hello", level: int = logging.INFO, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("kvolt.x").makeRecord("kvolt.x", level, "f", 1, message, (), None, extra=extra)


def as_json(item: logging.LogRecord) -> dict[str, Any]:
    text = JsonFormatter("worker-0", FixedClock()).format(item)
    assert "\n" not in text
    parsed: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return parsed


def as_text(item: logging.LogRecord, colours: bool = False) -> str:
    return HumanFormatter("worker-0", FixedClock(), colours).format(item)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


# formats


def test_a_json_line() -> None:
    with bind(request_id="r-1", traceparent=TRACEPARENT):
        line = as_json(record(num_tokens=3, model="m"))
    assert line == {
        "time": "2023-11-14T22:13:20.123Z",
        "level": "info",
        "logger": "kvolt.x",
        "process": "worker-0",
        "message": "hello",
        "request_id": "r-1",
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "span_id": "00f067aa0ba902b7",
        "num_tokens": 3,
        "model": "m",
    }


def test_extra_fields_cannot_replace_our_own() -> None:
    line = as_json(record(logger="x", time=1))
    assert (line["logger"], line["logger_"]) == ("kvolt.x", "x")
    assert (line["time"], line["time_"]) == ("2023-11-14T22:13:20.123Z", 1)


def test_json_takes_any_value() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert as_json(record(info=ErrorInfo("a", "b")))["info"] == {"code": "a", "message": "b"}
    assert as_json(record(task=object))["task"] == repr(object)
    assert as_json(record(ratio=float("nan")))["ratio"] == "nan"
    assert as_json(record(loop=loop))["loop"] == "[[...]]"
    assert as_json(record(text="\ud800"))["text"] == "\ud800"


def logged(template: str, *values: object) -> logging.LogRecord:
    return logging.getLogger("kvolt.x").makeRecord("kvolt.x", logging.INFO, "f", 1, template, values, None)


def test_pairs_of_a_format_string_are_json_keys() -> None:
    error = ValueError("a=1 b")
    line = as_json(
        logged(
            "event: text=%s number=%d ratio=%.1fs nothing=%s error=%r host=%s:%d %d%% time=%s",
            *("x y=3", 3, 0.25, None, error, "h", 1, 7, 9),
        )
    )
    fields = {name: line[name] for name in ("text", "number", "ratio", "nothing", "error", "time_")}
    assert fields == {
        "text": "x y=3",
        "number": 3,
        "ratio": 0.25,
        "nothing": None,
        "error": "ValueError('a=1 b')",
        "time_": 9,
    }
    assert line["message"].startswith("event: text=x y=3 number=3 ratio=0.2s ")
    assert not {"y", "host", "a"} & set(line)


@pytest.mark.parametrize(
    "item",
    [
        logged("width=%*d", 3, 4),
        logged("%(a)s b=%(b)s", {"a": 1, "b": 2}),
        logged("k=v"),
        logged("x" * 9999 + " k=%s", 1),
    ],
)
def test_other_format_strings_have_no_keys(item: logging.LogRecord) -> None:
    assert set(as_json(item)) == {"time", "level", "logger", "process", "message"}


def test_a_large_value_is_a_short_field() -> None:
    assert len(as_json(logged("a: b=%s", "x" * 100_000))["b"]) == 1024
    assert len(as_json(logged("a: b=%s", list(range(100_000))))["b"]) == 1024


def test_a_line_has_one_request_id() -> None:
    with bind(request_id="r-1"):
        item = logged("event: request_id=%s", "r-1-0")
        assert as_json(item)["request_id"] == "r-1-0"
        assert as_text(item) == "22:13:20.123 INFO    worker-0 event: request_id=r-1-0"


def _failed() -> logging.LogRecord:
    try:
        raise ValueError("bad\n22:13:20.123 INFO fake")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
        return logging.getLogger("kvolt.x").makeRecord("kvolt.x", logging.ERROR, "f", 1, "failed", (), info)


def test_an_exception_is_one_json_line_and_indented_text() -> None:
    line = as_json(_failed())
    assert line["exception"].startswith("Traceback")
    assert "ValueError: bad" in line["exception"]
    first, *rest = as_text(_failed()).split("\n")
    assert first.endswith("worker-0 failed")
    assert len(rest) > 2
    assert all(text.startswith("    ") for text in rest)


def test_a_human_line() -> None:
    with bind(request_id="r-1"):
        line = as_text(record("ready", num=3, name_="two words"))
    assert line == '22:13:20.123 INFO    worker-0 ready request_id=r-1 num=3 name_="two words"'
    assert as_text(record(level=logging.ERROR), colours=True).startswith("22:13:20.123 \x1b[31mERROR")


@given(st.text(), st.text())
def test_nothing_breaks_out_of_a_human_line(message: str, text: str) -> None:
    line = as_text(record(message.replace("%", "%%"), field=text))
    assert len(line.splitlines()) == 1
    assert line.isprintable() or all(
        ord(character) >= 0xA0 for character in line if not character.isprintable()
    )


@pytest.mark.parametrize(
    ("stream", "format", "human", "coloured"),
    [
        (io.StringIO, "auto", False, False),
        (Terminal, "auto", True, True),
        (io.StringIO, "human", True, False),
        (Terminal, "json", False, False),
    ],
)
def test_setup_chooses_the_format(
    root: logging.Logger, stream: type[io.StringIO], format: Any, human: bool, coloured: bool
) -> None:
    out = stream()
    setup_logs("info", format, "p", out, FixedClock())
    logging.getLogger("kvolt.y").warning("told %d", 1)
    logging.getLogger("kvolt.y").debug("not told")
    text = out.getvalue()
    assert text.count("\n") == 1
    assert text.startswith("{") is not human
    assert ("\x1b" in text) is coloured


def test_setup_again_replaces_only_our_handler(root: logging.Logger) -> None:
    other = logging.NullHandler()
    root.addHandler(other)
    first, second = io.StringIO(), io.StringIO()
    setup_logs("info", "json", "p", first, FixedClock())
    setup_logs("info", "json", "p", second, FixedClock())
    logging.getLogger("kvolt.y").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert other in root.handlers


# context


def test_traceparent_round_trip() -> None:
    trace = parse_traceparent(TRACEPARENT)
    assert trace == Trace("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "01")
    assert format_traceparent(trace) == TRACEPARENT
    assert parse_traceparent(TRACEPARENT.replace("00-4", "cc-4") + "-later") == trace


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        TRACEPARENT.upper(),
        TRACEPARENT + "-more",
        TRACEPARENT.replace("00-4", "ff-4"),
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        TRACEPARENT[:-1],
        TRACEPARENT + "\n" + TRACEPARENT,
    ],
)
def test_a_bad_traceparent_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None
    with bind(request_id="r", traceparent=text):
        assert current_context() == {"request_id": "r"}


@pytest.mark.parametrize("text", ["", "a b", "a\nb", "é", "x" * 129])
def test_a_bad_request_id_is_ignored(text: str) -> None:
    with bind(request_id=text):
        assert current_context() == {}


def test_context_travels_and_is_restored() -> None:
    with bind(request_id="outer", traceparent=TRACEPARENT):
        carried = current_context()
        with bind(request_id="inner"):
            assert current_context() == {"request_id": "inner", "traceparent": TRACEPARENT}
        assert current_context() == carried
    assert current_context() == {}
    with bind_context({**carried, "from_a_newer_peer": "x"}):
        assert current_context() == {"request_id": "outer", "traceparent": TRACEPARENT}


async def test_a_plain_bind_ends_with_its_task() -> None:
    async def request(name: str) -> dict[str, str]:
        bind(request_id=name)
        await asyncio.sleep(0)
        return current_context()

    assert await asyncio.gather(request("a"), request("b")) == [{"request_id": "a"}, {"request_id": "b"}]
    assert current_context() == {}


class _Unstable:
    """Has a text only once."""

    def __init__(self) -> None:
        self._texts = ["once"]

    def __str__(self) -> str:
        return self._texts.pop()


def test_a_value_never_fails_a_line() -> None:
    line = as_json(logged("event: bad=%s number=%s text=%s", _Unstable(), float("nan"), "x"))
    assert line["message"] == "event: bad=once number=nan text=x"
    assert (line.get("bad"), line["number"], line["text"]) == (None, "nan", "x")
