"""Converts structural tags to Lark: free text in which certain tags start constrained parts.

Supports `structures` with `triggers`, and the text formats of xgrammar's newer format tree. A special token spelled
out in a tag stands for the token itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.engines.native.grammar.lark import lark_of_ebnf
from kvolt.engines.native.grammar.regex import alternatives, quote, regex_source
from kvolt.engines.native.grammar.schema import prepared_schema

_ANY_TEXT = "/(?s:.*)/"
_MAX_REPEAT = 4096


def lark_of_tag(
    text: str,
    special: Mapping[str, int],
) -> str:
    """Convert a structural tag's JSON to the library's format: a Lark grammar and the grammars that it refers to."""
    tag = json.loads(text)
    writer = _Writer(special)
    if tag.get("format") is not None:
        start = writer.format(tag["format"], "format")
    else:
        tags = [
            {
                "begin": item["begin"],
                "content": {"type": "json_schema", "json_schema": item["schema"]},
                "end": item["end"],
            }
            for item in tag["structures"]
        ]
        start = writer.format(
            {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}, "structures"
        )
    lark = "\n".join([f"start: {start}", *writer.rules]) + "\n"
    main = {"name": "tags", "lark_grammar": lark}
    return json.dumps({"grammars": [main, *writer.grammars]})


class _Writer:
    """Writes formats as expressions, and adds rules where needed."""

    def __init__(
        self,
        special: Mapping[str, int],
    ) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._special = special
        self._special_at = re.compile(
            "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        )
        self._writers: dict[str, Callable[[dict[str, Any], str], str]] = {
            "const_string": lambda item, where: self._literal(_text(item, "value", where)),
            "json_schema": self._json_schema,
            "regex": lambda item, where: f"/{regex_source(_text(item, 'pattern', where))}/",
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": lambda item, where: self._joined(item, where, " "),
            "or": lambda item, where: self._joined(item, where, " | "),
            "optional": lambda item, where: f"({self._content(item, where)})?",
            "plus": lambda item, where: f"({self._content(item, where)})+",
            "star": lambda item, where: f"({self._content(item, where)})*",
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def format(self, item: object, where: str) -> str:
        if not isinstance(item, dict):
            raise InvalidRequest(f"structural tag: {where} must be an object", param="grammar")
        kind = _text(item, "type", where)
        write = self._writers.get(kind)
        if write is None:
            raise Unsupported(
                f"structural tag: {where}.type {kind[:40]!r} is not supported; known: {', '.join(self._writers)}",
                feature=f"structural_tag.{kind[:40]}",
            )
        return write(item, where)

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """Text, with special tokens where they are spelled out."""
        parts: list[str] = []
        at = 0
        for match in self._special_at.finditer(text):
            if match.start() > at:
                parts.append(f"/{quote(text[at : match.start()])}/")
            parts.append(f"<[{self._special[match.group()]}]>")
            at = match.end()
        if at < len(text):
            parts.append(f"/{quote(text[at:])}/")
        return " ".join(parts) or '""'

    def _json_schema(self, item: dict[str, Any], where: str) -> str:
        if item.get("style", "json") != "json":
            raise Unsupported(f"structural tag: {where}.style must be json", feature="structural_tag.style")
        schema = item.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequest(f"structural tag: {where}.json_schema must be an object", param="grammar")
        return f"%json {json.dumps(prepared_schema(schema))}"

    def _grammar(self, item: dict[str, Any], where: str) -> str:
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": lark_of_ebnf(_text(item, "grammar", where))})
        return f"@{name}"

    def _any_text(self, item: dict[str, Any], where: str) -> str:
        """Free text up to the end of the output or of its tag."""
        if item.get("max_tokens") is not None or item.get("max_chars") is not None:
            raise Unsupported(
                f"structural tag: {where} may not have a limit", feature="structural_tag.any_text"
            )
        return self._rule(self._text_without(_texts(item, "excludes", where)))

    def _text_without(self, excludes: Sequence[str]) -> str:
        if not excludes:
            return _ANY_TEXT
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {_ANY_TEXT} & ~/(?s:.*)(?:{alternatives(excludes)})(?s:.*)/")
        return name

    def _content(self, item: dict[str, Any], where: str) -> str:
        return self.format(item.get("content"), f"{where}.content")

    def _joined(self, item: dict[str, Any], where: str, mark: str) -> str:
        elements = _list(item, "elements", where)
        return (
            f"({mark.join(self.format(one, f'{where}.elements[{at}]') for at, one in enumerate(elements))})"
        )

    def _repeat(self, item: dict[str, Any], where: str) -> str:
        least, most = item.get("min"), item.get("max")
        if not (isinstance(least, int) and isinstance(most, int) and 0 <= least <= _MAX_REPEAT):
            raise InvalidRequest(f"structural tag: {where}.min and max must be numbers", param="grammar")
        bound = "" if most == -1 else str(min(most, _MAX_REPEAT))
        return f"({self._content(item, where)}){{{least},{bound}}}"

    def _tag(self, item: dict[str, Any], where: str) -> str:
        begin = self._literal(_text(item, "begin", where))
        return f"({begin} {self._rest(item, where)})"

    def _rest(self, item: dict[str, Any], where: str) -> str:
        """The part of a tag after its begin string."""
        end = item.get("end")
        ends = [end] if isinstance(end, str) else _texts(item, "end", where)
        content = item.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and any(ends):
            return self._text_until(ends, _texts(content, "excludes", f"{where}.content"))
        closing = " | ".join(map(self._literal, ends))
        return f"{self._content(item, where)} ({closing})"

    def _text_until(self, ends: Sequence[str], excludes: Sequence[str]) -> str:
        if any(self._special_at.search(end) for end in ends):
            closing = " | ".join(map(self._literal, ends))
            return f"{self._rule(self._text_without(excludes))} ({closing})"
        body = self._text_without(excludes)
        return self._rule(f"{body} /{alternatives(ends)}/", "[lazy]")

    def _tags(self, item: dict[str, Any], where: str) -> list[dict[str, Any]]:
        tags = _list(item, "tags", where)
        if not all(isinstance(tag, dict) and isinstance(tag.get("begin"), str) for tag in tags):
            raise Unsupported(
                f"structural tag: {where}.tags must begin with a string", feature="structural_tag.token"
            )
        return tags

    def _triggered_tags(self, item: dict[str, Any], where: str) -> str:
        tags, triggers = self._tags(item, where), _texts(item, "triggers", where)
        free = self._text_without(_texts(item, "excludes", where))
        text = self._rule(free)
        bound: list[str] = []
        for trigger in triggers:
            triggered = [(at, tag) for at, tag in enumerate(tags) if tag["begin"].startswith(trigger)]
            follow = " | ".join(
                f"{self._literal(tag['begin'][len(trigger) :])} {self._rest(tag, f'{where}.tags[{at}]')}"
                for at, tag in triggered
            )
            if not triggered:
                continue
            if self._special_at.search(trigger):
                bound.append(f"{text} {self._literal(trigger)} ({follow})")
            else:
                bound.append(f"{self._rule(f'{free} /{quote(trigger)}/', '[lazy]')} ({follow})")
        if not bound:
            raise InvalidRequest(f"structural tag: no trigger of {where} begins a tag", param="grammar")
        one = self._rule(" | ".join(bound))
        first = " | ".join(self._tag(tag, f"{where}.tags[{at}]") for at, tag in enumerate(tags))
        if item.get("stop_after_first"):
            return f"({first})" if item.get("at_least_one") else f"({one} | {text})"
        return f"(({first}) {one}* {text})" if item.get("at_least_one") else f"({one}* {text})"

    def _tags_with_separator(self, item: dict[str, Any], where: str) -> str:
        tags = (self._tag(tag, f"{where}.tags[{at}]") for at, tag in enumerate(self._tags(item, where)))
        one = self._rule(" | ".join(tags))
        separator = self._literal(_text(item, "separator", where))
        several = one if item.get("stop_after_first") else f"({one} ({separator} {one})*)"
        return several if item.get("at_least_one") else f"({several})?"


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"structural tag: {where}.{name} must be a string", param="grammar")
    return value


def _list(item: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = item.get(name)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"structural tag: {where}.{name} must be a list", param="grammar")
    return value


def _texts(item: Mapping[str, Any], name: str, where: str) -> list[str]:
    value = item.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidRequest(f"structural tag: {where}.{name} must be a list of strings", param="grammar")
    return value
