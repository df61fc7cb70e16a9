"""Names of models and of their files: what a name asks for, and which files of a folder or repository serve it.

Pure rules over text; no disk and no network. A hub name is `owner/repo`, with `@revision` and with
`:file.gguf` or `:Q4_K_M` where wanted. Weights are safetensors or GGUF. Pickles (`.bin`, `.pt`) are refused by
name: to read one is to run it.
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
"""What is fetched of a repository besides its weights."""


class ModelKind(StrEnum):
    FOLDER = "folder"
    """A Hugging Face folder: config.json, tokenizer, safetensors."""
    GGUF = "gguf"


class HubName(NamedTuple):
    """A name as the hub knows it."""

    repo: str
    revision: str | None = None
    file: str | None = None
    """A `.gguf` file, or what its name says of the quantization."""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f":{self.file}" if self.file else "")


class Chosen(NamedTuple):
    """The files that make the model; one of them, for a GGUF."""

    kind: ModelKind
    files: tuple[str, ...]


def parse_hub_name(text: str) -> HubName | None:
    """None for what is not shaped like one. The revision may also come last."""
    found = _HUB_NAME.fullmatch(text)
    if found is None or (found["rev"] and found["late_rev"]):
        return None
    return HubName(found["repo"], found["rev"] or found["late_rev"], found["file"])


def is_pickle(name: str) -> bool:
    return name.lower().endswith(_PICKLES)


def refuse_pickle(shown: str, names: Iterable[str]) -> ConfigError:
    listed = _some(sorted(names))
    return ConfigError(
        f"{shown}: {listed} is a pickle, which could run any code when it is read",
        key="model",
        reason="pickle",
        remedy="use a revision or a model with .safetensors or .gguf weights, or convert it",
    )


def choose(names: Iterable[str], wanted: str | None, shown: str) -> Chosen:
    """The files to use among `names`; safetensors go before GGUF. ConfigError when none or several would do.

    `wanted` is the part after the colon of a hub name. Only the top folder counts, unless a file is named.
    """
    every = sorted(names)
    if wanted is not None:
        return Chosen(ModelKind.GGUF, (_one_gguf(every, wanted, shown),))
    top = [name for name in every if "/" not in name]
    tensors = [name for name in top if name.endswith(".safetensors") and not name.startswith("adapter_")]
    # Mistral's repositories have the same weights a second time, in its own layout.
    own = [name for name in tensors if not name.startswith("consolidated")]
    small = [name for name in top if name in SMALL_FILES]
    if (own or tensors) and "config.json" in small:
        return Chosen(ModelKind.FOLDER, (*small, *(own or tensors)))
    if _ggufs(every):
        return Chosen(ModelKind.GGUF, (_one_gguf(every, None, shown),))
    pickles = [name for name in top if is_pickle(name) and not name.startswith("training_args")]
    if pickles:
        raise refuse_pickle(shown, pickles)
    what = "config.json" if tensors else "weights: neither .safetensors nor .gguf"
    raise ConfigError(
        f"{shown} has no {what}", key="model", reason="no_weights", remedy="name a model of the Llama family"
    )


def quantization(name: str) -> str | None:
    """What a GGUF file's name says of its quantization: `Q4_K_M`."""
    found = _QUANT.findall(name.rpartition("/")[2].removesuffix(".gguf"))
    return found[-1] if found else None


def _ggufs(names: Iterable[str]) -> list[str]:
    """Without the image encoders that lie beside some models."""
    return [
        name
        for name in names
        if name.lower().endswith(".gguf") and not name.rpartition("/")[2].lower().startswith("mmproj")
    ]


def _one_gguf(names: list[str], wanted: str | None, shown: str) -> str:
    ggufs = _ggufs(names)
    if wanted is None:
        found = ggufs
    elif is_pickle(wanted):
        raise refuse_pickle(shown, [wanted])
    elif wanted.lower().endswith(".gguf"):
        found = [name for name in ggufs if name == wanted]
    else:
        found = [name for name in ggufs if (quantization(name) or "").lower() == wanted.lower()]
    if len(found) == 1 and not _SPLIT.search(found[0]):
        return found[0]
    if found and all(_SPLIT.search(name) for name in found):
        raise ConfigError(
            f"{shown}: the GGUF is split into parts ({_some(found)})",
            key="model",
            reason="split",
            remedy="merge it with `llama-gguf-split --merge`, and give the path of the result",
        )
    kinds = sorted({quantization(name) or name for name in ggufs if not _SPLIT.search(name)})
    what = f"has {len(found)} such .gguf files" if found else f"has no .gguf file {wanted!r}"
    raise ConfigError(
        f"{shown} {what}",
        key="model",
        reason="ambiguous" if found else "not_found",
        remedy=f"name one: {shown.partition(':')[0]}:X with X of {_some(kinds, 12)}"
        if kinds
        else "it has none",
    )


def _some(names: list[str], most: int = 3) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
