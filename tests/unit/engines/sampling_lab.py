"""Which sampling fields an adapter declares and then ignores."""

from __future__ import annotations

from collections.abc import Callable

from kvolt.core.errors import Unsupported
from kvolt.core.request import Sampling
from kvolt.testing.engines.suite import SAMPLING_VALUES


def ignored_fields(declared: frozenset[str], map_request: Callable[[Sampling], object]) -> set[str]:
    """Declared fields that change nothing in what `map_request` makes for the engine, and are not refused."""
    unset = map_request(Sampling())
    ignored = set()
    for name in declared:
        try:
            if map_request(Sampling(**{name: SAMPLING_VALUES[name]})) == unset:  # type: ignore[arg-type]
                ignored.add(name)
        except Unsupported:
            continue
    return ignored
