"""kvolt with a vLLM worker beside a bare vLLM server: what each takes outside the engine, and what users see.

    VENV/bin/python -m benchmarks.engines.vllm_overhead           VENV as of tests/engines_vllm/setup.sh; ten minutes

Both serve the same tiny random model, small so that what is around the engine can be seen, and have the same load in
turn, several rounds each. CPU is that of all processes but vLLM's engine core and its workers: here a frontend and a
worker, there an API server. Ratios are of the medians of one run; the spread of single rounds is told.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from kvolt.testing.tiny_models import tiny_checkpoint

RESULTS = Path(__file__).parent / "results"
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
_READY_S = 300.0
_ENGINE = ("VLLM::EngineCore", "VLLM::Worker", "resource_tracker")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def environ(folder: Path) -> dict[str, str]:
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "KVOLT_LOG_LEVEL": "warning",
        "KVOLT_DISCOVERY_PATH": str(folder / "discovery"),
        "KVOLT_SUPERVISOR_LOG_DIR": str(folder / "logs"),
    }


def kvolt_commands(model: Path, port: int) -> list[list[str]]:
    """A frontend and a worker, each by itself: `kvolt serve` would give the engine other threads than vLLM's server."""
    given = ["--arg", f"engine_args={json.dumps(ENGINE_ARGS)}", "--arg", "served_name=tiny"]
    kvolt = [sys.executable, "-m", "kvolt"]
    return [
        [*kvolt, "frontend", "--port", str(port), "--router", "latency"],
        [*kvolt, "worker", str(model), "--engine", "vllm", *given],
    ]


def vllm_commands(model: Path, port: int) -> list[list[str]]:
    given: list[str] = []
    for name, value in ENGINE_ARGS.items():
        flag = f"--{name.replace('_', '-')}"
        given += [flag] if value is True else [flag, str(value)]
    module = "vllm.entrypoints.openai.api_server"
    served = [
        "--model",
        str(model),
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    return [[sys.executable, "-m", module, *served, *given]]


class Server:
    def __init__(self, processes: list[psutil.Popen], port: int) -> None:
        self.processes, self.url = processes, f"http://127.0.0.1:{port}"

    def wait(self, log: Path) -> None:
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=2) as answer:
                    if json.load(answer)["data"]:
                        return
            except (OSError, ValueError):
                pass
            if time.monotonic() > deadline or any(each.poll() is not None for each in self.processes):
                raise SystemExit(f"not ready:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)

    def family(self) -> list[psutil.Process]:
        return [member for each in self.processes for member in (each, *each.children(recursive=True))]

    def cpu_s(self) -> dict[str, float]:
        """Of what is around the engine, by process, and of the engine."""
        found: dict[str, float] = {}
        for each in self.family():
            command = " ".join(each.cmdline())
            times = each.cpu_times()
            name = "engine" if any(word in command for word in _ENGINE) else f"{each.pid}"
            found[name] = found.get(name, 0.0) + times.user + times.system
        return found


@contextmanager
def running(name: str, commands: list[list[str]], port: int, folder: Path) -> Iterator[Server]:
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        processes = [
            psutil.Popen(command, stdout=out, stderr=out, env=environ(folder), cwd=folder)
            for command in commands
        ]
    server = Server(processes, port)
    try:
        server.wait(log)
        yield server
    finally:
        family = server.family()
        for each in reversed(processes):
            each.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(family, 40)
        for each in left:
            each.kill()


def load(server: Server, folder: Path, seed: int) -> dict[str, float]:
    """One round; what it took."""
    out = folder / "bench"
    before = server.cpu_s()
    command = [
        sys.executable,
        "-m",
        "kvolt",
        "bench",
        "--url",
        server.url,
        "--out",
        str(out),
        "--force",
        "--quiet",
    ]
    command += ["--concurrency", str(CONCURRENCY), "--requests", str(REQUESTS), "--seed", str(seed)]
    command += [
        "--input",
        str(PROMPT),
        "--output",
        str(ANSWER),
        "--endpoint",
        "tokens",
        "--vocabulary",
        "3-900",
    ]
    command += ["--set", "temperature=0"]
    subprocess.run(command, check=True, env=environ(folder), stdout=subprocess.DEVNULL)
    after = server.cpu_s()
    report = json.loads((out / "report.json").read_text())
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    num_tokens = REQUESTS * ANSWER
    around = sum(value for name, value in used.items() if name != "engine")
    return {
        "cpu_us_per_token": around / num_tokens * 1e6,
        "engine_us_per_token": used.get("engine", 0.0) / num_tokens * 1e6,
        **figures(report),
    }


def figures(report: dict[str, Any]) -> dict[str, float]:
    first = report["latencies"]["ttft"]
    return {
        "ttft_p50_ms": first["p50"] * 1e3,
        "ttft_p99_ms": first["p99"] * 1e3,
        "tokens_per_s": report["throughput"]["output_tokens_per_s"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm_overhead.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-") as name, ExitStack() as stack:
        folder = Path(name)
        model = tiny_checkpoint(folder / "model", head_dim=32)
        servers = {}
        for kind, commands in (("kvolt", kvolt_commands), ("vllm", vllm_commands)):
            port = free_port()
            servers[kind] = stack.enter_context(running(kind, commands(model, port), port, folder))
        rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in servers}
        for number in range(ROUNDS + 1):
            for kind, server in servers.items():
                found = load(server, folder, number)
                if number:  # the first warms up
                    rounds[kind].append(found)
                    print(kind, json.dumps(found), flush=True)
    medians = {
        kind: {key: statistics.median(each[key] for each in found) for key in found[0]}
        for kind, found in rounds.items()
    }
    ratios = {key: medians["kvolt"][key] / medians["vllm"][key] for key in medians["kvolt"]}
    print("kvolt / vllm", json.dumps(ratios))
    options.out.parent.mkdir(exist_ok=True)
    result = {"medians": medians, "kvolt / vllm": ratios, "rounds": rounds}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
