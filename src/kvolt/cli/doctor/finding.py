"""Result of one check of `kvolt doctor`."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """Result of one check.

    `blocks`: `kvolt serve` cannot start. `running`: a kvolt process already runs here. State `untested`: may work, but
    is not covered by kvolt's tests.
    """

    name: str
    state: Literal["ok", "warn", "missing", "untested"]
    found: str
    remedy: str = ""
    blocks: bool = False
    running: bool = False
