"""Chat templates: what a conversation looks like to each family of models, and what a template may not do.

The templates beside this file are written for these tests, each to the prompt format its name says and with
the constructs that such templates use.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.frontend.templates import dialect as template_dialect
from kvolt.frontend.templates.template import ChatTemplate

TEMPLATES = Path(__file__).parent / "jinja"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
MARCH_1_2025 = 1740787200.0

SYSTEM = {"role": "system", "content": "Be <brief> & 'kind'."}
QUESTION = {"role": "user", "content": "Weather in Köln?"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny."}
AGAIN = {"role": "user", "content": "And now?"}
ARGUMENTS = '{"city": "Köln",  "days": 2}'
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": '{"t": 20}'}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOL_JSON = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'


@cache
def template(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return ChatTemplate(source, "<s>", "</s>", wall=lambda: MARCH_1_2025)


def render(source: str, *messages: dict[str, Any], **kwargs: Any) -> str:
    return ChatTemplate(source).render(messages or [QUESTION], **kwargs)


# Families.


def test_chatml() -> None:
    messages = [SYSTEM, QUESTION, {"role": "assistant", "content": "Sunny."}, AGAIN]
    assert template("chatml").render(messages) == (
        "<|im_start|>system\nBe <brief> & 'kind'.<|im_end|>\n"
        "<|im_start|>user\nWeather in Köln?<|im_end|>\n"
        "<|im_start|>assistant\nSunny.<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template("chatml").render([QUESTION], add_generation_prompt=False) == (
        "<|im_start|>user\nWeather in Köln?<|im_end|>\n"
    )
    assert not template("chatml").supports_tools


QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    f"<tools>\n{TOOL_JSON}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
QWEN_CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call><|im_end|>\n'
)
QWEN_RESULT = '<|im_start|>user\n<tool_response>\n{"t": 20}\n</tool_response>'


def test_qwen2_5() -> None:
    qwen = template("qwen2_5")
    assert qwen.supports_tools
    assert qwen.render([QUESTION]) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWeather in Köln?<|im_end|>\n<|im_start|>assistant\n"
    )
    second = {**RESULT, "content": "dry"}
    assert qwen.render([SYSTEM, QUESTION, CALL, RESULT, second], tools=[TOOL]) == (
        "<|im_start|>system\nBe <brief> & 'kind'.\n\n"
        + QWEN_TOOLS
        + "<|im_start|>user\nWeather in Köln?<|im_end|>\n"
        "<|im_start|>assistant\n"
        + QWEN_CALL
        + QWEN_RESULT
        + "\n<tool_response>\ndry\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_qwen3_forgets_thoughts_behind_an_older_question() -> None:
    qwen = template("qwen3")
    question = "<|im_start|>user\nWeather in Köln?<|im_end|>\n"
    assert qwen.render([QUESTION, ANSWER, AGAIN]) == (
        question + "<|im_start|>assistant\nSunny.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    thinking = {**CALL, "reasoning_content": "must look"}
    assert qwen.render([QUESTION, thinking, RESULT], tools=[TOOL], enable_thinking=False) == (
        "<|im_start|>system\n" + QWEN_TOOLS + question + "<|im_start|>assistant\n<think>\nmust look\n</think>\n\n"
        + QWEN_CALL + QWEN_RESULT + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )  # fmt: skip


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}])
def test_qwen3_thinks_unless_disabled(kwargs: dict[str, Any]) -> None:
    assert template("qwen3").render([QUESTION], **kwargs).endswith("<|im_start|>assistant\n")
    silent = template("qwen3").render([QUESTION], enable_thinking=False)
    assert silent.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


LLAMA_FORMAT = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n" + json.dumps(TOOL, indent=4) + "\n\n"
)


def test_llama3_puts_tools_into_the_first_question() -> None:
    assert template("llama3").render([SYSTEM, QUESTION, CALL, RESULT], tools=[TOOL]) == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 01 Mar 2025\n\nBe <brief> & 'kind'.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n"
        "Given the following functions, please respond with a JSON for a function call with its proper arguments "
        "that best answers the given prompt.\n\n" + LLAMA_FORMAT + "Weather in Köln?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"{\\"t\\": 20}"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_llama3_options() -> None:
    llama = template("llama3")
    assert llama.render([QUESTION], tools=[TOOL], tools_in_user_message=False, date_string="today") == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
        "Cutting Knowledge Date: December 2023\nToday Date: today\n\n"
        "You have access to the following functions. To call a function, please respond with JSON for a function "
        "call." + LLAMA_FORMAT + "<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWeather in Köln?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert "Environment" not in llama.render([QUESTION], tools=[])
    assert "26 Jul 2024" in ChatTemplate(llama.source).render([QUESTION])
    two = {**CALL, "tool_calls": CALL["tool_calls"] * 2}
    with pytest.raises(InvalidRequest, match="only supports single tool-calls"):
        llama.render([QUESTION, two])


def test_mistral() -> None:
    assert template("mistral").render([SYSTEM, QUESTION, ANSWER, AGAIN]) == (
        "<s>[INST]Weather in Köln?[/INST]<think>\nhm\n</think>\n\nSunny.</s>"
        "[INST]Be <brief> & 'kind'.\n\nAnd now?[/INST]"
    )
    assert template("mistral").render([QUESTION, CALL, RESULT], tools=[TOOL]) == (
        f"<s>[AVAILABLE_TOOLS][{TOOL_JSON}][/AVAILABLE_TOOLS][INST]Weather in Köln?[/INST]"
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "days": 2}, "id": "call00001"}]</s>'
        '[TOOL_RESULTS]{"content": {"t": 20}, "call_id": "call00001"}[/TOOL_RESULTS]'
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([QUESTION, AGAIN], "roles must alternate"),
        ([ANSWER], "must alternate"),
        ([QUESTION, {**SYSTEM, "role": "critic"}], "Only user and assistant"),
    ],
)
def test_mistral_refuses_what_it_was_not_trained_on(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        template("mistral").render(messages)
    assert refusal.value.fields == {"param": "messages"}


TO_ASCII = str.maketrans("\uff5c\u2581", "|_")
"""DeepSeek's markers are made of characters that only look like these."""


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.loads(ARGUMENTS)])
def test_deepseek_r1_gets_none_and_text(content: str | None, arguments: Any) -> None:
    """It knows a message of calls by content that is none, and joins arguments as text."""
    call = copy.deepcopy(CALL)
    call["content"] = content
    call["tool_calls"][0]["function"]["arguments"] = arguments
    text = ARGUMENTS if isinstance(arguments, str) else '{"city": "Köln", "days": 2}'
    got = template("deepseek_r1").render([SYSTEM, QUESTION, call, RESULT, ANSWER, AGAIN, ANSWER, AGAIN])
    assert got.translate(TO_ASCII) == (
        "<s>Be <brief> & 'kind'.<|User|>Weather in Köln?"
        "<|Assistant|><|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather\n```json\n"
        + text
        + "\n```<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>"
        '<|tool_outputs_begin|><|tool_output_begin|>{"t": 20}<|tool_output_end|>'
        "<|tool_outputs_end|><think>\nhm\n</think>\n\nSunny.<|end_of_sentence|>"
        "<|User|>And now?<|Assistant|>\n\nSunny.<|end_of_sentence|><|User|>And now?<|Assistant|><think>\n"
    )


