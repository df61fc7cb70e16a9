"""Checks at startup, before anything is loaded: the engine's package has the version and symbols that an adapter needs,
and the engine's own arguments have known names."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from kvolt.core.errors import ConfigError

log = logging.getLogger(__name__)


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """Symbols of a package that an adapter uses."""

    user: str
    """Name of the adapter for messages: `the vllm engine`."""
    key: str = "engine"
    """Setting that selected it."""
    distributions: Sequence[str]
    """Possible distribution names; the first installed one is used."""
    tested: Sequence[str]
    """Tested versions; `0.32.` matches all of 0.32."""
    symbols: Sequence[str]
    """Required symbols, as `module:name` or `module:name.attribute`."""
    remedy: str


def members(owner: str, names: str) -> list[str]:
    """Symbols of a module or class; `names` are separated by spaces."""
    return [f"{owner}{'.' if ':' in owner else ':'}{name}" for name in names.split()]


def installed_version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_requirement(requirement: Requirement) -> str:
    """Return the installed version. ConfigError if the package or a symbol is missing; an untested version is only
    logged."""
    installed = installed_version(requirement.distributions)
    if installed is None:
        raise ConfigError(
            f"{requirement.user} needs {requirement.distributions[0]}, which is not installed",
            key=requirement.key,
            remedy=requirement.remedy,
        )
    tested = ", ".join(f"{each}*" if each.endswith(".") else each for each in requirement.tested)
    missing = [symbol for symbol in requirement.symbols if _lacks(symbol)]
    if missing:
        raise ConfigError(
            f"{requirement.distributions[0]} {installed} has no {', '.join(missing)}, which {requirement.user} uses",
            key=requirement.key,
            remedy=f"tested with {tested}: {requirement.remedy}",
        )
    if not any(_is_version(installed, each) for each in requirement.tested):
        log.warning(
            "untested version: package=%s version=%s tested=%s",
            requirement.distributions[0],
            installed,
            tested,
        )
    return installed


def _is_version(installed: str, tested: str) -> bool:
    return f"{installed.partition('+')[0]}.".startswith(tested if tested.endswith(".") else f"{tested}.")


def _lacks(symbol: str) -> bool:
    module, _, path = symbol.partition(":")
    try:
        owner: Any = import_module(module)
    except ImportError:
        return True
    for name in filter(None, path.split(".")):
        if not _has(owner, name):
            return True
        owner = getattr(owner, name, None)
    return False


def _has(owner: Any, name: str) -> bool:
    """Whether the owner has the attribute, or a field of a dataclass, msgspec struct or pydantic model."""
    fields = (
        getattr(owner, "__annotations__", {}),
        getattr(owner, "__dataclass_fields__", {}),
        getattr(owner, "__struct_fields__", ()),
        getattr(owner, "model_fields", {}),
    )
    return hasattr(owner, name) or any(name in each for each in fields)


def check_names(engine: str, names: Iterable[str], known: Collection[str], key: str, where: str) -> None:
    """ConfigError for an unknown name, with the closest known one.

    `key`: setting that contains the names. `where`: where all names are documented."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else where
            raise ConfigError(f"{engine} has no argument {name!r}", key=f"{key}.{name}", remedy=hint)


def check_reserved(names: Mapping[str, object], remedies: Mapping[str, str], key: str) -> None:
    """ConfigError for a name that kvolt sets itself. `remedies`: where each such name belongs."""
    for name, remedy in remedies.items():
        if name in names:
            table = key.rpartition(".")[2]
            raise ConfigError(f"{table} must not contain {name}", key=f"{key}.{name}", remedy=remedy)


def kv_events_error(message: str, key: str) -> ConfigError:
    """Error for settings with which no KV events, or wrong ones, would be published."""
    return ConfigError(
        message,
        key=key,
        remedy="leave it out, or set kv_events=false: routers then use their own routing history",
    )
