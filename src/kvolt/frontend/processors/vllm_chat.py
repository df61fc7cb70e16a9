"""A chat in vLLM's words, and its prompt by vLLM's rendering: what vLLM's `HfRenderer` does for a text model."""

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
"""In the place of vLLM's ModelConfig, which is made from a model's folder: what rendering asks of it."""


_FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""How code fails that was given what it did not expect; pydantic's are ValueErrors."""


@contextmanager
def vllm_refusals() -> Iterator[None]:
    """What vLLM's code refuses is the client's: as in vLLM, where it is answered with 400."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (VLLMClientError, *_FAILURES) as error:
        reason = str(error)[:500] or type(error).__name__
        raise InvalidRequest(f"vLLM refuses the messages: {reason}", param="messages") from error


def chat_request(given: TemplateInput, may_call: bool = True) -> Any:
    """As vLLM would have read it from a client. `may_call`: whether the model may use its tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    effort = given.kwargs.get("reasoning_effort")
    fields: dict[str, Any] = {
        "messages": [_message(message) for message in given.messages],
        "add_generation_prompt": given.add_generation_prompt,
        "continue_final_message": given.continue_final_message,
        "chat_template_kwargs": given.kwargs,
    }
    if given.tools:
        fields |= {"tools": given.tools, "tool_choice": "auto" if may_call else "none"}
    if effort in _efforts(
        ChatCompletionRequest
    ):  # from it vLLM derives enable_thinking; others are the template's
        fields["reasoning_effort"] = effort
    return ChatCompletionRequest.model_validate(fields)


def render_chat(given: TemplateInput, template: str, tokenizer: Any) -> str:
    """InvalidRequest when vLLM or the template refuses the messages."""
    from vllm.renderers.chat_utils import has_non_text_content, parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    if has_non_text_content(given.messages):  # which vLLM would fetch, from wherever a client says
        raise InvalidRequest("this model takes text alone", param="messages")
    with vllm_refusals():
        request = chat_request(given)
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
    """As a client writes it: our templates are given calls with their arguments as objects, and "" for no content."""
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
    # vLLM refuses a call without an id, which our clients may leave out.
    return {"id": "", **call, "function": {**function, "arguments": arguments}}


def _efforts(request: Any) -> frozenset[Any]:
    literals = get_args(request.model_fields["reasoning_effort"].annotation)
    return frozenset(value for literal in literals for value in get_args(literal))
