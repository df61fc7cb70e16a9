"""Model config fields that change the result and that the native engine does not implement.

Other model families add scalings, caps and masks through a field in config.json or in GGUF metadata. A forward pass
that ignores such a field produces wrong text, so each is rejected by name unless it has one of its neutral values.
Fields that only affect training (dropout, initializer ranges) are not listed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from kvolt.core.errors import ConfigError
from kvolt.models.json_files import decode_json

_OFF = (None, False, 0)
_ONE = (None, 1)
_SINGLE = (None, 0, 1)

_HF_FIELDS: Mapping[str, tuple[object, ...]] = {
    # logits and attention scores
    "attn_logit_softcapping": _OFF,
    "final_logit_softcapping": _OFF,
    "logit_scale": _ONE,
    "logits_scaling": _ONE,
    "attention_chunk_size": _OFF,
    "attn_temperature_tuning": _OFF,
    "clip_qkv": _OFF,
    # embeddings and residuals
    "embedding_multiplier": _ONE,
    "residual_multiplier": _ONE,
    "scale_emb": _ONE,
    "scale_depth": (None,),
    # positions
    "alibi": _OFF,
    "position_embedding_type": (
        None,
        "rope",
        "rotary",
        "absolute",
    ),  # BERT's default, present in many Llama configs
    "no_rope_layer_interval": _OFF,
    "rope_interleave": _OFF,
    "rope_interleaved": _OFF,
    "rotary_pct": _ONE,
    # masks
    "is_causal": (None, True),
    "use_bidirectional_attention": _OFF,
    # layers
    "bias": _OFF,
    "hidden_activation": (None, "silu"),
    "kv_lora_rank": _OFF,
    "lm_head_bias": _OFF,
    "n_routed_experts": _SINGLE,
    "num_experts": _SINGLE,
    "num_local_experts": _SINGLE,
    "parallel_attn": _OFF,
    "pretraining_tp": _SINGLE,
    "qk_layernorm": _OFF,
    "use_bias": _OFF,
    "use_parallel_residual": _OFF,
    "use_qk_norm": _OFF,
}

_ROPE_FIELDS: Mapping[str, tuple[object, ...]] = {
    "llama_4_scaling_beta": _OFF,
    "mrope_section": (None,),
}

_GGUF_FIELDS: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (None, True),
    "attention.clamp_kqv": _OFF,
    "attention.max_alibi_bias": _OFF,
    "attention.scale": _OFF,
    "attention.temperature_length": _OFF,
    "attn_logit_softcapping": _OFF,
    "embedding_scale": _SINGLE,
    "final_logit_softcapping": _OFF,
    "logit_scale": _SINGLE,
    "residual_scale": _SINGLE,
    "use_parallel_residual": _OFF,
}

_REMEDY = "serve the model with an engine that implements it, such as --engine vllm"
_LAYER_TYPES = ("full_attention", "sliding_attention")
_RELATIVE_ERROR = 1e-6


def check_hf_fields(document: bytes, rope: Mapping[str, Any], head_dim: int, hidden_size: int) -> None:
    """ConfigError for the first field of a config.json that is not supported."""
    fields = decode_json(document, "config.json", dict[str, Any])
    _check_table(fields, _HF_FIELDS, "")
    _check_table(rope, _ROPE_FIELDS, "rope_parameters.")
    _check_number(fields, "query_pre_attn_scalar", head_dim)
    _check_number(fields, "attention_multiplier", head_dim**-0.5)
    _check_number(fields, "dim_model_base", hidden_size)
    _check_number(fields, "v_head_dim", head_dim)
    _check_number(fields, "rotary_dim", head_dim)
    layers_with_rope = fields.get("no_rope_layers")
    if layers_with_rope and not all(layers_with_rope):
        _refuse("no_rope_layers", layers_with_rope)
    for kind in fields.get("layer_types") or ():
        if kind not in _LAYER_TYPES:
            _refuse("layer_types", kind)


def check_gguf_fields(metadata: Mapping[str, Any], architecture: str) -> None:
    """Like `check_hf_fields` for GGUF metadata, whose field names start with the architecture."""
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    _check_table(own, _GGUF_FIELDS, prefix)


def _check_table(
    fields: Mapping[str, Any], neutral_values: Mapping[str, tuple[object, ...]], prefix: str
) -> None:
    for name in sorted(neutral_values.keys() & fields.keys()):
        if fields[name] not in neutral_values[name]:
            _refuse(prefix + name, fields[name])


def _check_number(fields: Mapping[str, Any], name: str, neutral: float) -> None:
    value = fields.get(name)
    if value is None:
        return
    if not isinstance(value, int | float) or not math.isclose(value, neutral, rel_tol=_RELATIVE_ERROR):
        _refuse(name, value)


def _refuse(name: str, value: object) -> NoReturn:
    raise ConfigError(
        f"the model's config has {name} = {str(value)[:64]}, which is not supported",
        key="model",
        remedy=_REMEDY,
    )
