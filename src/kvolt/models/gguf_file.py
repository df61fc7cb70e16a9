"""A GGUF file as a Checkpoint: its header, its config, and its tensors under Hugging Face names.

Owns the file format, llama.cpp's names for tensors and metadata, and the order of the rows of q and k in its
files. Quantized tensors are dequantized by the `gguf` package, one at a time, when they are read. The package's
file reader is not used: it takes seconds for a vocabulary that is read here in a tenth of a second, and does not
describe the damage of a damaged file.

    magic "GGUF" | u32 version | u64 tensors | u64 pairs | pairs: key, u32 type, value | infos | data
    info: name, u32 dimensions, u64 each (innermost first), u32 type, u64 offset from the start of the data
"""

from __future__ import annotations

import mmap
import re
import struct
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvolt.core.errors import ConfigError
from kvolt.models.config import (
    LLAMA,
    QWEN2,
    QWEN3,
    ModelConfig,
    RopeDivisors,
    RopeScaling,
    YarnRope,
    choose_context,
    read_rope_scaling,
    scaled_context,
    unknown_architecture,
)
from kvolt.models.generation_config import GenerationDefaults, read_gguf_defaults
from kvolt.models.gguf_tokenizer import build_tokenizer_json, end_token_ids, special_token_id
from kvolt.models.unsupported_fields import check_gguf_fields
from kvolt.models.weights import Shape, check_shapes, hash_weights

ARCHITECTURES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_DEQUANTIZE_ELEMENTS = 1 << 18
_COPY_ELEMENTS = 1 << 14  # longer copies start torch's threads, which wait for each other
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_ROPE_DIVISORS = "rope_freqs.weight"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class TensorInfo(NamedTuple):
    shape: Shape
    """Outermost dimension first, as in torch."""
    kind: GGMLQuantizationType
    offset: int
    """Offset from the start of the file."""
    num_bytes: int


