"""The names used from vLLM's pre- and postprocessing, and a check at start that they exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kvolt.core.errors import ConfigError
from kvolt.engines.external.requirements import check_requirement, members
from kvolt.engines.vllm import symbols
from kvolt.frontend.tokenization.preprocess import NO_PARSER, ParserNames

_CHAT = "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"
_DELTA = "vllm.entrypoints.generate.base.protocol:DeltaMessage"
_PARSER = "vllm.parser.abstract_parser:Parser"

REQUIREMENT = replace(
    symbols.REQUIREMENT,
    user="the processor 'vllm'",
    key="processor",
    symbols=(
        f"{_CHAT}.build_chat_params",
        f"{_CHAT}.skip_special_tokens",
        *members(_DELTA, "content reasoning tool_calls"),
        "vllm.exceptions:VLLMClientError",
        "vllm.parser.parser_manager:ParserManager.get_parser",
        *members(_PARSER, "adjust_request always_adjust_request parse_delta reasoning_parser_cls"),
        "vllm.reasoning:ReasoningParserManager.list_registered",
        "vllm.renderers.chat_utils:has_non_text_content",
        "vllm.renderers.chat_utils:parse_chat_messages",
        "vllm.renderers.hf:resolve_chat_template_content_format",
        "vllm.renderers.hf:safe_apply_chat_template",
        "vllm.tokenizers.hf:get_cached_tokenizer",
        "vllm.tool_parsers:ToolParserManager.list_registered",
    ),
    remedy="pip install 'kvolt[vllm]' in the frontend's environment, or set frontend.processor=card",
)


def check_vllm(names: ParserNames) -> None:
    """Raise ConfigError if vLLM is missing, has an unsupported version, or lacks a parser."""
    symbols.set_log_level()
    check_requirement(REQUIREMENT)
    known_names(names)


def known_names(names: ParserNames) -> ParserNames:
    """Parser names as spelled by vLLM; None: no parser. Raises ConfigError with the names that vLLM has."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    return ParserNames(
        _known("tool", names.tools, ToolParserManager),
        _known("reasoning", names.reasoning, ReasoningParserManager),
    )


def _known(kind: str, name: str | None, manager: Any) -> str | None:
    if name is None or name == NO_PARSER:
        return None
    registered: Sequence[str] = manager.list_registered()
    for each in registered:
        if _plain(each) == _plain(name):
            return each
    raise ConfigError(
        f"vLLM has no {kind} parser {name!r}; known: {', '.join(registered)}",
        key=f"{kind}_parser",
        remedy=f"use one of them, or {NO_PARSER}",
    )


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")