def test_deepseek_r1_answers_without_calls_stay_text() -> None:
    empty = {"role": "assistant", "content": None}
    assert template("deepseek_r1").render([QUESTION, empty, AGAIN]).translate(TO_ASCII) == (
        "<s><|User|>Weather in Köln?<|Assistant|><|end_of_sentence|><|User|>And now?<|Assistant|><think>\n"
    )


# Content.

PARTS = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]


def test_parts_become_one_string_for_templates_that_join_content() -> None:
    for name in FAMILIES:
        if name != "parts":
            assert "one\ntwo" in template(name).render([{"role": "user", "content": PARTS}]), name


def test_parts_stay_parts_for_templates_that_walk_through_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    said = {"role": "user", "content": [PARTS[0], image, PARTS[1]]}
    assert template("parts").render(
        [said, {"role": "assistant", "content": "a"}, {"role": "user", "content": None}]
    ) == (
        "<|im_start|>user\none<|image_pad|>two<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [
        ("{{ messages[0].content }}", "x", "a\nb"),
        ("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}", "[x]", "[a][b]"),
        (
            "{% for m in messages %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endfor %}",
            "[x]",
            "[a][b]",
        ),
        ("{% set c = messages[0].content %}{% for p in c %}[{{ p.text }}]{% endfor %}", "[x]", "[a][b]"),
        ("{% for p in messages[0].content | list %}[{{ p.text }}]{% endfor %}", "[x]", "[a][b]"),
        (
            "{% set m = messages[0] %}{% if m.content is string %}{{ m.content }}!"
            "{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}",
            "x!",
            "[a][b]",
        ),
        (
            "{% macro show(c) %}{% if c is string %}{{ c }}!{% else %}{% for p in c %}[{{ p.text }}]{% endfor %}"
            "{% endif %}{% endmacro %}{{ show(messages[0].content) }}",
            "x!",
            "[a][b]",
        ),
        ("{% for line in messages[0].content.split('\\n') %}[{{ line }}]{% endfor %}", "[x]", "[a][b]"),
        ("{% for t in messages[0].tool_calls %}{% endfor %}{{ messages[0].content }}", "x", "a\nb"),
        ("{{ messages[0].content if messages[0].content is iterable }}", "x", "a\nb"),
    ],
)
def test_a_template_gets_content_as_it_takes_it(source: str, text: str, parts: str) -> None:
    assert render(source, {"role": "user", "content": "x"}) == text
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(source, {"role": "user", "content": two}) == parts


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "text"}, {"type": []}, 7, None, {}]
)
def test_a_part_that_is_no_text_is_not_dropped(part: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        template("chatml").render([QUESTION, {"role": "user", "content": [*PARTS, part]}])
    assert refusal.value.fields == {"param": "messages"}


def test_refusals_and_bare_strings_are_text() -> None:
    content = ["a", {"type": "refusal", "refusal": "no"}]
    assert render("{{ messages[0].content }}", {"role": "assistant", "content": content}) == "a\nno"


def test_no_content_is_an_empty_string() -> None:
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        assert render("[{{ messages[0].content + '' }}]", message) == "[]"


def test_unknown_keys_are_passed_on_and_empty_ones_are_not() -> None:
    source = "{{ messages[0].mood }} {{ messages[0].name is defined }} {{ 'tool_calls' in messages[0] }}"
    message = {"role": "user", "content": "x", "mood": "good", "name": None, "tool_calls": None}
    assert render(source, message) == "good False False"
    assert render(source, {**message, "tool_calls": []}) == "good False False"
    assert message["name"] is None  # the caller's own is left alone


def test_the_developer_role_is_the_system_role_where_it_is_unknown() -> None:
    developer = {"role": "developer", "content": "x"}
    assert render("{{ messages[0].role }}", developer) == "system"
    assert render("{{ messages[0].role }}{% if false %}developer{% endif %}", developer) == "developer"


# Tool calls.


def shown(source: str, arguments: Any) -> str:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return render("{% set a = messages[0].tool_calls[0].function.arguments %}" + source, message)


@pytest.mark.parametrize("given", ['{"a":1,"text":"é"}', {"a": 1, "text": "é"}])
def test_arguments_are_an_object_and_can_be_joined(given: Any) -> None:
    assert shown("{{ a | tojson }}", given) == '{"a": 1, "text": "é"}'
    assert shown("{{ a.a }} {{ a['text'] }} {{ a.text }}", given) == "1 é é"
    assert shown("{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}", given) == "a=1;text=é;"
    assert shown("{% for k, v in a | items %}{{ k }}={{ v }};{% endfor %}", given) == "a=1;text=é;"
    assert shown("{{ a is mapping }} {{ a is string }}", given) == "True False"
    text = given if isinstance(given, str) else '{"a": 1, "text": "é"}'
    assert (
        shown("{{ 'x' + a + 'y' }} {{ 'x' ~ a }} {{ a }} {{ a + 'y' }}", given)
        == f"x{text}y x{text} {text} {text}y"
    )


@pytest.mark.parametrize("given", ["{", "[1]", "7", "null", "nonsense", '{"a":' * 5000, "9" * 5000])
def test_arguments_that_are_no_object_stay_what_the_model_wrote(given: str) -> None:
    assert shown("{{ a }}", given) == given


@pytest.mark.parametrize("given", ["", "  ", {}])
def test_no_arguments_are_an_empty_object(given: Any) -> None:
    assert shown("{{ a | tojson }} {{ a }}", given) == "{} {}"


@pytest.mark.parametrize(
    "call", [7, None, {}, {"function": 7}, {"function": {}}, {"function": {"arguments": None}}]
)
def test_calls_of_any_shape_reach_the_template(call: Any) -> None:
    message = {"role": "assistant", "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls | tojson }}", message) == json.dumps([call])


@pytest.mark.parametrize(
    ("source", "supported"),
    [
        ("{% if tools %}{% endif %}", True),
        ("{% set tools = none %}", False),
        ("{{ messages[0].tools }}", False),
        ("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", True),
    ],
)
def test_whether_tools_would_be_dropped_is_known(source: str, supported: bool) -> None:
    assert ChatTemplate(source).supports_tools is supported


# The dialect.


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ x | tojson }}", x={"é": "<&'>", "a": 1}) == '{"é": "<&\'>", "a": 1}'
    options = "ensure_ascii=true, indent=1, separators=(',', ':'), sort_keys=true"
    assert render(f"{{{{ x | tojson({options}) }}}}", x={"é": 1, "a": 2}) == '{\n "a":2,\n "\\u00e9":1\n}'


