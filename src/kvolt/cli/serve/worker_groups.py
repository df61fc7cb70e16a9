"""[[workers]] entries of the settings, changed by the flags of `kvolt serve`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import msgspec

from kvolt.cli.worker.command import with_arguments, with_model
from kvolt.cli.worker.served_model import with_served_model
from kvolt.cli.worker.tier_settings import with_tiers
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.runtime.config.settings import Settings, WorkerSettings

ROLES = (Role.PREFILL.value, Role.DECODE.value, Role.AGGREGATED.value)


def apply_flags(settings: Settings, args: argparse.Namespace) -> Settings:
    """Settings with the model, engine, tiers and counts of the flags."""
    _check_counts(args)
    settings = with_workers(with_model_served(settings, args.model, args.engine), args.workers)
    settings = with_engine_flags(settings, args.arg, args.lora)
    if settings.workers:
        first = with_tiers(settings.workers[0], args)
        first = with_served_model(first, args.served_model_name, args.generation_config)
        settings = _with_first(settings, first)
    return with_roles(settings, {role: getattr(args, role) for role in ROLES})


def _check_counts(args: argparse.Namespace) -> None:
    roles = [f"--{role}" for role in ROLES if getattr(args, role) is not None]
    if args.workers is not None and roles:
        raise ConfigError(
            f"--workers and {roles[0]} are mutually exclusive",
            key="workers",
            remedy="omit --workers; --aggregated N sets the number of workers that do both, --prefill and --decode "
            "those of each role",
        )


def with_model_served(settings: Settings, model: str | None, engine: str | None = None) -> Settings:
    if (model is None and engine is None) or not settings.workers:
        return settings
    first = with_model(settings.workers[0], model or settings.workers[0].model, engine)
    return _with_first(settings, first)


def with_workers(settings: Settings, count: int | None) -> Settings:
    if count is None:
        return settings
    if count < 1 or not settings.workers:
        raise ConfigError(
            "serve needs at least one worker", key="workers", remedy="set --workers to 1 or more"
        )
    first = msgspec.structs.replace(settings.workers[0], count=count)
    return _with_first(settings, first)


def _with_first(settings: Settings, *groups: WorkerSettings) -> Settings:
    """Replace the first [[workers]] entry."""
    return msgspec.structs.replace(settings, workers=[*groups, *settings.workers[1:]])


def with_roles(settings: Settings, counts: Mapping[str, int | None]) -> Settings:
    """Replace the first [[workers]] entry with one per role in `counts`; None leaves a role out."""
    by_role = {role: count for role, count in counts.items() if count is not None}
    if not by_role:
        return settings
    remedy = "for example --prefill 1 --decode 1, or --aggregated 2"
    if min(by_role.values()) < 0 or not any(by_role.values()) or not settings.workers:
        raise ConfigError("serve needs at least one worker", key="workers", remedy=remedy)
    if by_role.get("prefill") and not by_role.get("decode"):
        raise ConfigError("prefill workers require decode workers", key="workers", remedy=remedy)
    if by_role.get("decode") and by_role.get("aggregated"):
        # They are two components of the model; a frontend uses the newest one only.
        raise ConfigError(
            "decode and aggregated workers cannot serve the same model",
            key="workers",
            remedy=remedy,
        )
    first = settings.workers[0]
    groups = [
        msgspec.structs.replace(first, name=role, role=role, count=count)
        for role, count in by_role.items()
        if count
    ]
    return _with_first(settings, *groups)


def with_engine_flags(settings: Settings, arguments: Sequence[str], loras: Sequence[str]) -> Settings:
    """Apply `--arg` and `--lora` to the first [[workers]] entry."""
    if not arguments and not loras:
        return settings
    if not settings.workers:
        raise ConfigError("--arg and --lora require a worker", key="workers", remedy="add [[workers]]")
    first = with_arguments(settings.workers[0], arguments, loras)
    return _with_first(settings, first)
