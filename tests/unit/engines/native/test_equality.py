"""Greedy answers in float32 are those of transformers, token for token, however the requests are run.

A sample with tiny random models; the full count is in tests/long/test_equality_full.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.engines.native.equality_lab import (
    MODES,
    NUM_TOP,
    Answer,
    Mode,
    Prompts,
    Reference,
    Verdict,
    answer,
    answers,
    ask,
    batched,
    core_of,
    make_prompts,
)
from tests.unit.engines.native.test_slab import memory_file

from kvolt.engines.native.kernels import cpu_kernels
from kvolt.models.config import ARCHITECTURES
from kvolt.testing.tiny_models import tiny_checkpoint, tiny_gguf

MAX_TOKENS = 12
PROMPTS = make_prompts(seed=1, vocabulary=900)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: (folder := tiny_checkpoint(root / name, name, seed=3), Reference.of_folder(folder))
        for name in ARCHITECTURES
    }


def verdicts(reference: Reference, found: dict[str, Answer], prompts: Prompts = PROMPTS) -> list[Verdict]:
    assert found.keys() == prompts.keys()
    return [reference.compare(prompt, found[name]) for name, prompt in prompts.items()]


def assert_equal(reference: Reference, found: dict[str, Answer], prompts: Prompts = PROMPTS) -> None:
    assert all(len(one.tokens) == MAX_TOKENS for one in found.values())
    for verdict in verdicts(reference, found, prompts):
        assert verdict.flips == ()
        assert verdict.max_delta < 1e-3


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_equal_those_of_transformers(
    models: dict[str, tuple[Path, Reference]], architecture: str, mode: Mode
) -> None:
    folder, reference = models[architecture]
    core = core_of(folder, **mode.arguments)
    requests = [ask(name, prompt, MAX_TOKENS, logprobs=NUM_TOP) for name, prompt in PROMPTS.items()]
    assert_equal(reference, mode.run(core, requests))


def test_the_comparison_sees_a_wrong_token_and_a_wrong_figure(
    models: dict[str, tuple[Path, Reference]],
) -> None:
    folder, reference = models["LlamaForCausalLM"]
    found = answer(core_of(folder), ask("a", PROMPTS["p3"], MAX_TOKENS, logprobs=2))
    assert reference.generate(PROMPTS["p3"], MAX_TOKENS) == found.tokens
    assert len(set(found.tokens)) > 3, "an answer that repeats itself shows little"
    assert reference.compare(PROMPTS["p3"][1:], found).max_delta > 0.1
    right = found.tokens[4]
    found.logprobs = []
    found.tokens[4] = (right + 1) % 900
    flip = reference.compare(PROMPTS["p3"], found).flips[0]
    assert (flip.place, flip.theirs) == (4, right)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_torch_gives_the_same_where_there_are_no_kernels(
    models: dict[str, tuple[Path, Reference]], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "shared", lambda: None)
    folder, reference = models[architecture]
    requests = [ask(name, prompt, MAX_TOKENS, logprobs=NUM_TOP) for name, prompt in PROMPTS.items()]
    assert_equal(reference, batched(core_of(folder, max_batch_tokens=64), requests))


def test_long_contexts_and_several_threads(models: dict[str, tuple[Path, Reference]]) -> None:
    folder, reference = models["Qwen3ForCausalLM"]
    prompts = make_prompts(seed=8, vocabulary=900, count=4, longest=1500)
    core = core_of(folder, context_length=2048, kv_blocks=400, threads=2)
    try:
        found = answers(
            core, *(ask(name, prompt, MAX_TOKENS, logprobs=NUM_TOP) for name, prompt in prompts.items())
        )
    finally:
        torch.set_num_threads(1)
    assert_equal(reference, found, prompts)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_blocks_of_any_size_give_the_same(models: dict[str, tuple[Path, Reference]], block_size: int) -> None:
    folder, reference = models["Qwen3ForCausalLM"]
    core = core_of(folder, block_size=block_size, kv_blocks=4000 // block_size, max_batch_tokens=37)
    requests = [ask(name, prompt, MAX_TOKENS) for name, prompt in PROMPTS.items()]
    assert_equal(reference, batched(core, requests))


def test_a_memory_file_holds_the_blocks_as_well(models: dict[str, tuple[Path, Reference]]) -> None:
    import os

    from kvolt.core.request import Role
    from kvolt.engines.contract import EngineSpec
    from kvolt.engines.native.arguments import NativeArguments
    from kvolt.engines.native.loading import load_core

    folder, reference = models["LlamaForCausalLM"]
    made: list[int] = []

    def memory(rank: int, num_bytes: int) -> int:
        made.append(memory_file(num_bytes))
        return os.dup(made[0])

    core = load_core(
        EngineSpec(model=str(folder), role=Role.AGGREGATED),
        NativeArguments(dtype="float32", kv_blocks=64, context_length=256),
        memory,
    )
    assert_equal(
        reference, answers(core, *(ask(name, prompt, MAX_TOKENS) for name, prompt in PROMPTS.items()))
    )
    with os.fdopen(made[0], "rb") as seen:
        assert any(seen.read(core.capabilities.kv_layout().block_bytes))


def test_sharded_and_gguf_files_of_the_same_weights_give_the_same(tmp_path: Path) -> None:
    whole = tiny_checkpoint(tmp_path / "whole", seed=5)
    sharded = tiny_checkpoint(tmp_path / "sharded", seed=5, num_shards=3)
    gguf = tiny_gguf(tmp_path / "model.gguf", seed=5)
    reference = Reference.of_folder(whole)
    requests = [ask(name, prompt, MAX_TOKENS, logprobs=NUM_TOP) for name, prompt in PROMPTS.items()]
    tokens = []
    for path in (whole, sharded, gguf):
        found = answers(core_of(path), *requests)
        assert_equal(reference, found)
        tokens.append({name: one.tokens for name, one in found.items()})
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 32},
        {"attention_bias": True, "mlp_bias": True},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_variants_of_the_architecture(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", seed=2, **overrides)
    requests = [ask(name, prompt, MAX_TOKENS, logprobs=NUM_TOP) for name, prompt in PROMPTS.items()]
    core = core_of(folder, max_batch_tokens=64)
    assert_equal(Reference.of_folder(folder), batched(core, requests))


@pytest.mark.parametrize("max_batch_tokens", [64, 512])
def test_log_probabilities_of_prompts(
    models: dict[str, tuple[Path, Reference]], max_batch_tokens: int
) -> None:
    """Also in chunks, and where the prompt is cached: then it is computed all the same."""
    folder, reference = models["Qwen2ForCausalLM"]
    core = core_of(folder, max_batch_tokens=max_batch_tokens)
    answers(core, *(ask(name, prompt, 2) for name, prompt in PROMPTS.items()))
    asked = [ask(name, prompt, 4, prompt_logprobs=3, logprobs=0) for name, prompt in PROMPTS.items()]
    for name, found in answers(core, *asked).items():
        prompt = PROMPTS[name]
        assert found.cached == 0
        assert found.prompt_logprobs is not None
        assert len(found.prompt_logprobs) == len(prompt)
        assert found.prompt_logprobs[0] is None
        expected = reference.logits(prompt).log_softmax(dim=-1)
        for place, one in enumerate(found.prompt_logprobs[1:]):
            assert one is not None
            assert one.token_id == prompt[place + 1]
            assert one.logprob == pytest.approx(float(expected[place, one.token_id]), abs=1e-3)
            best = expected[place].topk(3)
            assert [token for token, _ in one.top] == best.indices.tolist()
            assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_bfloat16_differs_only_where_two_tokens_are_close(models: dict[str, tuple[Path, Reference]]) -> None:
    folder, reference = models["LlamaForCausalLM"]
    core = core_of(folder, dtype="bfloat16")
    found = answers(core, *(ask(name, prompt, MAX_TOKENS, logprobs=0) for name, prompt in PROMPTS.items()))
    flips = [flip for verdict in verdicts(reference, found) for flip in verdict.flips]
    assert len(flips) < len(PROMPTS) * MAX_TOKENS / 4
    assert all(flip.gap < 0.5 for flip in flips), flips
