"""`kvolt chat` against a real server on loopback: once, as a conversation, and in a real terminal."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import termios
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.cli.chat_lab import DONE, Script, Server, Terminal, event, refusal, whole
from tests.waits import MUST_HAPPEN_S

from kvolt.cli.chat.client import ChatClient
from kvolt.cli.chat.command import Chat, wants_colour
from kvolt.cli.chat.screen import Screen
from kvolt.cli.chat.session import ChatSession
from kvolt.cli.main import main
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.http.server_url import ServerUrl


@pytest.fixture(autouse=True)
def _clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "KVOLT_CONFIG"):
        monkeypatch.delenv(name, raising=False)


Pipe = Callable[[bytes], None]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Pipe:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    give(b"")
    return give


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens, and nobody will."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{free.getsockname()[1]}"


# --- one question


def test_one_question(capsys: pytest.CaptureFixture[str], pipe: Pipe) -> None:
    script = Script([event(reasoning_content="hm"), event("Be"), event("cause."), event(finish="stop"), DONE])
    with Server(script) as server:
        command = ["chat", "why", "so?", "--url", server.url, "--system", "s", "--set", "temperature=0"]
        assert main(command) == 0
        asked = server.asked[-1].body
    assert capsys.readouterr() == ("Because.\n", "(thinking) hm\n")
    assert asked["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "why so?"},
    ]
    assert (asked["model"], asked["temperature"], asked["stream"]) == ("m", 0, True)


@pytest.mark.parametrize(
    ("words", "piped", "question"),
    [
        ([], b"piped\nin\n", "piped\nin"),
        (["-"], b"piped", "piped"),
        (["Review", "this:", "-"], b"piped\n", "Review this:\n\npiped"),
        (["only this"], b"not read", "only this"),
        ([], b"caf\xe9", "caf\ufffd"),
    ],
)
def test_where_the_question_comes_from(words: list[str], piped: bytes, question: str, pipe: Pipe) -> None:
    pipe(piped)
    with Server(whole("ok")) as server:
        assert main(["chat", "--url", server.url, *words]) == 0
        assert server.asked[-1].body["messages"] == [{"role": "user", "content": question}]


def test_server_and_key_come_from_flag_environment_or_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pipe: Pipe
) -> None:
    with Server(whole("a"), whole("b"), whole("c")) as server:
        (tmp_path / "my.toml").write_text(f"[frontend]\nport = {server.port}\n")
        monkeypatch.setenv("OPENAI_API_KEY", "from-env")
        assert main(["chat", "q", "--model", "x", "--config", "my.toml"]) == 0
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        assert main(["chat", "q", "--model", "x"]) == 0
        assert main(["chat", "q", "--model", "x", "--api-key", "from-flag"]) == 0
        keys = [asked.headers.get("authorization") for asked in server.asked]
        assert keys == [None, "Bearer from-env", "Bearer from-flag"], (
            "the environment's key is for a server that is named; a named model needs no look at the list"
        )
        assert {asked.body["model"] for asked in server.asked} == {"x"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "kvolt: the question is empty (see `kvolt chat --help`)"),
        (
            ["q", "--set", "temperature"],
            "kvolt: --set temperature: expected NAME=VALUE (e.g. --set temperature=0.2)",
        ),
        (["q", "--set", "seed=x"], "kvolt: --set seed=x: seed must be a whole number, not x (e.g."),
        (["q", "--timeout", "0"], "kvolt: --timeout must be above 0"),
        (["q", "--timeout", "inf"], "kvolt: --timeout must be above 0"),
        (
            ["q", "--url", "gopher://x"],
            "kvolt: invalid server URL gopher://x (write it as http://HOST:PORT)",
        ),
        (["q", "--url", ""], "kvolt: no frontend is running, and frontend.port is 0 (set --url HOST:PORT)"),
    ],
)
def test_wrong_usage(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pipe: Pipe,
    arguments: list[str],
    line: str,
) -> None:
    monkeypatch.setenv("KVOLT_FRONTEND_PORT", "0")
    with Server() as server:
        url = [] if "--url" in arguments else ["--url", server.url]
        assert main(["chat", *arguments, *url]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_nobody_there(capsys: pytest.CaptureFixture[str], pipe: Pipe, nobody: str) -> None:
    for model in ([], ["--model", "m"]):
        assert main(["chat", "q", "--url", nobody, *model]) == 2
        assert capsys.readouterr() == (
            "",
            f"kvolt: cannot connect to {nobody}: connection refused "
            "(start a server with `kvolt serve`, or set --url)\n",
        )


@pytest.mark.parametrize(
    ("script", "code", "out", "line"),
    [
        (
            refusal(400, b'{"error": {"message": "too long"}}'),
            2,
            "",
            "kvolt: the server responded 400: too long",
        ),
        (refusal(401, b"{}"), 2, "", "kvolt: the server responded 401: {} (set --api-key, or"),
        (refusal(500, b'{"error": "broken"}'), 1, "", "kvolt: the server responded 500: broken"),
        (
            Script([event("half"), b'data: {"error": {"message": "worker lost"}}\n\n']),
            1,
            "half\n",
            "kvolt: server error: worker lost",
        ),
        (Script([event("half")], breaks_off=True), 1, "half\n", "kvolt: the answer was cut off"),
    ],
)
def test_errors_of_the_server(
    capsys: pytest.CaptureFixture[str], pipe: Pipe, script: Script, code: int, out: str, line: str
) -> None:
    with Server(script) as server:
        assert main(["chat", "q", "--url", server.url]) == code
    printed, err = capsys.readouterr()
    assert printed == out
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_which_model(capsys: pytest.CaptureFixture[str], pipe: Pipe) -> None:
    with Server(models=["a", "b"]) as server:
        assert main(["chat", "q", "--url", server.url]) == 2
        assert f"{server.url}/v1 serves 2 models: a, b (choose with --model NAME)" in capsys.readouterr().err
    with Server(models=[]) as server:
        assert main(["chat", "q", "--url", server.url]) == 2
        assert "serves no models yet (see `kvolt status`)" in capsys.readouterr().err


def test_colour() -> None:
    assert wants_colour({"TERM": "xterm"})
    assert wants_colour({"NO_COLOR": ""})
    assert not wants_colour({"NO_COLOR": "1"})
    assert not wants_colour({"TERM": "dumb"})


# --- a conversation


class Talk:
    """A conversation whose keys are typed beforehand: lines, or what a key raises."""

    def __init__(self, server: Server, *typed: str | BaseException, model: str = "m") -> None:
        self.session = ChatSession(model)
        self._out = io.StringIO()
        self._typed = [*typed, EOFError()]
        self.prompts: list[str] = []
        self._client = ChatClient(ServerUrl.parse(server.url).of_api())

    def run(self) -> str:
        screen = Screen(self._out, self._out, colour=False)
        assert Chat(self.session, self._client, screen, self._read, SystemClock()).run() == 0
        return self._out.getvalue()

    @property
    def left(self) -> int:
        """How much of what was typed nobody has read."""
        return len(self._typed)

    def _read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        item = self._typed.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item


def test_several_turns() -> None:
    with Server(whole("1"), whole("2")) as server:
        talk = Talk(server, "", "one \\", "line", "two", "/exit", "not read")
        text = talk.run()
        assert [message["content"] for message in server.asked[-1].body["messages"]] == [
            "one \nline",
            "1",
            "two",
        ]
    assert talk.prompts == ["> ", "> ", ". ", "> ", "> "]
    assert text.startswith(f"m at {server.url}/v1; /help lists the commands\n1\n1 token, first token after ")
    assert ", prompt 7 tokens\n" in text
    assert talk.left == 2


def test_an_error_is_one_line_and_the_turn_can_be_retried(nobody: str) -> None:
    broken = Script([event("ha"), b'data: {"error": {"message": "worker\\nlost"}}\n\n'])
    with Server(whole("1"), broken, whole("2")) as server:
        talk = Talk(server, "one", "two", "/retry")
        text = talk.run()
        roles = [[message["role"] for message in asked.body["messages"]] for asked in server.asked]
        assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user"]]
    assert "\nha\nserver error: worker lost\n/retry sends it again\n2\n" in text
    assert [turn.answer.content for turn in talk.session.turns] == ["1", "2"]
    server.url = f"http://{nobody}"
    text = Talk(server, "one", "/help").run()
    assert f"cannot connect to {nobody}: connection refused (start a server with `kvolt serve`" in text
    assert "/undo" in text


def test_interrupts_at_the_prompt() -> None:
    with Server(whole("1")) as server:
        talk = Talk(
            server, '"""given up', KeyboardInterrupt(), "one", KeyboardInterrupt(), KeyboardInterrupt(), "x"
        )
        text = talk.run()
        assert server.asked[-1].body["messages"] == [{"role": "user", "content": "one"}]
    assert text.count("Ctrl-C again or Ctrl-D to exit") == 2
    assert talk.left == 2, "the second in a row leaves"


