"""kvolt with a vLLM worker compared to a plain vLLM server: CPU time outside the engine, and client latencies.

    VENV/bin/python -m benchmarks.engines.vllm_overhead           VENV as of tests/engines_vllm/setup.sh; ten minutes

Both serve the same tiny random model, so that the cost around the engine is visible, and get the same load in turn,
several rounds each. CPU time is that of all processes except vLLM's engine core and its workers: a frontend and a
worker of kvolt, an API server of vLLM. Ratios are of the medians of one run; the report shows the spread of single
rounds.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from benchmarks.harness import Missing, parser_for, report, run, say
from benchmarks.processes import KVOLT, Processes, free_port, output_of

from kvolt.testing.tiny_models import tiny_checkpoint

ROUNDS = 5
CONCURRENCY, REQUESTS, PROMPT, ANSWER = 16, 96, 128, 128
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "block_size": 32,
    "num_gpu_blocks_override": 512,
    "max_num_seqs": 32,
}
_ENGINE = ("VLLM::EngineCore", "VLLM::Worker", "resource_tracker")


ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def kvolt_commands(model: Path, port: int) -> list[list[str]]:
    """A frontend and a worker: `kvolt serve` would limit the engine's threads, unlike vLLM's server."""
    engine_flags = ["--arg", f"engine_args={json.dumps(ENGINE_ARGS)}", "--arg", "served_name=tiny"]
    return [
        [*KVOLT, "frontend", "--port", str(port), "--router", "latency"],
        [*KVOLT, "worker", str(model), "--engine", "vllm", *engine_flags],
    ]


def vllm_commands(model: Path, port: int) -> list[list[str]]:
    flags: list[str] = []
    for name, value in ENGINE_ARGS.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, str(value)]
    module = "vllm.entrypoints.openai.api_server"
    served = f"--model {model} --served-model-name tiny --host 127.0.0.1 --port {port}".split()
    return [[sys.executable, "-m", module, *served, *flags]]


class Server:
    def __init__(self, pids: Sequence[int], url: str) -> None:
        self._roots, self.url = [psutil.Process(pid) for pid in pids], url

    def cpu_s(self) -> dict[str, float]:
        """CPU of the engine, and by pid of the processes around it."""
        seconds: dict[str, float] = {}
        for each in (member for root in self._roots for member in (root, *root.children(recursive=True))):
            command = " ".join(each.cmdline())
            name = "engine" if any(word in command for word in _ENGINE) else f"{each.pid}"
            seconds[name] = seconds.get(name, 0.0) + sum(each.cpu_times()[:2])
        return seconds


def start(stack: ExitStack, kind: str, model: Path) -> Server:
    processes, port = stack.enter_context(Processes(kind)), free_port()
    env = processes.environ(**ENVIRON)
    commands = kvolt_commands(model, port) if kind == "kvolt" else vllm_commands(model, port)
    pids = [processes.start(f"{kind}-{at}", command, env).pid for at, command in enumerate(commands)]
    if kind == "kvolt":
        processes.wait_workers(port, 1)
    else:
        processes.wait_answer(port, "tiny")
    return Server(pids, f"http://127.0.0.1:{port}")


def load(server: Server, seed: int) -> dict[str, float]:
    """One round."""
    before = server.cpu_s()
    sizes = ("--concurrency", CONCURRENCY, "--requests", REQUESTS, "--input", PROMPT, "--output", ANSWER)
    more = ("--seed", seed, "--endpoint", "tokens", "--vocabulary", "3-900", "--set", "temperature=0")
    command = ["kvolt", "bench", "--url", server.url, "--json", "--quiet", *map(str, (*sizes, *more))]
    answer: dict[str, Any] = json.loads(output_of(command))
    after = server.cpu_s()
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    around = sum(value for name, value in used.items() if name != "engine")
    ttft = answer["latencies"]["ttft"]
    return {
        "cpu_us_per_token": around / (REQUESTS * ANSWER) * 1e6,
        "engine_us_per_token": used.get("engine", 0.0) / (REQUESTS * ANSWER) * 1e6,
        "ttft_p50_ms": ttft["p50"] * 1e3,
        "ttft_p99_ms": ttft["p99"] * 1e3,
        "tokens_per_s": answer["throughput"]["output_tokens_per_s"],
    }


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    if importlib.util.find_spec("vllm") is None:
        raise Missing("vLLM in this environment (tests/engines_vllm/setup.sh)")
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as folder, ExitStack() as stack:
        model = tiny_checkpoint(Path(folder) / "model", head_dim=32)
        servers = {kind: start(stack, kind, model) for kind in ("kvolt", "vllm")}
        rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in servers}
        for number in range(2 if options.smoke else ROUNDS + 1):
            for kind, server in servers.items():
                row = load(server, number)
                if number:  # the first warms up
                    rounds[kind].append(row)
                    say(f"{kind} {json.dumps(row)}")
    medians = {
        kind: {key: statistics.median(each[key] for each in rows) for key in rows[0]}
        for kind, rows in rounds.items()
    }
    ratios = {key: medians["kvolt"][key] / medians["vllm"][key] for key in medians["kvolt"]}
    results = {"medians": medians, "kvolt / vllm": ratios, "rounds": rounds}
    report(options, f"kvolt / vllm {json.dumps(ratios)}", results)


if __name__ == "__main__":
    run(main)
