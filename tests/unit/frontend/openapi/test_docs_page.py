from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

from kvolt.frontend.openapi.docs_page import docs_page
from kvolt.frontend.openapi.document import openapi

DOCUMENT = openapi()
PAGE = docs_page(DOCUMENT).decode()
VOID = {"meta", "link", "input"}


class Reader(HTMLParser):
    """Every tag with its attributes, and whether all of them were closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


READER = Reader(PAGE)


def values(name: str) -> list[str]:
    return [attrs[name] or "" for _, attrs in READER.tags if name in attrs]


def test_the_page_is_well_formed_and_small() -> None:
    assert READER.open == []
    assert PAGE.startswith("<!doctype html>")
    assert len(PAGE) < 500_000
    assert len(values("id")) == len(set(values("id")))


def test_every_operation_has_a_section_and_a_link_to_it() -> None:
    ids = {
        operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()
    }
    assert ids <= set(values("id"))
    assert {f"#{name}" for name in ids} <= set(values("href"))
    for path in DOCUMENT["paths"]:
        assert path in READER.text


def test_fields_and_statuses_are_shown() -> None:
    for text in (
        "max_completion_tokens",
        "x-tenant-id",
        "tool_choice",
        "nvext",
        "ChatCompletionChunk",
        "504",
    ):
        assert text in READER.text


def test_nothing_comes_from_elsewhere() -> None:
    for address in values("href") + values("src"):
        assert address.startswith(("#", "/", "data:")), address
        assert not address.startswith("//")
    assert "@import" not in PAGE
    assert not re.search(r"\burl\(", PAGE)


def test_the_policy_lets_only_its_own_script_and_style_run() -> None:
    policy = next(text for text in values("content") if "script-src" in text)
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (source,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert not [
        attrs for _, attrs in READER.tags if "style" in attrs or any(name.startswith("on") for name in attrs)
    ]


def test_each_operation_can_be_tried() -> None:
    forms = [attrs for tag, attrs in READER.tags if tag == "form"]
    assert {(form["data-method"], form["data-path"]) for form in forms} == {
        (method, path) for path, methods in DOCUMENT["paths"].items() for method in methods
    }
    assert '"my-model"' in "".join(values("data-body"))


EVIL = '</script><script>alert("x")</script>`<b>`'


def small(**schema: Any) -> dict[str, Any]:
    operation = {
        "tags": ["All"],
        "operationId": "one",
        "summary": EVIL,
        "description": f"{EVIL}\n\n- {EVIL}",
        "requestBody": {
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/Node"},
                    "examples": {EVIL: {"value": EVIL}},
                }
            }
        },
        "responses": {
            "200": {"description": EVIL, "content": {"text/plain": {"schema": {"type": "string"}}}}
        },
    }
    return {
        "info": {"title": EVIL, "version": EVIL},
        "tags": [{"name": "All"}],
        "paths": {"/x": {"post": operation}},
        "components": {"schemas": {"Node": {"type": "object", "properties": schema}}, "responses": {}},
    }


def test_words_are_never_markup() -> None:
    page = docs_page(small(name={"type": "string", "enum": [EVIL], "description": EVIL})).decode()
    assert page.count("<script>") == 1
    assert "<b>" not in page
    assert Reader(page).open == []


def test_a_schema_that_contains_itself_ends() -> None:
    page = docs_page(small(child={"$ref": "#/components/schemas/Node"})).decode()
    assert len(page) < 100_000
    assert Reader(page).open == []


def test_limits_are_described() -> None:
    page = docs_page(
        small(
            count={"type": "integer", "minimum": 1, "maximum": 128},
            share={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            words={"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4},
            either={"anyOf": [{"type": "string"}, {"type": "null"}]},
        )
    ).decode()
    text = Reader(page).text
    for words in (
        "integer, 1 to 128",
        "number, over 0, at most 1",
        "list of string, not empty, at most 4 items",
    ):
        assert words in text
    assert "string or null" in text
