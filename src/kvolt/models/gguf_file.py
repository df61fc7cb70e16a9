"""A GGUF file as a Checkpoint: its header, its config, and its tensors under Hugging Face names.

Owns the file format, llama.cpp's names for tensors and metadata, and the order in which llama.cpp keeps the
rows of q and k. Quantized tensors are dequantized by the `gguf` package, one at a time, when they are asked
for. Its reader is not used: it takes seconds for a vocabulary that is read here in a tenth of one, and it does
not say what is wrong with a damaged file.

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
from kvolt.models.checkpoint import Shape, check_shapes, hash_weights
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
from kvolt.models.gguf_tokenizer import build_tokenizer_json, end_token_ids, special_token_id
from kvolt.models.unsupported_fields import check_gguf_fields

ARCHITECTURES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_ELEMENTS_AT_ONCE = 1 << 18
_COPIED_AT_ONCE = 1 << 14  # torch starts its threads for longer copies, and they wait for each other
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
    """Outermost first, as torch has it."""
    kind: GGMLQuantizationType
    offset: int
    """From the start of the file."""
    num_bytes: int


class GgufHeader(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Reader:
    """Reads values off a mapped file; a value that would pass its end raises EOFError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, num_bytes: int) -> int:
        """Where the next `num_bytes` lie."""
        start, end = self.position, self.position + num_bytes
        if end > len(self._data):
            raise EOFError(f"{num_bytes} bytes at {start} are past its end, {len(self._data)}")
        self.position = end
        return start

    def scalar(self, code: str) -> Any:
        form = struct.Struct("<" + code)
        return form.unpack_from(self._data, self.take(form.size))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
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
        start = self.take(count * item.itemsize)
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
            raise EOFError(f"there is no type {kind} (at {self.position})") from None

    def _check_count(self, count: int, least_bytes: int) -> None:
        """Before a list of that length is made."""
        if count * least_bytes > len(self._data) - self.position:
            raise EOFError(f"{count} values at {self.position} are past its end")


