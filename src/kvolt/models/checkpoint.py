"""Checkpoint: a model's weights under their Hugging Face names, with its config, tokenizer and template.

Owns the table of tensors that a config asks for, the identity of weights, and the folder of safetensors.
Tensors are views of the mapped file: nothing is read before it is used, and no second copy is held here.
It must not know how a model computes, nor where a model name leads.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from kvolt.core.errors import ConfigError
from kvolt.models.config import ModelConfig, read_hf_config
from kvolt.models.folder_texts import FolderTexts, decoded, required
from kvolt.runtime.host.cores import usable_cores

Shape = tuple[int, ...]

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HASHED_AT_ONCE = 16 << 20
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint(Protocol):
    """Opening one reads headers only, and has checked that every tensor is there in its shape."""

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> tuple[str, ...]:
        """The tensors the config asks for; `lm_head.weight` is not among them when embeddings are tied."""
        ...

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As stored (dequantized: float32), or as `dtype`. May be a view of the file: do not write into it."""
        ...

    @property
    def weights_hash(self) -> str:
        """Equal for equal weights on any machine; see `hash_weights`. Computed when first asked for."""
        ...

    @property
    def tokenizer_json(self) -> bytes: ...

    @property
    def chat_template(self) -> str: ...

    @property
    def sampling_defaults(self) -> dict[str, float | int]:
        """What the model's authors recommend, by the names of `Sampling`."""
        ...


def open_checkpoint(path: Path, context_length: int | None = None) -> Checkpoint:
    """A folder in Hugging Face's layout or a GGUF file. ConfigError, in one line, for all that is wrong."""
    if path.is_dir():
        return SafetensorsFolder(path, context_length)
    if not path.is_file():
        raise ConfigError(f"{path} is not there", key="model", remedy="name a folder or a .gguf file")
    from kvolt.models.gguf_file import GgufFile

    return GgufFile(path, context_length)


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a forward pass with this config uses, in the order of use."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear: list[tuple[str, int, int, bool]] = [
        ("self_attn.q_proj", heads, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, heads, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        for name, rows, columns, biased in linear:
            shapes[f"{at}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{at}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[at + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[at + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, Shape], where: str) -> tuple[str, ...]:
    """The names to load. ConfigError for a tensor that is missing, of another shape, or without a use:
    a bias that were left out would give wrong answers and no error."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{where} lacks {len(missing)} of {len(expected)} tensors: {missing[0]}{others}",
            key="model",
            remedy="fetch it again, or see whether its config belongs to these weights",
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ConfigError(
                f"{where}: {name} should have the shape {list(shape)} and has {list(found[name])}",
                key="model",
                remedy="see whether its config belongs to these weights",
            )
    extra = [name for name in found if name not in expected and not _without_use(name)]
    if extra:
        others = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ConfigError(
            f"{where} has tensors that {config.architecture} does not use: {extra[0]}{others}", key="model"
        )
    return tuple(expected)


def _without_use(name: str) -> bool:
    """A head beside tied embeddings, and the frequencies that old checkpoints stored."""
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")


def hash_weights(config: ModelConfig, files: Sequence[Path]) -> str:
    """BLAKE2b over every byte of the weight files and over what of the config shapes KV.

    No sampling: an edit of a few rows is other weights. Pieces of 16 MiB are hashed on all cores, and then
    their digests by file name. A folder's own name and place do not matter.
    """
    shaping = msgspec.structs.replace(
        config,
        context_length=1,
        sliding_window=None,
        eos_token_ids=(),
        bos_token_id=None,
        torch_dtype="float32",  # what a server computes in has its own place in a block's key
    )
    digest = blake2b(msgspec.msgpack.encode(shaping, order="deterministic"), digest_size=16)
    with ThreadPoolExecutor(len(usable_cores().ids)) as pool:
        for path in sorted(files, key=lambda each: each.name):
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            for piece in pool.map(partial(_hash_piece, path), range(0, path.stat().st_size, _HASHED_AT_ONCE)):
                digest.update(piece)
    return digest.hexdigest()


def _hash_piece(path: Path, start: int) -> bytes:
    length = min(_HASHED_AT_ONCE, path.stat().st_size - start)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as piece,
    ):
        return blake2b(piece).digest()


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class SafetensorsFolder:
    """config.json, tokenizer.json and one or many .safetensors, as Hugging Face lays them out."""

    def __init__(self, folder: Path, context_length: int | None = None) -> None:
        self._folder = folder
        document = required(folder, "config.json", "name a folder that holds a model")
        read_hf_config(document, "float32", context_length)  # what it refuses is clearer than what follows
        self._texts = FolderTexts(folder)
        self._files, self._places = self._open_files()
        self._slices = {name: place.get_slice(name) for name, place in self._places.items()}
        config = read_hf_config(document, self._stored_dtype(), context_length)
        shapes = {name: tuple(each.get_shape()) for name, each in self._slices.items()}
        self._names = check_shapes(config, shapes, str(folder))
        self._check_dtypes()
        ends, begin = self._texts.ends(config.eos_token_ids), self._texts.begin(config.bos_token_id)
        self.config = msgspec.structs.replace(config, eos_token_ids=ends, bos_token_id=begin)

    def names(self) -> tuple[str, ...]:
        return self._names

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor: torch.Tensor = self._places[name].get_tensor(name)
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
    def sampling_defaults(self) -> dict[str, float | int]:
        return self._texts.sampling_defaults

    def _open_files(self) -> tuple[list[Path], dict[str, Any]]:
        """The weight files, and which of them, opened, holds a tensor."""
        index = decoded(self._folder, _INDEX, _Index)
        names = [_SINGLE] if index is None else sorted(set(index.weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise ConfigError(f"{self._folder}/{_INDEX} names {name!r}, outside of it", key="model")
            if not (self._folder / name).is_file():
                raise ConfigError(
                    f"{self._folder} has no {name}",
                    key="model",
                    remedy="fetch it again" if index else "only safetensors are read: convert the weights",
                )
        opened = {name: _open_safetensors(self._folder / name) for name in names}
        held = {tensor: file for file in opened.values() for tensor in file.keys()}  # noqa: SIM118
        return [self._folder / name for name in names], held

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
                    remedy=f"take weights in one of {', '.join(_DTYPES)}, or a GGUF file",
                )


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read as safetensors: {error}", key="model", remedy="fetch it again"
        ) from error
