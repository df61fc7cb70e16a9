"""`kvolt chat`: a conversation with a served model, or one question."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from kvolt.cli.chat import session as session_actions
from kvolt.cli.chat.answer import Answer, sendable
from kvolt.cli.chat.client import ChatClient
from kvolt.cli.chat.screen import Screen
from kvolt.cli.chat.session import COMMANDS, Action, Composer, Session
from kvolt.cli.health import base_url
from kvolt.core.errors import ConfigError, ConnectFailed, Fault, KvoltError
from kvolt.runtime.clock import Clock, SystemClock
from kvolt.runtime.config.loader import LoadedConfig, nearest
from kvolt.runtime.config.settings import Settings

HELP = """
Talk to a model, as it answers: to the one of `kvolt serve`, or to any OpenAI-compatible server. With a
question it answers once and ends; the answer goes to stdout, everything else to stderr.

Examples:
  kvolt chat                                   a conversation; /help lists its commands
  kvolt chat --url 10.0.0.5:8080               another server, with or without http:// and /v1
  kvolt chat "Why is the sky blue?"            one question
  git diff | kvolt chat "Review this:" -       - stands for what is piped in
  kvolt chat --set temperature=0.2 --set max_tokens=200 --system "Be short."
  OPENAI_API_KEY=... kvolt chat --url https://api.openai.com --model gpt-4o-mini

Exits with 2 when the server cannot be reached or refuses the request as wrong, with 1 when it fails.
"""

_INPUT_LIMIT_BYTES = 16 << 20
_MAX_TIMEOUT_S = 86_400


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="*", metavar="QUESTION", help="ask this and end; - reads stdin")
    parser.add_argument(
        "--url",
        help="the server (default: env OPENAI_BASE_URL, or where `kvolt serve` listens by its settings)",
    )
    parser.add_argument("--model", metavar="NAME", help="which model, where several are served")
    parser.add_argument(
        "--api-key", metavar="KEY", help="sent as a bearer token (default: env OPENAI_API_KEY)"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the request, e.g. temperature=0.2; again for more",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="longest silence of the server (default: 300)",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (env KVOLT_CONFIG)")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    if not 0 < args.timeout <= _MAX_TIMEOUT_S:
        message = f"--timeout must be above 0 and at most {_MAX_TIMEOUT_S}"
        raise ConfigError(message, key="timeout", remedy="give it in seconds")
    client = make_client(args, loaded.settings, os.environ)
    question = _question(args.question, sys.stdin)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # models know more characters than some terminals
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
    """What is no terminal gets none in any case."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def make_client(args: argparse.Namespace, settings: Settings, environ: Mapping[str, str]) -> ChatClient:
    """Flags before environment before settings, as everywhere."""
    url = args.url or environ.get("OPENAI_BASE_URL")
    if not url:
        frontend = settings.frontend
        if not frontend.port:
            raise ConfigError(
                "frontend.port is 0, which is no address", key="url", remedy="give --url HOST:PORT"
            )
        url = base_url(frontend.host, frontend.port)
    return ChatClient(url, args.api_key or environ.get("OPENAI_API_KEY"), args.timeout)


def choose_model(
    client: ChatClient, wanted: str | None, read_line: Callable[[str], str] | None, screen: Screen
) -> str:
    """The wanted model, or the only one, or the one that the person picks."""
    try:
        models = client.models()
    except ConnectFailed:
        raise
    except KvoltError:
        if wanted is None:
            raise
        return wanted  # a server may well answer without listing
    if wanted is not None:
        return wanted
    if not models:
        raise ConfigError(f"{client.url} serves no model yet", key="model", remedy="see `kvolt status`")
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


def receive(session: Session, client: ChatClient, screen: Screen, answer: Answer, clock: Clock) -> None:
    """Ask, and show the answer as it comes. Whatever ends it, what came is in `answer`."""
    try:
        with closing(client.stream(session.body())) as pieces:
            for piece in pieces:
                answer.add(piece, clock.monotonic())
                screen.show(piece)
    finally:
        screen.end()


def answer_once(session: Session, client: ChatClient, screen: Screen, question: str, clock: Clock) -> int:
    session.question = question
    answer = Answer(asked_at=clock.monotonic())
    receive(session, client, screen, answer, clock)
    if sys.stderr.isatty():
        screen.note(answer.summary())
    return 0


