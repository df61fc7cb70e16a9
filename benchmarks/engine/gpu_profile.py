"""Where a step's time goes: on the host by function, on the device by kernel."""

from __future__ import annotations

import cProfile
import io
import pstats
from typing import Any

import torch
from benchmarks.engine.gpu_bench import Bench
from benchmarks.engine.gpu_engine import BATCHES, CONTEXT, decode_rate, engine_of, prefill_seconds


def profiles(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    core = engine_of(bench)
    batch, context, steps = (2, 40, 8) if bench.is_smoke else (BATCHES[-1], CONTEXT, 48)
    with bench.attempt("host", found):
        decode_rate(bench, core, batch, context, 4)  # prefilled, for the most part
        profiler = cProfile.Profile()
        profiler.enable()
        decode_rate(bench, core, batch, context, steps)
        profiler.disable()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(18)
        found["host"] = text.getvalue().splitlines()
        print(f"  host, decode at batch {batch}, prefix hits and {steps} steps", flush=True)
        print("\n".join(line[:150] for line in found["host"] if line.strip()), flush=True)
    if bench.device.type != "cuda":
        return found
    cases = {
        "decode 32": lambda: decode_rate(bench, core, 32, CONTEXT, 16),
        "prefill 2048": lambda: prefill_seconds(bench, core, 2048, "profile"),
        "prefill 16384": lambda: prefill_seconds(bench, core, 16384, "profile"),
    }
    for name, work in cases.items():
        with bench.attempt(name, found):
            work()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                work()
                bench.sync()
            rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)[:14]
            found[name] = [(row.key[:90], row.count, row.self_device_time_total / 1e3) for row in rows]
            print(f"  device, {name}", flush=True)
            for key, count, milliseconds in found[name]:
                print(f"    {milliseconds:9.2f} ms {count:6d} x {key}", flush=True)
    return found
