"""A routing target and what is known of its load. Pure."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.ids import InstanceId

_Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class WorkerDpRank(NamedTuple):
    """One data-parallel rank of one worker."""

    instance_id: InstanceId
    dp_rank: int


def ranks_of(info: EngineInfo | None) -> tuple[int, ...]:
    """Distinct DP ranks of a worker: rank 0 if it registered none."""
    return tuple(dict.fromkeys(info.dp_ranks)) or (0,) if info is not None else (0,)


class WorkerRankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Known load of a worker rank, from all routers."""

    instance: InstanceId
    dp_rank: int
    requests: float
    decoding: float
    prefill_tokens: float
    blocks: float
    queue_s: float


class ReservedLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load that one router has reserved on a worker rank."""

    instance: InstanceId
    dp_rank: int = 0
    requests: _Amount = 0.0
    decoding: _Amount = 0.0
    prefill_tokens: _Amount = 0.0
    """Prompt tokens not computed yet."""
    blocks: _Amount = 0.0
    context_tokens: _Amount = 0.0
    """Prompt tokens of the decoding requests."""
    queue_s: _Amount = 0.0
    """Predicted time until the pending prompts are computed."""

    @property
    def worker_rank(self) -> WorkerDpRank:
        return WorkerDpRank(self.instance, self.dp_rank)
