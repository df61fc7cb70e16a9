"""State of a conversation: turns, input lines and commands. Pure.

Text and answers come in; request bodies and actions go out. No terminal, files or clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvolt.cli.chat.answer import ChatAnswer, counted, sendable
from kvolt.runtime.config.loader import nearest

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_INTS = ("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed")
_ANY = (
    "stop",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "response_format",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "chat_template_kwargs",
    "nvext",
    "user",
)
_RESERVED = {
    "model": "use /model NAME",
    "messages": "type a message",
    "stream": "answers are always streamed",
}
_RESERVED |= {"stream_options": _RESERVED["stream"], "n": "a conversation has one answer per turn"}
_NO_RESULT = "(no result)"
_REMOVE = "-"


def unknown_field(name: str) -> str:
    """Note on a field that kvolt's API does not have; empty if it does."""
    known = (*_FLOATS, *_INTS, *_ANY)
    return "" if name in known else f"unknown field, sent anyway{nearest(name, known)}"


# --- input


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A complete input. Verbatim text is never a command."""

    text: str
    verbatim: bool = False


class Composer:
    """Join lines into messages: after a trailing backslash, and between triple quotes."""

    _QUOTES = '"""'

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._quoted = False

    @property
    def is_open(self) -> bool:
        """Whether a message is incomplete."""
        return self._quoted or bool(self._lines)

    def reset(self) -> None:
        self._lines.clear()
        self._quoted = False

    def feed(self, line: str) -> ChatMessage | None:
        if not self.is_open and line.lstrip().startswith(self._QUOTES):
            self._quoted = True
            line = line.lstrip().removeprefix(self._QUOTES)
        if self._quoted:
            ends = line.rstrip().endswith(self._QUOTES)
            self._lines.append(line.rstrip().removesuffix(self._QUOTES) if ends else line)
        else:
            ends = not line.endswith("\\")
            self._lines.append(line if ends else line[:-1])
        if not ends:
            return None
        text = sendable("\n".join(self._lines)).strip()
        message = ChatMessage(text, self._quoted) if text else None
        self.reset()
        return message


# --- actions


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the conversation's body and show the answer."""


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Complain:
    text: str


@dataclass(frozen=True, slots=True)
class UseModel:
    """Switch to a model if the server has it; without a name, list the models."""

    name: str | None


@dataclass(frozen=True, slots=True)
class Save:
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    pass


Action = Ask | Say | Complain | UseModel | Save | Leave


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer: ChatAnswer


@dataclass(slots=True)
class _Totals:
    num_answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0


