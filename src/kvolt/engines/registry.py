"""Engines by name: ours, and those that a package offers under the entry point group `kvolt.engines`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import Engine

GROUP = "kvolt.engines"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted of an engine, besides its own arguments."""

    model: str
    role: Role
    devices: tuple[str, ...] = ()


class EngineKind(msgspec.Struct, frozen=True):
    """How to make an engine of one kind."""

    arguments: type[msgspec.Struct]
    """Frozen, unknown fields forbidden, every field with a default."""
    build: Callable[[EngineSpec, Any], Engine]


def _sim() -> EngineKind:
    from kvolt.engines.sim import SimArguments, SimEngine

    return EngineKind(SimArguments, SimEngine)


_BUILT_IN: dict[str, Callable[[], EngineKind]] = {"sim": _sim}


def engine_names() -> list[str]:
    return sorted([*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))])


def find_engine(name: str) -> EngineKind:
    """The kind of that name; ConfigError lists the known ones."""
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        return built_in()
    for point in entry_points(group=GROUP, name=name):
        try:
            kind = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"engine {name!r} cannot be loaded: {error}", key="engine", remedy="install what it needs"
            ) from error
        if not isinstance(kind, EngineKind):
            raise ConfigError(f"engine {name!r}: {point.value} is not an EngineKind", key="engine")
        return kind
    raise ConfigError(
        f"unknown engine {name!r}", key="engine", remedy=f"known engines: {', '.join(engine_names())}"
    )


def check_arguments(name: str, arguments: Mapping[str, Any]) -> msgspec.Struct:
    """An engine's arguments as its own class; ConfigError names the field and the nearest known one."""
    kind = find_engine(name).arguments
    _check_names(name, kind, arguments, "args")
    try:
        return msgspec.convert(dict(arguments), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine {name!r}: {error}", key="args", remedy="correct the value") from error


def _check_names(engine: str, kind: type[msgspec.Struct], arguments: Mapping[str, Any], where: str) -> None:
    """Also inside nested structs that would ignore what they do not know, as wire types do."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in arguments.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"engine {engine!r} has no argument {key!r}", key=f"{where}.{key}", remedy=hint)
        inner = fields[key]
        if isinstance(value, Mapping) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _check_names(engine, inner, value, f"{where}.{key}")


def build_engine(name: str, spec: EngineSpec, arguments: Mapping[str, Any]) -> Engine:
    checked = check_arguments(name, arguments)
    return find_engine(name).build(spec, checked)
