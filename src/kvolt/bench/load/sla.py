"""Parsing of durations, and SLA limits for goodput. Pure."""

from __future__ import annotations

import math
import re

import msgspec

from kvolt.core.errors import ConfigError

_UNITS_S = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(\D*)$")

SLA_LATENCIES = ("ttft", "ttst", "itl", "max_gap", "tpot", "e2e")
"""Metrics of a response: TTFT, first to second token, mean and longest gap, time per output token, total."""


def parse_duration_s(text: str, key: str = "duration") -> float:
    """Parse `500ms`, `1.5s`, `2m` or `1h`; a plain number is in seconds."""
    match = _DURATION.match(text.strip())
    unit = match[2].strip() if match else None
    if match is None or unit not in _UNITS_S or not math.isfinite(float(match[1])):
        raise ConfigError(f"invalid duration {text!r}", key=key, remedy="for example 500ms, 1.5s or 2m")
    return float(match[1]) * _UNITS_S[unit]


class Sla(msgspec.Struct, frozen=True):
    """Upper limits in seconds for some metrics; a response is good if it meets all."""

    limits: dict[str, float]

    def is_met(self, latencies: dict[str, float | None]) -> bool:
        """Whether all limits are met. Missing metrics (one token has no gap) count as met."""
        for name, limit_s in self.limits.items():
            value = latencies.get(name)
            if value is not None and value > limit_s:
                return False
        return True


def parse_sla(text: str) -> Sla:
    """Parse `ttft=500ms,itl=50ms`."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().lower()
        if not equals or name not in SLA_LATENCIES:
            raise ConfigError(
                f"--sla: invalid limit {part.strip()!r}",
                key="sla",
                remedy=f"write ttft=500ms,itl=50ms with any of {', '.join(SLA_LATENCIES)}",
            )
        if value.strip()[-1:].isdigit():
            raise ConfigError(
                f"--sla: {part.strip()} has no unit",
                key="sla",
                remedy=f"write {part.strip()}ms or {part.strip()}s",
            )
        limits[name] = parse_duration_s(value, "sla")
    return Sla(limits)
