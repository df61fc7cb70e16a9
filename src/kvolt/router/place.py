"""Place: where a request can go."""

from __future__ import annotations

from typing import NamedTuple

from kvolt.core.ids import InstanceId


class Place(NamedTuple):
    """One data-parallel rank of one worker."""

    instance_id: InstanceId
    dp_rank: int
