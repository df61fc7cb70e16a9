"""The tensors that a model config requires, and the identity hash of weight files."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.models.config import ModelConfig
from kvolt.runtime.host.cores import usable_cores

Shape = tuple[int, ...]

_HASH_PIECE_BYTES = 16 << 20


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of all tensors that a forward pass with this config uses, in order of use."""
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


def check_shapes(config: ModelConfig, shapes: Mapping[str, Shape], where: str) -> tuple[str, ...]:
    """Check the tensors of a checkpoint; returns the names to load. ConfigError for a missing tensor, a wrong
    shape, or an unused tensor: ignoring a bias would give wrong answers without an error."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in shapes]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{where} lacks {len(missing)} of {len(expected)} tensors: {missing[0]}{others}",
            key="model",
            remedy="download it again, or check that its config belongs to these weights",
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise ConfigError(
                f"{where}: {name} has the shape {list(shapes[name])} instead of {list(shape)}",
                key="model",
                remedy="check that its config belongs to these weights",
            )
    extra = [name for name in shapes if name not in expected and not _is_ignorable(name)]
    if extra:
        others = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ConfigError(
            f"{where} has tensors that {config.architecture} does not use: {extra[0]}{others}", key="model"
        )
    return tuple(expected)


def _is_ignorable(name: str) -> bool:
    """Whether a tensor is redundant: an output head beside tied embeddings, or precomputed rotary frequencies."""
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")


def hash_weights(config: ModelConfig, files: Sequence[Path]) -> str:
    """BLAKE2b over all bytes of the weight files and the config fields that affect KV.

    Nothing is sampled: changing a few rows gives other weights. Pieces of 16 MiB are hashed on all cores, then their
    digests in order of file name. The path of the folder does not matter.
    """
    identity = msgspec.structs.replace(
        config,
        context_length=1,
        sliding_window=None,
        eos_token_ids=(),
        bos_token_id=None,
        torch_dtype="float32",  # the compute type is a separate part of block keys
    )
    digest = blake2b(msgspec.msgpack.encode(identity, order="deterministic"), digest_size=16)
    with ThreadPoolExecutor(len(usable_cores())) as pool:
        for path in sorted(files, key=lambda each: each.name):
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            for piece in pool.map(
                partial(_hash_piece, path), range(0, path.stat().st_size, _HASH_PIECE_BYTES)
            ):
                digest.update(piece)
    return digest.hexdigest()


def _hash_piece(path: Path, start: int) -> bytes:
    length = min(_HASH_PIECE_BYTES, path.stat().st_size - start)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as piece,
    ):
        return blake2b(piece).digest()
