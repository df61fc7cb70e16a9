"""When a cluster that `kvolt serve` starts is ready, and what it lacks until then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvolt.cli.health import Served
from kvolt.core.request import Role
from kvolt.runtime.config.settings import Settings, WorkerSettings

ANSWERING = frozenset((Role.DECODE.value, Role.AGGREGATED.value))


def in_words(models: Served) -> str:
    counts = {name: sum(roles.values()) for name, roles in models.items()}
    return ", ".join(f"{name} ({count} worker{'s' * (count != 1)})" for name, count in counts.items())


def is_ready(settings: Settings, models: Served, *, every_worker: bool) -> bool:
    """Whether the frontend reaches every role of the config: all of its workers, or at least one of each, and one that
    answers for each model."""
    groups = [group for group in settings.workers if group.count]
    num_answering = len({group.model for group in groups if group.role in ANSWERING})
    return len(models) >= num_answering and not missing_roles(groups, models, every_worker=every_worker)


def missing_roles(groups: Sequence[WorkerSettings], models: Served, *, every_worker: bool) -> list[str]:
    """Roles of which fewer workers are reached than the config has, or none."""
    decodes = any(group.role == Role.DECODE.value and group.count for group in groups)
    counted = (
        ANSWERING | {Role.PREFILL.value} if decodes else ANSWERING
    )  # nothing goes on after other prompts
    wanted: Counter[str] = Counter()
    for group in groups:
        if group.role in counted:
            wanted[group.role] += group.count * group.per_process
    reached: Counter[str] = Counter()
    for roles in models.values():
        reached.update(roles)
    return sorted(
        role
        for role, number in wanted.items()
        if reached[role] < (number if every_worker else min(number, 1))
    )


def missing(settings: Settings, models: Served | None) -> str:
    """What keeps requests from being answered, or a role from doing its part, in words; `models`: as the frontend says,
    if it answers."""
    if models is None:
        return "the frontend does not answer"
    if models:
        roles = missing_roles(settings.workers, models, every_worker=False)
        lacking = f"no {' and no '.join(roles)} worker is" if roles else "not every model is"
        return f"{lacking} reached yet (see its log)"
    if not settings.workers:
        return "no worker has joined yet (start one with `kvolt worker`)"
    roles = sorted({group.role for group in settings.workers if group.count})
    if not ANSWERING.intersection(roles):
        wanted = " or ".join(sorted(ANSWERING))
        return f"no worker has the role {wanted} (only {', '.join(roles) or 'none'}), and only those answer"
    return "no worker has registered a model yet (see its log)"
