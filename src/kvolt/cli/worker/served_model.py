"""Names and generation defaults of the model that a worker serves, from the flags and settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from kvolt.cli.flags import option
from kvolt.core.errors import ConfigError
from kvolt.engines.registry import choose_engine
from kvolt.models.generation_config import FILE, GenerationConfig
from kvolt.models.json_files import read_json
from kvolt.models.resolve import recommended_defaults
from kvolt.runtime.config.settings import WorkerSettings
from kvolt.worker.served_card import ServedModel

_REMOTE = "remote"
_GGUF = ".gguf"
_MAX_NAME_CHARS = 1024


def add_model_flags(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Name for clients; further names are aliases. Default: the model as given.",
    )
    option(
        engine,
        "--generation-config",
        "CONFIG",
        f"Defaults of temperature, top_p and others: auto ({FILE} of the model), none, or a folder.",
    )


def with_served_model(
    group: WorkerSettings, names: list[str], generation_config: str | None
) -> WorkerSettings:
    """The group with the values of the flags, if they are given."""
    return msgspec.structs.replace(
        group,
        served_names=names or group.served_names,
        generation_config=generation_config or group.generation_config,
    )


def served_model(group: WorkerSettings) -> ServedModel:
    """Names and generation defaults of the group. Raises ConfigError for invalid ones; reads the folder, if any."""
    # An attached server decides what it serves, whatever the group's model is.
    model = None if choose_engine(group.engine, group.model)[0] == _REMOTE else group.model
    names = tuple(dict.fromkeys(group.served_names))
    if not names and "served_name" not in group.args:
        names = _default_names(model)
    for name in names:
        if not name.strip() or not name.isprintable() or len(name) > _MAX_NAME_CHARS:
            raise ConfigError(
                f"the served model name {name[:80]!r} is not usable",
                key="served_names",
                remedy=f"use 1 to {_MAX_NAME_CHARS} printable characters",
            )
    defaults = _defaults(group.generation_config, model)
    return ServedModel(names=names, loaded_name=model, generation_defaults=defaults)


def _default_names(model: str | None) -> tuple[str, ...]:
    """A GGUF file is named by its stem, not by its path on this machine."""
    if model is None or not model.lower().endswith(_GGUF) or not Path(model).expanduser().is_file():
        return ()
    return (Path(model).stem,)


def _defaults(choice: str, model: str | None) -> dict[str, Any] | None:
    """None: those that the engine finds in the model's files."""
    if choice == "none":
        return {}
    if choice == "auto":
        return None if model is None else recommended_defaults(model)
    folder = Path(choice).expanduser()
    config = read_json(folder, FILE, GenerationConfig)
    if config is None:
        raise ConfigError(
            f"{folder} has no {FILE}",
            key="generation_config",
            remedy="use auto, none, or a folder with that file",
        )
    return dict(config.defaults)
