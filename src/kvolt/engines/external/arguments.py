"""An engine's own arguments, as a user gives them: what is wrong with them is told before anything is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

from kvolt.core.errors import ConfigError


def check_names(engine: str, given: Iterable[str], known: Collection[str], key: str, where: str) -> None:
    """ConfigError for the first that the engine does not know, with the nearest that it does.

    `key`: under which they are given. `where`: where all of them are told."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else where
            raise ConfigError(f"{engine} has no argument {name!r}", key=f"{key}.{name}", remedy=hint)


def check_not_given(given: Mapping[str, object], remedies: Mapping[str, str], key: str) -> None:
    """ConfigError for a name that is kvolt's to say. `remedies`: of each such name, where it belongs."""
    for name, remedy in remedies.items():
        if name in given:
            table = key.rpartition(".")[2]
            raise ConfigError(
                f"{table} has a {name}, which is not its to say", key=f"{key}.{name}", remedy=remedy
            )


def blind(message: str, key: str) -> ConfigError:
    """For a setting with which a router would go by KV events that never come, or are another's."""
    return ConfigError(
        message,
        key=key,
        remedy="leave it out, or say kv_events=false: routers then go by what they have sent",
    )