class GgufHeader(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Reader:
    """Reads values sequentially from a mapped file. EOFError for a value beyond its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def skip(self, num_bytes: int) -> int:
        """Advance by `num_bytes`; returns the offset before them."""
        start, end = self.position, self.position + num_bytes
        if end > len(self._data):
            raise EOFError(f"{num_bytes} bytes at {start} exceed the file size {len(self._data)}")
        self.position = end
        return start

    def scalar(self, code: str) -> Any:
        form = struct.Struct("<" + code)
        return form.unpack_from(self._data, self.skip(form.size))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.skip(length)
        return self._data[start : start + length].decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(self._code(kind))
        of, count = self.scalar("I"), self.scalar("Q")
        if of == _STRING:
            self._check_count(count, 8)
            return [self.string() for _ in range(count)]
        item = np.dtype(f"<{self._code(of)}")
        start = self.skip(count * item.itemsize)
        return np.frombuffer(self._data, item, count, start).tolist()

    def tensor_info(self) -> tuple[str, list[int], int, int]:
        name = self.string()
        num_dimensions = self.scalar("I")
        self._check_count(num_dimensions, 8)
        dimensions = [self.scalar("Q") for _ in range(num_dimensions)]
        return name, dimensions, self.scalar("I"), self.scalar("Q")

    def _code(self, kind: int) -> str:
        try:
            return _SCALARS[kind]
        except KeyError:
            raise EOFError(f"unknown type {kind} at {self.position}") from None

    def _check_count(self, count: int, least_bytes: int) -> None:
        """EOFError if a list of that length cannot be in the file. Called before it is allocated."""
        if count * least_bytes > len(self._data) - self.position:
            raise EOFError(f"{count} values at {self.position} exceed the file size")


def read_header(path: Path, data: mmap.mmap) -> GgufHeader:
    """Read the header. ConfigError if the file is not GGUF, is truncated, or has unknown types."""
    if data[:4] != b"GGUF":
        raise ConfigError(f"{path} is not a GGUF file", key="model", remedy="name a folder or a .gguf file")
    reader = _Reader(data)
    reader.skip(4)
    try:
        version = reader.scalar("I")
        if version not in (2, 3):
            raise ConfigError(f"{path} has GGUF version {version}; supported are 2 and 3", key="model")
        num_tensors, num_pairs = reader.scalar("Q"), reader.scalar("Q")
        metadata = {}
        for _ in range(num_pairs):
            key = reader.string()
            metadata[key] = reader.value(reader.scalar("I"))
        infos = [reader.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-reader.position // alignment) * alignment
        return GgufHeader(metadata, {info[0]: _locate(info, start, len(data)) for info in infos})
    except (EOFError, ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is truncated or damaged: {error}", key="model", remedy="download it again"
        ) from error


def _locate(info: tuple[str, list[int], int, int], start: int, file_bytes: int) -> TensorInfo:
    name, dimensions, kind, offset = info
    quantization = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    shape = tuple(reversed(dimensions))
    num_elements = int(np.prod(shape, dtype=object))
    if not shape or shape[-1] % block:
        raise ValueError(f"{name} has the shape {list(shape)} and is stored in blocks of {block}")
    num_bytes = num_elements // block * block_bytes
    if start + offset + num_bytes > file_bytes:
        raise EOFError(f"{name} ends at {start + offset + num_bytes} and the file at {file_bytes}")
    return TensorInfo(shape, quantization, start + offset, num_bytes)


class GgufFile:
    """A Checkpoint in a GGUF file. `tensor` is thread-safe."""

    def __init__(self, path: Path, context_length: int | None = None) -> None:
        self._path = path
        self._data = _map(path)
        self._metadata, stored = read_header(path, self._data)
        self._infos = {_hugging_face_name(name): info for name, info in stored.items()}
        divisors = self._infos.pop(_ROPE_DIVISORS, None)
        scaling = None if divisors is None else self._read_divisors(divisors)
        self.config = read_gguf_config(self._metadata, self._infos, scaling, context_length)
        self._names = check_shapes(self.config, {n: i.shape for n, i in self._infos.items()}, str(path))
        self._check_kinds()

    def names(self) -> tuple[str, ...]:
        return self._names

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        info = self._infos[name]
        order = self._row_order(name, info)
        if info.kind in _PLAIN:
            tensor = self._plain(info)
            tensor = tensor if order is None else tensor[torch.from_numpy(order)]
            return tensor if dtype is None else tensor.to(dtype)
        raw = np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        if order is not None:
            raw = raw.reshape(info.shape[0], -1)[order].reshape(-1)
        return _dequantized(raw, info, dtype or torch.float32)

    @cached_property
    def weights_hash(self) -> str:
        return hash_weights(self.config, [self._path])

    @cached_property
    def tokenizer_json(self) -> bytes:
        return build_tokenizer_json(self._metadata)

    @property
    def chat_template(self) -> str:
        return str(self._metadata.get("tokenizer.chat_template", ""))

    @property
    def generation_defaults(self) -> GenerationDefaults:
        return read_gguf_defaults(self._metadata)

    def _read_divisors(self, info: TensorInfo) -> RopeDivisors:
        if info.kind not in _PLAIN or not info.num_bytes:
            _refuse(
                f"{self._path} has {_ROPE_DIVISORS} as {info.kind.name} {list(info.shape)}, which is not supported"
            )
        return RopeDivisors(tuple(self._plain(info).flatten().tolist()))

    def _plain(self, info: TensorInfo) -> torch.Tensor:
        """A view of the mapped file."""
        count = int(np.prod(info.shape))
        return torch.frombuffer(self._data, dtype=_PLAIN[info.kind], count=count, offset=info.offset).view(
            info.shape
        )

    def _row_order(self, name: str, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """The row order that restores Hugging Face's layout of q and k; None if it is the same. llama.cpp
        rotates adjacent dimensions, Hugging Face the halves of a head, so for the llama architecture the
        converter interleaves the halves."""
        if self.config.architecture != LLAMA:
            return None
        if ".self_attn.q_proj." in name:
            heads = self.config.num_heads
        elif ".self_attn.k_proj." in name:
            heads = self.config.num_kv_heads
        else:
            return None
        rows = np.arange(info.shape[0], dtype=np.int64)
        return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _check_kinds(self) -> None:
        for kind in {self._infos[name].kind for name in self._names}:
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                _refuse(f"{self._path} has weights quantized as {kind.name}, which is not supported")


def _map(path: Path) -> mmap.mmap:
    """Map the file privately: torch requires writable memory, and writes must not reach the file."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", key="model") from error


