"""The engine as a whole on a GPU: decode and prefill rates beside the machine's limits, and a mixed load's steps."""

from __future__ import annotations

import itertools
import math
import random
import time
from typing import Any

import torch
from benchmarks.engine.gpu_bench import (
    Bench,
    RandomWeights,
    kv_token_bytes,
    matrix_params,
    prefill_flops,
    spread,
)

from kvolt.core.ids import RequestId
from kvolt.core.load import StepLogHeader, StepStats, encode_step_log
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.loading import CoreHooks, build_core
from kvolt.engines.native.parallel import Solo

CONTEXT, STEPS = 1024, 128
BATCHES = (1, 32, 256)
PROMPTS = (2048, 16384)
_numbers = itertools.count()


def request_of(prompt: list[int], max_tokens: int) -> Request:
    return Request(
        request_id=RequestId(f"r{next(_numbers)}"),
        model="random",
        token_ids=tuple(prompt),
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        sampling=Sampling(temperature=0.0),
    )


def random_prompts(bench: Bench, count: int, length: int, seed: object) -> list[list[int]]:
    rng = random.Random(f"{count} {length} {seed}")
    return [[rng.randrange(bench.config.vocab_size) for _ in range(length)] for _ in range(count)]


def engine_of(bench: Bench) -> EngineCore:
    """The benchmarked engine, built once."""
    if "core" not in bench.shared:
        bench.shared["core"] = build(bench)
    core: EngineCore = bench.shared["core"]
    return core


