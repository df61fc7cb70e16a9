"""Tiny random models on disk, for tests of engines that load real files.

Each is a complete checkpoint: config, weights, and the tokenizer and chat template of the simulated model. Weights are
large enough for greedy outputs to vary. The same arguments give the same weights, as a directory or as a GGUF file.
torch, safetensors and gguf are imported only when a model is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvolt.engines.sim.model import CHAT_TEMPLATE, EOS, SPECIAL, tokenizer_json

if TYPE_CHECKING:
    import torch
    from gguf import GGUFWriter

    from kvolt.models.config import ModelConfig

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_GGUF_ARCHITECTURES = _MODEL_TYPES | {"MistralForCausalLM": "llama"}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SPREAD = 0.2
"""Standard deviation of the weights; with the usual 0.02 a model this small repeats one token."""


def tiny_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    """config.json with 3 layers, 4 heads and 2 KV heads of size 16; `overrides` replace its fields."""
    config = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": len(_vocabulary()),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    return config | overrides


def tiny_checkpoint(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    *,
    num_shards: int = 1,
    generation: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a directory in Hugging Face's layout, with an index if there are several shards. Return `folder`."""
    import torch
    from safetensors.torch import save_file

    config = tiny_config(architecture, **overrides)
    weights = _weights(_model_config(config), seed)
    dtype = getattr(torch, config["torch_dtype"])
    stored = {name: weight.to(dtype) for name, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{at + 1:05}-of-{num_shards:05}.safetensors" for at in range(num_shards)]
    if num_shards == 1:
        names = ["model.safetensors"]
    weight_map = {name: names[at % num_shards] for at, name in enumerate(stored)}
    for file in names:
        held = {name: stored[name] for name in stored if weight_map[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    if num_shards > 1:
        total = sum(weight.nbytes for weight in stored.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation or {"eos_token_id": EOS})
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[EOS],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer)
    return folder


def tiny_gguf(
    path: Path,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    *,
    quantization: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write the same model as a GGUF file, like llama.cpp's converter. Return `path`.

    Matrices are stored as `quantization` (F32, F16, BF16, Q8_0, ...); `metadata` replaces pairs, None removes one.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config = _model_config(tiny_config(architecture, **overrides))
    own = _GGUF_ARCHITECTURES[architecture]
    pairs = _gguf_metadata(config, own) | dict(metadata or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, str(pairs.pop("general.architecture", None) or own))
    for key, value in pairs.items():
        _add_pair(writer, key, value)
    for name, weight in _gguf_weights(config, own, seed).items():
        kind = GGMLQuantizationType[quantization] if weight.dim() > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary() -> dict[str, int]:
    vocabulary: dict[str, int] = json.loads(tokenizer_json())["model"]["vocab"]
    return vocabulary


def _model_config(config: dict[str, Any]) -> ModelConfig:
    from kvolt.models.config import read_hf_config

    return read_hf_config(json.dumps(config).encode(), "float32")


def _weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    import torch

    from kvolt.models.weights import expected_shapes

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        weight = torch.randn(shape, generator=generator) * _SPREAD
        weights[name] = weight + 1 if "norm" in name else weight
    return weights


def _gguf_weights(config: ModelConfig, own: str, seed: int) -> dict[str, torch.Tensor]:
    import torch

    from kvolt.models.config import Llama3Rope, inverse_frequencies

    weights = {}
    for name, weight in _weights(config, seed).items():
        placed = weight
        if own == "llama" and ".q_proj." in name:
            placed = _interleave(weight, config.num_heads)
        elif own == "llama" and ".k_proj." in name:
            placed = _interleave(weight, config.num_kv_heads)
        weights[_gguf_name(name)] = placed.contiguous()
    if isinstance(config.rope_scaling, Llama3Rope):
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        weights["rope_freqs.weight"] = 1.0 / config.rope_theta**exponents / inverse_frequencies(config)[0]
    return weights


def _interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Interleave the rows of the two halves of each head."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES[stem]}.{suffix}"
    number, _, inner = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_GGUF_NAMES[inner]}.{suffix}"


def _gguf_metadata(config: ModelConfig, own: str) -> dict[str, Any]:
    document = json.loads(tokenizer_json())
    tokens = sorted(document["model"]["vocab"], key=document["model"]["vocab"].__getitem__)
    return {
        f"{own}.context_length": config.context_length,
        f"{own}.embedding_length": config.hidden_size,
        f"{own}.block_count": config.num_layers,
        f"{own}.feed_forward_length": config.intermediate_size,
        f"{own}.attention.head_count": config.num_heads,
        f"{own}.attention.head_count_kv": config.num_kv_heads,
        f"{own}.attention.key_length": config.head_dim,
        f"{own}.attention.value_length": config.head_dim,
        f"{own}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{own}.rope.freq_base": config.rope_theta,
        f"{own}.rope.dimension_count": config.head_dim,
        f"{own}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": document["model"]["merges"],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_pair(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
