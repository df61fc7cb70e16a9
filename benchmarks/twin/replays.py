"""One trace through Dynamo's offline replay and through `kvolt twin`: each a process on one core, and what it said.

Both simulate the same engine: Dynamo's polynomial step times (`dynamo-mocker`), blocks of 64 tokens, 16,384 of them, at
most 256 sequences and 8,192 tokens in a step (the defaults of both), round-robin.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.harness import Missing, say
from benchmarks.load.metered import Usage, run_metered
from msgspec.structs import replace

KVOLT, PEER = "kvolt twin", "Dynamo 1.4.2 replay"
LATENCIES = ("ttft", "itl", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")

BLOCK_SIZE, NUM_BLOCKS = 64, 16_384
LONGEST_CONTEXT = 262_144
"""Dynamo's replay has no limit; the twin's default would refuse a trace's longest prompts."""


class Replayed(msgspec.Struct, frozen=True):
    """Results of a simulation, its time and memory."""

    system: str
    used: Usage
    num_whole: int
    output_tokens: int
    hit_rate: float
    """Prompt tokens that were found in a cache, of all prompt tokens."""
    latencies: dict[str, dict[str, float]]
    """Milliseconds, by figure and statistic."""
    replay_s: float | None = None
    """Dynamo's own figure, without start and reading."""


def peer_python(folder: Path, *, may_install: bool = True) -> Path:
    """Interpreter of the peer in this folder, installed at the first use."""
    environment = folder / "replay"
    if not (environment / "complete").exists():
        if not may_install:
            raise Missing(f"{PEER} in {environment}")
        say(f"installing ai-dynamo 1.4.2 into {environment} (once, 0.6 GB)")
        script = Path(__file__).parent / "peers" / "install"
        done = subprocess.run([str(script)], env={**os.environ, "KVOLT_PEER": str(folder)}, check=False)
        if done.returncode:
            raise Missing(f"{PEER}: benchmarks/twin/peers/install failed, see the output of pip above")
    return environment / "bin" / "python"


def replay_dynamo(
    python: Path,
    trace: Path,
    num_workers: int,
    block_size: int,
    core: int,
    *,
    mode: str = "round_robin",
    speed: float = 1.0,
    prefill_load_scale: float = 1.0,
) -> Replayed:
    """`block_size` is that of the trace's hash ids; `mode` and `prefill_load_scale` are its router's."""
    engine = {"block_size": BLOCK_SIZE, "num_gpu_blocks": NUM_BLOCKS}
    weights = {"prefill_load_scale": prefill_load_scale} if mode == "kv_router" else {}
    routing = ("--router-config", msgspec.json.encode(weights).decode()) if weights else ()
    with tempfile.TemporaryDirectory(prefix="bench-twin-") as folder:
        report_path = Path(folder) / "report.json"
        used, _ = on_one_core(
            PEER,
            [
                *(str(python), "-m", "dynamo.replay", str(trace), "--trace-format", "mooncake"),
                *("--trace-block-size", str(block_size), "--num-workers", str(num_workers)),
                *("--router-mode", mode, "--replay-mode", "offline", "--arrival-speedup-ratio", str(speed)),
                *routing,
                *(
                    "--extra-engine-args",
                    msgspec.json.encode(engine).decode(),
                    "--report-json",
                    str(report_path),
                ),
            ],
            Path(folder),
            core,
        )
        report: dict[str, Any] = msgspec.json.decode(report_path.read_bytes())
    spelled = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
    names = {"ttft": "ttft", "itl": "itl", "tpot": "tpot", "e2e": "e2e_latency"}
    return Replayed(
        PEER,
        used,
        int(report["completed_requests"]),
        int(report["total_output_tokens"]),
        float(report["prefix_cache_reused_ratio"]),
        {
            name: {
                statistic: float(report[f"{spelled[statistic]}_{names[name]}_ms"]) for statistic in STATISTICS
            }
            for name in LATENCIES
        },
        float(report["wall_time_ms"]) / 1e3,
    )


def replay_kvolt(trace: Path, num_workers: int, core: int) -> Replayed:
    arguments = {"block_size": BLOCK_SIZE, "kv_blocks": NUM_BLOCKS, "context_length": LONGEST_CONTEXT}
    flags = [part for name, value in arguments.items() for part in ("--arg", f"{name}={value}")]
    with tempfile.TemporaryDirectory(prefix="bench-twin-") as folder:
        used, stdout = on_one_core(
            KVOLT,
            [
                *(sys.executable, "-m", "kvolt", "twin", str(trace), "--workers", str(num_workers)),
                *("--router", "round-robin", "--preset", "dynamo-mocker", *flags, "--json", "--quiet"),
            ],
            Path(folder),
            core,
        )
    report: dict[str, Any] = msgspec.json.decode(stdout)
    counts = report["counts"]
    return Replayed(
        KVOLT,
        used,
        counts["whole"],
        counts["output_tokens"],
        counts["cached_tokens"] / max(1, counts["input_tokens"]),
        {
            name: {statistic: 1e3 * report["latencies"][name][statistic] for statistic in STATISTICS}
            for name in LATENCIES
        },
    )


def on_one_core(name: str, command: Sequence[str], folder: Path, core: int) -> tuple[Usage, bytes]:
    """Usage and standard output; BrokenRun with its last output if it fails."""
    used, stdout = run_metered(name, command, folder, str(core))
    return replace(used, looks=[]), stdout
