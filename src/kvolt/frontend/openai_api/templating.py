"""What a chat template is given for one request."""

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
    """Whatever else the template may know by name."""
    is_large: bool = False
    """From a large body: rendering it takes milliseconds and stays off the event loop."""


def template_input(
    request: TemplateRequest, tools: Sequence[Tool] | None = None, is_large: bool = False
) -> TemplateInput:
    """`tools`: those the model may see (`GenerationOptions.tools`); None for all of the request's."""
    shown = request.tools or () if tools is None else tools
    continues = bool(request.continue_final_message)
    begins = request.add_generation_prompt
    return TemplateInput(
        messages=template_messages(request.messages or ()),
        tools=template_tools(shown) if shown else None,
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        kwargs=template_kwargs(request),
        is_large=is_large,
    )


def template_kwargs(request: TemplateRequest) -> dict[str, Any]:
    """The caller's own words last: they beat what we derive from OpenAI's fields."""
    kwargs: dict[str, Any] = {}
    effort = request.reasoning_effort
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs.update(_switch(False))
    thinking = request.thinking
    if thinking is not None:
        kwargs.update(_switch(thinking if isinstance(thinking, bool) else thinking.type != "disabled"))
    if request.documents is not None:
        kwargs["documents"] = request.documents
    given = request.chat_template_kwargs or request.chat_template_args
    if given:
        kwargs.update(given)
    return kwargs


def _switch(on: bool) -> dict[str, bool]:
    """Thinking, by the names that templates have for it: Qwen's and GLM's, DeepSeek's and Granite's."""
    return {"enable_thinking": on, "thinking": on}
