"""Fields that change the output and are not implemented: refused by name; neutral values pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvolt.core.errors import ConfigError
from kvolt.models.config import ARCHITECTURES, ModelConfig, read_hf_config
from kvolt.models.unsupported_fields import check_gguf_fields
from kvolt.testing.tiny_models import tiny_config

ROPE = {"rope_type": "default", "rope_theta": 1e4}


def read(architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelConfig:
    return read_hf_config(json.dumps(tiny_config(architecture, **fields)).encode(), "bfloat16")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("pretraining_tp", 2),
        ("logit_scale", 0.0625),
        ("logits_scaling", 8.0),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 0.015625),
        ("query_pre_attn_scalar", 256),
        ("query_pre_attn_scalar", "large"),
        ("dim_model_base", 256),
        ("attention_chunk_size", 8192),
        ("no_rope_layers", [1, 1, 0]),
        ("layer_types", ["full_attention", "chunked_attention", "full_attention"]),
        ("is_causal", False),
        ("use_qk_norm", True),
        ("num_local_experts", 8),
        ("hidden_activation", "gelu_pytorch_tanh"),
    ],
)
def test_a_field_that_changes_the_output_is_refused_by_name(
    architecture: str, name: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(architecture, **{name: value})
    assert f"{name} = " in caught.value.message
    assert "--engine vllm" in str(caught.value.fields["remedy"])


@pytest.mark.parametrize(
    "fields",
    [
        {"final_logit_softcapping": None, "attn_logit_softcapping": None, "pretraining_tp": None},
        {"pretraining_tp": 1, "rope_interleaved": False, "use_qk_norm": False, "num_local_experts": 0},
        {"logit_scale": 1.0, "logits_scaling": 1, "embedding_multiplier": 1.0, "residual_multiplier": 1.0},
        {"query_pre_attn_scalar": 16, "attention_multiplier": 0.25, "dim_model_base": 64},
        {"no_rope_layers": [1, 1, 1], "layer_types": ["full_attention"] * 3, "is_causal": True},
        {"attention_dropout": 0.1, "initializer_range": 0.02, "use_cache": False, "is_llama_config": True},
    ],
)
def test_neutral_values_change_nothing(fields: dict[str, Any]) -> None:
    assert read(head_dim=16, **fields) == read(head_dim=16)


def test_fields_of_the_rotation_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rope_parameters\.llama_4_scaling_beta = 0\.1"):
        read(rope_parameters={**ROPE, "llama_4_scaling_beta": 0.1})
    with pytest.raises(ConfigError, match="partial rotary embeddings"):
        read(rope_scaling={**ROPE, "partial_rotary_factor": 0.5})


def test_gguf_fields_count_only_under_the_name_of_their_architecture() -> None:
    check_gguf_fields({"llama.logit_scale": 1.0, "qwen2.logit_scale": 3.0, "logit_scale": 3.0}, "llama")
    with pytest.raises(ConfigError, match=r"qwen2\.logit_scale = 3\.0"):
        check_gguf_fields({"qwen2.logit_scale": 3.0}, "qwen2")