def test_an_interrupted_answer_keeps_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ChatClient.stream

    async def interrupted(client: ChatClient, body: dict[str, object]) -> AsyncIterator[object]:
        number = 0
        async for piece in stream(client, body):
            yield piece
            number += 1
            if number == 2:
                raise KeyboardInterrupt

    with Server(Script([event("so"), event(" far"), threading.Event()])) as server:
        monkeypatch.setattr(ChatClient, "stream", interrupted)
        talk = Talk(server, "one", KeyboardInterrupt(), "two")
        text = talk.run()
        assert server.gone.wait(MUST_HAPPEN_S)
    assert "so far\nstopped, partial answer kept; Ctrl-C again exits\n" in text
    assert talk.left == 2, "and the next one at the prompt left"
    assert [turn.answer.content for turn in talk.session.turns] == ["so far"]


def test_nothing_came_of_an_answer() -> None:
    with Server(Script([event(finish="stop"), DONE])) as server:
        talk = Talk(server, "one")
        assert "0 pieces; no answer, /retry sends it again" in talk.run()
    assert talk.session.question == "one"


def test_models() -> None:
    with Server(models=["m", "other"]) as server:
        talk = Talk(server, "/model", "/model othr", "/model other")
        text = talk.run()
    assert "* m\n  other\n" in text
    assert "no model othr; did you mean other?; served: m, other" in text
    assert talk.session.model == "other"


