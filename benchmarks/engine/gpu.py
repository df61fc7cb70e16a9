"""The native engine on a GPU: kernels, correctness, decode and prefill beside the machine's limits and transformers.

Random weights in the shape of Llama-3.1-8B in bfloat16; nothing is downloaded. Needs a CUDA device with about
130 GiB, torch, Triton, transformers, msgspec and xxhash. From the repository's root, about eight minutes:

    PYTHONPATH=src python3 -u -m benchmarks.engine.gpu

On a machine that has no msgspec and no network, with wheels for its Python in a folder beside:

    python3 -m pip install -q --no-index --no-deps --find-links .device-wheels msgspec xxhash
    PYTHONPATH=src python3 -u -m benchmarks.engine.gpu

`--phases limits,decode` runs some. Each phase stands alone: one that fails is printed, and the next continues; without
`limits` the others leave out their ratios. Results are saved after each in `gpu.json`, steps of a mixed load in
`steps.jsonl`, in the folder --out (default: the folder in OUT, else gpu-results). A smoke run does the phases that need
no GPU, on a tiny model, with Triton's kernels interpreted.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from benchmarks.engine.gpu_bench import Bench
from benchmarks.harness import BrokenRun, Missing, names, parser_for, run

if "--smoke" in sys.argv and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a phase imports the kernels

_PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "xxhash")


def _later(module: str, name: str) -> Callable[[Bench], dict[str, Any]]:
    """Imported when it runs: a broken module breaks its own phases only."""

    def run(bench: Bench) -> dict[str, Any]:
        work: Callable[[Bench], dict[str, Any]] = getattr(import_module(f"benchmarks.engine.{module}"), name)
        return work(bench)

    return run


def machine(bench: Bench) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        facts["device"] = properties.name
        facts["processors"] = properties.multi_processor_count
        facts["memory_gib"] = properties.total_memory / 2**30
    bench.say(f"  {facts}")
    return facts


_GROUPS = {
    "kernels": {
        "machine": machine,
        "limits": _later("gpu_limits", "limits"),
        "kernel_checks": _later("gpu_kernels", "kernel_checks"),
    },
    "models": {"model_checks": _later("gpu_checks", "model_checks")},
    "engine": {
        "engine": _later("gpu_engine", "run_engine"),
        "decode": _later("gpu_engine", "decode"),
        "prefill": _later("gpu_engine", "prefill"),
        "mixed_load": _later("gpu_engine", "mixed_load"),
        "transformers": _later("gpu_peer", "beside_transformers"),
    },
    "shared": {"shared_prefix": _later("gpu_shared_prefix", "shared_prefix")},
}
"""Each runs in its own process, so that a broken device context or a hanging step ends with it."""
_PHASES = {name: work for group in _GROUPS.values() for name, work in group.items()}
_SHARES = {"kernels": 110.0, "engine": 330.0, "models": 110.0, "shared": 200.0}
"""Most seconds of each; what is left of the whole decides too."""


_SMOKE_PHASES = (
    "machine",
    "limits",
    "kernel_checks",
    "engine",
    "decode",
    "prefill",
    "mixed_load",
    "shared_prefix",
)


def main() -> int:
    options = _options()
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            _run_here(options, Path(folder))
        return 0
    if not torch.cuda.is_available():
        raise Missing("a CUDA device")
    out = options.out or Path(os.environ.get("OUT", "gpu-results"))
    if options.here:
        _run_here(options, out)
        return 0
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").unlink(missing_ok=True)
    failed = False
    for name, group in _GROUPS.items():
        phases = [phase for phase in group if phase in options.phases]
        left = options.deadline_s - (time.monotonic() - started)
        if phases and left > 10:
            failed |= not _run_child(options, out, phases, min(_SHARES[name], left))
        elif phases:
            print(f"{name}: skipped, the time is up", flush=True)
            failed = True
    print(f"done in {time.monotonic() - started:.0f} s; results in {out / 'gpu.json'}", flush=True)
    return 1 if failed else 0


def _run_child(options: argparse.Namespace, out: Path, phases: list[str], limit_s: float) -> bool:
    """Whether the phases succeeded in a process of their own."""
    command = [sys.executable, "-u", "-m", "benchmarks.engine.gpu", "--here", "--phases", ",".join(phases)]
    command += ["--out", str(out), "--rounds", str(options.rounds), "--deadline-s", str(limit_s)]
    try:
        return subprocess.run(command, timeout=limit_s + 15, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{phases}: stopped after {limit_s + 15:.0f} s", flush=True)
        return False


def _run_here(options: argparse.Namespace, out: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, out, options.deadline_s, options.smoke, options.rounds)
    bench.load()
    for name in options.phases:
        bench.phase(name, _PHASES[name])
    results = {name: bench.results[name] for name in options.phases}
    failed = [name for name, result in results.items() if "failed" in result]
    # Parts of a phase, and kernels that are wrong.
    parts = ((name, part, each) for name, result in results.items() for part, each in result.items())
    failed += [f"{name}: {part}" for name, part, each in parts if isinstance(each, dict) and _is_wrong(each)]
    if failed:
        raise BrokenRun(f"failed: {', '.join(failed)}")


def _is_wrong(part: dict[str, Any]) -> bool:
    return "failed" in part or part.get("right") is False


def _options() -> argparse.Namespace:
    parser = parser_for(__file__, __doc__, results=None)
    add = parser.add_argument
    add("--phases", type=names, default=tuple(_PHASES), help=f"of {', '.join(_PHASES)} (default: all)")
    add("--rounds", type=int, default=3)
    add(
        "--deadline-s",
        type=float,
        default=520.0,
        help="no phase starts after this time (default %(default)s)",
    )
    add("--here", action="store_true", help="in this process, adding to the existing results")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.phases = (
            1,
            _SMOKE_PHASES if options.phases == tuple(_PHASES) else options.phases,
        )
    unknown = [name for name in options.phases if name not in _PHASES]
    if unknown:
        parser.error(f"unknown phases: {', '.join(unknown)}")
    return options


if __name__ == "__main__":
    run(main)
