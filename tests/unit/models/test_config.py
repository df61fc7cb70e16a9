"""ModelConfig from config.json: both spellings, what is refused, and frequencies equal to transformers'."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvolt.core.errors import ConfigError
from kvolt.models.config import (
    ARCHITECTURES,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    RopeDivisors,
    YarnRope,
    inverse_frequencies,
    read_hf_config,
)
from kvolt.testing.tiny_models import tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def read(architecture: str = "LlamaForCausalLM", context: int | None = None, **fields: Any) -> ModelConfig:
    document = tiny_config(architecture, **fields)
    kept = {name: value for name, value in document.items() if value != "absent"}
    return read_hf_config(json.dumps(kept).encode(), "bfloat16", context)


def refusal(architecture: str = "LlamaForCausalLM", context: int | None = None, **fields: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(architecture, context, **fields)
    assert "\n" not in caught.value.message
    return caught.value


def test_the_shape_of_a_llama() -> None:
    config = read(
        num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-5, eos_token_id=[2, 1, 2], bos_token_id=0
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 1, 32)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 128, 3)
    assert (config.rms_norm_eps, config.rope_theta, config.context_length) == (1e-5, 10000.0, 2048)
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 1), 0)
    assert not config.tie_embeddings


def test_what_config_json_leaves_out_is_what_transformers_takes() -> None:
    config = read(head_dim="absent", num_key_value_heads="absent", rope_theta="absent", rms_norm_eps="absent")
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-6)
    assert read("Qwen3ForCausalLM", head_dim="absent").head_dim == 128


@pytest.mark.parametrize(
    ("architecture", "fields", "flags"),
    [
        ("LlamaForCausalLM", {}, ""),
        ("LlamaForCausalLM", {"attention_bias": True}, "qkv o"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "mlp"),
        ("Qwen2ForCausalLM", {}, "qkv"),
        ("Qwen3ForCausalLM", {}, "norm"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "qkv o norm"),
        ("MistralForCausalLM", {"attention_bias": True}, ""),
    ],
)
def test_biases_and_norms(architecture: str, fields: dict[str, Any], flags: str) -> None:
    config = read(architecture, **fields)
    seen = {
        "qkv": config.qkv_bias,
        "o": config.o_bias,
        "mlp": config.mlp_bias,
        "norm": config.qk_norm,
    }
    assert " ".join(name for name, on in seen.items() if on) == flags


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_spelling_of_transformers_5_means_the_same(architecture: str) -> None:
    new = {
        "rope_theta": "absent",
        "torch_dtype": "absent",
        "dtype": "float16",
        "rope_parameters": {"rope_theta": 5e5, **LLAMA3},
    }
    old = {"rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": "float16"}
    assert read(architecture, **new) == read(architecture, **old)
    assert read(architecture, **new).rope_theta == 5e5


def test_the_dtype_is_the_stated_one_or_the_stored_one() -> None:
    assert read(torch_dtype="float16").torch_dtype == "float16"
    assert read(torch_dtype="absent").torch_dtype == "bfloat16"
    assert "float8_e4m3fn" in refusal(torch_dtype="float8_e4m3fn").message


@pytest.mark.parametrize(
    ("scaling", "kind", "context"),
    [
        (None, type(None), 2048),
        ({"type": "default"}, type(None), 2048),
        ({"type": "linear", "factor": 2.0}, LinearRope, 4096),
        (LLAMA3, Llama3Rope, 2048),
        ({"type": "yarn", "factor": 4.0}, YarnRope, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, YarnRope, 2048),
    ],
)
def test_scaling_and_the_context_it_gives(scaling: dict[str, Any] | None, kind: type, context: int) -> None:
    config = read(rope_scaling=scaling)
    assert type(config.rope_scaling) is kind
    assert config.context_length == context


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "attention_factor": 0.7,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 8.0,
            "beta_slow": 8.0,
            "truncate": False,
        },
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn-betas", "yarn-mscale", "yarn-step"],
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_equal_those_of_transformers_bit_for_bit(scaling: dict[str, Any], head_dim: int) -> None:
    parameters = {"rope_theta": 50000.0, **scaling}
    document = tiny_config(head_dim=head_dim, rope_theta=None, rope_parameters=parameters)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**document))
    ours, factor = inverse_frequencies(read_hf_config(json.dumps(document).encode(), "float32"))
    assert torch.equal(ours, theirs.inv_freq)
    assert ours.dtype == torch.float32
    assert factor == theirs.attention_scaling


def test_divisors_are_one_per_frequency() -> None:
    config = read(head_dim=4)
    divided = msgspec.structs.replace(config, rope_scaling=RopeDivisors((2.0, 8.0)))
    plain, _ = inverse_frequencies(config)
    assert torch.equal(inverse_frequencies(divided)[0], plain / torch.tensor([2.0, 8.0]))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_other_scalings_are_refused_by_name(kind: str) -> None:
    error = refusal(rope_scaling={"type": kind, "factor": 2.0})
    assert f"rope scaling {kind} is not supported" in error.message
    assert "llama3" in str(error.fields["remedy"])


def test_a_scaling_that_lacks_a_number_is_refused() -> None:
    assert (
        "llama3 cannot be read: KeyError('low_freq_factor')"
        in refusal(rope_scaling={"rope_type": "llama3", "factor": 8.0}).message
    )


def test_an_unknown_architecture_is_named_with_the_known_ones() -> None:
    error = refusal(architectures=["MambaForCausalLM"])
    assert "MambaForCausalLM" in error.message
    assert all(name in str(error.fields["remedy"]) for name in ARCHITECTURES)
    assert "architecture none" in refusal(architectures=[]).message


def test_an_unknown_architecture_is_named_even_where_its_other_fields_are_foreign() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        read_hf_config(b'{"architectures": ["GPT2LMHeadModel"], "n_embd": 768}', "float32")


def test_quantized_checkpoints_are_refused_by_method() -> None:
    error = refusal(quantization_config={"quant_method": "awq", "bits": 4})
    assert "quantized (awq)" in error.message
    assert "GGUF" in str(error.fields["remedy"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embeddings"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "partial rotary embeddings",
        ),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "15 dimensions"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_hidden_layers": 1 << 24}, "num_layers is 16777216"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_what_cannot_run_is_refused_with_what_it_is(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(**fields).message


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b'{"architectures": 3}'])
def test_a_config_that_is_no_config(document: bytes) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be used"):
        read_hf_config(document, "float32")


def test_a_context_may_be_cut_and_not_grown() -> None:
    assert read(context=100).context_length == 100
    assert "the model has 2048" in refusal(context=4096).message
    assert "the model has 2048" in refusal(context=0).message


def test_a_sliding_window_is_refused_unless_the_context_fits_into_it() -> None:
    error = refusal("MistralForCausalLM", sliding_window=512)
    assert "sliding window attention over 512" in error.message
    assert "512 or less" in str(error.fields["remedy"])
    assert error.fields["key"] == "context_length"
    assert read("MistralForCausalLM", 512, sliding_window=512).context_length == 512
    assert read("MistralForCausalLM", sliding_window=2048).sliding_window == 2048
    assert read("MistralForCausalLM", sliding_window=None).sliding_window is None


def test_mistral_has_a_window_where_its_config_is_silent_and_qwen_has_none() -> None:
    assert read("MistralForCausalLM", sliding_window="absent").sliding_window == 4096
    assert read("Qwen2ForCausalLM", sliding_window=512).sliding_window is None
    error = refusal("Qwen2ForCausalLM", sliding_window=512, use_sliding_window=True)
    assert "sliding window attention over 512" in error.message
    late = read("Qwen2ForCausalLM", sliding_window=512, use_sliding_window=True, max_window_layers=3)
    assert late.sliding_window is None
    full = {"layer_types": ["full_attention"] * 3}
    assert (
        read("Qwen3ForCausalLM", sliding_window=512, use_sliding_window=True, **full).sliding_window is None
    )
