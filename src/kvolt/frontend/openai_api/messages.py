"""Chat messages as sent by clients, and their conversion for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.frontend.openai_api.structure import check_texts, nests_deeper


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """Media parts are recognized but not supported."""


class InputAudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    pass


class AudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="audio_url"):
    pass


class VideoPart(msgspec.Struct, frozen=True, tag_field="type", tag="video_url"):
    pass


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    pass


Part = TextPart | RefusalPart | ImagePart | InputAudioPart | AudioPart | VideoPart | FilePart
Content = str | Annotated[list[Part], Meta(max_length=4096)]


class CalledFunction(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    arguments: str = ""
    """JSON text; invalid text that a model produced earlier is accepted."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an earlier assistant message."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    name: str | None = None


class SystemMessage(_Message, frozen=True, kw_only=True, tag="system"):
    content: Content


class DeveloperMessage(_Message, frozen=True, kw_only=True, tag="developer"):
    content: Content


class UserMessage(_Message, frozen=True, kw_only=True, tag="user"):
    content: Content


class AssistantMessage(_Message, frozen=True, kw_only=True, tag="assistant"):
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=1024)] | None = None
    function_call: CalledFunction | None = None
    """Legacy form of a single tool call."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Alias of `reasoning_content`."""
    refusal: str | None = None


class ToolMessage(_Message, frozen=True, kw_only=True, tag="tool"):
    content: Content
    tool_call_id: Annotated[str, Meta(min_length=1)]


class FunctionMessage(_Message, frozen=True, kw_only=True, tag="function"):
    """Legacy form of a tool message."""

    content: Content | None
    name: Annotated[str, Meta(min_length=1)]


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage

_decode_json = msgspec.json.Decoder().decode


def check_messages(messages: Sequence[Message]) -> None:
    arguments: list[str] = []
    for index, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            _check_parts(content, f"messages[{index}].content")
        elif content is None and isinstance(message, AssistantMessage):
            _check_has_content(message, f"messages[{index}].content")
        if isinstance(message, AssistantMessage):
            arguments += [call.function.arguments for call in message.tool_calls or ()]
            if message.function_call is not None:
                arguments.append(message.function_call.arguments)
    check_texts(arguments, "tool call arguments have", "messages")


def _check_parts(parts: list[Part], param: str) -> None:
    for index, part in enumerate(parts):
        if not isinstance(part, TextPart | RefusalPart):
            kind = part.__struct_config__.tag
            raise Unsupported(
                f"{param}[{index}] is a part of type {kind}; only text is supported",
                feature="media",
                param=f"{param}[{index}]",
            )


def _check_has_content(message: AssistantMessage, param: str) -> None:
    other_contents = (message.tool_calls, message.function_call, message.refusal, message.reasoning_content)
    if not any(other_contents) and message.reasoning is None:
        raise InvalidRequest(f"{param} is required in an assistant message without tool calls", param=param)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as dicts for a chat template, which handles the developer role itself.

    Legacy function calls become tool calls: most templates silently drop unknown fields.
    """
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> dict[str, Any]:
    role = message.__struct_config__.tag
    if role == "function":
        role = "tool"
    content = message.content
    plain: dict[str, Any] = {
        "role": role,
        "content": content if isinstance(content, str) else _template_content(content),
    }
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, AssistantMessage):
        _add_calls(plain, message)
    elif isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _template_content(content: list[Part] | None) -> str | list[dict[str, str]]:
    if content is None:
        return ""  # templates print null as "None"
    parts = []
    for part in content:
        text = part.text if isinstance(part, TextPart) else getattr(part, "refusal", "")
        parts.append({"type": "text", "text": text})
    return parts


def _add_calls(plain: dict[str, Any], message: AssistantMessage) -> None:
    if not plain["content"] and message.refusal:
        plain["content"] = message.refusal
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    calls = message.tool_calls or []
    if message.function_call is not None:
        calls = [*calls, ToolCall(function=message.function_call)]
    if calls:
        plain["tool_calls"] = [_template_call(call) for call in calls]


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    plain: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        plain = {"id": call.id, **plain}
    return plain


def _arguments(text: str) -> Any:
    """Parse the arguments, because templates print them as JSON and would quote a string twice.

    Text that is not a JSON object is kept: a chat must not fail because a model once produced invalid JSON.
    """
    if not text:
        return {}
    try:
        value = _decode_json(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) and not nests_deeper(value) else text
