"""How many GPUs? Simulate clusters of growing size on a trace, until enough requests meet their targets.

python examples/twin_sweep.py [TRACE.jsonl]     # default: the built-in small trace, forty times as fast

`kvolt trace record` records a trace of a running frontend; `kvolt twin sweep` does the same over several axes at once.
"""

import sys

import msgspec

from kvolt.bench.load.sla import parse_sla
from kvolt.bench.traces import read_trace, scale_time, small_trace
from kvolt.engines.sim.arguments import SimArguments
from kvolt.twin.axes import PointSetup
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.sweep_runner import Common, solve

TARGETS = "ttft=300ms,itl=20ms"
ENOUGH = 0.95  # share of requests within the targets
PRESET = "mid-gpu-8b"  # step times: `kvolt engine list sim` lists presets, `kvolt fit` makes one of your own engine
MAX_WORKERS = 8

records = list(read_trace(sys.argv[1])) if len(sys.argv) > 1 else list(scale_time(small_trace(), 40.0))
common = Common(records, parse_sla(TARGETS))
settings = TwinSettings(router="latency", engine=SimArguments(preset=PRESET, trace_blocks=True))

print(f"{len(records)} requests, targets {TARGETS}")
print("workers   within  TTFT p90   ITL p90  GPU-seconds")
for num_workers in range(1, MAX_WORKERS + 1):
    cluster = msgspec.structs.replace(settings, num_workers=num_workers)
    found = solve(common, PointSetup(settings=cluster))  # `kvolt.twin.objectives` lists what it measures
    within, gpu_s = found["good_share"], found["gpu_seconds"]
    ttft_ms, itl_ms = 1e3 * found["ttft_p90"], 1e3 * found["itl_p90"]
    print(f"{num_workers:7}{within:9.1%}{ttft_ms:7.0f} ms{itl_ms:7.1f} ms{gpu_s:13.1f}")
    if within >= ENOUGH:
        print(f"{num_workers} workers are enough")
        break
else:
    sys.exit(f"{MAX_WORKERS} workers are not enough")
