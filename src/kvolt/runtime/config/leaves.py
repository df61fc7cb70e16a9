"""Every setting as flags, environment, file validation and help use it; derived from the classes of `settings`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from kvolt.core.field_docs import field_texts
from kvolt.runtime.config.settings import Settings, WorkerSettings

_StructClass = type[msgspec.Struct]


class Leaf(msgspec.Struct, frozen=True):
    """One setting, as used by flags, environment, file validation and help."""

    section: str | None
    name: str
    type: Any
    default: Any
    info: inspect.Type
    struct: _StructClass
    """Class that has this field."""
    extra: dict[str, Any]

    @property
    def description(self) -> str:
        """Help: the string below the field, on one line."""
        return " ".join(field_texts(self.struct).get(self.name, "").split())

    @property
    def summary(self) -> str:
        """First sentence of the help, and its `Default:` unless that is none: what fits a list of flags."""
        first, *rest = re.split(r"(?<=\.) (?=[A-Z0-9`])", self.description)
        return " ".join(
            [first, *(each for each in rest if each.startswith("Default:") and "none" not in each)]
        )

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def env(self) -> str:
        return "KVOLT_" + self.key.upper().replace(".", "_")

    @property
    def optional(self) -> bool:
        return isinstance(self.info, inspect.UnionType)

    @property
    def expects(self) -> str:
        """Description of the accepted values, such as `a whole number from 0 to 65535`."""
        return str(self.extra.get("expects") or _in_words(self.info))

    @property
    def choices(self) -> tuple[str, ...]:
        return (
            tuple(str(value) for value in self.info.values)
            if isinstance(self.info, inspect.LiteralType)
            else tuple(self.extra.get("known", ()))
        )

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        units = {"s": "SECONDS", "bytes": "BYTES"}
        fallback = "N" if isinstance(self.info, inspect.IntType) else "TEXT"
        return str(self.extra.get("metavar") or units.get(self.name.rpartition("_")[2], fallback))


@cache
def leaves() -> dict[str, Leaf]:
    """Every scalar setting by its dotted key, in tree order; without `workers`."""
    settings = [leaf for leaf in leaves_of(Settings, None) if leaf.name not in (*sections(), "workers")]
    for name, section in sections().items():
        settings += leaves_of(section, name)
    return {leaf.key: leaf for leaf in settings}


@cache
def worker_leaves() -> dict[str, Leaf]:
    """Fields of a `[[workers]]` entry by name."""
    return {leaf.name: leaf for leaf in leaves_of(WorkerSettings, None)}


@cache
def sections() -> dict[str, type[msgspec.Struct]]:
    """Sections of the tree by name."""
    fields = msgspec.structs.fields(Settings)
    return {field.name: field.type for field in fields if isinstance(field.type, type(msgspec.Struct))}


def leaves_of(struct: type[msgspec.Struct], section: str | None) -> list[Leaf]:
    """Settings of one section class, with keys below `section`."""
    settings = []
    for field in msgspec.structs.fields(struct):
        info = inspect.type_info(field.type)
        meta = info if isinstance(info, inspect.Metadata) else inspect.Metadata(info)
        settings.append(
            Leaf(
                section=section,
                name=field.name,
                type=field.type,
                default=field.default_factory() if field.default is msgspec.NODEFAULT else field.default,
                info=meta.type,
                struct=struct,
                extra=meta.extra or {},
            )
        )
    return settings


def _in_words(info: inspect.Type) -> str:
    match info:
        case inspect.LiteralType():
            return "one of " + ", ".join(map(str, info.values))
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(le=None):
            return f"a whole number from {info.ge}" if info.ge is not None else "a whole number"
        case inspect.IntType():
            return f"a whole number from {info.ge} to {info.le}"
        case inspect.FloatType() if info.gt is not None:
            return f"a number above {info.gt:g}, at most {info.le:g}"
        case inspect.FloatType():
            return f"a number from {info.ge:g} to {info.le:g}"
        case inspect.ListType():
            return "a list of text"
        case inspect.DictType():
            return "a table"
        case inspect.UnionType():
            return _in_words(info.types[0])
        case inspect.StrType() if info.min_length:
            return "text that is not empty"
        case _:
            return "text"
