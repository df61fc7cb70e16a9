"""Prefill and decode workers of the native engine on one GPU, as real processes: same text, and what KV costs to move.

Needs a CUDA device with 40 GiB, torch and Triton. From the repository's root, some minutes:

    PYTHONPATH=src python3 -u -m benchmarks.disaggregation.gpu_pair --out gpu_pair.json

Two models with random weights are made in a temporary folder. `exact`: a tiny one in float32, greedy, 200 prompts of
all lengths around blocks and chunks, some with a common beginning; every answer through `kvolt serve` with a prefill
and a decode worker, in both flows, must be that of one worker, word for word. `moves`: one with the KV of a real model
(64 KiB a token, bfloat16, blocks of 1 MiB), prompts of 1,024 to 8,192 tokens: how long the KV was on its way, beside
what it took to compute. One GPU runs both workers, so nothing here says how fast the two are together.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.twin.accuracy_runs import System, served

from kvolt.testing.tiny_models import tiny_checkpoint

BLOCK_SIZE = 16
NUM_PROMPTS = 200
LENGTHS = (1024, 4096, 8192)
ROUNDS = 8
_AT_ONCE = 8
_ASK_S = 120.0
FLOWS: dict[str, tuple[str, ...]] = {"prefill-first": (), "decode-first": ("--decode-first", "*")}
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


def ask(url: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["worker_id", "timing"]},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    beginnings = [[draw.randrange(3, 200) for _ in range(3 * BLOCK_SIZE)] for _ in range(4)]
    made = []
    for number in range(NUM_PROMPTS):
        begin = draw.choice(beginnings)[: draw.choice((0, 0, BLOCK_SIZE, 3 * BLOCK_SIZE))]
        made.append([*begin, *(draw.randrange(3, 200) for _ in range(1 + number % 170))])
    return made


def system(checkpoint: Path, prefill: int, workers: int, **arguments: str | int) -> System:
    given: dict[str, str | int] = {"served_name": "m", "device": "cuda:0", "block_size": BLOCK_SIZE}
    return System(model=str(checkpoint), workers=workers, prefill=prefill, arguments=given | arguments)


def exact(folder: Path) -> dict[str, Any]:
    checkpoint = tiny_checkpoint(folder / "tiny")
    arguments: dict[str, str | int] = {
        "dtype": "float32",
        "kv_blocks": 2048,
        "max_batch_tokens": 64,
        "max_num_seqs": 16,
    }

    def texts(url: str) -> tuple[list[str], list[str]]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = list(pool.map(lambda prompt: ask(url, prompt, 24), prompts()))
        paths = [str(each["nvext"]["timing"].get("kv_transfer_path")) for each in answers]
        return [each["choices"][0]["text"] for each in answers], paths

    with served(system(checkpoint, 0, 1, **arguments), folder) as url:
        expected, _ = texts(url)
    found: dict[str, Any] = {}
    for name, flags in FLOWS.items():
        with served(
            system(checkpoint, 1, 2, **arguments), folder, (*flags, "--prefill-choice", "threshold")
        ) as url:
            got, paths = texts(url)
        same = sum(left == right for left, right in zip(expected, got, strict=True))
        by_path = {path: paths.count(path) for path in sorted(set(paths))}
        found[name] = {"same": same, "of": len(expected), "paths": by_path}
        print(f"  {name}: {same} of {len(expected)} the same, {by_path}", flush=True)
    return found


def moves(folder: Path) -> dict[str, Any]:
    checkpoint = tiny_checkpoint(folder / "large", **LARGE)
    arguments: dict[str, str | int] = {"dtype": "bfloat16", "kv_blocks": 4096, "max_num_seqs": 16}
    found: dict[str, Any] = {}
    for name, flags in FLOWS.items():
        with served(
            system(checkpoint, 1, 2, **arguments), folder, (*flags, "--prefill-choice", "threshold")
        ) as url:
            draw = random.Random(3)
            for length in LENGTHS:
                told = []
                for number in range(ROUNDS + 1):
                    answer = ask(url, [draw.randrange(3, 200) for _ in range(length)], 16)
                    if number:  # the first opens the memory and makes connections
                        told.append(answer["nvext"]["timing"])
                found[f"{name} {length}"] = _summary(told)
                print(f"  {name}, {length} tokens: {found[f'{name} {length}']}", flush=True)
    return found


def _summary(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def median(field: str) -> float:
        return statistics.median(float(each.get(field) or 0.0) for each in told)

    moved, took = median("kv_transfer_bytes"), median("kv_transfer_ms")
    return {
        "MiB": round(moved / 2**20, 1),
        "transfer ms": round(took, 2),
        "GB/s": round(moved / max(took, 1e-6) / 1e6, 1),
        "prefill ms": round(median("prefill_time_ms"), 1),
        "TTFT ms": round(median("ttft_ms"), 1),
        "paths": sorted({str(each.get("kv_transfer_path")) for each in told}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disaggregation.gpu_pair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="results as JSON")
    parser.add_argument("--only", choices=("exact", "moves"))
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-pair-") as name:
        for what, run in (("exact", exact), ("moves", moves)):
            if options.only in (None, what):
                print(what, flush=True)
                results[what] = run(Path(name))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    wrong = [
        each
        for each in results.get("exact", {}).values()
        if each["same"] != each["of"] or each["paths"].get("cuda-ipc", 0) < each["of"] // 2
    ]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
