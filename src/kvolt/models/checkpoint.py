"""Checkpoint: a model's weights under their Hugging Face names, with its config, tokenizer and template.

Owns the Hugging Face folder format. Tensors are views of the mapped file: each is read on first use, and no second
copy is kept. Must not know how a model computes or how a model name is resolved.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from kvolt.core.card import ModelCard
from kvolt.core.errors import ConfigError
from kvolt.models.config import ModelConfig, read_hf_config
from kvolt.models.folder_texts import FolderTexts
from kvolt.models.generation_config import GenerationDefaults
from kvolt.models.json_files import read_json, read_required
from kvolt.models.weights import check_shapes, hash_weights

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SMALL_MODEL_WEIGHTS = 400_000_000
_SMALL_MODEL_TOKENS = 1024
"""Default `max_tokens` of small models, which often repeat themselves until the context is full."""


class Checkpoint(Protocol):
    """An open checkpoint. Opening reads only headers, and checks that all tensors exist with the expected shapes."""

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> tuple[str, ...]:
        """Names of the tensors that the config requires; without `lm_head.weight` if embeddings are tied."""
        ...

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor with `dtype`, or its stored type (float32 if quantized). May be a view of the file; must
        not be modified."""
        ...

    @property
    def weights_hash(self) -> str:
        """Equal for equal weights on any machine; see `hash_weights`. Computed on first access."""
        ...

    @property
    def tokenizer_json(self) -> bytes: ...

    @property
    def chat_template(self) -> str: ...

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """Defaults of requests, recommended by the model's authors."""
        ...


def open_checkpoint(path: Path, context_length: int | None = None) -> Checkpoint:
    """Open a folder in Hugging Face's layout, or a GGUF file. ConfigError describes the first problem."""
    if path.is_dir():
        return SafetensorsFolder(path, context_length)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", key="model", remedy="name a folder or a .gguf file")
    from kvolt.models.gguf_file import GgufFile

    return GgufFile(path, context_length)


def model_card(name: str, checkpoint: Checkpoint, block_size: int) -> ModelCard:
    """The card of a model. Names no parsers: a frontend derives them from the chat template."""
    config = checkpoint.config
    return ModelCard(
        name=name,
        tokenizer_json=checkpoint.tokenizer_json,
        chat_template=checkpoint.chat_template,
        context_length=config.context_length,
        block_size=block_size,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        defaults=dict(checkpoint.generation_defaults),
        default_max_tokens=_SMALL_MODEL_TOKENS if config.num_weights < _SMALL_MODEL_WEIGHTS else None,
    )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class SafetensorsFolder:
    """A folder in Hugging Face's layout: config.json, tokenizer.json and .safetensors files."""

    def __init__(self, folder: Path, context_length: int | None = None) -> None:
        self._folder = folder
        document = read_required(folder, "config.json", "name a folder that holds a model")
        read_hf_config(
            document, "float32", context_length
        )  # its errors are clearer than those of the weights
        self._texts = FolderTexts(folder)
        self._files, self._file_of = self._open_files()
        self._slices = {name: file.get_slice(name) for name, file in self._file_of.items()}
        config = read_hf_config(document, self._stored_dtype(), context_length)
        shapes = {name: tuple(each.get_shape()) for name, each in self._slices.items()}
        self._names = check_shapes(config, shapes, str(folder))
        self._check_dtypes()
        self.config = msgspec.structs.replace(
            config,
            eos_token_ids=self._texts.eos_token_ids(config.eos_token_ids),
            bos_token_id=self._texts.bos_token_id(config.bos_token_id),
        )

    def names(self) -> tuple[str, ...]:
        return self._names

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor if dtype is None else tensor.to(dtype)

    @cached_property
    def weights_hash(self) -> str:
        return hash_weights(self.config, self._files)

    @property
    def tokenizer_json(self) -> bytes:
        return self._texts.tokenizer_json

    @property
    def chat_template(self) -> str:
        return self._texts.chat_template

    @property
    def generation_defaults(self) -> GenerationDefaults:
        return self._texts.generation_defaults

    def _open_files(self) -> tuple[list[Path], dict[str, Any]]:
        """Paths of the weight files, and the open file of each tensor."""
        index = read_json(self._folder, _INDEX, _Index)
        names = [_SINGLE] if index is None else sorted(set(index.weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise ConfigError(
                    f"{self._folder}/{_INDEX} names {name!r}, which is outside the folder", key="model"
                )
            if not (self._folder / name).is_file():
                raise ConfigError(
                    f"{self._folder} has no {name}",
                    key="model",
                    remedy="download the model again" if index else "convert the weights to safetensors",
                )
        opened = {name: _open_safetensors(self._folder / name) for name in names}
        file_of = {tensor: file for file in opened.values() for tensor in file.keys()}  # noqa: SIM118
        return [self._folder / name for name in names], file_of

    def _stored_dtype(self) -> str:
        stored = self._slices.get("model.embed_tokens.weight")
        return "float32" if stored is None else _DTYPES.get(stored.get_dtype(), "float32")

    def _check_dtypes(self) -> None:
        for name in self._names:
            stored = self._slices[name].get_dtype()
            if stored not in _DTYPES:
                raise ConfigError(
                    f"{self._folder}: {name} is stored as {stored}, which is not supported",
                    key="model",
                    remedy=f"use weights in one of {', '.join(_DTYPES)}, or a GGUF file",
                )


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read as safetensors: {error}", key="model", remedy="download the model again"
        ) from error
