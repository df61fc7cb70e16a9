"""Plain templates on the event loop: the same text as the whole dialect, and an allowance that nothing gets around."""

from __future__ import annotations

import tracemalloc
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api.templating import TemplateInput
from kvolt.frontend.templates.dialect import INLINE_UNITS, Beyond
from kvolt.frontend.templates.template import ChatTemplate

FAMILIES = sorted(path.stem for path in (Path(__file__).parent / "jinja").glob("*.jinja"))
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "é", "parameters": {"type": "object"}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "<think>hm</think>", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "x"},
        {"role": "assistant", "content": "<think>so</think>It rains."},
        {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "then?"}]},
    ],
]


def given(messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> TemplateInput:
    return TemplateInput(messages, tools, True, False, kwargs)


def inline(source: str, content: str = "hello", **kwargs: Any) -> str:
    return ChatTemplate(source).render_inline(given([{"role": "user", "content": content}], **kwargs))


def outcome(render: Any) -> str:
    try:
        return str(render())
    except InvalidRequest as error:
        return f"refused: {error.message}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_known_families_are_plain_and_render_the_same_on_the_loop(family: str, chat: Any, tools: Any) -> None:
    source = (Path(__file__).parent / "jinja" / f"{family}.jinja").read_text()
    template = ChatTemplate(source, "<s>", "</s>", wall=lambda: 0.0)
    assert template.is_plain
    wide = outcome(lambda: template.render(chat, tools, enable_thinking=False))
    assert outcome(lambda: template.render_inline(given(chat, tools, enable_thinking=False))) == wide


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(n=0) %}{% for c in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages[0].content) ~ m(1) }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}",
        "{{ messages | map(attribute='content') | join(', ') }}{{ messages | length }}{{ messages | first }}",
        "{{ messages[0].content.replace('l', 'LL').split('L') | last }}{{ ','.join(messages[0].content.split('l')) }}",
        "{% set x %}a{{ messages[0].role }}{% endset %}{{ x ~ x }}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index % 2 }}{{ m['content'][1:3] }}{% endfor %}",
        "{{ strftime_now('%Y') if strftime_now is defined else 'never' }}{{ missing | default('none') }}",
        "{{ messages[0]['nothing'] is defined }}{{ messages[0].get('role') }}{{ none | string }}",
        "{{ {} }}{{ [1, 'a'] }}{{ messages | tojson(indent=2) }}{{ messages[::-1] }}",
        "{{ namespace(a=messages) }}{{ 7 // 2 - 1 }}{{ raise_exception('no ' + messages[0].role) }}",
    ],
)
def test_the_dialect_means_the_same_in_both_environments(source: str) -> None:
    template = ChatTemplate(source, wall=lambda: 0.0)
    assert template.is_plain
    messages = [{"role": "user", "content": "hello"}]
    assert outcome(lambda: template.render_inline(given(messages))) == outcome(
        lambda: template.render(messages)
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.center(1500000000) }}",
        "{{ 'a' | center(1500000000) }}",
        "{{ 'a' * 1500000000 }}",
        "{{ '%1500000000d' % 1 }}" * 2000,
        "{{ '{:>1500000000}'.format(1) }}",
        "{{ 'a' | indent(1500000000, true) }}",
        "{{ lipsum(100000) }}",
        "{% set ns = namespace(strip=lipsum) %}{{ ns.strip(100000) }}",
        "{% set ns = namespace() %}{% set ns.strip = messages[0].content.center %}{{ ns.strip(1500000000) }}",
        "{% set f = messages[0].content['center'] %}{{ f(1500000000) }}",
        "{{ messages[0].content['center'](1500000000) }}",
        "{% set a = [messages, messages] %}{% set b = [a, a] %}{{ b }}",
        "{{ dict(a=messages) }}",
        "{% macro m() %}{{ varargs }}{% endmacro %}{{ m(1) }}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% call(x) m() %}{% endcall %}{% macro m() %}{{ caller(1) }}{% endmacro %}",
        "{{ messages | tojson(indent=100000) }}",
        "{% filter upper %}x{% endfilter %}",
        "{{ strftime_now(messages[0].content) }}",
        "{{ 9 ** 9 }}",
    ],
)
def test_what_can_grow_out_of_nothing_is_not_plain_and_costs_nothing_to_load(source: str) -> None:
    tracemalloc.start()
    try:
        assert not ChatTemplate(source).is_plain
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = messages[0].content %}" + "{% set x = x ~ x %}" * 60 + "{{ x }}",
        "{% set x = messages[0].content %}" + "{% set x = x + x %}" * 60 + "{{ x }}",
        "{% set x = messages[0].content %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60 + "{{ x }}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "m(" * 50 + "'ab'" + ")" * 50 + " }}",
        "{% set x = messages[0].content %}" + "{% set x = x.replace('h', x) %}" * 60 + "{{ x }}",
        "{% set x = messages[0].content %}" + "{% set x = x.join(x.split('l')) %}" * 90 + "{{ x }}",
        "{% set x = messages[0].content %}" + "{% set x = x.split('l') | join(x) %}" * 90 + "{{ x }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if 1 > 2 %}{% endfor %}" * 9,
        "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
        "{% macro m(n) %}{{ m(n - 1) if n }}{{ m(n - 1) if n }}{% endmacro %}{{ m(50) }}",
        "{% set x = messages[0].content %}{{ x['center'] }}",
        "{{ messages + messages }}",
        "{% set f = '%100d' %}{{ f % 1 }}",
    ],
)
def test_growth_ends_beyond_the_allowance(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Beyond):
            inline(source)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_the_clock_ends_a_rendering_on_the_loop() -> None:
    ticks = count()
    template = ChatTemplate("{% for i in range(1000) %}{% endfor %}", monotonic=lambda: next(ticks) * 0.02)
    with pytest.raises(Beyond):
        template.render_inline(given([{"role": "user", "content": "x"}]))
    assert next(ticks) < 10
    patient = ChatTemplate("{% for i in range(1000) %}{% endfor %}", monotonic=lambda: 0.0)
    assert patient.render_inline(given([{"role": "user", "content": "x"}])) == ""


def test_a_long_prompt_does_not_belong_on_the_loop() -> None:
    source = "{{ messages[0].content }}"
    assert inline(source, "x" * 1000) == "x" * 1000
    with pytest.raises(Beyond):
        inline(source, "x" * (INLINE_UNITS + 1))
