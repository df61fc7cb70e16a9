"""Writes the config tree as TOML that the loader reads back unchanged."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvolt.runtime.config.leaves import sections
from kvolt.runtime.config.settings import Settings


def to_toml(settings: Settings) -> str:
    """Encode the tree as a TOML file that loads to the same settings; None values are omitted."""
    lines = [f"namespace = {literal(settings.namespace)}"]
    if not settings.workers:
        lines.append("workers = []")
    tables = [(f"[{name}]", getattr(settings, name)) for name in sections()]
    tables += [("[[workers]]", worker) for worker in settings.workers]
    for head, table in tables:
        lines += ["", head]
        values = msgspec.structs.asdict(table)
        lines += [f"{name} = {literal(value)}" for name, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def literal(value: Any) -> str:
    """Encode a value as TOML on one line; raises TypeError for unsupported types (dates, None inside a table)."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # JSON's escapes are valid TOML, except that TOML also requires DEL to be escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(literal(item) for item in value) + "]"
        case msgspec.Struct():
            fields = msgspec.structs.asdict(value)
            return literal({name: field for name, field in fields.items() if field is not None})
        case dict():
            return (
                "{" + ", ".join(f"{literal(str(key))} = {literal(item)}" for key, item in value.items()) + "}"
            )
        case _:
            raise TypeError(f"{type(value).__name__} is not supported in a config file")
