"""Parsers by the names used in Dynamo and vLLM, and detection of parsers from chat templates.

A new parser is a row in one of the two tables. Names may contain dashes or underscores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvolt.core.errors import ConfigError
from kvolt.frontend.parsers.calls import HermesParser, Llama3JsonParser
from kvolt.frontend.parsers.port import TextParser
from kvolt.frontend.parsers.reasoning import CLOSING, OPENING, ThinkParser

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class _Marks:
    """Markers in a chat template that identify the model's output format."""

    any_of: tuple[str, ...]
    all_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()

    def fit(self, template: str) -> bool:
        return (
            any(mark in template for mark in self.any_of)
            and all(mark in template for mark in self.all_of)
            and not any(mark in template for mark in self.none_of)
        )


@dataclass(frozen=True, slots=True)
class _ToolRow:
    build: Callable[[], TextParser]
    marks: _Marks


@dataclass(frozen=True, slots=True)
class _ReasoningRow:
    starts_inside: bool
    """Default if the prompt does not determine it."""
    marks: _Marks


# In order of detection. `<tool_call>` also wraps the XML of Qwen3-Coder and GLM, which is not hermes.
_HERMES = _ToolRow(HermesParser, _Marks(("<tool_call>",), none_of=("<function=", "<arg_key>")))
TOOL_PARSERS = {
    "hermes": _HERMES,
    "qwen25": _HERMES,
    "llama3_json": _ToolRow(Llama3JsonParser, _Marks(("<|python_tag|>", "ipython"))),
}
REASONING_PARSERS = {
    "deepseek_r1": _ReasoningRow(True, _Marks((OPENING, CLOSING), all_of=("<｜Assistant｜>",))),  # noqa: RUF001
    "qwen3": _ReasoningRow(False, _Marks((OPENING, CLOSING))),
}


def tool_parser(name: str) -> TextParser:
    return _row("tool", TOOL_PARSERS, name).build()


def reasoning_parser(name: str, *, starts_inside: bool | None = None) -> TextParser:
    """`starts_inside` is the result of `prompt_opens_reasoning`; None: the model's default."""
    row = _row("reasoning", REASONING_PARSERS, name)
    return ThinkParser(starts_inside=row.starts_inside if starts_inside is None else starts_inside)


def detect_tool_parser(chat_template: str) -> str | None:
    return next((name for name, row in TOOL_PARSERS.items() if row.marks.fit(chat_template)), None)


def detect_reasoning_parser(chat_template: str) -> str | None:
    return next((name for name, row in REASONING_PARSERS.items() if row.marks.fit(chat_template)), None)


def prompt_opens_reasoning(prompt: str) -> bool | None:
    """Whether a rendered prompt ends inside reasoning or just after it; None if undetermined.

    Uses the prompt, not the template's source, because the result may depend on the request's arguments.
    """
    end = prompt[-64:].rstrip()
    if end.endswith(OPENING):
        return True
    return False if end.endswith(CLOSING) else None


def _row(kind: str, rows: Mapping[str, _Row], name: str) -> _Row:
    row = rows.get(name.strip().lower().replace("-", "_"))
    if row is None:
        raise ConfigError(
            f"unknown {kind} parser {name!r}; known: {', '.join(sorted(rows))}",
            key=f"{kind}_parser",
            remedy="use one of them, or omit it to detect the parser from the chat template",
        )
    return row
