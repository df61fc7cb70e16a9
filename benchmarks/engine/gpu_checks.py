"""Whole models on a GPU beside the CPU, and captured steps beside plain ones."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import torch
from benchmarks.engine.gpu_bench import TINY, Bench, RandomWeights
from benchmarks.engine.gpu_engine import request_of
from torch import Tensor

from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.batch import Batch
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.loading import CoreHooks, build_core
from kvolt.engines.native.parallel import Solo
from kvolt.models.config import ModelConfig

QWEN3 = msgspec.structs.replace(TINY, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=32)
MIDDLE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    context_length=2048,
)


def core_of(config: ModelConfig, device: str, dtype: str, *, graphs: bool = True) -> EngineCore:
    arguments = NativeArguments(
        device=device,
        dtype=dtype,  # type: ignore[arg-type]
        kv_blocks=600,
        max_num_seqs=16,
        max_batch_tokens=96,
        cuda_graphs=graphs,
    )
    # Made on the CPU: both devices must have the same. Larger than usual, so that choices are not ties.
    weights = RandomWeights(config, torch.device("cpu"), scale=0.08)
    return build_core(
        EngineSpec(model="m", role=Role.AGGREGATED), "m", weights, arguments, CoreHooks(), Solo()
    )


def tokens_of(core: EngineCore, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy, all at once: batched, chunked, mixed steps."""
    requests = [request_of(prompt, count) for prompt in prompts]
    tokens: dict[str, list[int]] = {str(request.request_id): [] for request in requests}
    for request in requests:
        core.submit(request)
    while core.has_work:
        output = core.step()
        if output is None:
            continue
        for name, token in zip(output.plain_ids, output.plain_tokens, strict=True):
            tokens[str(name)].append(token)
        for name, delta in output.deltas:
            tokens[str(name)] += delta.token_ids
    return [tokens[str(request.request_id)] for request in requests]


def _prompts(vocab: int, count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(3, 180))] for _ in range(count)]


def all_logits(core: EngineCore, tokens: list[int]) -> Tensor:
    """Logits after every token of one sequence, computed as one prefill."""
    runner = core.runner
    size, device = runner.slab.shape.block_size, runner.device
    count = len(tokens)
    width = -(-count // size)
    batch = Batch(
        token_ids=torch.tensor(tokens, device=device),
        positions=torch.arange(count, device=device),
        slots=torch.arange(count, device=device),
        num_decodes=0,
        query_starts=[0, count],
        context_lens=[count],
        context_lens_t=torch.tensor([count], dtype=torch.int32, device=device),
        block_tables=torch.arange(width, dtype=torch.int32, device=device)[None],
        logit_rows=torch.arange(count, device=device),
    )
    with torch.inference_mode():
        return runner.model.logits(runner.forward(batch)).float().cpu()


def model_checks(bench: Bench) -> dict[str, Any]:
    """Tiny models in float32: the GPU's tokens are the CPU's; captured steps give what plain ones give."""
    results: dict[str, Any] = {}
    device = str(bench.device)
    for name, config in (("llama", TINY), ("qwen3", QWEN3)):
        prompts = _prompts(config.vocab_size, 12, 1)
        with bench.attempt(name, results):
            on_cpu = core_of(config, "cpu", "float32")
            captured = core_of(config, device, "float32")
            plain = core_of(config, device, "float32", graphs=False)
            expected = tokens_of(on_cpu, prompts, 24)
            by_graph, by_launch = tokens_of(captured, prompts, 24), tokens_of(plain, prompts, 24)
            cpu_logits, gpu_logits = (all_logits(core, prompts[0]) for core in (on_cpu, plain))
            results[name] = {
                "tokens": sum(map(len, expected)),
                "gpu_equals_cpu": by_launch == expected,
                "graph_equals_launches": by_graph == by_launch,
                "graph_equals_cpu": by_graph == expected,
                "differing_tokens": _differing(by_graph, expected),
                "logits_error": float((gpu_logits - cpu_logits).abs().max()),
                "logits_spread": float(cpu_logits.std()),
            }
    with bench.attempt("bfloat16 graph", results):
        prompts = _prompts(MIDDLE.vocab_size if not bench.is_smoke else TINY.vocab_size, 16, 2)
        config = TINY if bench.is_smoke else MIDDLE
        captured, plain = (core_of(config, device, "bfloat16", graphs=graphs) for graphs in (True, False))
        one, two = tokens_of(captured, prompts, 32), tokens_of(plain, prompts, 32)
        results["bfloat16 graph"] = {
            "tokens": sum(map(len, one)),
            "equal": one == two,
            "differing": _differing(one, two),
        }
    return results


def _differing(left: list[list[int]], right: list[list[int]]) -> int:
    return sum(a != b for one, two in zip(left, right, strict=True) for a, b in zip(one, two, strict=True))
