"""Parsers by name, and by what a chat template says."""

from __future__ import annotations

import pytest

from kvolt.core.errors import ConfigError
from kvolt.frontend.parsers.calls import HermesParser, Llama3JsonParser
from kvolt.frontend.parsers.port import Content, Reasoning
from kvolt.frontend.parsers.registry import (
    detect_reasoning_parser,
    detect_tool_parser,
    prompt_opens_reasoning,
    reasoning_parser,
    tool_parser,
)

QWEN25 = (
    '{{- "within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>" }}'
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN3 = QWEN25.replace(
    "{%- endif %}",
    "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
)
QWEN3_THINKING = QWEN25.replace("assistant\\n'", "assistant\\n<think>\\n'")
QWEN3_CODER = "<tool_call>\n<function=example>\n<parameter=a>"
LLAMA31 = "{{- 'Environment: ipython\\n' }}{{- '<|python_tag|>' + tool_call.name }}"
LLAMA32 = "{{- 'Environment: ipython\\n' }}"
DEEPSEEK_R1 = (
    "{% set content = content.split('</think>')[-1] %}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"  # noqa: RUF001
)
PLAIN = "{{ messages[0].content }}{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.mark.parametrize("name", ["hermes", "qwen25", "Hermes", " QWEN25 "])
def test_hermes_by_name(name: str) -> None:
    assert type(tool_parser(name)) is HermesParser


@pytest.mark.parametrize("name", ["llama3_json", "llama3-json"])
def test_llama_by_name(name: str) -> None:
    assert type(tool_parser(name)) is Llama3JsonParser


@pytest.mark.parametrize("name", ["deepseek_r1", "deepseek-r1"])
def test_deepseek_starts_inside_if_nothing_else_is_said(name: str) -> None:
    assert reasoning_parser(name).feed("Hm.") == [Reasoning("Hm.")]
    assert reasoning_parser(name, starts_inside=False).feed("Yes.") == [Content("Yes.")]


def test_qwen_starts_outside_if_nothing_else_is_said() -> None:
    assert reasoning_parser("qwen3").feed("Yes.") == [Content("Yes.")]
    assert reasoning_parser("qwen3", starts_inside=True).feed("Hm.") == [Reasoning("Hm.")]


def test_each_parser_is_new() -> None:
    assert tool_parser("hermes") is not tool_parser("hermes")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'harmony'; known: hermes, llama3_json, qwen25") as tool:
        tool_parser("harmony")
    assert tool.value.fields["key"] == "tool_parser"
    with pytest.raises(ConfigError, match=r"'kimi'; known: deepseek_r1, qwen3") as reasoning:
        reasoning_parser("kimi")
    assert reasoning.value.fields["key"] == "reasoning_parser"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN25, "hermes", None),
        (QWEN3, "hermes", "qwen3"),
        (QWEN3_THINKING, "hermes", "qwen3"),
        (QWEN3_CODER, None, None),
        (LLAMA31, "llama3_json", None),
        (LLAMA32, "llama3_json", None),
        (DEEPSEEK_R1, None, "deepseek_r1"),
        (PLAIN, None, None),
        ("", None, None),
    ],
)
def test_detection(template: str, tools: str | None, reasoning: str | None) -> None:
    assert detect_tool_parser(template) == tools
    assert detect_reasoning_parser(template) == reasoning


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>", True),  # noqa: RUF001
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", None),
        ("what does <think>\n mean?<|im_end|>", None),
    ],
)
def test_a_prompt_that_opens_reasoning(prompt: str, opens: bool | None) -> None:
    assert prompt_opens_reasoning(prompt) is opens
