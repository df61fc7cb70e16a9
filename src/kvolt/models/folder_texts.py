"""FolderTexts: what a model's folder says besides its weights and their shape: tokenizer, template, ends, defaults.

Hugging Face's layout. For any architecture, and without torch: engines of others serve models that ours does not know.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.models.config import token_ids

T = TypeVar("T")


class _Generation(msgspec.Struct):
    """The fields of generation_config.json that matter."""

    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _AddedToken(msgspec.Struct):
    content: str
    id: int | None = None


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _AddedToken | msgspec.UnsetType | None = msgspec.UNSET
    eos_token: str | _AddedToken | None = None


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class FolderTexts:
    """See the module. ConfigError names the file that is wrong."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tokenizer_json = required(
            folder,
            "tokenizer.json",
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) makes one",
        )
        self._generation = decoded(folder, "generation_config.json", _Generation) or _Generation()
        self._tokenizer = decoded(folder, "tokenizer_config.json", _TokenizerConfig) or _TokenizerConfig()

    @cached_property
    def chat_template(self) -> str:
        """The file of its own, or the default one of tokenizer_config.json; empty where there is none."""
        own = _read(self._folder / "chat_template.jinja")
        if own is not None:
            return own.decode(errors="replace")
        given = self._tokenizer.chat_template
        if given is None or isinstance(given, str):
            return given or ""
        named = {each.name: each.template for each in given}
        return named.get("default") or next(iter(named.values()), "")

    @property
    def sampling_defaults(self) -> dict[str, float | int]:
        given = self._generation
        if not given.do_sample:
            return {}
        values = {
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": given.top_k or None,  # 0 means all, there
            "min_p": given.min_p,
            "repetition_penalty": given.repetition_penalty,
        }
        return {name: value for name, value in values.items() if value is not None}

    def ends(self, of_config: tuple[int, ...]) -> tuple[int, ...]:
        """The ids that end a text: generation_config.json goes before config.json, and of several ends the tokenizer's
        own comes first, since templates know it as `eos_token`."""
        ends = token_ids(self._generation.eos_token_id) or of_config
        own_end = self._token_id(self._tokenizer.eos_token)
        if own_end is not None and (not ends or own_end in ends):
            ends = tuple(dict.fromkeys((own_end, *ends)))
        return ends

    def begin(self, of_config: int | None) -> int | None:
        """The id that begins a text, if one does."""
        if self._tokenizer.bos_token is not msgspec.UNSET:  # Qwen's tokenizer has none, its config.json does
            return self._token_id(self._tokenizer.bos_token)
        begin = self._generation.bos_token_id
        return of_config if begin is None else begin

    def _token_id(self, token: str | _AddedToken | None) -> int | None:
        text = token.content if isinstance(token, _AddedToken) else token
        return None if text is None else self._added_tokens.get(text)

    @cached_property
    def _added_tokens(self) -> dict[str, int]:
        try:
            tokenizer = msgspec.json.decode(self.tokenizer_json, type=_Tokenizer)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self._folder}/tokenizer.json cannot be used: {error}", key="model"
            ) from error
        return {token.content: token.id for token in tokenizer.added_tokens if token.id is not None}


def required(folder: Path, name: str, remedy: str) -> bytes:
    """The bytes of a file; ConfigError where there is none."""
    found = _read(folder / name)
    if found is None:
        raise ConfigError(f"{folder} has no {name}", key="model", remedy=remedy)
    return found


def decoded(folder: Path, name: str, kind: type[T]) -> T | None:
    """A JSON file; None where there is none."""
    document = _read(folder / name)
    try:
        return None if document is None else msgspec.json.decode(document, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder / name} cannot be used: {error}", key="model") from error


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", key="model") from error