class Chat:
    """The conversation in a terminal: reads, asks, shows, until the person leaves."""

    def __init__(
        self,
        session: Session,
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
                self._screen.problem("that was no UTF-8")
            except EOFError:
                self._screen.say("")
                return 0
            except KeyboardInterrupt:
                self._screen.say("")
                if self._interrupted:
                    return 0
                self._interrupted = True
                self._composer.reset()
                self._screen.note("Ctrl-C again or Ctrl-D leaves")

    def _perform(self, action: Action) -> bool:
        """False when the conversation is over."""
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
                self._ask()
        return True

    def _ask(self) -> None:
        answer = Answer(asked_at=self._clock.monotonic())
        try:
            receive(self._session, self._client, self._screen, answer, self._clock)
        except KeyboardInterrupt:
            self._interrupted = True
        except KvoltError as error:
            remedy = error.fields.get("remedy")
            self._screen.problem(error.message + (f" ({remedy})" if remedy else ""))
            self._screen.note("/retry asks again")
            return
        self._session.answered(answer)
        if self._interrupted:
            kept = "nothing came" if answer.is_empty else "what came is kept"
            self._screen.note(f"stopped, {kept}; Ctrl-C again leaves")
        else:
            self._screen.note(
                answer.summary() + ("; no answer, /retry asks again" if answer.is_empty else "")
            )

    def _use_model(self, name: str | None) -> None:
        models: list[str] = []
        try:
            models = self._client.models()
        except (KvoltError, KeyboardInterrupt) as error:
            if name is None:
                self._screen.problem(str(error) or "stopped")
                return
        if name is None:
            lines = [f"{'*' if model == self._session.model else ' '} {model}" for model in models]
            self._screen.say("\n".join(lines) or "no model is served")
        elif models and name not in models:
            self._screen.problem(f"no model {name}{nearest(name, models)}; served: {', '.join(models)}")
        else:
            self._session.model = name
            self._screen.say(f"talking to {name}")

    def _save(self, given: str, text: str) -> None:
        try:
            path = Path(given).expanduser()
            # Over a file of this conversation, not over somebody's work.
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            self._screen.problem(f"{given} exists; give another name")
        except (OSError, RuntimeError, ValueError) as error:  # no such home; a name with a zero byte
            self._screen.problem(f"cannot write {given}: {getattr(error, 'strerror', None) or error}")
        else:
            self._saved.add(path)
            self._screen.say(f"saved to {path}")


def _question(words: list[str], stdin: TextIO | None) -> str | None:
    """The one question, or None for a conversation."""
    if not words and stdin is not None and stdin.isatty():
        return None
    parts = [" ".join(word for word in words if word != "-")]
    if stdin is not None and (not words or "-" in words):
        # Only when told so: a pipe that nobody closes must not keep a question from being asked.
        parts.append(_piped(stdin))
    text = sendable("\n\n".join(part for part in parts if part.strip()))
    if not text:
        raise ConfigError("the question is empty", key="question", remedy="see `kvolt chat --help`")
    return text


def _piped(stdin: TextIO) -> str:
    data = stdin.buffer.read(_INPUT_LIMIT_BYTES + 1)
    if len(data) > _INPUT_LIMIT_BYTES:
        raise ConfigError(
            f"stdin is over {_INPUT_LIMIT_BYTES} bytes", key="question", remedy="send less than that"
        )
    return data.decode(errors="replace").strip("\n")


def _session(args: argparse.Namespace, model: str) -> Session:
    session = Session(sendable(model), sendable(args.system) if args.system else None)
    for given in args.set:
        name, equals, text = sendable(given).partition("=")
        outcome = session.set_option(name.strip(), text.strip())
        if not equals or not text.strip() or isinstance(outcome, session_actions.Complain):
            what = outcome.text if isinstance(outcome, session_actions.Complain) else "is no NAME=VALUE"
            raise ConfigError(f"--set {given}: {what}", key="set", remedy="e.g. --set temperature=0.2")
    return session


@contextmanager
def _terminal() -> Iterator[Callable[[str], str]]:
    """A way to read lines, with history and completion where there is readline.

    A polite end (SIGTERM) unwinds like any other: killed at the prompt, we would leave a terminal without echo.
    """
    with suppress(ImportError):
        import readline

        def complete(text: str, state: int) -> str | None:
            found = [f"{name} " for name in COMMANDS if name.startswith(text)] if text.startswith("/") else []
            return found[state] if state < len(found) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" \t\n")
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
        else:
            readline.parse_and_bind("tab: complete")
            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield _read_line
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_line(prompt: str) -> str:
    try:
        return input(prompt)
    except OSError as error:  # the terminal is gone
        raise EOFError from error
