"""The ModelCard of an attached server: its model's tokenizer and template have to be on this disk.

A server tells neither over HTTP; text is made here, and only tokens go there and come back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from kvolt.core.card import ModelCard
from kvolt.core.errors import ConfigError
from kvolt.engines.remote.server import ServerFacts
from kvolt.models.config import token_ids
from kvolt.models.folder_texts import FolderTexts, decoded
from kvolt.models.resolve import locate


class _Texts(Protocol):
    """What is said besides weights: of a folder, or of a GGUF file."""

    @property
    def tokenizer_json(self) -> bytes: ...

    @property
    def chat_template(self) -> str: ...

    @property
    def sampling_defaults(self) -> dict[str, float | int]: ...


class _Config(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


def card_of(facts: ServerFacts, tokenizer: str | None) -> ModelCard:
    """Blocks. ConfigError where the model's files are not here."""
    texts, ends, begin = _read(_find(facts, tokenizer))
    return ModelCard(
        name=facts.model,
        tokenizer_json=texts.tokenizer_json,
        chat_template=texts.chat_template,
        context_length=facts.context_length,
        block_size=facts.block_size,
        eos_token_ids=ends,
        bos_token_id=begin,
        defaults=dict(texts.sampling_defaults),
    )


def _find(facts: ServerFacts, tokenizer: str | None) -> Path:
    for name in (tokenizer,) if tokenizer else facts.sources:
        folder = Path(name).expanduser()
        if (folder / "tokenizer.json").is_file():
            return folder
        try:
            found = locate(name)
        except ConfigError:
            continue
        if found is not None:
            return Path(found.path)
    looked = tokenizer or ", ".join(facts.sources)
    raise ConfigError(
        f"the tokenizer of {facts.model} is not on this machine (looked for {looked})",
        key="tokenizer",
        remedy="give tokenizer=FOLDER, one that has the model's tokenizer.json and tokenizer_config.json "
        "(`kvolt model fetch OWNER/NAME` gets a model of the hub)",
    )


def _read(path: Path) -> tuple[_Texts, tuple[int, ...], int | None]:
    if path.is_dir():
        texts = FolderTexts(path)
        config = decoded(path, "config.json", _Config) or _Config()
        return texts, texts.ends(token_ids(config.eos_token_id)), texts.begin(config.bos_token_id)
    try:
        from kvolt.models.gguf_file import GgufFile  # it needs torch, which a frontend may not have
    except ImportError as error:
        raise ConfigError(
            f"{path} is a GGUF file, and what reads those is not installed: {error}",
            key="tokenizer",
            remedy="give tokenizer=FOLDER with a tokenizer.json, or install kvolt[native]",
        ) from error
    file = GgufFile(path)
    return file, file.config.eos_token_ids, file.config.bos_token_id
