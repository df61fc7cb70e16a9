"""Transformer: forward pass of the Llama family over a flat batch of tokens.

Llama, Mistral, Qwen2 and Qwen3 differ in biases and head norms, which the config describes. Weights with the same
input are joined: q, k and v; gate and up. Knows no requests, no scheduling, and no location of keys and values, which
the attention backend owns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvolt.engines.native.batch import Batch
from kvolt.engines.native.kernels.inputs import Rotation
from kvolt.engines.native.kernels.operations import add_rmsnorm, silu_mul
from kvolt.engines.native.model.linear import Projection, Quantize, projection
from kvolt.engines.native.model.lora import Adapters
from kvolt.engines.native.parallel import RankGroup, Solo, share
from kvolt.models.checkpoint import Checkpoint
from kvolt.models.config import ModelConfig, inverse_frequencies


class Attention(Protocol):
    """Attention backend: writes a layer's keys and values to the slab and computes attention. See
    attention_cpu and attention_cuda."""

    def rotate_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, batch: Batch
    ) -> Tensor:
        """q [T, heads, hd], k and v [T, kv_heads, hd], before rotation -> [T, heads * hd]."""
        ...


@dataclass(slots=True)
class Layer:
    input_norm: Tensor
    qkv: Projection
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    rotation: Rotation


@dataclass(frozen=True, slots=True)
class LoadOptions:
    dtype: torch.dtype
    device: torch.device
    quantize: Quantize = "none"
    """int8: int8 weights including the output matrix, except embeddings, if the device supports it."""


class Transformer:
    """One rank's share of a model. `forward` computes hidden states, `logits` the logits of selected rows."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: LoadOptions,
        group: RankGroup | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        config = self.config = checkpoint.config
        self.group: RankGroup = group or Solo()
        self.adapters = Adapters(config, self.group, options.dtype, options.device)
        self._num_heads = config.num_heads // self.group.degree
        self._num_kv_heads = config.num_kv_heads // self.group.degree
        self._q_size = self._num_heads * config.head_dim
        self._kv_size = self._num_kv_heads * config.head_dim
        self._eps = config.rms_norm_eps
        loader = _Loader(checkpoint, options, self.group)
        self.embedding = loader.whole("model.embed_tokens.weight")
        cos, sin = _rotation_tables(config, options.device)
        self.layers: list[Layer] = []
        for number in range(config.num_layers):
            self.layers.append(loader.layer(number, cos, sin))
            progress(number + 1, config.num_layers)
        self.norm = loader.whole("model.norm.weight")
        head = self.embedding if config.tie_embeddings else loader.whole("lm_head.weight")
        self._head = projection(head, None, options.quantize)

    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        """Normalised hidden states of all tokens, [T, hidden]."""
        x = self.embedding[batch.token_ids]
        residual: Tensor | None = None
        for number, layer in enumerate(self.layers):
            normed, residual = add_rmsnorm(x, residual, layer.input_norm, self._eps)
            x = self._attend(number, layer, normed, batch, attention)
            normed, residual = add_rmsnorm(x, residual, layer.mlp_norm, self._eps)
            x = self._mlp(number, layer, normed, batch)
        normed, _ = add_rmsnorm(x, residual, self.norm, self._eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] in float32. Every rank has the whole output matrix; only rank 0 uses the result."""
        return self._head(hidden).float()

    def _attend(self, number: int, layer: Layer, x: Tensor, batch: Batch, attention: Attention) -> Tensor:
        qkv = layer.qkv(x)
        adapters = self.adapters
        if batch.lora_rows:
            adapters.add(batch.lora_rows, number, "qkv", x, qkv)
        head_dim = self.config.head_dim
        first_k, first_v = self._q_size, self._q_size + self._kv_size
        q, k, v = qkv[:, :first_k], qkv[:, first_k:first_v], qkv[:, first_v:]
        attended = attention.rotate_and_attend(
            number,
            _heads(q, head_dim),
            _heads(k, head_dim),
            _heads(v, head_dim),
            layer.rotation,
            batch,
        )
        out = layer.out(attended)
        if batch.lora_rows:
            adapters.add(batch.lora_rows, number, "out", attended, out)
        return self.group.all_reduce(out)

    def _mlp(self, number: int, layer: Layer, x: Tensor, batch: Batch) -> Tensor:
        gate_up = layer.gate_up(x)
        if batch.lora_rows:
            self.adapters.add(batch.lora_rows, number, "gate_up", x, gate_up)
        inner = silu_mul(gate_up)
        out = layer.down(inner)
        if batch.lora_rows:
            self.adapters.add(batch.lora_rows, number, "down", inner, out)
        return self.group.all_reduce(out)


class _Loader:
    """Loads one rank's share of each weight, joined as the layers need it."""

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions, group: RankGroup) -> None:
        self._checkpoint = checkpoint
        self._options = options
        self._group = group

    def whole(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name, self._options.dtype).to(self._options.device)

    def layer(self, number: int, cos: Tensor, sin: Tensor) -> Layer:
        config = self._checkpoint.config
        at = f"model.layers.{number}"
        rotation = Rotation(
            cos,
            sin,
            self.whole(f"{at}.self_attn.q_norm.weight") if config.qk_norm else None,
            self.whole(f"{at}.self_attn.k_norm.weight") if config.qk_norm else None,
            config.rms_norm_eps,
        )
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        qkv = [f"{attention}.{name}_proj" for name in "qkv"]
        return Layer(
            input_norm=self.whole(f"{at}.input_layernorm.weight"),
            qkv=self._columns(qkv, config.qkv_bias),
            out=self._rows(f"{attention}.o_proj", config.o_bias),
            mlp_norm=self.whole(f"{at}.post_attention_layernorm.weight"),
            gate_up=self._columns([f"{mlp}.gate_proj", f"{mlp}.up_proj"], config.mlp_bias),
            down=self._rows(f"{mlp}.down_proj", config.mlp_bias),
            rotation=rotation,
        )

    def _columns(self, names: list[str], biased: bool) -> Projection:
        """Join weights with the same input, each split by output."""
        weight = torch.cat([self._share(f"{name}.weight", 0) for name in names])
        bias = torch.cat([self._share(f"{name}.bias", 0) for name in names]) if biased else None
        return projection(weight, bias, self._options.quantize)

    def _rows(self, name: str, biased: bool) -> Projection:
        """A weight split by input; the sum over the ranks is the product, and rank 0 adds the bias."""
        weight = self._share(f"{name}.weight", 1).contiguous()
        bias = self.whole(f"{name}.bias") if biased and self._group.rank == 0 else None
        return projection(weight, bias, self._options.quantize)

    def _share(self, name: str, dim: int) -> Tensor:
        options = self._options
        whole = self._checkpoint.tensor(name, options.dtype)
        return share(whole, dim, self._group.rank, self._group.degree).to(options.device)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """View [T, heads * hd] as [T, heads, hd]."""
    return x.view(x.shape[0], -1, head_dim)


def _rotation_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies, factor = inverse_frequencies(config)
    angles = torch.arange(config.context_length, dtype=torch.float32)[:, None] * frequencies
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)