def build(bench: Bench, num_blocks: int | None = None) -> EngineCore:
    blocks = 400 if bench.is_smoke else BATCHES[-1] * (CONTEXT + STEPS + 64) // 16 + 600
    arguments = NativeArguments(
        device=str(bench.device),
        dtype=str(bench.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        kv_blocks=num_blocks or blocks,
        max_num_seqs=8 if bench.is_smoke else BATCHES[-1],
        max_batch_tokens=64 if bench.is_smoke else 8192,
    )
    spec = EngineSpec(model="random", role=Role.AGGREGATED)
    weights = RandomWeights(bench.config, bench.device)
    return build_core(spec, "random", weights, arguments, CoreHooks(), Solo())


def run_engine(bench: Bench) -> dict[str, Any]:
    """Builds it: loading, and the capture of decode steps."""
    started = time.perf_counter()
    core = engine_of(bench)
    used = torch.cuda.memory_allocated() / 2**30 if bench.device.type == "cuda" else 0.0
    return {
        "build_s": time.perf_counter() - started,
        "allocated_gib": used,
        "blocks": core.info.capacity.kv_total_blocks,
    }


def decode_rate(bench: Bench, core: EngineCore, batch: int, context: int, steps: int) -> dict[str, float]:
    """Tokens a second of `steps` steps in which all of `batch` sequences decode, and the mean KV they read."""
    return decode_rate_of(bench, core, random_prompts(bench, batch, context, "decode"), steps)


def decode_rate_of(
    bench: Bench, core: EngineCore, prompts: list[list[int]], steps: int, spare_steps: int = 256
) -> dict[str, float]:
    """The same for given prompts, which are computed in at most `spare_steps`."""
    batch = len(prompts)
    # The first ones decode while the last ones prefill: none may end before all were measured.
    requests = [request_of(prompt, steps + spare_steps) for prompt in prompts]
    seen: list[StepStats] = []
    before, core.on_step = core.on_step, seen.append
    for request in requests:
        core.submit(request)
    for _ in range(100_000):
        core.step()
        if seen[-1].batch == batch and not seen[-1].prefill_tokens:
            break
    for _ in range(3):
        core.step()
    seen.clear()
    bench.sync()
    started = time.perf_counter()
    tokens = 0
    for _ in range(steps):
        output = core.step()
        assert output is not None
        tokens += len(output.plain_tokens) + sum(len(delta.token_ids) for _, delta in output.deltas)
    bench.sync()
    took = time.perf_counter() - started
    core.on_step = before
    for request in requests:
        core.abort(request.request_id)
    seen = seen[:steps]
    assert tokens == batch * steps, f"{tokens} tokens in {steps} steps of {batch}"
    return {
        "tokens_per_s": tokens / took,
        "step_ms": took / steps * 1e3,
        "context_tokens": sum(step.context_tokens for step in seen) / len(seen),
        "in_step_ms": sum(step.time_s for step in seen) / len(seen) * 1e3,
    }


def decode_limit_ms(bench: Bench, context_tokens: float) -> float:
    """Weights and KV over the measured bandwidth."""
    item = 4 if bench.is_smoke else 2
    num_bytes = matrix_params(bench.config) * item + context_tokens * kv_token_bytes(bench.config, item)
    bandwidth = bench.results.get("limits", {}).get("bandwidth", float("nan"))
    return float(num_bytes / bandwidth * 1e3)


def decode(bench: Bench) -> dict[str, Any]:
    core = engine_of(bench)
    batches, context, steps = ((1, 4), 40, 8) if bench.is_smoke else (BATCHES, CONTEXT, STEPS)
    rows: dict[int, list[dict[str, float]]] = {batch: [] for batch in batches}
    for _ in range(bench.rounds):
        for batch in batches:
            rows[batch].append(decode_rate(bench, core, batch, context, steps))
    results: dict[str, Any] = {}
    for batch, rounds in rows.items():
        limit = decode_limit_ms(bench, rounds[0]["context_tokens"])
        step = spread([row["step_ms"] for row in rounds])
        results[str(batch)] = {
            "tokens_per_s": spread([row["tokens_per_s"] for row in rounds]),
            "step_ms": step,
            "in_step_ms": spread([row["in_step_ms"] for row in rounds]),
            "limit_ms": limit,
            "of_limit": limit / step["median"],
            "gpu_ms": _gpu_ms(bench, core, batch, context + steps // 2),
        }
    return results


def _gpu_ms(bench: Bench, core: EngineCore, batch: int, context: int) -> float:
    """The captured step alone, without scheduling and sampling: where the rest of a step goes."""
    from kvolt.engines.native.batch import Batch

    runner = core.runner
    replay = getattr(runner, "_replay", None)
    size = runner.slab.shape.block_size
    width = -(-context // size)
    spare = runner.slab.shape.num_blocks - 1
    blocks = torch.arange(batch * width, dtype=torch.int32).view(batch, width) % spare
    host = Batch(
        token_ids=torch.arange(batch),
        positions=torch.full((batch,), context - 1),
        slots=torch.full((batch,), spare * size),
        num_decodes=batch,
        query_starts=list(range(batch + 1)),
        context_lens=[context] * batch,
        context_lens_t=torch.full((batch,), context, dtype=torch.int32),
        block_tables=blocks,
        logit_rows=torch.arange(batch),
    )
    fields = ("token_ids", "positions", "slots", "context_lens_t", "block_tables", "logit_rows")
    for name in fields:
        setattr(host, name, getattr(host, name).to(bench.device))
    with torch.inference_mode():
        if replay is not None and replay.covers(host):
            return bench.seconds(lambda: replay.replay(host), 20) * 1e3
        return bench.seconds(lambda: runner.decode_logits(host), 5) * 1e3


def prefill_seconds(bench: Bench, core: EngineCore, length: int, seed: object) -> float:
    """Time from submission to the first token of a single prompt."""
    request = request_of(random_prompts(bench, 1, length, seed)[0], 1)
    bench.sync()
    started = time.perf_counter()
    core.submit(request)
    while core.has_work:
        core.step()
    bench.sync()
    return time.perf_counter() - started


def prefill(bench: Bench) -> dict[str, Any]:
    core = engine_of(bench)
    lengths = (20, 80) if bench.is_smoke else PROMPTS
    times: dict[int, list[float]] = {length: [] for length in lengths}
    for length in lengths:  # compiles what is not yet compiled
        prefill_seconds(bench, core, length, "warm")
    for round_number in range(bench.rounds):
        for length in lengths:
            times[length].append(prefill_seconds(bench, core, length, round_number))
    results: dict[str, Any] = {}
    matmul = bench.results.get("limits", {}).get("matmul", float("nan"))
    for length, times_ms in times.items():
        took = spread(times_ms)
        limit = prefill_flops(bench.config, length) / matmul
        results[str(length)] = {
            "tokens_per_s": spread([length / one for one in times_ms]),
            "ms": {name: value * 1e3 for name, value in took.items()},
            "limit_ms": limit * 1e3,
            "of_limit": limit / took["median"],
        }
    return results


def mixed_load(bench: Bench) -> dict[str, Any]:
    """Poisson arrivals at three rates, prompts 100 to 8000 tokens, outputs 50 to 400: a step log for the simulator."""
    core = engine_of(bench)
    rng = random.Random(11)
    longest, outputs = (100, (3, 5)) if bench.is_smoke else (8000, (50, 400))
    rates, part_s = ((20.0,), 0.2) if bench.is_smoke else ((3.0, 8.0, 14.0), 9.0)
    arrivals: list[tuple[float, int, int]] = []
    at = 0.0
    for number, rate in enumerate(rates):
        while at < (number + 1) * part_s:
            at += rng.expovariate(rate)
            length = int(math.exp(rng.uniform(math.log(min(100, longest // 2)), math.log(longest))))
            arrivals.append((at, length, rng.randint(*outputs)))
    prompts = [random_prompts(bench, 1, length, seed)[0] for seed, (_, length, _) in enumerate(arrivals)]
    steps: list[StepStats] = []
    before, core.on_step = core.on_step, steps.append
    started = time.perf_counter()
    pending = list(zip(arrivals, prompts, strict=True))[::-1]
    submitted: list[RequestId] = []
    most = 0
    while pending or core.has_work:
        now = time.perf_counter() - started
        while pending and pending[-1][0][0] <= now:
            (_, _, tokens), prompt = pending.pop()
            request = request_of(prompt, tokens)
            core.submit(request)
            submitted.append(request.request_id)
        if core.has_work:
            core.step()
            most = max(most, core.scheduler.num_running)
        elif pending:
            time.sleep(max(pending[-1][0][0] - now, 0))
        if now > 2 * part_s * len(rates):  # it does not keep up: what there is will do
            bench.say(f"  broken off with {len(pending)} to come, {core.scheduler.num_running} running")
            for request_id in submitted:
                core.abort(request_id)
            break
    core.on_step = before
    took = time.perf_counter() - started
    header = StepLogHeader(
        engine="native",
        model="random Llama-3.1-8B" if not bench.is_smoke else "tiny",
        device=torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu",
        block_size=core.info.block_size,
        dtype=str(bench.dtype).removeprefix("torch."),
    )
    (bench.out / "steps.jsonl").write_bytes(b"".join(encode_step_log(header, steps)))
    return {
        "requests": len(arrivals),
        "seconds": took,
        "steps": len(steps),
        "decoded": sum(step.batch for step in steps),
        "prefilled": sum(step.prefill_tokens for step in steps),
        "busy_share": sum(step.time_s for step in steps) / took,
        "most_running": most,
    }
