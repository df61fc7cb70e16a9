"""`kvolt chat` with a real kvolt, and `kvolt serve --interactive` in a real terminal."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.processes import MODEL, Bench, free_port, read_status, until
from tests.unit.cli.chat_lab import Terminal

WORKERS = """
[[workers]]
engine = "sim"
model = "sim-tiny"
count = 2
args = {speed = 2}
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        (bench.folder / "kvolt.toml").write_text(WORKERS)
        yield bench


@pytest.fixture
def terminal(bench: Bench) -> Iterator[Terminal]:
    """`kvolt serve --interactive` at its first prompt."""
    command = [sys.executable, "-m", "kvolt", "serve", "--interactive", "--port", "0"]
    with Terminal(command, bench.env, bench.folder) as terminal:
        terminal.sees(
            r"kvolt: ready at http://[\d.:]+ with sim-tiny \(2 workers\); leaving the chat stops everything"
        )
        terminal.sees(rf"{MODEL} at http://[\d.:]+/v1; /help lists the commands")
        yield terminal


async def test_a_question(bench: Bench) -> None:
    _, url = await bench.serve()
    limit = ("--set", "max_tokens=5")
    asked = bench.run("chat", "--url", url, "Hello", "there", *limit)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert len(asked.stdout.split()) == 5
    by_settings = bench.run("chat", "Hello", *limit, KVOLT_FRONTEND_PORT=url.rpartition(":")[2])
    assert (by_settings.returncode, len(by_settings.stdout.split())) == (0, 5)
    found = bench.run("chat", "Hello", "--set", "max_tokens=5", "--set", "temprature=1")
    assert (found.returncode, len(found.stdout.split())) == (0, 5)
    assert found.stderr == (
        "kvolt: --set temprature: unknown field, sent anyway; did you mean temperature?\n"
    )
    wrong = bench.run("chat", "--url", url, "Hello", "--model", "nobody")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "the server responded 404: " in wrong.stderr
    wrong = bench.run("chat", "--url", url, "Hello", "--set", "temperature=9")
    assert (wrong.returncode, "temperature" in wrong.stderr) == (2, True)


async def test_no_server(bench: Bench) -> None:
    done = bench.run("chat", "Hello", "--url", f"127.0.0.1:{free_port()}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "connection refused (start a server with `kvolt serve`" in done.stderr


async def test_serve_and_chat_in_one_terminal(bench: Bench, terminal: Terminal) -> None:
    terminal.at_prompt("/set max_tokens 4\r")
    terminal.sees("max_tokens = 4")
    terminal.at_prompt("Hello\r")
    terminal.sees(r"[\r\n](\s*\w+){4}\s*\x1b\[2m4 tokens, .*first token after .*prompt \d+ tokens")
    terminal.at_prompt("/set max_tokens 3000\r")
    terminal.sees("max_tokens = 3000")
    terminal.at_prompt("And then?\r")
    await bench.until_computing(1)
    terminal.type("\x03")
    terminal.sees("stopped, .*Ctrl-C again exits")
    await bench.until_computing(0)

    first = bench.child_pid("worker-0")
    os.kill(first, signal.SIGKILL)

    def has_restarted() -> bool:
        status = read_status(bench.folder / "logs")
        assert status is not None
        return any(child.name == "worker-0" and child.restarts and child.pid for child in status.children)

    await until(has_restarted, what="the restart")
    terminal.at_prompt("/stats\r")
    terminal.sees("2 answers, ")
    assert " | " not in terminal.text, "a log reached the terminal"
    terminal.at_prompt("\x04")
    terminal.sees("worker-0 was killed by SIGKILL")  # what was said meanwhile
    terminal.sees("kvolt: stopped")
    assert terminal.ended() == 0
    await bench.nothing_left()
    assert list((bench.folder / "logs").glob("*.toml")) == []
    assert "listening on" in (bench.folder / "logs" / "frontend.log").read_text()
    assert "Traceback" not in terminal.text


async def test_a_signal_stops_the_chat_too(bench: Bench, terminal: Terminal) -> None:
    terminal.sees("> ")
    os.kill(terminal.pid, signal.SIGTERM)
    terminal.sees("kvolt: stopped")
    assert terminal.ended() == 0
    assert termios.tcgetattr(terminal.keys)[3] & termios.ECHO, "the terminal was left raw"
    await bench.nothing_left()
    assert "Traceback" not in terminal.text


async def test_two_interrupts_at_the_prompt_leave(bench: Bench, terminal: Terminal) -> None:
    terminal.at_prompt("\x03")
    terminal.sees("Ctrl-C again or Ctrl-D to exit")
    terminal.at_prompt("\x03")
    terminal.sees("kvolt: stopped")
    assert terminal.ended() == 0
    await bench.nothing_left()
