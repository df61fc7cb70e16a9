"""Conversion of a chat to vLLM's request, and its rendering by vLLM, as vLLM's `HfRenderer` does for text models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, get_args

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api.templating import TemplateInput

_TEXT_MODEL = SimpleNamespace(
    allowed_local_media_path="",
    allowed_media_domains=None,
    code_revision=None,
    enable_prompt_embeds=False,
    hf_config=SimpleNamespace(model_type=""),
    is_multimodal_model=False,
    model="",
    multimodal_config=None,
    revision=None,
    tokenizer="",
    tokenizer_revision=None,
    trust_remote_code=False,
)
"""Replaces vLLM's ModelConfig, which requires a model directory: the attributes used by rendering."""


_FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions of code that gets unexpected input; pydantic's are ValueErrors."""


@contextmanager
def vllm_refusals() -> Iterator[None]:
    """Convert errors of vLLM's code to InvalidRequest, as vLLM answers them with 400."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (VLLMClientError, *_FAILURES) as error:
        reason = str(error)[:500] or type(error).__name__
        raise InvalidRequest(f"vLLM rejected the messages: {reason}", param="messages") from error


def chat_request(template_input: TemplateInput, may_call: bool = True) -> Any:
    """Build vLLM's request. `may_call`: whether the model may use its tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    effort = template_input.kwargs.get("reasoning_effort")
    fields: dict[str, Any] = {
        "messages": [_message(message) for message in template_input.messages],
        "add_generation_prompt": template_input.add_generation_prompt,
        "continue_final_message": template_input.continue_final_message,
        "chat_template_kwargs": template_input.kwargs,
    }
    if template_input.tools:
        fields |= {"tools": template_input.tools, "tool_choice": "auto" if may_call else "none"}
    if effort in _efforts(
        ChatCompletionRequest
    ):  # vLLM derives enable_thinking from these; other values are only passed to the template
        fields["reasoning_effort"] = effort
    return ChatCompletionRequest.model_validate(fields)


def render_chat(template_input: TemplateInput, template: str, tokenizer: Any) -> str:
    """Render the prompt; raises InvalidRequest if vLLM or the template rejects the messages."""
    from vllm.renderers.chat_utils import has_non_text_content, parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    if has_non_text_content(template_input.messages):  # vLLM would fetch media from any URL
        raise InvalidRequest("this model supports text only", param="messages")
    with vllm_refusals():
        request = chat_request(template_input)
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
        params = request.build_chat_params(template, "auto").with_defaults(
            {"tools": tools, "tokenize": False}
        )
        content_format = resolve_chat_template_content_format(
            template, tools, "auto", tokenizer, model_config=_TEXT_MODEL
        )
        conversation, _, _ = parse_chat_messages(request.messages, _TEXT_MODEL, content_format)
        text: str = safe_apply_chat_template(
            _TEXT_MODEL, tokenizer, conversation, **params.get_apply_chat_template_kwargs()
        )
        return text


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Message in the client's format: the template input has call arguments as objects, and "" for no content."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {
        **message,
        "content": message.get("content") or None,
        "tool_calls": [_call(call) for call in calls],
    }


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    # vLLM requires an id for a call, which clients may omit.
    return {"id": "", **call, "function": {**function, "arguments": arguments}}


def _efforts(request: Any) -> frozenset[Any]:
    literals = get_args(request.model_fields["reasoning_effort"].annotation)
    return frozenset(value for literal in literals for value in get_args(literal))
