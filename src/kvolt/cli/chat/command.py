"""`kvolt chat`: an interactive conversation with a model, or one question."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from kvolt.cli.chat import session as session_actions
from kvolt.cli.chat.answer import ChatAnswer, sendable
from kvolt.cli.chat.client import ChatClient
from kvolt.cli.chat.screen import Screen
from kvolt.cli.chat.session import COMMANDS, Action, ChatSession, Composer
from kvolt.cli.flags import option, repeated
from kvolt.cli.health import add_server_flags, api_url
from kvolt.core.errors import ConfigError, ConnectFailed, Fault, KvoltError
from kvolt.runtime.clock import Clock, SystemClock
from kvolt.runtime.config.loader import LoadedConfig, nearest

HELP = """
Chat with a model of `kvolt serve` or any OpenAI-compatible server. With a QUESTION it prints one answer to stdout
and exits; everything else goes to stderr.

Examples:
  kvolt chat                                   interactive; /help lists the commands
  kvolt chat --join 10.0.0.5:7400              the frontend of another machine's cluster
  kvolt chat --url 10.0.0.5:8080               another server, with or without http:// and /v1
  kvolt chat "Why is the sky blue?"            one question
  git diff | kvolt chat "Review this:" -       - is replaced by stdin
  kvolt chat --set temperature=0.2 --set max_tokens=200 --system "Be short."
  OPENAI_API_KEY=... kvolt chat --url https://api.openai.com --model gpt-4o-mini

Exit code: 2 if the server is unreachable or rejects the request, 1 if the server fails.
"""

_INPUT_LIMIT_BYTES = 16 << 20
_MAX_TIMEOUT_S = 86_400


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "question", nargs="*", metavar="QUESTION", help="Ask one question and exit; - reads stdin."
    )
    add_server_flags(parser)
    option(parser, "--system", "TEXT", "System message.")
    repeated(parser, "--set", "NAME=VALUE", "Request field, such as temperature=0.2.")
    option(parser, "--timeout", "SECONDS", "Maximum time without data from the server.", float, default=300.0)


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    if not 0 < args.timeout <= _MAX_TIMEOUT_S:
        message = f"--timeout must be above 0 and at most {_MAX_TIMEOUT_S}"
        raise ConfigError(message, key="timeout", remedy="give it in seconds")
    client = ChatClient(api_url(args, loaded, os.environ), args.timeout)
    question = _question(args.question, sys.stdin)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the terminal may not support all characters of a model
    colour = wants_colour(os.environ)
    try:
        if question is None:
            with _terminal() as read_line:
                screen = Screen(sys.stdout, sys.stdout, colour)
                session = _session(args, choose_model(client, args.model, read_line, screen))
                return Chat(session, client, screen, read_line, SystemClock()).run()
        screen = Screen(sys.stdout, sys.stderr, colour)
        session = _session(args, args.model or choose_model(client, None, None, screen))
        return answer_once(session, client, screen, question, SystemClock())
    except KvoltError as error:
        if isinstance(error, ConnectFailed) or error.fault is Fault.CALLER:
            remedy = error.fields.get("remedy") or "see `kvolt chat --help`"
            raise ConfigError(error.message, key="chat", remedy=remedy) from error
        raise


def wants_colour(environ: Mapping[str, str]) -> bool:
    """Whether the environment allows colours. Streams other than terminals never get any."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def choose_model(
    client: ChatClient, wanted: str | None, read_line: Callable[[str], str] | None, screen: Screen
) -> str:
    """The requested model, else the only one served, else the user's choice."""
    try:
        models = asyncio.run(client.models())
    except ConnectFailed:
        raise
    except KvoltError:
        if wanted is None:
            raise
        return wanted  # a server may not implement /models
    if wanted is not None:
        return wanted
    if not models:
        raise ConfigError(f"{client.url} serves no models yet", key="model", remedy="see `kvolt status`")
    if len(models) == 1:
        return models[0]
    if read_line is None:
        raise ConfigError(
            f"{client.url} serves {len(models)} models: {', '.join(models)}",
            key="model",
            remedy="choose with --model NAME",
        )
    screen.say(f"{client.url} serves {len(models)} models (--model NAME chooses one):")
    screen.say("\n".join(f"  {number}  {name}" for number, name in enumerate(models, 1)))
    while True:
        try:
            typed = read_line("model: ").strip()
        except EOFError:
            raise ConfigError("no model was chosen", key="model", remedy="choose with --model NAME") from None
        if typed in models:
            return typed
        if typed.isdecimal() and 1 <= int(typed) <= len(models):
            return models[int(typed) - 1]
        if typed:
            screen.problem(f"no model {typed}{nearest(typed, models)}")


async def receive(
    session: ChatSession, client: ChatClient, screen: Screen, answer: ChatAnswer, clock: Clock
) -> None:
    """Send the conversation and show the answer as it streams; `answer` collects it, also if this fails."""
    try:
        async with aclosing(client.stream(session.body())) as pieces:
            async for piece in pieces:
                answer.add(piece, clock.monotonic())
                screen.show(piece)
    finally:
        screen.end()


def answer_once(session: ChatSession, client: ChatClient, screen: Screen, question: str, clock: Clock) -> int:
    session.question = question
    answer = ChatAnswer(sent_at=clock.monotonic())
    asyncio.run(receive(session, client, screen, answer, clock))
    if sys.stderr.isatty():
        screen.note(answer.summary())
    return 0


