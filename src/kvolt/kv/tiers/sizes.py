"""How large a tier is, as people say it: 4GiB, 1000blocks, or 2x as much as the device holds. Pure."""

from __future__ import annotations

import re

import msgspec

from kvolt.core.errors import ConfigError

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_PATTERN = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)\s*([a-z]+)", re.IGNORECASE)


class Capacity(msgspec.Struct, frozen=True):
    """One of these is set."""

    num_bytes: int = 0
    num_blocks: int = 0
    of_device: float = 0.0

    def blocks(self, slot_bytes: int, num_device_blocks: int) -> int:
        """As many as that is, where each takes so many bytes."""
        if self.num_blocks:
            return self.num_blocks
        if self.of_device:
            return int(self.of_device * num_device_blocks)
        return self.num_bytes // slot_bytes


def parse_capacity(text: str, key: str) -> Capacity:
    """ConfigError for what is none."""
    found = _PATTERN.fullmatch(text.strip())
    unit = found[2].lower() if found else ""
    number = float(found[1]) if found else 0.0
    if number > 0 and unit in _UNITS:
        return Capacity(num_bytes=int(number * _UNITS[unit]))
    if number >= 1 and unit in ("block", "blocks"):
        return Capacity(num_blocks=int(number))
    if number > 0 and unit == "x":
        return Capacity(of_device=number)
    raise ConfigError(
        f"{text!r} is no size of a tier", key=key, remedy="write for example 4GiB, 1000blocks or 2x"
    )
