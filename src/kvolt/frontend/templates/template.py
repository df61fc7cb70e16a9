"""Chat templates in Hugging Face's dialect: a request's messages to the text of a prompt.

A template comes with a model and is run on a client's values. The sandbox keeps it from reaching Python. What it may
use is bounded: `render_inline` runs plain templates with a small allowance, on the event loop; `render` runs all of
the dialect and belongs into a process that can be lost (`template_dialect` has both, `template_process` the process).

Templates disagree about their input. What each one wants is read from its source, once: content as one
string or as parts, None for an empty answer with tool calls or "".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, cast

from jinja2 import Template

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api.templating import TemplateInput
from kvolt.frontend.templates.dialect import (
    FAILURES,
    INLINE_UNITS,
    STRFTIME_NOW,
    Beyond,
    RenderContext,
    compiled,
    to_json,
)

Message = Mapping[str, Any]

DEFAULT_MAX_CHARS = 16 * 1024 * 1024

_INLINE_S = 0.05
"""Longest rendering on the event loop."""

_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "strftime_now"}
)

_HERE = "\ue000continue here\ue000 "
"""Put at the end of the message to be continued. Ends in a space, so that a template that trims shows."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class ChatTemplate:
    """One model's template. Without the clock that `wall` is, `strftime_now` is undefined, and templates
    that use it fall back to a date of their own; with it, the date is UTC, the same in every frontend.
    With `monotonic`, a rendering on the loop is bounded in time, too."""

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        max_chars: int = DEFAULT_MAX_CHARS,
        wall: Callable[[], float] | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self.source = source
        self._compiled = compiled(source)
        self._wants = self._compiled.wants
        self._monotonic = monotonic
        self._max_chars = max_chars
        self._globals: dict[str, Any] = {"bos_token": bos_token, "eos_token": eos_token}
        if wall is not None:

            def strftime_now(form: str) -> str:
                return datetime.fromtimestamp(wall(), UTC).strftime(form)

            self._globals[STRFTIME_NOW] = strftime_now
        self.supports_tools = self._wants.tools
        """The template does something with tools; if not, they would be dropped without a word."""

    @property
    def is_plain(self) -> bool:
        """It can be rendered on the event loop."""
        return self._compiled.narrow is not None

    def render(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt. With `continue_final_message` it ends where the last message ends, whatever
        `add_generation_prompt` says. Raises InvalidRequest when the template refuses."""
        given = TemplateInput(
            cast("list[dict[str, Any]]", messages),
            cast("list[dict[str, Any]] | None", tools),
            add_generation_prompt,
            continue_final_message,
            kwargs,
        )
        return self.render_input(given)

    def render_input(self, given: TemplateInput) -> str:
        """`render` with the client's variables in a dict, whatever their names are."""
        return self._render(given, self._compiled.wide, inline=False)

    def render_inline(self, given: TemplateInput) -> str:
        """The same on the event loop. Beyond when it takes too much, or when the template is not plain."""
        if self._compiled.narrow is None:
            raise Beyond("the template is not plain")
        return self._render(given, self._compiled.narrow, inline=True)

    def _render(self, given: TemplateInput, template: Template, inline: bool) -> str:
        if not self.source.strip():
            raise InvalidRequest(
                "this model has no chat template: it takes completions only", param="messages"
            )
        if taken := _RESERVED & given.kwargs.keys():
            raise InvalidRequest(f"{min(taken)} is not the client's to set", param="chat_template_kwargs")
        if not given.messages:
            raise InvalidRequest("messages is empty: at least one is needed", param="messages")
        continues = given.continue_final_message
        variables = {
            **given.kwargs,
            **self._globals,
            "tools": given.tools or None,
            "add_generation_prompt": given.add_generation_prompt and not continues,
        }
        try:
            prepared = [self._prepare(message, index) for index, message in enumerate(given.messages)]
            if continues:
                prepared[-1] = {**prepared[-1], "content": _marked(prepared[-1]["content"])}
            context = cast("RenderContext", template.new_context({**variables, "messages": prepared}))
            if inline:
                context.limit(self._monotonic, _INLINE_S)
            text = self._generate(template, context)
        except FAILURES as error:
            reason = str(error)[:500] or type(error).__name__
            raise InvalidRequest(
                f"the chat template refused the messages: {reason}", param="messages"
            ) from error
        return _cut_at_mark(text) if continues else text

    def _generate(self, template: Template, context: RenderContext) -> str:
        # Template.generate() without its layers: they cost more than the rendering of a short chat.
        stream = template.root_render_func(context)
        pieces: list[str] = []
        room = self._max_chars
        while some := list(islice(stream, 256)):
            room -= sum(map(len, some))
            if context.inline and room < self._max_chars - INLINE_UNITS:
                raise Beyond("the prompt is long")
            if room < 0:
                raise InvalidRequest(
                    f"the prompt is longer than {self._max_chars} characters once in the chat template",
                    param="messages",
                )
            pieces += some
        return "".join(pieces)

    def _prepare(self, message: Message, index: int) -> Message:
        content = message.get("content")
        unknown_role = message.get("role") == "developer" and not self._wants.developer
        unlike = unknown_role or self._wants.only_parts or "tool_calls" in message or None in message.values()
        if type(content) is str and not unlike:
            return message
        # A client that sends back what its SDK gave it sends every unused field as None.
        prepared = {name: value for name, value in message.items() if value is not None}
        if unknown_role:
            prepared["role"] = "system"
        if calls := message.get("tool_calls"):
            prepared["tool_calls"] = [_with_object_arguments(call) for call in calls]
        else:
            prepared.pop("tool_calls", None)
        prepared["content"] = self._content(content, bool(calls), index)
        return prepared

    def _content(self, content: Any, has_calls: bool, index: int) -> Any:
        if isinstance(content, list):
            if self._wants.parts:
                return [_text_part(part) for part in content]
            texts = [_text_in(part) for part in content]
            if None in texts:
                raise InvalidRequest(
                    f"part {texts.index(None)} of messages[{index}] is no text, and this model takes text alone",
                    param="messages",
                )
            content = "\n".join(cast(list[str], texts))
        if not content and has_calls and self._wants.none:
            return None
        if content is None:
            content = ""
        if self._wants.only_parts and isinstance(content, str):
            return [{"type": "text", "text": content}]
        return content


def _text_in(part: Any) -> str | None:
    """The text of a part that is text."""
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
        part = part.get("text", part.get("refusal"))
    return part if isinstance(part, str) else None


def _text_part(part: Any) -> Any:
    text = _text_in(part)
    return part if text is None else {"type": "text", "text": text}


class _Arguments(dict[str, Any]):
    """A tool call's arguments: an object for templates that take it apart, text for those that join it."""

    __slots__ = ("_text",)

    def __init__(self, value: Mapping[str, Any], text: str | None) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return to_json(dict(self)) if self._text is None else self._text

    def __add__(self, other: Any) -> str:
        return cast(str, str(self) + other)

    def __radd__(self, other: Any) -> str:
        return cast(str, other + str(self))


def _with_object_arguments(call: Any) -> Any:
    """OpenAI's clients send arguments as text, templates expect an object. What is none stays as it is: the
    model wrote it, and the next turn must not fail over it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    value = function.get("arguments")
    text = value if isinstance(value, str) and value.strip() else None
    if isinstance(value, str):
        try:
            value = {} if text is None else json.loads(text)
        except (ValueError, RecursionError):
            return call
    if not isinstance(value, Mapping):
        return call
    return {**call, "function": {**function, "arguments": _Arguments(value, text)}}


def _marked(content: Any) -> Any:
    if isinstance(content, str):
        return content + _HERE
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _HERE}]
    raise InvalidRequest("the final message has no text to continue", param="continue_final_message")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_HERE.rstrip())
    if at < 0:
        raise InvalidRequest(
            "the chat template leaves out the final message's text, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_HERE, at) else text[:at].rstrip()
