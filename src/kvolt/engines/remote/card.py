"""ModelCard of an attached server. The tokenizer and chat template must be on this machine.

Servers provide neither over HTTP, and kvolt exchanges only tokens with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from kvolt.core.card import ModelCard
from kvolt.core.errors import ConfigError
from kvolt.engines.remote.server import ServerFacts
from kvolt.models.config import token_ids
from kvolt.models.folder_texts import FolderTexts
from kvolt.models.generation_config import GenerationDefaults
from kvolt.models.json_files import read_json
from kvolt.models.resolve import locate


class _Texts(Protocol):
    """Model texts of a folder or a GGUF file."""

    @property
    def tokenizer_json(self) -> bytes: ...

    @property
    def chat_template(self) -> str: ...

    @property
    def generation_defaults(self) -> GenerationDefaults: ...


class _Config(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


def card_of(facts: ServerFacts, tokenizer: str | None) -> ModelCard:
    """Create the card. Blocking. ConfigError if the model's files are missing."""
    texts, ends, begin = _read(_find(facts, tokenizer))
    return ModelCard(
        name=facts.model,
        tokenizer_json=texts.tokenizer_json,
        chat_template=texts.chat_template,
        context_length=facts.context_length,
        block_size=facts.block_size,
        eos_token_ids=ends,
        bos_token_id=begin,
        defaults=dict(texts.generation_defaults),
    )


def _find(facts: ServerFacts, tokenizer: str | None) -> Path:
    for name in (tokenizer,) if tokenizer else facts.sources:
        folder = Path(name).expanduser()
        if (folder / "tokenizer.json").is_file():
            return folder
        try:
            located = locate(name)
        except ConfigError:
            continue
        if located is not None:
            return Path(located.path)
    names = " or ".join(repr(name) for name in ((tokenizer,) if tokenizer else facts.sources))
    raise ConfigError(
        f"the tokenizer of {facts.model} is not on this machine: no folder with tokenizer.json and no downloaded model "
        f"is named {names}",
        key="tokenizer",
        remedy="set tokenizer=FOLDER with the model's tokenizer.json and tokenizer_config.json "
        "(`kvolt model fetch OWNER/NAME` downloads a model from the hub)",
    )


def _read(path: Path) -> tuple[_Texts, tuple[int, ...], int | None]:
    if path.is_dir():
        texts = FolderTexts(path)
        config = read_json(path, "config.json", _Config) or _Config()
        return (
            texts,
            texts.eos_token_ids(token_ids(config.eos_token_id)),
            texts.bos_token_id(config.bos_token_id),
        )
    try:
        from kvolt.models.gguf_file import GgufFile  # needs torch, which may not be installed
    except ImportError as error:
        raise ConfigError(
            f"{path} is a GGUF file, whose reader is not installed: {error}",
            key="tokenizer",
            remedy="set tokenizer=FOLDER with a tokenizer.json, or install kvolt[native]",
        ) from error
    file = GgufFile(path)
    return file, file.config.eos_token_ids, file.config.bos_token_id
