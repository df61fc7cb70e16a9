"""Gaps between tokens of the native engine alone, random weights: steps cut by predicted time beside whole ones.

    python -m benchmarks.engine.engine_cuts --device cpu --threads 1     # SmolLM2-135M's shape, 8 users, 256 in, 48 out
    PYTHONPATH=src python3 -m benchmarks.engine.engine_cuts --device cuda  # an 8B model, 64 users, 4096 in, 256 out

A closed loop in one process, without server and network: each user asks when its answer is there. The variants run in
turn on one engine with an empty cache; `whole` has no step model, so that only tokens limit a step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import msgspec
import torch
from benchmarks.engine.gpu_bench import LLAMA_8B, TINY, RandomWeights
from benchmarks.engine.gpu_engine import request_of
from benchmarks.harness import parser_for, report, run, say

from kvolt.core.ids import RequestId
from kvolt.core.load import StepStats
from kvolt.core.request import Request, Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.loading import CoreHooks, build_core
from kvolt.engines.native.parallel import Solo
from kvolt.models.config import ModelConfig
from kvolt.scheduler.step_pace import StepPace

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
    tie_embeddings=True,
)


class Load(msgspec.Struct, frozen=True):
    users: int
    requests: int
    prompt: int
    answer: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in milliseconds."""

    variant: str
    tokens_per_s: float
    gap_p50: float
    gap_p99: float
    gap_max: float
    ttft_p50: float
    ttft_p99: float
    longest_shared_step: float
    longest_step: float
    largest_chunk: int


class Loop:
    """A closed loop over one engine."""

    def __init__(self, core: EngineCore, load: Load, seed: int) -> None:
        rng, vocabulary = random.Random(seed), core.runner.model.config.vocab_size
        self._core = core
        self._todo: list[Request] = [
            request_of([rng.randrange(vocabulary) for _ in range(load.prompt)], load.answer)
            for _ in range(load.requests)
        ]
        self._sent: dict[RequestId, float] = {}
        self._last: dict[RequestId, float] = {}
        self._gaps: list[float] = []
        self._ttft: list[float] = []
        self._steps: list[StepStats] = []
        core.on_step = self._steps.append
        for _ in range(load.users):
            self._ask()

    def run(self, variant: str) -> Row:
        started = time.perf_counter()
        while self._core.has_work:
            self._step()
        took_s = time.perf_counter() - started
        shared = [step.time_s for step in self._steps if step.batch and step.prefill_tokens]
        return Row(
            variant=variant,
            tokens_per_s=(len(self._gaps) + len(self._ttft)) / took_s,
            gap_p50=_quantile(self._gaps, 0.5),
            gap_p99=_quantile(self._gaps, 0.99),
            gap_max=_quantile(self._gaps, 1.0),
            ttft_p50=_quantile(self._ttft, 0.5),
            ttft_p99=_quantile(self._ttft, 0.99),
            longest_shared_step=1e3 * max(shared, default=0.0),
            longest_step=1e3 * max(step.time_s for step in self._steps),
            largest_chunk=max(step.prefill_tokens for step in self._steps),
        )

    def _ask(self) -> None:
        if self._todo:
            request = self._todo.pop()
            self._sent[request.request_id] = time.perf_counter()
            self._core.submit(request)

    def _step(self) -> None:
        output = self._core.step()
        if output is None:
            return
        now = time.perf_counter()
        for request_id in (*output.plain_ids, *(request_id for request_id, _ in output.deltas)):
            if request_id in self._last:
                self._gaps.append(now - self._last[request_id])
            else:
                self._ttft.append(now - self._sent[request_id])
            self._last[request_id] = now
        for _, delta in output.deltas:
            if delta.finish is not None:
                self._ask()


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def build(device: str, threads: int, config: ModelConfig) -> EngineCore:
    blocks = 40_000 if config is LLAMA_8B else 2_000
    return build_core(
        EngineSpec(model="random", role=Role.AGGREGATED),
        "random",
        RandomWeights(config, torch.device(device)),
        NativeArguments(device=device, threads=threads, kv_blocks=blocks),
        CoreHooks(),
        Solo(),
    )


def main() -> None:
    parser = parser_for(__file__, __doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config, load = SMOLLM2, Load(8, 24, 256, 48)
    if options.device == "cuda":
        config, load = LLAMA_8B, Load(64, 256, 4096, 256)
    if options.smoke:
        config, load, options.rounds = TINY, Load(2, 4, 32, 8), 1
    core = build(options.device, options.threads, config)
    measured = core.scheduler.planner.pace
    assert measured is not None, "no step ran at start"
    model, most_timed = measured.model, measured.most_prompt_tokens
    say(f"{model}; largest step at start: {most_timed} / 2 prompt tokens")
    rows, lines = [], []
    for number in range(options.rounds):
        for variant in ("cut", "whole"):
            timed = None if most_timed is None else most_timed // 2
            core.scheduler.planner.pace = StepPace(model, timed) if variant == "cut" else None
            core.scheduler.clear()
            row = Loop(core, load, number).run(variant)
            rows.append(row)
            values = {name: round(value, 1) for name, value in list(msgspec.structs.asdict(row).items())[1:]}
            lines.append(f"{variant:<6} {values} p99/p50 {row.gap_p99 / row.gap_p50:.1f}")
            say(lines[-1])
    core.close()
    report(options, "\n".join(lines), {"rows": rows})


if __name__ == "__main__":
    run(main)
