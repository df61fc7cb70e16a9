"""Readiness of the cluster that `kvolt serve` starts, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvolt.cli.health import Served
from kvolt.core.request import Role
from kvolt.runtime.config.settings import Settings, WorkerSettings

GENERATING = frozenset((Role.DECODE.value, Role.AGGREGATED.value))


def models_text(models: Served) -> str:
    counts = {name: sum(roles.values()) for name, roles in models.items()}
    return ", ".join(f"{name} ({count} worker{'s' * (count != 1)})" for name, count in counts.items())


def is_ready(settings: Settings, models: Served, *, every_worker: bool) -> bool:
    """Whether the frontend reaches every role of the config and every model.

    `every_worker` requires all workers of each role, otherwise one is enough.
    """
    groups = [group for group in settings.workers if group.count]
    num_answering = len(
        {(group.model, *group.served_names[:1]) for group in groups if group.role in GENERATING}
    )
    return len(models) >= num_answering and not missing_roles(groups, models, every_worker=every_worker)


def missing_roles(groups: Sequence[WorkerSettings], models: Served, *, every_worker: bool) -> list[str]:
    """Roles with fewer reachable workers than required."""
    decodes = any(group.role == Role.DECODE.value and group.count for group in groups)
    # Prefill workers count only if there are decode workers.
    counted = GENERATING | {Role.PREFILL.value} if decodes else GENERATING
    expected: Counter[str] = Counter()
    for group in groups:
        if group.role in counted:
            expected[group.role] += group.count * group.per_process
    reached: Counter[str] = Counter()
    for roles in models.values():
        reached.update(roles)
    return sorted(
        role
        for role, number in expected.items()
        if reached[role] < (number if every_worker else min(number, 1))
    )


def missing(settings: Settings, models: Served | None) -> str:
    """What is missing until the cluster is ready, in words. `models` is None if the frontend does not respond."""
    if models is None:
        return "the frontend does not respond"
    if models:
        roles = missing_roles(settings.workers, models, every_worker=False)
        subject = f"no {' and no '.join(roles)} worker is" if roles else "not every model is"
        return f"{subject} reachable yet (see its log)"
    if not settings.workers:
        return "no worker has joined yet (start one with `kvolt worker`)"
    roles = sorted({group.role for group in settings.workers if group.count})
    if not GENERATING.intersection(roles):
        expected = " or ".join(sorted(GENERATING))
        return f"no worker has the role {expected}, which requests need (only {', '.join(roles) or 'none'})"
    return "no worker has registered a model yet (see its log)"