def test_loops_can_be_left_and_cut_short() -> None:
    skip = "{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}"
    assert render("{% for i in range(9) %}" + skip + "{{ i }}{% endfor %}") == "013"


def test_loop_variables_survive_the_counting_of_steps() -> None:
    body = "{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
    assert render("{% for m in messages | map('length') %}" + body, QUESTION, AGAIN) == "1/2False 2/2True "
    source = "{% for a, b in [(1, 2), (3, 4)] if a > 1 %}{{ a }}{{ b }}{% else %}none{% endfor %}"
    assert render(source) == "34"
    assert render("{% for x in nothing %}{% else %}none{% endfor %}") == "none"


def test_a_generation_block_is_its_body() -> None:
    source = "a{% generation %}{{ messages[0].role }}{% set x = 1 %}{% endgeneration %}{{ x is defined }}"
    assert render(source) == "auserFalse"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("  {% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb"


def test_the_date_comes_from_the_clock_given() -> None:
    source = "{{ strftime_now('%Y-%m-%d') if strftime_now is defined else 'never' }}"
    assert ChatTemplate(source, wall=lambda: MARCH_1_2025).render([QUESTION]) == "2025-03-01"
    assert ChatTemplate(source).render([QUESTION]) == "never"


def test_kwargs_reach_the_template_and_cannot_stand_in_for_its_own() -> None:
    assert render("{{ depth }}{{ documents is defined }}", depth=3) == "3False"
    for name in ("messages", "bos_token", "strftime_now"):
        with pytest.raises(InvalidRequest, match=name) as refusal:
            ChatTemplate("x").render([QUESTION], **{name: 1})
        assert refusal.value.fields == {"param": "chat_template_kwargs"}


# Continuing the final message.

START = {"role": "assistant", "content": "It is "}


def test_a_final_message_is_left_open() -> None:
    assert template("chatml").render([QUESTION, START], continue_final_message=True) == (
        "<|im_start|>user\nWeather in Köln?<|im_end|>\n<|im_start|>assistant\nIt is "
    )
    parts = {"role": "assistant", "content": [{"type": "text", "text": "It is "}]}
    assert template("parts").render([parts], continue_final_message=True) == "<|im_start|>assistant\nIt is "


def test_a_template_that_trims_trims_the_open_message_too() -> None:
    opened = template("llama3").render([QUESTION, START], continue_final_message=True)
    assert opened.endswith("<|start_header_id|>assistant<|end_header_id|>\n\nIt is")


def test_a_final_message_like_the_end_of_the_template_is_found() -> None:
    for text in ("<|im_end|>\n", "assistant", "\n", ""):
        message = {"role": "assistant", "content": text}
        assert (
            template("chatml").render([message], continue_final_message=True)
            == f"<|im_start|>assistant\n{text}"
        )


def test_what_cannot_be_continued_is_refused() -> None:
    image = {"role": "user", "content": [{"type": "image_url"}]}
    for source, message in (
        ("{{ messages[0].role }}", START),
        ("{% for p in messages[0].content %}{% endfor %}", image),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            render(source, message, continue_final_message=True)
        assert refusal.value.fields == {"param": "continue_final_message"}


# Limits.


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x",
        "{% endfor %}",
        "{{ 'a' | nofilter }}",
        "{% generation %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if x %}" * 150 + "{% endif %}" * 150,
        "{{ " + "9" * 5000 + " }}",
    ],
)
def test_a_template_that_does_not_compile_is_the_operators_fault(source: str) -> None:
    with pytest.raises(ConfigError, match="does not compile") as error:
        ChatTemplate(source)
    assert error.value.fields["key"] == "chat_template"
    assert len(error.value.message) < 600


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for m in messages %}{{ loop.__class__.__mro__ }}{% endfor %}",
        "{% set n = namespace(a=1) %}{{ n._Namespace__attrs.a }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].tool_calls[0].function.arguments.clear() }}",
        "{{ _steps.append(9) }}",
        "{% include 'passwd' %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source, CALL)