class Chat:
    """Interactive conversation in a terminal: read, send, show, until the user exits."""

    def __init__(
        self,
        session: ChatSession,
        client: ChatClient,
        screen: Screen,
        read_line: Callable[[str], str],
        clock: Clock,
    ) -> None:
        self._session = session
        self._client = client
        self._screen = screen
        self._read_line = read_line
        self._clock = clock
        self._composer = Composer()
        self._interrupted = False
        self._saved: set[Path] = set()

    def run(self) -> int:
        self._screen.note(f"{self._session.model} at {self._client.url}; /help lists the commands")
        while True:
            try:
                line = self._read_line(". " if self._composer.is_open else "> ")
                self._interrupted = False
                message = self._composer.feed(line)
                if message is not None and not self._perform(self._session.handle(message)):
                    return 0
            except UnicodeDecodeError:
                self._screen.problem("input is not UTF-8")
            except EOFError:
                self._screen.say("")
                return 0
            except KeyboardInterrupt:
                self._screen.say("")
                if self._interrupted:
                    return 0
                self._interrupted = True
                self._composer.reset()
                self._screen.note("press Ctrl-C again or Ctrl-D to exit")

    def _perform(self, action: Action) -> bool:
        """Run an action. False ends the conversation."""
        match action:
            case session_actions.Leave():
                return False
            case session_actions.Say(text):
                self._screen.say(text)
            case session_actions.Complain(text):
                self._screen.problem(text)
            case session_actions.Save(path, text):
                self._save(path, text)
            case session_actions.UseModel(name):
                self._use_model(name)
            case session_actions.Ask():
                self._send()
        return True

    def _send(self) -> None:
        answer = ChatAnswer(sent_at=self._clock.monotonic())
        try:
            asyncio.run(receive(self._session, self._client, self._screen, answer, self._clock))
        except KeyboardInterrupt:
            self._interrupted = True
        except KvoltError as error:
            remedy = error.fields.get("remedy")
            self._screen.problem(error.message + (f" ({remedy})" if remedy else ""))
            self._screen.note("/retry sends it again")
            return
        self._session.answered(answer)
        if self._interrupted:
            kept = "no answer" if answer.is_empty else "partial answer kept"
            self._screen.note(f"stopped, {kept}; Ctrl-C again exits")
        else:
            self._screen.note(
                answer.summary() + ("; no answer, /retry sends it again" if answer.is_empty else "")
            )

    def _use_model(self, name: str | None) -> None:
        models: list[str] = []
        try:
            models = asyncio.run(self._client.models())
        except (KvoltError, KeyboardInterrupt) as error:
            if name is None:
                self._screen.problem(str(error) or "stopped")
                return
        if name is None:
            lines = [f"{'*' if model == self._session.model else ' '} {model}" for model in models]
            self._screen.say("\n".join(lines) or "no models are served")
        elif models and name not in models:
            self._screen.problem(f"no model {name}{nearest(name, models)}; served: {', '.join(models)}")
        else:
            self._session.model = name
            self._screen.say(f"using {name}")

    def _save(self, name: str, text: str) -> None:
        try:
            path = Path(name).expanduser()
            # Overwrite only files that this conversation has written.
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            self._screen.problem(f"{name} exists; choose another name")
        except (OSError, RuntimeError, ValueError) as error:  # unknown home directory; NUL byte in the name
            self._screen.problem(f"cannot write {name}: {getattr(error, 'strerror', None) or error}")
        else:
            self._saved.add(path)
            self._screen.say(f"saved to {path}")


def _question(words: list[str], stdin: TextIO | None) -> str | None:
    """The question, or None for an interactive conversation."""
    if not words and stdin is not None and stdin.isatty():
        return None
    parts = [" ".join(word for word in words if word != "-")]
    if stdin is not None and (not words or "-" in words):
        # Only on request: an open pipe must not block the question.
        parts.append(_piped(stdin))
    text = sendable("\n\n".join(part for part in parts if part.strip()))
    if not text:
        raise ConfigError("the question is empty", key="question", remedy="see `kvolt chat --help`")
    return text


def _piped(stdin: TextIO) -> str:
    data = stdin.buffer.read(_INPUT_LIMIT_BYTES + 1)
    if len(data) > _INPUT_LIMIT_BYTES:
        raise ConfigError(
            f"stdin is over {_INPUT_LIMIT_BYTES} bytes", key="question", remedy="send less input"
        )
    return data.decode(errors="replace").strip("\n")


def _session(args: argparse.Namespace, model: str) -> ChatSession:
    session = ChatSession(sendable(model), sendable(args.system) if args.system else None)
    for assignment in args.set:
        name, equals, text = sendable(assignment).partition("=")
        outcome = session.set_option(name.strip(), text.strip())
        if not equals or not text.strip() or isinstance(outcome, session_actions.Complain):
            what = outcome.text if isinstance(outcome, session_actions.Complain) else "expected NAME=VALUE"
            raise ConfigError(f"--set {assignment}: {what}", key="set", remedy="e.g. --set temperature=0.2")
        note = session_actions.unknown_field(name.strip())
        if note:
            print(f"kvolt: --set {name.strip()}: {note}", file=sys.stderr)
    return session


@contextmanager
def _terminal() -> Iterator[Callable[[str], str]]:
    """Line reader with history and completion if readline is available.

    SIGTERM raises SystemExit, so that a terminal at the prompt gets its echo back.
    """
    with suppress(ImportError):
        import readline

        def complete(text: str, state: int) -> str | None:
            names = [f"{name} " for name in COMMANDS if name.startswith(text)] if text.startswith("/") else []
            return names[state] if state < len(names) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" \t\n")
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
        else:
            readline.parse_and_bind("tab: complete")
            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines form one message
    old_handler = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield _read_line
    finally:
        signal.signal(signal.SIGTERM, old_handler)


def _read_line(prompt: str) -> str:
    try:
        return input(prompt)
    except OSError as error:  # the terminal was closed
        raise EOFError from error
