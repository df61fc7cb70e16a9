"""Prefill and decode workers of the native engine on one GPU as processes: equality of texts, and cost of KV transfer.

    PYTHONPATH=src python3 -u -m benchmarks.disaggregation.gpu_pair    a CUDA device with 40 GiB, torch, Triton; minutes

Two models with random weights are made in a temporary folder. `exact`: a tiny one in float32, greedy, 200 prompts of
all lengths around blocks and chunks, some with a common prefix; every answer of `kvolt serve` with a prefill and a
decode worker, in both flows, must equal that of one worker. `moves`: one with the KV of a real model (64 KiB a token,
bfloat16, blocks of 1 MiB), prompts of 1,024 to 8,192 tokens: transfer time of the KV beside prefill time. One GPU runs
both workers, so the results say nothing about their joint speed. A smoke run does `exact` in one flow on the CPU."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import Missing, parser_for, report, run, say
from benchmarks.processes import System, complete, served

from kvolt.testing.tiny_models import tiny_checkpoint

BLOCK_SIZE = 16
NUM_PROMPTS = 200
LENGTHS = (1024, 4096, 8192)
ROUNDS = 8
FLOWS: dict[str, tuple[str, ...]] = {
    "prefill-first": (),
    "decode-first": ("--set", "frontend.decode_first=*"),
}
LARGE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(7)
    prefixes = [[draw.randrange(3, 200) for _ in range(3 * BLOCK_SIZE)] for _ in range(4)]
    made = []
    for number in range(count):
        prefix = draw.choice(prefixes)[: draw.choice((0, 0, BLOCK_SIZE, 3 * BLOCK_SIZE))]
        made.append([*prefix, *(draw.randrange(3, 200) for _ in range(1 + number % 170))])
    return made


def system(checkpoint: Path, prefill: int, workers: int, device: str, **arguments: str | int) -> System:
    common: dict[str, str | int] = {"served_name": "m", "device": device, "block_size": BLOCK_SIZE}
    return System(model=str(checkpoint), workers=workers, prefill=prefill, arguments=common | arguments)


def exact(folder: Path, device: str, smoke: bool) -> dict[str, Any]:
    checkpoint, requests = tiny_checkpoint(folder / "tiny"), prompts(4 if smoke else NUM_PROMPTS)
    arguments: dict[str, str | int] = {
        "dtype": "float32",
        "kv_blocks": 2048,
        "max_batch_tokens": 64,
        "max_num_seqs": 16,
    }
    if smoke:
        arguments["measure_steps"] = "false"

    def texts(url: str) -> tuple[list[str], list[str]]:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: complete(url, prompt, 24), requests))
        return [each.text for each in answers], [str(each.timing.get("kv_transfer_path")) for each in answers]

    with served(system(checkpoint, 0, 1, device, **arguments)) as url:
        expected, _ = texts(url)
    results: dict[str, Any] = {}
    for name, flags in list(FLOWS.items())[: 1 if smoke else None]:
        with served(
            system(checkpoint, 1, 2, device, **arguments), (*flags, "--prefill-choice", "threshold")
        ) as url:
            got, paths = texts(url)
        same = sum(left == right for left, right in zip(expected, got, strict=True))
        by_path = {path: paths.count(path) for path in sorted(set(paths))}
        results[name] = {"same": same, "of": len(expected), "paths": by_path}
        say(f"  {name}: {same} of {len(expected)} equal, {by_path}")
    return results


def moves(folder: Path, device: str, smoke: bool) -> dict[str, Any]:
    checkpoint = tiny_checkpoint(folder / "large", **LARGE)
    arguments: dict[str, str | int] = {"dtype": "bfloat16", "kv_blocks": 4096, "max_num_seqs": 16}
    results: dict[str, Any] = {}
    for name, flags in FLOWS.items():
        with served(
            system(checkpoint, 1, 2, device, **arguments), (*flags, "--prefill-choice", "threshold")
        ) as url:
            draw = random.Random(3)
            for length in LENGTHS:
                timings = [
                    complete(url, [draw.randrange(3, 200) for _ in range(length)], 16).timing
                    for _ in range(ROUNDS + 1)
                ]
                results[f"{name} {length}"] = _summary(timings[1:])  # the first maps the memory and connects
                say(f"  {name}, {length} tokens: {results[f'{name} {length}']}")
    return results


def _summary(timings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def median(field: str) -> float:
        return statistics.median(float(each.get(field) or 0.0) for each in timings)

    moved, took = median("kv_transfer_bytes"), median("kv_transfer_ms")
    return {
        "MiB": round(moved / 2**20, 1),
        "transfer ms": round(took, 2),
        "GB/s": round(moved / max(took, 1e-6) / 1e6, 1),
        "prefill ms": round(median("prefill_time_ms"), 1),
        "TTFT ms": round(median("ttft_ms"), 1),
        "paths": sorted({str(each.get("kv_transfer_path")) for each in timings}),
    }


def main() -> int:
    parser = parser_for(__file__, __doc__)
    parser.add_argument("--only", choices=("exact", "moves"))
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not options.smoke:
        raise Missing("a CUDA device")
    only = "exact" if options.smoke else options.only
    with tempfile.TemporaryDirectory(prefix="bench-gpu-pair-") as folder:
        results = {
            name: work(Path(folder), "cuda:0" if has_gpu else "cpu", options.smoke)
            for name, work in (("exact", exact), ("moves", moves))
            if only in (None, name)
        }
    lines = [f"{part}, {name}: {row}" for part, rows in results.items() for name, row in rows.items()]
    report(options, "\n".join(lines), results)
    is_right = all(
        each["same"] == each["of"] and (not has_gpu or each["paths"].get("cuda-ipc", 0) >= each["of"] // 2)
        for each in results.get("exact", {}).values()
    )
    return 0 if is_right else 1


if __name__ == "__main__":
    run(main)
