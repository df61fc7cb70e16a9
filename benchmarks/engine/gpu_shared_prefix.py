"""Decode steps of sequences that share the KV blocks of a prefix, beside sequences with prefixes of their own.

A paged attention kernel reads a shared block once per sequence. How much of that reaches the device's memory depends on
its L2 cache. `read_share` is what remains of a prefix's cost when all sequences share it:
`(shared - none) / (distinct - none)`, 1 if sharing saves nothing, 1 / batch if the prefix is read once for all.
"""

from __future__ import annotations

from typing import Any

from benchmarks.engine.gpu_bench import Bench, kv_token_bytes, spread
from benchmarks.engine.gpu_engine import build, decode_rate_of, random_prompts

SUFFIX_TOKENS, STEPS = 64, 48
SPARE_STEPS = 1024
CASES = ((8, 4000), (32, 4000), (128, 4000), (8, 16000), (32, 16000))
SMOKE_CASES = ((2, 32),)


def shared_prefix(bench: Bench) -> dict[str, Any]:
    cases = SMOKE_CASES if bench.is_smoke else CASES
    steps, spare_steps = (4, 16) if bench.is_smoke else (STEPS, SPARE_STEPS)
    most_tokens = max(batch * (prefix + SUFFIX_TOKENS + steps + spare_steps) for batch, prefix in cases)
    core = build(bench, most_tokens // 16 + 200)
    rows: list[dict[str, Any]] = []
    for batch, prefix_tokens in cases:
        times: dict[str, list[float]] = {"none": [], "shared": [], "distinct": []}
        for round_number in range(bench.rounds):
            seed = f"{prefix_tokens} {round_number}"
            suffixes = random_prompts(bench, batch, SUFFIX_TOKENS, f"suffix {seed}")
            common = random_prompts(bench, 1, prefix_tokens, f"common {seed}")[0]
            own = random_prompts(bench, batch, prefix_tokens, f"own {seed}")
            decode_rate_of(
                bench, core, [[*common, *suffixes[0]]], 1, spare_steps
            )  # computes the shared blocks
            prompts = {
                "none": suffixes,
                "shared": [[*common, *suffix] for suffix in suffixes],
                "distinct": [[*prefix, *suffix] for prefix, suffix in zip(own, suffixes, strict=True)],
            }
            for name, token_ids in prompts.items():
                times[name].append(decode_rate_of(bench, core, token_ids, steps, spare_steps)["step_ms"])
        step_ms = {name: spread(values) for name, values in times.items()}
        none, shared, distinct = (step_ms[name]["median"] for name in ("none", "shared", "distinct"))
        rows.append(
            {
                "batch": batch,
                "prefix_tokens": prefix_tokens,
                "prefix_mib": prefix_tokens * kv_token_bytes(bench.config) / 2**20,
                "step_ms_no_prefix": step_ms["none"],
                "step_ms_shared": step_ms["shared"],
                "step_ms_distinct": step_ms["distinct"],
                "read_share": (shared - none) / (distinct - none),
            }
        )
    return {"rows": rows}
