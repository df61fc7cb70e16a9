"""Clears the KV caches of all workers that this frontend knows, for its admin port."""

from __future__ import annotations

import msgspec

from kvolt.core.errors import Unsupported
from kvolt.frontend.admin.worker_commands import Outcome, ask_workers
from kvolt.frontend.models import Models
from kvolt.runtime.runtime import Runtime
from kvolt.worker.control import ClearKv


class Clearing(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of it at one worker."""

    model: str
    instance: str
    process: str
    cleared_blocks: int | None = None
    error: str | None = None


async def clear_kv_blocks(runtime: Runtime, models: Models) -> list[Clearing]:
    """One result for each worker. Unsupported when there are workers and none of them has such a thing."""
    outcomes = await ask_workers(runtime, models.all(), ClearKv())
    refusals = [outcome.error for outcome in outcomes if isinstance(outcome.error, Unsupported)]
    if refusals and len(refusals) == len(outcomes):
        raise refusals[0]
    return [_clearing(outcome) for outcome in outcomes]


def _clearing(outcome: Outcome) -> Clearing:
    instance, error = outcome.instance, outcome.error
    return Clearing(
        outcome.model,
        instance.id,
        instance.process,
        outcome.answer.cleared_blocks,
        error.message if error is not None else None,
    )
