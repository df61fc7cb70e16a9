"""Capacity of a tier from text: 4GiB, 4GB, 1000blocks, or 2x the blocks of the device. Pure.

Units are written exactly: `4Gb` could mean bits, `4gb` either unit.
"""

from __future__ import annotations

import re

import msgspec

from kvolt.core.errors import ConfigError

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_PATTERN = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)\s*([A-Za-z]+)")


class TierCapacity(msgspec.Struct, frozen=True):
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


def parse_capacity(text: str, key: str) -> TierCapacity:
    """Parse a capacity. ConfigError if malformed."""
    match = _PATTERN.fullmatch(text.strip())
    unit = match[2] if match else ""
    number = float(match[1]) if match else 0.0
    if number > 0 and unit in _UNITS:
        return TierCapacity(num_bytes=int(number * _UNITS[unit]))
    if number >= 1 and unit in ("block", "blocks"):
        return TierCapacity(num_blocks=int(number))
    if number > 0 and unit == "x":
        return TierCapacity(device_ratio=number)
    raise ConfigError(
        f"invalid tier size: {text!r}",
        key=key,
        remedy="write 4GB (10^9 bytes each), 4GiB (2^30 bytes each), 1000blocks or 2x (the device's blocks)",
    )


class Watermarks(msgspec.Struct, frozen=True):
    """Shares of free slots: below `low`, evict until `high` is reached. Both 0: evict on demand only."""

    low: float = 0.01
    high: float = 0.02

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 0.5:
            raise ConfigError(
                f"invalid watermarks: {self.low:g} and {self.high:g}",
                key="tiers.disk_low_water",
                remedy="set the shares of free slots with 0 <= low <= high <= 0.5, for example 0.01 and 0.02",
            )
