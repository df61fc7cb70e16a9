"""Chat templates in Hugging Face's dialect: a request's messages to the text of a prompt.

A template is the model's own code, as trusted as its weights, run on a client's values. The sandbox keeps
it from reaching Python; what is bounded beside that (characters of output, steps of loops, repetition) is
what a client's values could drive.

Templates disagree about their input. What each one wants is read from its source, once: content as one
string or as parts, None for an empty answer with tool calls or "".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from typing import Any, cast

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvolt.core.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]

DEFAULT_MAX_CHARS = 16 * 1024 * 1024

_MAX_STEPS = 500_000
"""Of all loops of one rendering together: some templates go over all messages for each message."""

_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""A template fails in any way that expressions can; RuntimeError holds too deep a recursion."""

_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "strftime_now"}
)

_HERE = "\ue000continue here\ue000 "
"""Put at the end of the message to be continued. Ends in a space, so that a template that trims shows."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class ChatTemplate:
    """One model's template. Without the clock that `wall` is, `strftime_now` is undefined, and templates
    that use it fall back to a date of their own; with it, the date is UTC, the same in every frontend."""

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        max_chars: int = DEFAULT_MAX_CHARS,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self.source = source
        self._template, self._wants = _compiled(source)
        self._max_chars = max_chars
        self._globals: dict[str, Any] = {"bos_token": bos_token, "eos_token": eos_token}
        if wall is not None:
            self._globals["strftime_now"] = lambda form: datetime.fromtimestamp(wall(), UTC).strftime(form)
        self.supports_tools = self._wants.tools
        """The template does something with tools; if not, they would be dropped without a word."""

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
        if not self.source.strip():
            raise InvalidRequest(
                "this model has no chat template: it takes completions only", param="messages"
            )
        if taken := _RESERVED & kwargs.keys():
            raise InvalidRequest(f"{min(taken)} is not the client's to set", param="chat_template_kwargs")
        if not messages:
            raise InvalidRequest("messages is empty: at least one is needed", param="messages")
        variables = {
            **kwargs,
            **self._globals,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            _STEPS: [_MAX_STEPS],
        }
        try:
            prepared = [self._prepare(message, index) for index, message in enumerate(messages)]
            if continue_final_message:
                prepared[-1] = {**prepared[-1], "content": _marked(prepared[-1]["content"])}
            text = self._generate({**variables, "messages": prepared})
        except _FAILURES as error:
            reason = str(error)[:500] or type(error).__name__
            raise InvalidRequest(
                f"the chat template refused the messages: {reason}", param="messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _generate(self, variables: dict[str, Any]) -> str:
        # Template.generate() without its layers: they cost more than the rendering of a short chat.
        stream = self._template.root_render_func(self._template.new_context(variables))
        pieces: list[str] = []
        room = self._max_chars
        while some := list(islice(stream, 256)):
            room -= sum(map(len, some))
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
        return _to_json(dict(self)) if self._text is None else self._text

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


# What a template wants, read from its source.


@dataclass(frozen=True, slots=True)
class _Wants:
    tools: bool
    """It reads `tools`."""
    developer: bool
    """It knows the role that newer clients give to system messages; others drop or refuse it."""
    parts: bool
    """It walks through a content's parts."""
    only_parts: bool
    """And never asks whether content is a string."""
    none: bool
    """It asks whether content is none: that is how it knows a message of tool calls alone."""


def _wants(source: str, tree: nodes.Template) -> _Wants:
    names = _names_of_content(tree)
    parts = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    tests = list(tree.find_all(nodes.Test))
    return _Wants(
        tools=any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name)),
        developer="developer" in source,
        parts=parts,
        only_parts=parts
        and not any(test.name == "string" and _is_content(test.node, names) for test in tests),
        none=any(test.name == "none" and _is_content(test.node, set()) for test in tests),
    )


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Variables and macro parameters that a message's content is given to."""
    parameters = {macro.name: macro.args for macro in tree.find_all(nodes.Macro)}
    bound: list[tuple[nodes.Node, nodes.Node]] = [
        (assign.target, assign.node) for assign in tree.find_all(nodes.Assign)
    ]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name):
            bound += zip(parameters.get(call.node.name, ()), call.args, strict=False)
    names: set[str] = set()
    while new := {
        target.name
        for target, value in bound
        if isinstance(target, nodes.Name) and target.name not in names and _is_content(value, names)
    }:
        names |= new
    return names


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    match node:
        case nodes.Filter():
            return _is_content(node.node, names)
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False


# The dialect.

_STEPS = "_steps"
"""The variable that holds the steps left; clients cannot set it."""


def _take(context: Context, num_steps: int) -> None:
    left = context.parent[_STEPS]
    left[0] -= num_steps
    if left[0] < 0:
        raise TemplateError(f"its loops take more than {_MAX_STEPS} steps")


@pass_context
def _counted(context: Context, items: Any) -> Any:
    """A filter on the items of every loop."""
    try:
        _take(context, len(items))
    except TypeError:
        return _counted_singly(context, items)
    return items


def _counted_singly(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _take(context, 1)
        yield item


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model said, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sized, times = (left, right) if isinstance(left, Sized) else (right, left)
        if isinstance(sized, Sized) and isinstance(times, int) and len(sized) * times > DEFAULT_MAX_CHARS:
            raise TemplateError(f"it repeats something {times} times")
        if operator == "**" and (abs(left) > 2**64 or abs(right) > 64):
            raise TemplateError("it computes too large a power")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox's own, quicker for what templates do at every turn: `message.role`, `loop.last`,
        `ns.index`, `content.strip`. None of these can reach Python or change what it is taken from."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind in _HARMLESS and not attribute.startswith(("_", "format")) and hasattr(obj, attribute):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_HARMLESS = frozenset({LoopContext, Namespace, str})


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


_SANDBOX = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
_SANDBOX.filters |= {"tojson": _to_json, _counted.__name__: _counted}
_SANDBOX.globals["raise_exception"] = _raise_exception


@lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[Template, _Wants]:
    try:
        tree = _SANDBOX.parse(source)
        wants = _wants(source, tree)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _counted.__name__, [], [], None, None, lineno=loop.lineno)
        tree.set_environment(_SANDBOX)
        return _SANDBOX.from_string(tree), wants
    except (*_FAILURES, SyntaxError, MemoryError) as error:
        raise ConfigError(
            f"the chat template does not compile: {str(error)[:500] or type(error).__name__}",
            key="chat_template",
            remedy="give the model's own template, or one in Hugging Face's dialect",
        ) from error
