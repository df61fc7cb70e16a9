"""Durations as people write them, and the limits within which an answer is good. Pure."""

from __future__ import annotations

import math
import re

import msgspec

from kvolt.core.errors import ConfigError

_UNITS_S = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(\D*)$")

FIGURES = ("ttft", "ttst", "itl", "max_gap", "tpot", "e2e")
"""Of one answer: first token, second after first, mean and longest gap, time per output token, all of it."""


def parse_duration_s(text: str, key: str = "duration") -> float:
    """`500ms`, `1.5s`, `2m`; a bare number is in seconds."""
    found = _DURATION.match(text.strip())
    unit = found[2].strip() if found else None
    if found is None or unit not in _UNITS_S or not math.isfinite(float(found[1])):
        raise ConfigError(f"{text!r} is no duration", key=key, remedy="write 500ms, 1.5s or 2m")
    return float(found[1]) * _UNITS_S[unit]


class Sla(msgspec.Struct, frozen=True):
    """An upper limit in seconds for each of some figures; an answer is good when it keeps all of them."""

    limits: dict[str, float]

    def is_kept(self, figures: dict[str, float | None]) -> bool:
        """A figure that an answer does not have (one token has no gap) breaks nothing."""
        for name, limit_s in self.limits.items():
            value = figures.get(name)
            if value is not None and value > limit_s:
                return False
        return True


def parse_sla(text: str) -> Sla:
    """`ttft=500ms,itl=50ms`."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().lower()
        if not equals or name not in FIGURES:
            raise ConfigError(
                f"--sla: {part.strip()!r} is no limit",
                key="sla",
                remedy=f"write ttft=500ms,itl=50ms with any of {', '.join(FIGURES)}",
            )
        limits[name] = parse_duration_s(value, "sla")
    return Sla(limits)