def test_models_of_a_server_that_lists_none() -> None:
    with Server() as server:
        server.models = refusal(404, b"")
        talk = Talk(server, "/model", "/model other")
        assert "the server responded 404: Not Found\n" in talk.run()
    assert talk.session.model == "other"


def test_save(tmp_path: Path) -> None:
    (tmp_path / "work.md").write_text("precious")
    with Server(whole("1"), whole("2")) as server:
        text = Talk(
            server, "one", "/save work.md", "/save a.md", "two", "/save a.md", "/save no/such", "/save \0"
        ).run()
    assert "work.md exists; choose another name" in text
    assert (tmp_path / "work.md").read_text() == "precious"
    assert (tmp_path / "a.md").read_text().count("## user") == 2
    assert "cannot write no/such: No such file or directory" in text
    assert text.count("cannot write") == 2


def test_text_that_is_no_text() -> None:
    with Server(whole("1")) as server:
        text = Talk(server, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "one").run()
    assert "input is not UTF-8\n1\n" in text


# --- in a terminal


def test_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    slow = Script([event(reasoning_content="hm"), event("so far"), threading.Event()])
    with Server(whole("o", "ne"), slow, whole("two"), models=["a", "b"]) as server:
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("KVOLT_", "NO_COLOR"))
        }
        command = [sys.executable, "-m", "kvolt", "chat", "--url", server.url]
        with Terminal(command, {**env, "XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path) as terminal:
            echo = termios.tcgetattr(terminal.keys)[3] & termios.ECHO
            terminal.sees(r"serves 2 models .*\s+1  a\s+2  b\s")
            terminal.sees("model: ")
            terminal.type("2\r")
            terminal.sees(r"b at http://.*/help lists the commands")
            terminal.at_prompt("\x1b[200~first\nlines\x1b[201~\r")  # pasted
            terminal.sees(r"[\r\n]one\r\n\x1b\[2m2 tokens, .*first token after .*\x1b\[0m\r\n")
            terminal.at_prompt("second\r")
            terminal.sees(r"\x1b\[2mhm\x1b\[0m\r\nso far")
            terminal.type("\x03")
            terminal.sees("stopped, partial answer kept")
            assert server.gone.wait(MUST_HAPPEN_S)
            terminal.at_prompt("/he\t\r")
            terminal.sees("/undo .*remove the last question")
            terminal.at_prompt("\x1b[A\x1b[A\r")  # up, past /help: the second question again
            terminal.sees(r"[\r\n]two\r\n")
            assert [message["content"] for message in server.asked[-1].body["messages"]] == [
                *("first\nlines", "one", "second", "so far", "second")
            ]
            terminal.at_prompt("\x03")
            terminal.sees("Ctrl-C again or Ctrl-D to exit")
            terminal.at_prompt("")
            os.kill(terminal.pid, signal.SIGTERM)
            assert terminal.ended() == 143
            assert termios.tcgetattr(terminal.keys)[3] & termios.ECHO == echo, "the terminal was left raw"
