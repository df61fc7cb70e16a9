"""Checks of an engine's own arguments, before anything is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

from kvolt.core.errors import ConfigError


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
