"""Finding: one thing that `kvolt doctor` looked at."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at.

    `blocks`: `kvolt serve` cannot start because of it. `running`: a kvolt does already what it would. `untested`: it
    may work here, and nobody has tried.
    """

    name: str
    state: Literal["ok", "warn", "missing", "untested"]
    found: str
    remedy: str = ""
    blocks: bool = False
    running: bool = False
