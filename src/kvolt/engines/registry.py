"""Registry of engines: built-in ones, those of the entry point group `kvolt.engines`, and `FILE.py:NAME`."""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, get_args

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.engines.contract import Engine, EngineSpec

GROUP = "kvolt.engines"
AUTO = "auto"


class HeadlessNode(Protocol):
    """An engine process without an API, whose engine another process leads and registers."""

    async def run(self) -> None:
        """Run until cancelled. KvoltError when it ends by itself."""


class EngineKind(msgspec.Struct, frozen=True):
    """How to build an engine of one kind."""

    arguments: type[msgspec.Struct]
    """Frozen, unknown fields forbidden, every field with a default."""
    build: Callable[[EngineSpec, Any], Engine]
    default_model: str | None = None
    """Default model, which is always available."""
    choices: dict[str, dict[str, str]] = {}
    """Arguments with a fixed set of values, and a one-line description of each value."""
    headless_node: Callable[[EngineSpec, Any], HeadlessNode | None] = lambda spec, arguments: None
    """Builds the node that runs instead of an engine if these arguments make it a follower of another process."""
    many_per_process: bool = False
    """Whether hundreds of them can share an event loop, because they compute nothing."""


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
    from kvolt.engines.vllm.headless_node import headless_node_of

    return EngineKind(VllmArguments, VllmEngine, "smollm2-135m", headless_node=headless_node_of)


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
"""Bounds answers: a chat request without `max_tokens` would generate words up to the context length."""


def choose_engine(name: str, model: str) -> tuple[str, dict[str, Any]]:
    """The engine name (`auto` is resolved by the model's name) and the arguments implied by that choice."""
    if name != AUTO:
        return name, {}
    return ("sim", dict(_SIM_ARGUMENTS)) if is_simulated(model) else ("native", {})


def is_simulated(model: str) -> bool:
    """Whether the name is one of the simulated engine, which has no files."""
    return model.startswith("sim-")


def engine_names() -> list[str]:
    return sorted([*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))])


def find_engine(name: str) -> EngineKind:
    """The engine kind of that name; ConfigError lists the known ones."""
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        kind: EngineKind = _load(name, built_in)
        return kind
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py"):
        return _plugin(name, lambda: getattr(_module_of(name, Path(file).expanduser()), attribute), attribute)
    for point in entry_points(group=GROUP, name=name):
        return _plugin(name, point.load, point.value)
    known = ", ".join([*engine_names(), "FILE.py:NAME"])
    raise ConfigError(f"unknown engine {name!r}", key="engine", remedy=f"known engines: {known}")


def _plugin(name: str, load: Callable[[], Any], value: str) -> EngineKind:
    plugin = _load(name, load)
    if not isinstance(plugin, EngineKind):
        raise ConfigError(f"engine {name!r}: {value} is not an EngineKind", key="engine")
    return plugin


def _module_of(name: str, path: Path) -> Any:
    """The module in a file, loaded once per process: its classes must stay the same."""
    module_name = f"kvolt engine {path.resolve()}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # structs and dataclasses resolve their annotations here
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[module_name]
            if isinstance(error, Exception) and not isinstance(error, ImportError):
                raise _not_loaded(name, f"{type(error).__name__}: {error}", "correct the file") from error
            raise
    return sys.modules[module_name]


def _load(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ImportError as error:
        raise _not_loaded(name, str(error), "install its dependencies") from error
    except AttributeError as error:
        raise _not_loaded(name, str(error), "correct its name") from error


def _not_loaded(name: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"engine {name!r} cannot be loaded: {why}", key="engine", remedy=remedy)


def parse_argument(text: str, flag: str = "--arg") -> tuple[str, object]:
    """Parse `KEY=VALUE` of a flag; VALUE is JSON or a string."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{flag} {text!r} is not KEY=VALUE", key="arg", remedy=f"for example {flag} NAME=10"
        )
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def merge_arguments(known: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply `--arg` overrides; `engine_args.dtype=float16` sets a nested argument."""
    merged = dict(known)
    for text in overrides:
        path, value = parse_argument(text)
        *outer, last = path.split(".")
        inside = merged
        for name in outer:
            part = inside.get(name)
            inside[name] = inside = dict(part) if isinstance(part, Mapping) else {}
        inside[last] = value
    return merged


_VLLM_NAMES = {
    "enforce_eager": "cuda_graphs",
    "gpu_memory_utilization": "kv_memory_gib",
    "max_model_len": "context_length",
    "max_num_batched_tokens": "max_batch_tokens",
    "quantization": "quantize",
    "tensor_parallel_size": "tensor_parallel",
}
"""Engine arguments of vLLM, and the ones of the native engine for the same purpose."""


def check_arguments(name: str, arguments: Mapping[str, Any]) -> msgspec.Struct:
    """Convert arguments to the engine's argument class; ConfigError names the field and the nearest known
    one."""
    kind = find_engine(name).arguments
    _check_names(name, kind, arguments, "args")
    try:
        return msgspec.convert(dict(arguments), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine {name!r}: {error}", key="args", remedy="correct the value") from error


def _check_names(engine: str, kind: type[msgspec.Struct], arguments: Mapping[str, Any], where: str) -> None:
    """Also checks nested structs that ignore unknown fields, as wire types do."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in arguments.items():
        if key not in fields:
            same = _VLLM_NAMES.get(key)
            near = [same] if same in fields else difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"engine {engine!r} has no argument {key!r}", key=f"{where}.{key}", remedy=hint)
        for inner in get_args(fields[key]) or (fields[key],):  # an optional field is a union
            if isinstance(value, Mapping) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                _check_names(engine, inner, value, f"{where}.{key}")


def build_headless_node(name: str, spec: EngineSpec, arguments: Mapping[str, Any]) -> HeadlessNode | None:
    """The node for these arguments; None if they describe an engine that runs by itself or leads."""
    checked = check_arguments(name, arguments)
    return find_engine(name).headless_node(spec, checked)


def build_engine(name: str, spec: EngineSpec, arguments: Mapping[str, Any]) -> Engine:
    checked = check_arguments(name, arguments)
    return find_engine(name).build(spec, checked)