class ChatSession:
    """A conversation. A question stays pending until it is answered, so that /retry can resend it."""

    def __init__(self, model: str, system: str | None = None) -> None:
        self.model = model
        self.system = system
        self.options: dict[str, Any] = {}
        self.turns: list[Turn] = []
        self.question: str | None = None
        self._totals = _Totals()

    def handle(self, message: ChatMessage) -> Action:
        text = message.text
        if message.verbatim or not text.startswith("/"):
            self.question = text
            return Ask()
        name, rest = (*text.split(maxsplit=1), "")[:2]
        command = COMMANDS.get(_ALIASES.get(name, name))
        if command is None:
            hint = nearest(name, COMMANDS)
            return Complain(
                f'unknown command {name}{hint} (/help lists all; text in """ """ is never a command)'
            )
        return command.run(self, rest.strip())

    def answered(self, answer: ChatAnswer) -> None:
        """Record the answer to the pending question, complete or stopped by the user."""
        if self.question is None:
            return
        totals = self._totals
        totals.num_answers += 1
        totals.first_token_s += answer.first_token_s or 0.0
        if answer.usage is not None:
            totals.prompt_tokens += answer.usage.prompt_tokens
            totals.completion_tokens += answer.usage.completion_tokens
        if not answer.is_empty:
            self.turns.append(Turn(self.question, answer))
            self.question = None

    def body(self) -> dict[str, Any]:
        """Request body for the pending question."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": self.messages(), **self.options, **options}

    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        results: list[dict[str, Any]] = []
        for turn in self.turns:
            messages += [*results, {"role": "user", "content": turn.question}, _assistant(turn.answer)]
            # Servers require a result for each tool call; this client executes none.
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": _NO_RESULT}
                for call in turn.answer.calls.values()
            ]
        if self.question is not None:
            messages += [*results, {"role": "user", "content": self.question}]
        return messages

    # --- commands

    def _help(self, _rest: str) -> Action:
        width = max(len(command.usage) for command in COMMANDS.values())
        lines = [f"  {command.usage:<{width}}  {command.help}" for command in COMMANDS.values()]
        return Say("\n".join([*lines, "", *_KEYS]))

    def _exit(self, _rest: str) -> Action:
        return Leave()

    def _clear(self, _rest: str) -> Action:
        self.turns.clear()
        self.question = None
        return Say("conversation cleared")

    def _model(self, rest: str) -> Action:
        return UseModel(rest or None)

    def _system(self, rest: str) -> Action:
        if rest:
            self.system = None if rest == _REMOVE else rest
        return Say(f"system: {self.system}" if self.system else "no system message")

    def _set(self, rest: str) -> Action:
        if not rest:
            shown = [f"{name} = {_json(value)}" for name, value in self.options.items()]
            return Say("\n".join(shown) or "no fields are set; the server's defaults apply")
        name, _, text = rest.partition(" ")
        return self.set_option(name, text.strip())

    def set_option(self, name: str, text: str) -> Action:
        """Set a field of all further requests; `-` removes it."""
        if text in ("", _REMOVE):
            removed = self.options.pop(name, None) is not None
            return Say(f"{name}: server default" if removed else f"{name} is not set")
        if name in _RESERVED:
            return Complain(f"{name} cannot be set: {_RESERVED[name]}")
        value = _value(text)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in _FLOATS and not is_number:
            return Complain(f"{name} must be a number, not {text}")
        if name in _INTS and (not is_number or isinstance(value, float)):
            return Complain(f"{name} must be a whole number, not {text}")
        self.options[name] = value
        note = unknown_field(name)
        return Say(f"{name} = {_json(value)}" + (f" ({note})" if note else ""))

    def _retry(self, _rest: str) -> Action:
        if self.question is None:
            if not self.turns:
                return Complain("nothing to retry")
            self.question = self.turns.pop().question
        return Ask()

    def _undo(self, _rest: str) -> Action:
        if self.question is not None:
            removed, self.question = self.question, None
        elif self.turns:
            removed = self.turns.pop().question
        else:
            return Complain("nothing to undo")
        first = removed.partition("\n")[0]
        return Say(f"removed: {first}")

    def _save(self, rest: str) -> Action:
        if not rest:
            return Complain("missing file name: /save FILE")
        if not self.turns:
            return Complain("nothing to save")
        if rest.endswith(".json"):
            body = {"model": self.model, "messages": self.messages(), **self.options}
            return Save(rest, msgspec.json.format(msgspec.json.encode(body)).decode() + "\n")
        return Save(rest, self._transcript())

    def _transcript(self) -> str:
        parts = [f"# Conversation with {self.model}"]
        if self.system:
            parts.append(f"## system\n\n{self.system}")
        for turn in self.turns:
            parts.append(f"## user\n\n{turn.question}")
            calls = [f"`{call.name}({call.arguments})`" for call in turn.answer.calls.values()]
            parts.append("\n\n".join(["## assistant", *filter(None, [turn.answer.content.strip()]), *calls]))
        return "\n\n".join(parts) + "\n"

    def _stats(self, _rest: str) -> Action:
        totals = self._totals
        if not totals.num_answers:
            return Say("no answers yet")
        lines = [
            f"{counted(totals.num_answers, 'answer')}, {counted(totals.completion_tokens, 'token')}, "
            f"prompts {counted(totals.prompt_tokens, 'token')}, "
            f"first token after {totals.first_token_s / totals.num_answers:.2f} s on average"
        ]
        if self.turns:
            lines.append(f"last: {self.turns[-1].answer.summary()}")
        return Say("\n".join(lines))


def _assistant(answer: ChatAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls.values()
        ]
    return message


def _value(text: str) -> Any:
    """Parse JSON; other text is a string."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


@dataclass(frozen=True, slots=True)
class ChatCommand:
    usage: str
    help: str
    run: Callable[[ChatSession, str], Action]


COMMANDS: dict[str, ChatCommand] = {
    "/help": ChatCommand("/help", "list the commands", ChatSession._help),
    "/exit": ChatCommand("/exit", "exit (also Ctrl-D)", ChatSession._exit),
    "/clear": ChatCommand("/clear", "remove all turns; keep system message and fields", ChatSession._clear),
    "/model": ChatCommand("/model [NAME]", "switch the model; without NAME, list models", ChatSession._model),
    "/system": ChatCommand(
        "/system [TEXT]", "show or set the system message; - removes it", ChatSession._system
    ),
    "/set": ChatCommand(
        "/set [NAME VALUE]", "set a request field, e.g. /set temperature 0.2; - removes it", ChatSession._set
    ),
    "/retry": ChatCommand("/retry", "send the last question again", ChatSession._retry),
    "/undo": ChatCommand("/undo", "remove the last question and its answer", ChatSession._undo),
    "/save": ChatCommand(
        "/save FILE", "save the conversation; FILE.json as a request body", ChatSession._save
    ),
    "/stats": ChatCommand("/stats", "show token counts and latencies", ChatSession._stats),
}
_ALIASES = {"/quit": "/exit", "/?": "/help"}
_KEYS = (
    'End a line with \\ to continue it, or enclose several lines in """.',
    "Ctrl-C stops an answer and keeps it; a second Ctrl-C or Ctrl-D exits.",
)
