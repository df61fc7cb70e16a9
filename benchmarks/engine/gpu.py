"""The native engine on a GPU: kernels, correctness, decode and prefill beside the machine's limits and transformers.

Random weights in the shape of Llama-3.1-8B in bfloat16; nothing is downloaded. Needs a CUDA device with about
130 GiB, torch, Triton, transformers, msgspec and xxhash. From the repository's root, about eight minutes:

    PYTHONPATH=src python3 -u -m benchmarks.engine.gpu --out results

On a machine that has no msgspec and no network, with wheels for its Python in a folder beside:

    python3 -m pip install -q --no-index --no-deps --find-links .device-wheels msgspec xxhash
    PYTHONPATH=src python3 -u -m benchmarks.engine.gpu

`--phases limits,decode` runs some; `--tiny` tries the script itself on any machine, in two minutes (with
TRITON_INTERPRET=1 where there is no GPU). Each phase stands alone: one that fails is printed, and the next goes on;
without `limits` the others leave out their ratios. Figures are saved after each in `gpu.json`, steps of a mixed load in
`steps.jsonl`, in --out, or the folder that the environment names OUT.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from benchmarks.engine.gpu_bench import Bench

_PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "xxhash")


def _later(module: str, name: str) -> Callable[[Bench], dict[str, Any]]:
    """Imported when it runs: a broken module breaks its own phases only."""

    def run(bench: Bench) -> dict[str, Any]:
        work: Callable[[Bench], dict[str, Any]] = getattr(import_module(f"benchmarks.engine.{module}"), name)
        return work(bench)

    return run


def machine(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        found["device"] = properties.name
        found["processors"] = properties.multi_processor_count
        found["memory_gib"] = properties.total_memory / 2**30
    bench.say(f"  {found}")
    return found


_GROUPS = {
    "kernels": {
        "machine": machine,
        "limits": _later("gpu_limits", "limits"),
        "kernel_checks": _later("gpu_kernels", "kernel_checks"),
    },
    "models": {
        "model_checks": _later("gpu_checks", "model_checks"),
        "flips": _later("gpu_checks", "flips"),
    },
    "engine": {
        "engine": _later("gpu_engine", "run_engine"),
        "decode": _later("gpu_engine", "decode"),
        "prefill": _later("gpu_engine", "prefill"),
        "mixed_load": _later("gpu_engine", "mixed_load"),
        "step_memory": _later("gpu_memory", "step_memory"),
        "slab_elsewhere": _later("gpu_memory", "slab_elsewhere"),
        "profiles": _later("gpu_profile", "profiles"),
        "transformers": _later("gpu_peer", "beside_transformers"),
    },
    "shared": {"shared_prefix": _later("gpu_shared_prefix", "shared_prefix")},
    "sweeps": {
        "decode_sweep": _later("gpu_kernels", "decode_sweep"),
        "prefill_sweep": _later("gpu_kernels", "prefill_sweep"),
    },
}
"""Each runs in a process of its own: a device that one of them has broken, or a step that hangs, is gone with it."""
_PHASES = {name: work for group in _GROUPS.values() for name, work in group.items()}
_SHARES = {"kernels": 110.0, "engine": 330.0, "models": 110.0, "shared": 200.0, "sweeps": 150.0}
"""Most seconds of each; what is left of the whole decides too."""


def main() -> None:
    options = _options()
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("no CUDA device; --tiny tries the script without one")
    if options.here:
        _run_here(options)
        return
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").unlink(missing_ok=True)
    wanted = options.phases.split(",")
    failed = False
    for name, group in _GROUPS.items():
        mine = [phase for phase in group if phase in wanted]
        left = options.deadline_s - (time.monotonic() - started)
        if mine and left > 10:
            failed |= _run_child(options, mine, min(_SHARES[name], left))
        elif mine:
            print(f"{name}: skipped, the time is up", flush=True)
            failed = True
    print(f"done in {time.monotonic() - started:.0f} s; figures in {options.out / 'gpu.json'}", flush=True)
    sys.exit(1 if failed else 0)


def _run_child(options: argparse.Namespace, phases: list[str], limit_s: float) -> bool:
    """Whether it went wrong."""
    command = [sys.executable, "-u", "-m", "benchmarks.engine.gpu", "--here", "--phases", ",".join(phases)]
    command += ["--out", str(options.out), "--rounds", str(options.rounds), "--deadline-s", str(limit_s)]
    try:
        return (
            subprocess.run(
                [*command, *["--tiny"] * options.tiny], timeout=limit_s + 15, check=False
            ).returncode
            != 0
        )
    except subprocess.TimeoutExpired:
        print(f"{phases}: ended after {limit_s + 15:.0f} s", flush=True)
        return True


def _run_here(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, options.out, options.deadline_s, options.tiny, options.rounds)
    bench.load()
    wanted = options.phases.split(",")
    for name in wanted:
        bench.phase(name, _PHASES[name])
    failed = [name for name in wanted if "failed" in bench.results[name]]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The native engine on a GPU.")
    parser.add_argument(
        "--phases", default=",".join(_PHASES), help="comma-separated, of: " + ", ".join(_PHASES)
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deadline-s", type=float, default=520.0, help="no phase starts after this long")
    parser.add_argument("--tiny", action="store_true", help="try the script itself, on any machine")
    parser.add_argument(
        "--here", action="store_true", help="in this process, adding to the figures that are there"
    )
    options = parser.parse_args()
    unknown = [name for name in options.phases.split(",") if name not in _PHASES]
    if unknown:
        parser.error(f"unknown phases: {', '.join(unknown)}")
    return options


if __name__ == "__main__":
    main()
