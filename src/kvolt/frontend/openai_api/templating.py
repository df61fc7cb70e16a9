"""Input of the chat template for one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvolt.frontend.openai_api.messages import template_messages
from kvolt.frontend.openai_api.requests import TemplateRequest
from kvolt.frontend.openai_api.tools import Tool, template_tools


class TemplateInput(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: dict[str, Any]
    """Additional template variables."""
    is_large: bool = False
    """From a large body: rendering takes milliseconds and stays off the event loop."""


def build_template_input(
    request: TemplateRequest, tools: Sequence[Tool] | None = None, is_large: bool = False
) -> TemplateInput:
    """`tools`: tools for the template (`GenerationOptions.tools`); None: all tools of the request."""
    visible_tools = request.tools or () if tools is None else tools
    continues = bool(request.continue_final_message)
    add_generation_prompt = request.add_generation_prompt
    return TemplateInput(
        messages=template_messages(request.messages or ()),
        tools=template_tools(visible_tools) if visible_tools else None,
        add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continues,
        kwargs=template_kwargs(request),
        is_large=is_large,
    )


def template_kwargs(request: TemplateRequest) -> dict[str, Any]:
    """Template variables; the caller's own override those derived from OpenAI's fields."""
    kwargs: dict[str, Any] = {}
    effort = request.reasoning_effort
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs.update(_thinking_switch(False))
    thinking = request.thinking
    if thinking is not None:
        kwargs.update(
            _thinking_switch(thinking if isinstance(thinking, bool) else thinking.type != "disabled")
        )
    if request.documents is not None:
        kwargs["documents"] = request.documents
    caller_kwargs = request.chat_template_kwargs or request.chat_template_args
    if caller_kwargs:
        kwargs.update(caller_kwargs)
    return kwargs


def _thinking_switch(on: bool) -> dict[str, bool]:
    """Variables that switch thinking: of Qwen and GLM templates, and of DeepSeek and Granite templates."""
    return {"enable_thinking": on, "thinking": on}