def _dequantized(
    raw: np.ndarray[Any, np.dtype[np.uint8]], info: TensorInfo, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize piecewise, so that a bfloat16 tensor never exists in float32 as a whole."""
    block, block_bytes = GGML_QUANT_SIZES[info.kind]
    result = torch.empty(info.shape, dtype=dtype)
    flat = result.view(-1)
    step = _DEQUANTIZE_ELEMENTS // block
    for first in range(0, raw.size // block_bytes, step):
        piece = raw[first * block_bytes : (first + step) * block_bytes]
        values = torch.from_numpy(dequantize(piece.reshape(1, -1), info.kind).reshape(-1))
        places = flat[first * block : first * block + len(values)]
        for start in range(0, len(values), _COPY_ELEMENTS):
            places[start : start + _COPY_ELEMENTS] = values[start : start + _COPY_ELEMENTS]
    return result


def _hugging_face_name(name: str) -> str:
    """The Hugging Face name of a tensor. Unknown names are returned unchanged; `check_shapes` rejects them."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        return name
    prefix = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{prefix}{_NAMES[match[2]]}.{match[3]}"


def read_gguf_config(
    metadata: dict[str, Any],
    tensors: dict[str, TensorInfo],
    divisors: RopeDivisors | None = None,
    context_length: int | None = None,
) -> ModelConfig:
    """Read the config from metadata; biases and tied embeddings are derived from the tensors in the file."""
    architecture = str(metadata.get("general.architecture", "none"))
    if architecture not in ARCHITECTURES:
        raise unknown_architecture(architecture, tuple(ARCHITECTURES))
    if metadata.get("split.count", 1) > 1:
        _refuse("the file is one part of a split model", remedy="join them with llama-gguf-split --merge")
    if metadata.get(f"{architecture}.expert_count"):
        _refuse("a mixture of experts is not supported")
    check_gguf_fields(metadata, architecture)

    def number(key: str, default: float | None = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int | float):
            _refuse(
                f"the GGUF metadata have no number for {architecture}.{key}"
                if value is None
                else f"{architecture}.{key} is a list"
            )
        return value

    num_heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", hidden // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            _refuse(f"{architecture}.{key} is {number(key)}; only the head size {head_dim} is supported")
    if divisors is not None and len(divisors.divisors) != head_dim // 2:
        _refuse(
            f"{_ROPE_DIVISORS} has {len(divisors.divisors)} values instead of {head_dim // 2}, half the head size"
        )
    stated = number("context_length")
    scaling = divisors or _read_scaling(metadata, architecture, stated)
    window = metadata.get(f"{architecture}.attention.sliding_window") or None
    embedding = tensors.get("model.embed_tokens.weight")
    has = "model.layers.0.{}.bias".format
    return ModelConfig(
        architecture=ARCHITECTURES[architecture],
        vocab_size=embedding.shape[0] if embedding else number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number("feed_forward_length"),
        num_layers=number("block_count"),
        num_heads=num_heads,
        num_kv_heads=number("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        context_length=choose_context(scaled_context(stated, scaling), window, context_length),
        tie_embeddings="lm_head.weight" not in tensors,
        qkv_bias=has("self_attn.q_proj") in tensors,
        o_bias=has("self_attn.o_proj") in tensors,
        mlp_bias=has("mlp.gate_proj") in tensors,
        qk_norm=ARCHITECTURES[architecture] == QWEN3,
        sliding_window=window,
        eos_token_ids=end_token_ids(metadata),
        bos_token_id=special_token_id(metadata, "bos"),
        torch_dtype=_stored_dtype(tensors.get("model.layers.0.self_attn.q_proj.weight")),
    )


def _read_scaling(metadata: dict[str, Any], architecture: str, context_length: int) -> RopeScaling | None:
    prefix = f"{architecture}.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    if kind == "none":
        return None
    fields = {
        "rope_type": kind,
        "factor": metadata.get(prefix + "factor"),
        "original_max_position_embeddings": metadata.get(prefix + "original_context_length"),
        "beta_fast": metadata.get(prefix + "yarn_beta_fast"),
        "beta_slow": metadata.get(prefix + "yarn_beta_slow"),
    }
    scaling = read_rope_scaling(fields, context_length)
    if isinstance(scaling, YarnRope):  # llama.cpp's factor multiplies yarn's own
        factor = scaling.attention_factor * metadata.get(prefix + "attn_factor", 1.0)
        return msgspec.structs.replace(scaling, attention_factor=factor)
    return scaling


def _stored_dtype(weight: TensorInfo | None) -> str:
    dtype = torch.float32 if weight is None else _PLAIN.get(weight.kind, torch.float32)
    return str(dtype).removeprefix("torch.")


def _refuse(message: str, **fields: str) -> NoReturn:
    raise ConfigError(message, key="model", **fields)