@pytest.mark.parametrize(
    "source",
    ["{{ '{0.__class__}'.format(messages) }}", "{{ 'x' | attr('__class__') }}", "{{ ''.format.__self__ }}"],
)
def test_what_is_unsafe_is_undefined(source: str) -> None:
    assert render(source) == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(9999999) %}{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 1000000000 }}", "repeats"),
        ("{{ 1000000000 * [1] }}", "repeats"),
        ("{{ 9 ** 999999999 }}", "power"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages | tojson(indent='x', sort_keys=nothing.x) }}", "undefined"),
        ("{{ raise_exception('no ' ~ messages[0].content) }}", "no Weather"),
        ("{{ raise_exception('') }}", "TemplateError"),
    ],
)
def test_a_template_that_goes_astray_ends(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        render(source)


def test_small_repetitions_and_powers_are_fine() -> None:
    assert render("{{ 'ab' * 2 }}{{ 2 * 'ab' }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ [1] * 2 }}") == "abababab68[1, 1]"


def test_steps_over_what_has_no_length_are_counted_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_dialect.RenderContext, "units_left", 100 * 64)
    source = "{% for i in messages | map('length') %}{{ i }}{% endfor %}"
    assert render(source, *[QUESTION] * 100) == "2" * 100
    with pytest.raises(InvalidRequest, match="steps"):
        render(source, *[QUESTION] * 101)


