"""Model names, and the choice of the files to load from a folder or repository.

Pure; no disk and no network. A hub name is `owner/repo`, optionally with `@revision` and `:file.gguf` or `:Q4_K_M`.
Weights are safetensors or GGUF. Pickles (`.bin`, `.pt`) are rejected: loading one executes code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from kvolt.core.errors import ConfigError

_HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<rev>[^:@\s]+))?(?::(?P<file>[^:@\s]+))?(?:@(?P<late_rev>[^:@\s]+))?",
    re.ASCII,
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_QUANT = re.compile(r"(?:^|[-._])((?:I?Q\d\w*)|BF16|F16|F32|FP16|MXFP4\w*)(?=[-._]|$)", re.IGNORECASE)

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
"""Files downloaded from a repository besides its weights."""


class ModelKind(StrEnum):
    FOLDER = "folder"
    """A Hugging Face folder: config.json, tokenizer, safetensors."""
    GGUF = "gguf"


class HubName(NamedTuple):
    """A model name on the hub."""

    repo: str
    revision: str | None = None
    file: str | None = None
    """A `.gguf` file name, or the quantization in it."""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f":{self.file}" if self.file else "")


class ModelFiles(NamedTuple):
    """The files of a model; a single one for GGUF."""

    kind: ModelKind
    files: tuple[str, ...]


def parse_hub_name(text: str) -> HubName | None:
    """Parse a hub name; None if it is not one. The revision may also come last."""
    match = _HUB_NAME.fullmatch(text)
    if match is None or (match["rev"] and match["late_rev"]):
        return None
    return HubName(match["repo"], match["rev"] or match["late_rev"], match["file"])


def is_pickle(name: str) -> bool:
    return name.lower().endswith(_PICKLES)


def pickle_error(shown: str, names: Iterable[str]) -> ConfigError:
    listed = _some(sorted(names))
    return ConfigError(
        f"{shown}: {listed} is a pickle, which can execute code when it is loaded",
        key="model",
        reason="pickle",
        remedy="use a revision or a model with .safetensors or .gguf weights, or convert it",
    )


def choose_files(names: Iterable[str], selector: str | None, shown: str) -> ModelFiles:
    """Choose the files to load among `names`, safetensors before GGUF. ConfigError if there are none or several.

    `selector` is the part of a hub name after the colon. Subfolders are ignored unless a file in one is named.
    """
    every = sorted(names)
    if selector is not None:
        return ModelFiles(ModelKind.GGUF, (_one_gguf(every, selector, shown),))
    top = [name for name in every if "/" not in name]
    tensors = [name for name in top if name.endswith(".safetensors") and not name.startswith("adapter_")]
    # Mistral's repositories contain the same weights again in its own format.
    hf_tensors = [name for name in tensors if not name.startswith("consolidated")]
    small = [name for name in top if name in SMALL_FILES]
    if (hf_tensors or tensors) and "config.json" in small:
        return ModelFiles(ModelKind.FOLDER, (*small, *(hf_tensors or tensors)))
    if _ggufs(every):
        return ModelFiles(ModelKind.GGUF, (_one_gguf(every, None, shown),))
    pickles = [name for name in top if is_pickle(name) and not name.startswith("training_args")]
    if pickles:
        raise pickle_error(shown, pickles)
    missing = "config.json" if tensors else "weights: neither .safetensors nor .gguf"
    raise ConfigError(
        f"{shown} has no {missing}",
        key="model",
        reason="no_weights",
        remedy="use a model of the Llama family",
    )


def quantization(name: str) -> str | None:
    """The quantization in the name of a GGUF file, for example `Q4_K_M`."""
    matches = _QUANT.findall(name.rpartition("/")[2].removesuffix(".gguf"))
    return matches[-1] if matches else None


def _ggufs(names: Iterable[str]) -> list[str]:
    """GGUF files, without the image encoders of multimodal models."""
    return [
        name
        for name in names
        if name.lower().endswith(".gguf") and not name.rpartition("/")[2].lower().startswith("mmproj")
    ]


def _one_gguf(names: list[str], selector: str | None, shown: str) -> str:
    ggufs = _ggufs(names)
    if selector is None:
        matches = ggufs
    elif is_pickle(selector):
        raise pickle_error(shown, [selector])
    elif selector.lower().endswith(".gguf"):
        matches = [name for name in ggufs if name == selector]
    else:
        matches = [name for name in ggufs if (quantization(name) or "").lower() == selector.lower()]
    if len(matches) == 1 and not _SPLIT.search(matches[0]):
        return matches[0]
    if matches and all(_SPLIT.search(name) for name in matches):
        raise ConfigError(
            f"{shown}: the GGUF is split into parts ({_some(matches)})",
            key="model",
            reason="split",
            remedy="merge it with `llama-gguf-split --merge` and use the path of the result",
        )
    kinds = sorted({quantization(name) or name for name in ggufs if not _SPLIT.search(name)})
    problem = f"has {len(matches)} such .gguf files" if matches else f"has no .gguf file {selector!r}"
    raise ConfigError(
        f"{shown} {problem}",
        key="model",
        reason="ambiguous" if matches else "not_found",
        remedy=f"use {shown.partition(':')[0]}:X with X one of {_some(kinds, 12)}"
        if kinds
        else "use another model",
    )


def _some(names: list[str], most: int = 3) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
