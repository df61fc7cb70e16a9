"""Whether a package of others is one that our code was made for: told at the start, by name, not in the middle."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from kvolt.core.errors import ConfigError

log = logging.getLogger(__name__)


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """What some code of ours uses of a package."""

    user: str
    """That code, as people know it: `the vllm engine`."""
    key: str = "engine"
    """The setting by which they chose it."""
    distributions: Sequence[str]
    """Under which its version may be known: the first that is installed counts."""
    tested: Sequence[str]
    """Versions, by their beginnings: `0.32.` is all of them."""
    symbols: Sequence[str]
    """`module:name`, or `module:name.attribute`. What is not there is told."""
    remedy: str


def installed_version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_requirement(wanted: Requirement) -> str:
    """The version that is installed. ConfigError where there is none, or it lacks something that is used; a version
    that was not tested is only told, since most work."""
    found = installed_version(wanted.distributions)
    if found is None:
        raise ConfigError(
            f"{wanted.user} needs {wanted.distributions[0]}, which is not installed",
            key=wanted.key,
            remedy=wanted.remedy,
        )
    tested = ", ".join(f"{each}*" if each.endswith(".") else each for each in wanted.tested)
    missing = [symbol for symbol in wanted.symbols if _lacks(symbol)]
    if missing:
        raise ConfigError(
            f"{wanted.distributions[0]} {found} has no {', '.join(missing)}, which {wanted.user} uses",
            key=wanted.key,
            remedy=f"tested with {tested}: {wanted.remedy}",
        )
    if not any(_is_version(found, each) for each in wanted.tested):
        log.warning(
            "%s %s was not tested with this kvolt (tested: %s)", wanted.distributions[0], found, tested
        )
    return found


def _is_version(found: str, tested: str) -> bool:
    return f"{found.partition('+')[0]}.".startswith(tested if tested.endswith(".") else f"{tested}.")


def _lacks(symbol: str) -> bool:
    module, _, path = symbol.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError:
        return True
    for name in filter(None, path.split(".")):
        if not _has(found, name):
            return True
        found = getattr(found, name, None)
    return False


def _has(owner: Any, name: str) -> bool:
    """Also what only instances have: a field of a dataclass, a msgspec struct or a pydantic model."""
    fields = (
        getattr(owner, "__annotations__", {}),
        getattr(owner, "__dataclass_fields__", {}),
        getattr(owner, "__struct_fields__", ()),
        getattr(owner, "model_fields", {}),
    )
    return hasattr(owner, name) or any(name in each for each in fields)