def test_the_prompt_is_bounded_while_it_grows() -> None:
    flood = ChatTemplate("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", max_chars=1000)
    with pytest.raises(InvalidRequest, match="longer than 1000 characters"):
        flood.render([{"role": "user", "content": "x" * 1_000_000}])
    exact = ChatTemplate("{{ messages[0].content }}", max_chars=1000)
    assert len(exact.render([{"role": "user", "content": "x" * 1000}])) == 1000
    with pytest.raises(InvalidRequest):
        exact.render([{"role": "user", "content": "x" * 1001}])


def test_a_refusal_is_short_whatever_the_client_sent() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        render("{{ raise_exception(messages[0].content) }}", {"role": "user", "content": "x" * 100_000})
    assert len(refusal.value.message) < 600


def test_no_template_and_no_messages_are_said_plainly() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(" \n").render([QUESTION])
    with pytest.raises(InvalidRequest, match="at least one"):
        ChatTemplate("x").render([])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "id"]), inner)
    ),
    max_leaves=8,
)
any_messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "reasoning_content", "name"]), values),
    max_size=4,
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=25)
@given(messages=any_messages, continue_final_message=st.booleans())
def test_any_messages_give_a_prompt_or_a_refusal(
    name: str, messages: list[dict[str, Any]], continue_final_message: bool
) -> None:
    before = copy.deepcopy(messages)
    try:
        text = template(name).render(messages, tools=[TOOL], continue_final_message=continue_final_message)
    except InvalidRequest:
        pass
    else:
        assert isinstance(text, str)
        assert text == template(name).render(
            messages, tools=[TOOL], continue_final_message=continue_final_message
        )
    assert repr(messages) == repr(before)
