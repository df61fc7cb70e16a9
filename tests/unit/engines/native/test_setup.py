"""Default sizes of steps and caches."""

from __future__ import annotations

import msgspec
import torch

from kvolt.engines.native.setup import largest_step_bytes, memory_for_kv, step_tokens
from kvolt.models.config import ModelConfig

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    context_length=8192,
)
LLAMA_8B = msgspec.structs.replace(
    SMOLLM2,
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)


def test_weights_are_those_that_tokens_are_multiplied_with() -> None:
    assert SMOLLM2.num_weights == 106_168_320
    assert LLAMA_8B.num_weights == 6_979_321_856


def test_a_step_on_a_cpu_is_shorter_the_larger_the_model() -> None:
    assert step_tokens(SMOLLM2, on_gpu=False) == 2048
    half_billion = msgspec.structs.replace(SMOLLM2, num_layers=140)
    assert 512 <= step_tokens(half_billion, on_gpu=False) <= 1024
    assert step_tokens(LLAMA_8B, on_gpu=False) == 256
    assert step_tokens(LLAMA_8B, on_gpu=True) == 8192


def test_the_largest_step_holds_what_it_computes() -> None:
    """Gate, up and their product of a prompt; logits of every sequence with what a draw sorts."""
    found = largest_step_bytes(LLAMA_8B, 8192, 256, itemsize=2)
    assert found > 8192 * 3 * 14336 * 2 + 256 * 128256 * (4 + 4 + 8 + 8 + 8)
    halved = largest_step_bytes(LLAMA_8B, 8192, 256, itemsize=2, degree=2)
    assert found - halved == 8192 * 3 * 14336 // 2 * 2


def test_a_cpu_gives_at_most_two_gigabytes() -> None:
    assert 0 < memory_for_kv(torch.device("cpu"), 10**15) <= 2 * 1024**3