def read_header(path: Path, data: mmap.mmap) -> GgufHeader:
    """ConfigError for a file that is no GGUF, is cut short, or holds types that nobody can dequantize."""
    if data[:4] != b"GGUF":
        raise ConfigError(f"{path} is not a GGUF file", key="model", remedy="name a folder or a .gguf file")
    reader = _Reader(data)
    reader.take(4)
    try:
        version = reader.scalar("I")
        if version not in (2, 3):
            raise ConfigError(f"{path} has GGUF version {version}; known are 2 and 3", key="model")
        num_tensors, num_pairs = reader.scalar("Q"), reader.scalar("Q")
        metadata = {}
        for _ in range(num_pairs):
            key = reader.string()
            metadata[key] = reader.value(reader.scalar("I"))
        infos = [reader.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-reader.position // alignment) * alignment
        return GgufHeader(metadata, {info[0]: _placed(info, start, len(data)) for info in infos})
    except (EOFError, ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is cut short or damaged: {error}", key="model", remedy="fetch it again"
        ) from error


def _placed(info: tuple[str, list[int], int, int], start: int, file_bytes: int) -> TensorInfo:
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
    """A Checkpoint. Calls of `tensor` from several threads do not disturb each other."""

    def __init__(self, path: Path, context_length: int | None = None) -> None:
        self._path = path
        self._data = _map(path)
        self._metadata, stored = read_header(path, self._data)
        self._places = {_hugging_face_name(name): info for name, info in stored.items()}
        divisors = self._places.pop(_ROPE_DIVISORS, None)
        scaling = None if divisors is None else self._read_divisors(divisors)
        self.config = read_gguf_config(self._metadata, self._places, scaling, context_length)
        self._names = check_shapes(self.config, {n: i.shape for n, i in self._places.items()}, str(path))
        self._check_kinds()

    def names(self) -> tuple[str, ...]:
        return self._names

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        info = self._places[name]
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
    def sampling_defaults(self) -> dict[str, float | int]:
        names = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
        found = {ours: self._metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _read_divisors(self, info: TensorInfo) -> RopeDivisors:
        if info.kind not in _PLAIN or not info.num_bytes:
            _refuse(
                f"{self._path} has {_ROPE_DIVISORS} as {info.kind.name} {list(info.shape)}: not supported"
            )
        return RopeDivisors(tuple(self._plain(info).flatten().tolist()))

    def _plain(self, info: TensorInfo) -> torch.Tensor:
        """A view of the mapped file."""
        count = int(np.prod(info.shape))
        return torch.frombuffer(self._data, dtype=_PLAIN[info.kind], count=count, offset=info.offset).view(
            info.shape
        )

    def _row_order(self, name: str, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """llama.cpp rotates neighbours, Hugging Face the halves of a head, so for the llama architecture the
        converter has interleaved the halves of q and k. This is the order that undoes it."""
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
        for kind in {self._places[name].kind for name in self._names}:
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                _refuse(f"{self._path} has weights quantized as {kind.name}, which cannot be dequantized")


def _map(path: Path) -> mmap.mmap:
    """Private: torch wants memory that may be written, and nothing written here reaches the file."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", key="model") from error


def _dequantized(
    raw: np.ndarray[Any, np.dtype[np.uint8]], info: TensorInfo, dtype: torch.dtype
) -> torch.Tensor:
    """Piece by piece into the result, so that a bfloat16 tensor is never held in float32 as a whole."""
    block, block_bytes = GGML_QUANT_SIZES[info.kind]
    result = torch.empty(info.shape, dtype=dtype)
    flat = result.view(-1)
    step = _ELEMENTS_AT_ONCE // block
    for first in range(0, raw.size // block_bytes, step):
        piece = raw[first * block_bytes : (first + step) * block_bytes]
        values = torch.from_numpy(dequantize(piece.reshape(1, -1), info.kind).reshape(-1))
        places = flat[first * block : first * block + len(values)]
        for start in range(0, len(values), _COPIED_AT_ONCE):
            places[start : start + _COPIED_AT_ONCE] = values[start : start + _COPIED_AT_ONCE]
    return result


def _hugging_face_name(name: str) -> str:
    """A name that is not known stays as it is, to be refused by it."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _NAMES:
        return name
    prefix = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{prefix}{_NAMES[found[2]]}.{found[3]}"


def read_gguf_config(
    metadata: dict[str, Any],
    tensors: dict[str, TensorInfo],
    divisors: RopeDivisors | None = None,
    context_length: int | None = None,
) -> ModelConfig:
    """What a file leaves unsaid is seen from the tensors that it has."""
    own = str(metadata.get("general.architecture", "none"))
    if own not in ARCHITECTURES:
        raise unknown_architecture(own, tuple(ARCHITECTURES))
    if metadata.get("split.count", 1) > 1:
        _refuse("the file is one of several parts of a model", "join them with llama-gguf-split --merge")
    if metadata.get(f"{own}.expert_count"):
        _refuse("a mixture of experts is not supported")
    check_gguf_fields(metadata, own)

    def number(key: str, default: float | None = None) -> Any:
        value = metadata.get(f"{own}.{key}", default)
        if not isinstance(value, int | float):
            _refuse(
                f"the GGUF metadata have no number for {own}.{key}"
                if value is None
                else f"{own}.{key} is a list"
            )
        return value

    num_heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", hidden // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            _refuse(f"{own}.{key} is {number(key)} and not the size of a head, {head_dim}: not supported")
    if divisors is not None and len(divisors.divisors) != head_dim // 2:
        _refuse(
            f"{_ROPE_DIVISORS} has {len(divisors.divisors)} values and not {head_dim // 2}, half the size of a head"
        )
    stated = number("context_length")
    scaling = divisors or _read_scaling(metadata, own, stated)
    window = metadata.get(f"{own}.attention.sliding_window") or None
    embedding = tensors.get("model.embed_tokens.weight")
    has = "model.layers.0.{}.bias".format
    return ModelConfig(
        architecture=ARCHITECTURES[own],
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
        qk_norm=ARCHITECTURES[own] == QWEN3,
        sliding_window=window,
        eos_token_ids=end_token_ids(metadata),
        bos_token_id=special_token_id(metadata, "bos"),
        torch_dtype=_stored_dtype(tensors.get("model.layers.0.self_attn.q_proj.weight")),
    )


def _read_scaling(metadata: dict[str, Any], own: str, context_length: int) -> RopeScaling | None:
    at = f"{own}.rope.scaling."
    kind = metadata.get(at + "type", "none")
    if kind == "none":
        return None
    given = {
        "rope_type": kind,
        "factor": metadata.get(at + "factor"),
        "original_max_position_embeddings": metadata.get(at + "original_context_length"),
        "beta_fast": metadata.get(at + "yarn_beta_fast"),
        "beta_slow": metadata.get(at + "yarn_beta_slow"),
    }
    scaling = read_rope_scaling(given, context_length)
    if isinstance(scaling, YarnRope):  # llama.cpp's factor goes on top of yarn's own
        own_factor = scaling.attention_factor * metadata.get(at + "attn_factor", 1.0)
        return msgspec.structs.replace(scaling, attention_factor=own_factor)
    return scaling


def _stored_dtype(weight: TensorInfo | None) -> str:
    dtype = torch.float32 if weight is None else _PLAIN.get(weight.kind, torch.float32)
    return str(dtype).removeprefix("torch.")


def _refuse(message: str, remedy: str | None = None) -> NoReturn:
    if remedy is None:
        raise ConfigError(message, key="model")
    raise ConfigError(message, key="model", remedy=remedy)
