"""As much of vLLM's pre- and postprocessing as is used, with a format of its own: `(thought)`, `[name arguments]`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest

VERSION = "0.32.1"


class VLLMClientError(Exception):
    pass


class Manager:
    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def list_registered(self) -> list[str]:
        return self.names


@dataclass
class ChatParams:
    chat_template: str
    chat_template_kwargs: dict[str, Any]

    def with_defaults(self, defaults: dict[str, Any]) -> ChatParams:
        return ChatParams(self.chat_template, {**defaults, **self.chat_template_kwargs})

    def get_apply_chat_template_kwargs(self) -> dict[str, Any]:
        return {**self.chat_template_kwargs, "chat_template": self.chat_template}


class Tool(dict[str, Any]):
    def model_dump(self) -> dict[str, Any]:
        return {**self, "dumped": True}


class ChatCompletionRequest:
    model_fields = {  # noqa: RUF012
        "reasoning_effort": SimpleNamespace(annotation=Literal["none", "high"] | None),
        "skip_special_tokens": None,
    }
    skip_special_tokens = True

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.messages = fields["messages"]
        self.tools = [Tool(tool) for tool in fields["tools"]] if "tools" in fields else None

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> ChatCompletionRequest:
        for message in fields["messages"]:
            if message["role"] == "pirate":
                raise ValueError("no such role: pirate")
        return cls(fields)

    def build_chat_params(self, template: str, content_format: str) -> ChatParams:
        assert content_format == "auto"
        return ChatParams(template, dict(self.fields["chat_template_kwargs"]))


@dataclass
class DeltaMessage:
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] = field(default_factory=list)


class Parser:
    """Reads what it is given at once: it holds back nothing, and needs each marker by itself."""

    names: tuple[str | None, str | None] = (None, None)
    reasoning_parser_cls: Any = None
    always_adjust_request = False

    def __init__(self, tokenizer: Any, tools: Any = None, *, chat_template_kwargs: dict[str, Any]) -> None:
        self.kwargs = chat_template_kwargs
        self.seen: list[tuple[str, list[int], Any, bool]] = []

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        if self.kwargs.get("refuse"):
            raise VLLMClientError("not so")
        if self.names[0] is not None:
            request.skip_special_tokens = False
        return request

    def parse_delta(
        self, text: str, ids: list[int], request: Any, prompt: Any = None, *, finished: bool
    ) -> DeltaMessage | None:
        self.seen.append((text, ids, prompt, finished))
        if "crash" in text:
            raise KeyError("arguments")
        call = re.fullmatch(r"\[(\w*) ?(.*)\]", text)
        if call:
            function = SimpleNamespace(name=call[1] or None, arguments=call[2])
            return DeltaMessage(tool_calls=[SimpleNamespace(index=3, function=function)])
        thought = re.fullmatch(r"\((.*)\)", text)
        if thought:
            return DeltaMessage(reasoning=thought[1])
        return DeltaMessage(content="the end" if finished else text)


class ParserManager:
    @classmethod
    def get_parser(cls, *, tool_parser_name: Any, reasoning_parser_name: Any, **named: Any) -> Any:
        assert named["enable_auto_tools"]
        if reasoning_parser_name == "unfit":
            raise TypeError("--reasoning-parser unfit cannot be used with this tokenizer")
        if tool_parser_name is None and reasoning_parser_name is None:
            return None
        return type(
            "_Parser",
            (Parser,),
            {
                "names": (tool_parser_name, reasoning_parser_name),
                "reasoning_parser_cls": reasoning_parser_name,
            },
        )


def has_non_text_content(messages: list[dict[str, Any]]) -> bool:
    return "image_url" in str(messages)


def parse_chat_messages(messages: Any, model_config: Any, content_format: str) -> tuple[Any, None, None]:
    assert not model_config.is_multimodal_model
    return messages, None, None


def safe_apply_chat_template(model_config: Any, tokenizer: Any, conversation: Any, **kwargs: Any) -> str:
    if kwargs.pop("chat_template") == "refuses":
        raise VLLMClientError("no system role here")
    return f"{conversation} {sorted(kwargs.items())} {tokenizer.bos_token} {tokenizer.eos_token}"


def modules() -> dict[str, dict[str, Any]]:
    return {
        "vllm": {},
        "vllm.entrypoints": {},
        "vllm.entrypoints.generate": {},
        "vllm.entrypoints.generate.base": {},
        "vllm.entrypoints.generate.base.protocol": {"DeltaMessage": DeltaMessage},
        "vllm.entrypoints.openai": {},
        "vllm.entrypoints.openai.chat_completion": {},
        "vllm.entrypoints.openai.chat_completion.protocol": {"ChatCompletionRequest": ChatCompletionRequest},
        "vllm.exceptions": {"VLLMClientError": VLLMClientError},
        "vllm.parser": {},
        "vllm.parser.abstract_parser": {"Parser": Parser},
        "vllm.parser.parser_manager": {"ParserManager": ParserManager},
        "vllm.reasoning": {"ReasoningParserManager": Manager("deepseek_r1", "unfit")},
        "vllm.renderers": {},
        "vllm.renderers.chat_utils": {
            "has_non_text_content": has_non_text_content,
            "parse_chat_messages": parse_chat_messages,
        },
        "vllm.renderers.hf": {
            "resolve_chat_template_content_format": lambda *given, model_config: "string",
            "safe_apply_chat_template": safe_apply_chat_template,
        },
        "vllm.tokenizers": {},
        "vllm.tokenizers.hf": {"get_cached_tokenizer": lambda tokenizer: tokenizer},
        "vllm.tool_parsers": {"ToolParserManager": Manager("granite-20b-fc", "hermes")},
    }


def install(monkeypatch: pytest.MonkeyPatch, site: Path, without: str = "") -> None:
    """As an installed package, perhaps of a version that lacks `module:name`."""
    missing_module, _, missing = without.partition(":")
    for name, content in modules().items():
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.__dict__.update(
            {key: value for key, value in content.items() if (name, key) != (missing_module, missing)}
        )
        monkeypatch.setitem(sys.modules, name, module)
    info = site / f"vllm-{VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
