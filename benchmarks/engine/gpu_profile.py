"""Device time of a step, by kernel."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.engine.gpu_bench import Bench
from benchmarks.engine.gpu_engine import CONTEXT, decode_rate, engine_of, prefill_seconds


def profiles(bench: Bench) -> dict[str, Any]:
    results: dict[str, Any] = {}
    core = engine_of(bench)
    cases = {
        "decode 32": lambda: decode_rate(bench, core, 32, CONTEXT, 16),
        "prefill 2048": lambda: prefill_seconds(bench, core, 2048, "profile"),
        "prefill 16384": lambda: prefill_seconds(bench, core, 16384, "profile"),
    }
    for name, work in cases.items():
        with bench.attempt(name, results):
            work()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                work()
                bench.sync()
            rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)[:14]
            results[name] = [(row.key[:90], row.count, row.self_device_time_total / 1e3) for row in rows]
    return results
