"""Capacity of a tier from text: 4GiB, 1000blocks, or 2x the blocks of the device. Pure."""

from __future__ import annotations

import re

import msgspec

from kvolt.core.errors import ConfigError

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_PATTERN = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)\s*([a-z]+)", re.IGNORECASE)


class Capacity(msgspec.Struct, frozen=True):
    """Exactly one field is set."""

    num_bytes: int = 0
    num_blocks: int = 0
    device_ratio: float = 0.0

    def blocks(self, slot_bytes: int, num_device_blocks: int) -> int:
        """Capacity in blocks of `slot_bytes`."""
        if self.num_blocks:
            return self.num_blocks
        if self.device_ratio:
            return int(self.device_ratio * num_device_blocks)
        return self.num_bytes // slot_bytes


def parse_capacity(text: str, key: str) -> Capacity:
    """Parse a capacity. ConfigError if malformed."""
    match = _PATTERN.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    number = float(match[1]) if match else 0.0
    if number > 0 and unit in _UNITS:
        return Capacity(num_bytes=int(number * _UNITS[unit]))
    if number >= 1 and unit in ("block", "blocks"):
        return Capacity(num_blocks=int(number))
    if number > 0 and unit == "x":
        return Capacity(device_ratio=number)
    raise ConfigError(
        f"invalid tier size: {text!r}", key=key, remedy="use for example 4GiB, 1000blocks or 2x"
    )
