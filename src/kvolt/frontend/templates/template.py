"""Chat templates: renders the messages of a request as the text of a prompt.

A template comes with a model and runs on a client's values. The sandbox prevents access to Python. Resources are
limited: `render_inline` renders plain templates with a small allowance on the event loop; `render` supports the full
dialect and must run in a separate process (`dialect` has both environments, `process` the process).

Templates expect different input. `traits` determines it once from the source: content as a string or as parts, None or
"" for an empty message with tool calls.
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
"""Time limit of a rendering on the event loop."""

_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "strftime_now"}
)

_CONTINUE_MARK = "\ue000continue here\ue000 "
"""Appended to the message to be continued. Ends with a space, so that templates that strip text are recognized."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class ChatTemplate:
    """A model's chat template.

    Without `wall`, `strftime_now` is undefined, and templates that use it fall back to a date of their own; with it,
    the date is UTC, the same in every frontend. `monotonic` limits the time of renderings on the event loop.
    """

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
        self._traits = self._compiled.traits
        self._monotonic = monotonic
        self._max_chars = max_chars
        self._globals: dict[str, Any] = {"bos_token": bos_token, "eos_token": eos_token}
        if wall is not None:

            def strftime_now(form: str) -> str:
                return datetime.fromtimestamp(wall(), UTC).strftime(form)

            self._globals[STRFTIME_NOW] = strftime_now
        self.supports_tools = self._traits.tools
        """Whether the template uses tools; otherwise they would be dropped silently."""

    @property
    def is_plain(self) -> bool:
        """Whether it can be rendered on the event loop."""
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
        """Render the prompt. With `continue_final_message` it ends where the last message ends, regardless of
        `add_generation_prompt`. Raises InvalidRequest if the template rejects the messages."""
        template_input = TemplateInput(
            cast("list[dict[str, Any]]", messages),
            cast("list[dict[str, Any]] | None", tools),
            add_generation_prompt,
            continue_final_message,
            kwargs,
        )
        return self.render_input(template_input)

    def render_input(self, template_input: TemplateInput) -> str:
        """Like `render`, with the client's variables in a dict, whatever their names."""
        return self._render(template_input, self._compiled.wide, inline=False)

    def render_inline(self, template_input: TemplateInput) -> str:
        """Like `render_input`, on the event loop. Raises Beyond if it exceeds the allowance or the template is not
        plain."""
        if self._compiled.narrow is None:
            raise Beyond("the template is not plain")
        return self._render(template_input, self._compiled.narrow, inline=True)

    def _render(self, template_input: TemplateInput, template: Template, inline: bool) -> str:
        if not self.source.strip():
            raise InvalidRequest("this model has no chat template: use completions instead", param="messages")
        if reserved := _RESERVED & template_input.kwargs.keys():
            raise InvalidRequest(f"{min(reserved)} is reserved", param="chat_template_kwargs")
        if not template_input.messages:
            raise InvalidRequest("messages is empty: at least one is needed", param="messages")
        continues = template_input.continue_final_message
        variables = {
            **template_input.kwargs,
            **self._globals,
            "tools": template_input.tools or None,
            "add_generation_prompt": template_input.add_generation_prompt and not continues,
        }
        try:
            prepared = [
                self._prepare(message, index) for index, message in enumerate(template_input.messages)
            ]
            if continues:
                prepared[-1] = {**prepared[-1], "content": _marked(prepared[-1]["content"])}
            context = cast("RenderContext", template.new_context({**variables, "messages": prepared}))
            if inline:
                context.limit(self._monotonic, _INLINE_S)
            text = self._generate(template, context)
        except FAILURES as error:
            reason = str(error)[:500] or type(error).__name__
            raise InvalidRequest(
                f"the chat template rejected the messages: {reason}", param="messages"
            ) from error
        return _cut_at_mark(text) if continues else text

    def _generate(self, template: Template, context: RenderContext) -> str:
        # Template.generate() without its wrappers, which cost more than rendering a short chat.
        stream = template.root_render_func(context)
        pieces: list[str] = []
        num_left = self._max_chars
        while some := list(islice(stream, 256)):
            num_left -= sum(map(len, some))
            if context.inline and num_left < self._max_chars - INLINE_UNITS:
                raise Beyond("the prompt is long")
            if num_left < 0:
                raise InvalidRequest(
                    f"the rendered prompt is longer than {self._max_chars} characters",
                    param="messages",
                )
            pieces += some
        return "".join(pieces)

    def _prepare(self, message: Message, index: int) -> Message:
        content = message.get("content")
        unknown_role = message.get("role") == "developer" and not self._traits.developer
        unlike = (
            unknown_role or self._traits.only_parts or "tool_calls" in message or None in message.values()
        )
        if type(content) is str and not unlike:
            return message
        # A client that returns objects of its SDK sends every unused field as None.
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
            if self._traits.parts:
                return [_text_part(part) for part in content]
            texts = [_text_in(part) for part in content]
            if None in texts:
                raise InvalidRequest(
                    f"part {texts.index(None)} of messages[{index}] is not text; this model supports text only",
                    param="messages",
                )
            content = "\n".join(cast(list[str], texts))
        if not content and has_calls and self._traits.none:
            return None
        if content is None:
            content = ""
        if self._traits.only_parts and isinstance(content, str):
            return [{"type": "text", "text": content}]
        return content


def _text_in(part: Any) -> str | None:
    """Text of a text part, else None."""
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
        part = part.get("text", part.get("refusal"))
    return part if isinstance(part, str) else None


def _text_part(part: Any) -> Any:
    text = _text_in(part)
    return part if text is None else {"type": "text", "text": text}


class _Arguments(dict[str, Any]):
    """Arguments of a tool call: an object for templates that read it, text for those that concatenate it."""

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
    """Tool call with its arguments as an object, as templates expect; OpenAI's clients send text. Text that is not an
    object is kept: the model produced it, and the next turn must not fail because of it."""
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
        return content + _CONTINUE_MARK
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}]
    raise InvalidRequest("the final message has no text to continue", param="continue_final_message")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_MARK.rstrip())
    if at < 0:
        raise InvalidRequest(
            "the chat template omits the final message's text, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()
