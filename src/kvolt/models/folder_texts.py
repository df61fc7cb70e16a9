"""FolderTexts: tokenizer, chat template, special tokens and generation defaults of a Hugging Face folder.

Independent of the architecture and of torch, since external engines serve models that the native engine does not
support.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec

from kvolt.models.config import token_ids
from kvolt.models.generation_config import FILE, GenerationConfig, GenerationDefaults
from kvolt.models.json_files import decode_json, read_bytes, read_json, read_required


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
    """See the module. ConfigError names the invalid file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tokenizer_json = read_required(
            folder,
            "tokenizer.json",
            "create it with AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
        self._generation = read_json(folder, FILE, GenerationConfig) or GenerationConfig()
        self._tokenizer = read_json(folder, "tokenizer_config.json", _TokenizerConfig) or _TokenizerConfig()

    @cached_property
    def chat_template(self) -> str:
        """chat_template.jinja, or the default template of tokenizer_config.json; empty if there is none."""
        document = read_bytes(self._folder / "chat_template.jinja")
        if document is not None:
            return document.decode(errors="replace")
        template = self._tokenizer.chat_template
        if template is None or isinstance(template, str):
            return template or ""
        named = {each.name: each.template for each in template}
        return named.get("default") or next(iter(named.values()), "")

    @property
    def generation_defaults(self) -> GenerationDefaults:
        return self._generation.defaults

    def eos_token_ids(self, config_ids: tuple[int, ...]) -> tuple[int, ...]:
        """EOS token ids: those of generation_config.json, else of config.json.

        The tokenizer's EOS comes first, because templates use it as `eos_token`.
        """
        ids = token_ids(self._generation.eos_token_id) or config_ids
        tokenizer_eos = self._token_id(self._tokenizer.eos_token)
        if tokenizer_eos is not None and (not ids or tokenizer_eos in ids):
            ids = tuple(dict.fromkeys((tokenizer_eos, *ids)))
        return ids

    def bos_token_id(self, config_id: int | None) -> int | None:
        """The BOS token id, or None if the model has none."""
        if self._tokenizer.bos_token is not msgspec.UNSET:  # may be None: Qwen has one only in config.json
            return self._token_id(self._tokenizer.bos_token)
        token_id = self._generation.bos_token_id
        return config_id if token_id is None else token_id

    def _token_id(self, token: str | _AddedToken | None) -> int | None:
        text = token.content if isinstance(token, _AddedToken) else token
        return None if text is None else self._added_tokens.get(text)

    @cached_property
    def _added_tokens(self) -> dict[str, int]:
        tokenizer = decode_json(self.tokenizer_json, f"{self._folder}/tokenizer.json", _Tokenizer)
        return {token.content: token.id for token in tokenizer.added_tokens if token.id is not None}
