"""Engines by name: ours, and those that a package offers under the entry point group `kvolt.engines`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol, get_args

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.engines.contract import Engine, EngineSpec

GROUP = "kvolt.engines"
AUTO = "auto"


class Follower(Protocol):
    """A part of an engine that another process leads, and registers."""

    async def run(self) -> None:
        """Until it is cancelled. KvoltError when it ends by itself."""
        ...


class EngineKind(msgspec.Struct, frozen=True):
    """How to make an engine of one kind."""

    arguments: type[msgspec.Struct]
    """Frozen, unknown fields forbidden, every field with a default."""
    build: Callable[[EngineSpec, Any], Engine]
    default_model: str | None = None
    """One that it can always serve, for a first try."""
    choices: dict[str, dict[str, str]] = {}
    """Arguments that know some words: each word with a line about it."""
    follower: Callable[[EngineSpec, Any], Follower | None] = lambda spec, arguments: None
    """What runs in place of an engine where another process leads it, by these arguments."""
    many_per_process: bool = False
    """Whether hundreds of them can run on one event loop: those that compute nothing."""


def _sim() -> EngineKind:
    from kvolt.engines.sim.engine import SimArguments, SimEngine
    from kvolt.latency.presets import PRESETS

    presets = {name: f"{preset.about} ({preset.source})" for name, preset in PRESETS.items()}
    return EngineKind(SimArguments, SimEngine, "sim-tiny", {"preset": presets}, many_per_process=True)


def _native() -> EngineKind:
    from kvolt.engines.native.arguments import NativeArguments
    from kvolt.engines.native.shell.engine import NativeEngine

    return EngineKind(NativeArguments, NativeEngine, "smollm2-135m")


def _vllm() -> EngineKind:
    from kvolt.engines.vllm.arguments import VllmArguments
    from kvolt.engines.vllm.engine import VllmEngine
    from kvolt.engines.vllm.following import follower_of

    return EngineKind(VllmArguments, VllmEngine, "smollm2-135m", follower=follower_of)


def _remote() -> EngineKind:
    from kvolt.engines.remote import RemoteArguments, RemoteEngine

    return EngineKind(RemoteArguments, RemoteEngine, many_per_process=True)


def _sglang() -> EngineKind:
    from kvolt.engines.sglang.arguments import SglangArguments
    from kvolt.engines.sglang.engine import SglangEngine

    return EngineKind(SglangArguments, SglangEngine, "smollm2-135m")


def _trtllm() -> EngineKind:
    from kvolt.engines.trtllm.arguments import TrtllmArguments
    from kvolt.engines.trtllm.engine import TrtllmEngine

    return EngineKind(TrtllmArguments, TrtllmEngine)


_BUILT_IN: dict[str, Callable[[], EngineKind]] = {
    "native": _native,
    "remote": _remote,
    "sglang": _sglang,
    "sim": _sim,
    "trtllm": _trtllm,
    "vllm": _vllm,
}


_SIM_ARGUMENTS = {"words": 120}
"""Answers that come to an end: nothing else would end a chat that names no limit."""


def choose_engine(name: str, model: str) -> tuple[str, dict[str, Any]]:
    """The engine by name, where `auto` goes by the model's, and the arguments that it has by being chosen so."""
    if name != AUTO:
        return name, {}
    return ("sim", dict(_SIM_ARGUMENTS)) if model.startswith("sim-") else ("native", {})


def engine_names() -> list[str]:
    return sorted([*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))])


def find_engine(name: str) -> EngineKind:
    """The kind of that name; ConfigError lists the known ones."""
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        kind: EngineKind = _loaded(name, built_in)
        return kind
    for point in entry_points(group=GROUP, name=name):
        found = _loaded(name, point.load)
        if not isinstance(found, EngineKind):
            raise ConfigError(f"engine {name!r}: {point.value} is not an EngineKind", key="engine")
        return found
    raise ConfigError(
        f"unknown engine {name!r}", key="engine", remedy=f"known engines: {', '.join(engine_names())}"
    )


def _loaded(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"engine {name!r} cannot be loaded: {error}", key="engine", remedy="install what it needs"
        ) from error


def parse_argument(text: str, flag: str = "--arg") -> tuple[str, object]:
    """`KEY=VALUE` as it is typed behind a flag; VALUE is JSON or a word."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{flag} {text!r} is not KEY=VALUE", key="arg", remedy=f"write for example {flag} NAME=10"
        )
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def merge_arguments(known: Mapping[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """Arguments with those of `--arg` in their places; `engine_args.dtype=float16` is one inside another."""
    merged = dict(known)
    for text in given:
        path, value = parse_argument(text)
        *outer, last = path.split(".")
        inside = merged
        for name in outer:
            part = inside.get(name)
            inside[name] = inside = dict(part) if isinstance(part, Mapping) else {}
        inside[last] = value
    return merged


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
        for inner in get_args(fields[key]) or (fields[key],):  # one that may be None is a union
            if isinstance(value, Mapping) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                _check_names(engine, inner, value, f"{where}.{key}")


def build_follower(name: str, spec: EngineSpec, arguments: Mapping[str, Any]) -> Follower | None:
    """None where these are the arguments of an engine that leads, or is alone."""
    checked = check_arguments(name, arguments)
    return find_engine(name).follower(spec, checked)


def build_engine(name: str, spec: EngineSpec, arguments: Mapping[str, Any]) -> Engine:
    checked = check_arguments(name, arguments)
    return find_engine(name).build(spec, checked)
