"""Conversations that come back after their KV has left the device: the first token with tiers below it and without.

    python -m benchmarks.kv.returning                          on the CPU, SmolLM2-135M; some ten minutes
    PYTHONPATH=src python3 -u -m benchmarks.kv.returning --device cuda:0 --out gpu.json
                                                               a CUDA device with 80 GiB, a model of Llama 8B's shape
                                                               with random weights; some minutes

`returning`: more conversations than the device holds, each with a long beginning of its own, asked one after the other
and again and again in that order, so that a device alone has always forgotten the next. With `host` the memory of the
host holds all of them, with `disk` a small one passes on what a disk holds, with `straight` (`--disk`, on a device)
blocks come from it by NIXL and GPUDirect Storage. Greedy; every answer must be that of the run without tiers. TTFT is
what the client sees, of all rounds but the first.
`fresh`: prompts that nobody has asked before, so that tiers have nothing to give: what they take from tokens per
second, of servers that stand side by side and have their rounds in turn. `copies` (a device only): the tier's own
copies of blocks, checksums included, beside one plain copy of as many bytes. `disk`: blocks from a disk by way of the
host's memory, and straight by NIXL (GPUDirect Storage on a device), beside plain reads of a file on the same disk into
the host's memory, each past the kernel's cache. Ratios are of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.twin.accuracy_runs import System, served

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Tier
from kvolt.kv.disk.direct_reads import DirectReads
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.testing.tiny_models import tiny_checkpoint
from kvolt.transfer.memory.slabs import Slab

RESULTS = Path(__file__).parent / "results"
_ASK_S = 300.0
FRESH_ROUNDS = 9
"""The first is not counted; of the others the median."""
COPIED_BYTES, NUM_COPIED = 2 << 20, 1024
NUM_READ = 512
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


class Plan(msgspec.Struct, frozen=True):
    sessions: int
    prefix_tokens: int
    turn_tokens: int
    rounds: int
    device_blocks: int
    small_host: str
    host: str
    disk: str
    fresh: int
    """Prompts of the second part, at once."""
    fresh_tokens: int
    fresh_answer: int
    is_straight: bool = False


CPU = Plan(8, 1000, 16, 3, 200, "40blocks", "1000blocks", "1000blocks", 4, 128, 128)
GPU = Plan(10, 20_000, 64, 3, 4500, "", "48GiB", "", 16, 512, 512)


class Asked(msgspec.Struct, frozen=True):
    ttft_s: float
    took_s: float
    text: str
    cached: int
    onboard_ms: float
    """Of the first token's time, what it took to bring KV back."""


def ask(url: str, prompt: Sequence[int], max_tokens: int) -> Asked:
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "nvext": {"extra_fields": ["timing"]},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first, texts, cached, onboard_ms = time.perf_counter(), None, [], 0, 0.0
    with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                first = first or time.perf_counter()
                texts.append(event["choices"][0]["text"])
            if event.get("usage"):
                cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            timing = event.get("nvext", {}).get("timing", {})
            onboard_ms = timing.get("kv_onboard_ms", onboard_ms)
    assert first is not None
    return Asked(first - began, time.perf_counter() - began, "".join(texts), cached, onboard_ms)


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, 200) for _ in range(count)]


def returning(url: str, plan: Plan) -> tuple[list[Asked], list[str]]:
    """All but the first round, and every text."""
    draw = random.Random(11)
    sessions = [tokens(draw, plan.prefix_tokens) for _ in range(plan.sessions)]
    asked: list[Asked] = []
    texts: list[str] = []
    for number in range(plan.rounds):
        for session in sessions:
            answer = ask(url, [*session, *tokens(draw, plan.turn_tokens)], 8)
            texts.append(answer.text)
            if number:
                asked.append(answer)
        time.sleep(0.5)
    return asked, texts


def fresh_round(url: str, plan: Plan, draw: random.Random) -> float:
    """Tokens per second of answers to prompts that are new."""
    prompts = [tokens(draw, plan.fresh_tokens) for _ in range(plan.fresh)]
    began = time.perf_counter()
    with ThreadPoolExecutor(plan.fresh) as pool:
        list(pool.map(lambda prompt: ask(url, prompt, plan.fresh_answer), prompts))
    return plan.fresh * plan.fresh_answer / (time.perf_counter() - began)


def fresh(plan: Plan, system: System, folder: Path) -> dict[str, Any]:
    """All systems are there at once, and each has its round in turn: what the machine does meanwhile is everyone's."""
    draw = random.Random(13)
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(served(system, folder, flags)) for name, flags in systems(plan, folder)
        }
        for _ in range(FRESH_ROUNDS):
            for name, url in urls.items():
                rates.setdefault(name, []).append(fresh_round(url, plan, draw))
    for rounds in rates.values():
        rounds.pop(0)  # what is compiled on the way is nobody's
    found: dict[str, Any] = {name: {"tokens/s": statistics.median(rounds)} for name, rounds in rates.items()}
    for name in rates.keys() - {"without"}:
        pairs = [with_it / without for with_it, without in zip(rates[name], rates["without"], strict=True)]
        found[name] |= {"with / without": statistics.median(pairs), "of single rounds": sorted(pairs)}
    print("fresh", json.dumps(found), flush=True)
    return found


def copies(device: str) -> dict[str, float]:
    """GB/s of a tier's own copies of blocks of 2 MiB, checksums included, beside one plain copy of as many bytes."""
    import torch

    from kvolt.transfer.cuda.memory import CudaMemory

    memory = torch.randint(0, 255, (NUM_COPIED * COPIED_BYTES,), dtype=torch.uint8, device=device)
    slab = Slab.on_device(CudaMemory(memory), COPIED_BYTES)
    plain = torch.empty(memory.nbytes, dtype=torch.uint8, pin_memory=True)

    def best(act: Callable[[], object]) -> float:
        took = []
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            act()
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
        return memory.nbytes / min(took) / 1e9

    async def tier() -> tuple[float, float]:
        cache = TieredCache.over([slab], 5 * NUM_COPIED)
        down, up = [], []
        await cache.start()
        for number in range(5):
            blocks = [_block(number, index) for index in range(NUM_COPIED)]
            began = time.perf_counter()
            assert await cache.offload(blocks, range(NUM_COPIED)) == NUM_COPIED
            down.append(time.perf_counter() - began)
        before = memory.clone()
        memory.zero_()
        torch.cuda.synchronize()
        for number in range(5):
            blocks = [_block(number, index) for index in range(NUM_COPIED)]
            began = time.perf_counter()
            assert (await cache.fetch(blocks, range(NUM_COPIED))).num_blocks == NUM_COPIED
            up.append(time.perf_counter() - began)
        await cache.close()
        assert torch.equal(memory, before)
        return memory.nbytes / min(down) / 1e9, memory.nbytes / min(up) / 1e9

    found = {"plain down": best(lambda: plain.copy_(memory)), "plain up": best(lambda: memory.copy_(plain))}
    found["offload"], found["onboard"] = asyncio.run(tier())
    found["offload / plain"] = found["offload"] / found["plain down"]
    found["onboard / plain"] = found["onboard"] / found["plain up"]
    print("copies", json.dumps(found), flush=True)
    return found


def disk_reads(device: str, folder: Path) -> dict[str, float]:
    """GB/s of blocks from a disk into an engine's memory, checksums included, by both ways in turn."""
    import torch

    from kvolt.transfer.cuda.memory import CudaMemory

    memory = torch.randint(0, 255, (NUM_READ * COPIED_BYTES,), dtype=torch.uint8, device=device)
    before = memory.clone()
    slab = Slab.on_device(CudaMemory(memory), COPIED_BYTES)
    blocks, numbers = [_block(0, index) for index in range(NUM_READ)], range(NUM_READ)

    async def read(is_direct: bool, where: Path) -> list[float]:
        disk = DiskTier(DiskFiles(where, BlockShape.of([slab]), 2 * NUM_READ))
        assert disk.files.is_direct, "the disk is read by way of the kernel's cache"
        direct = DirectReads(disk, [slab]) if is_direct else None
        took: list[float] = []
        for number in range(4):
            # Of a host that has none of them, each time.
            cache = TieredCache.over([slab], NUM_READ, [(disk, 1)], direct=direct)
            await cache.start()
            if not len(disk):
                await _written(cache, disk, blocks)
            else:
                memory.zero_()
                torch.cuda.synchronize()
                began = time.perf_counter()
                assert (await cache.fetch(blocks, numbers)).by_tier == ((Tier.DISK, NUM_READ),)
                took.append(time.perf_counter() - began)
                assert torch.equal(memory, before)
            await cache.close()
            if number < 3:
                disk = DiskTier(DiskFiles(where, BlockShape.of([slab]), 2 * NUM_READ))
                direct = DirectReads(disk, [slab]) if is_direct else None
        return took

    num_bytes = memory.nbytes / 1e9
    found: dict[str, float] = {"plain file": num_bytes / min(_plain_reads(folder / "plain", memory.nbytes))}
    for name, is_direct in (("by the host", False), ("straight", True)):
        found[name] = num_bytes / min(asyncio.run(read(is_direct, folder / name.replace(" ", "-"))))
        found[f"{name} / plain file"] = found[name] / found["plain file"]
    print("disk", json.dumps(found), flush=True)
    return found


async def _written(cache: TieredCache, disk: DiskTier, blocks: Sequence[TierBlock]) -> None:
    are_all = asyncio.Event()
    cache.host.on_change(lambda: are_all.set() if len(disk) == len(blocks) else None)
    assert await cache.offload(blocks, range(len(blocks))) == len(blocks)
    await are_all.wait()


def _plain_reads(path: Path, num_bytes: int) -> list[float]:
    part = mmap.mmap(-1, 64 << 20)
    path.parent.mkdir(parents=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    took: list[float] = []
    try:
        for start in range(0, num_bytes, len(part)):
            os.pwritev(descriptor, [part], start)
        for _ in range(3):
            began = time.perf_counter()
            for start in range(0, num_bytes, len(part)):
                assert os.preadv(descriptor, [part], start) == len(part)
            took.append(time.perf_counter() - began)
    finally:
        os.close(descriptor)
    return took


def _block(sequence: int, index: int) -> TierBlock:
    key = BlockKey(hashlib.blake2b(f"{sequence}/{index}".encode(), digest_size=16).digest())
    return TierBlock(key, SequenceHash(int.from_bytes(key[:8], "little")), None, None, 0)


def systems(plan: Plan, folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "without", ()
    yield "host", ("--kv-host", plan.host)
    if plan.disk:
        where = ("--kv-disk-dir", str(folder / "kv"))
        yield "disk", ("--kv-host", plan.small_host, "--kv-disk", plan.disk, *where)
    if plan.is_straight:
        where = ("--kv-disk-dir", str(folder / "straight"), "--kv-disk-direct")
        yield "straight", ("--kv-host", plan.small_host, "--kv-disk", plan.disk, *where)


def returned(plan: Plan, system: System, folder: Path, rows: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    expected: list[str] | None = None
    for name, flags in systems(plan, folder):
        if rows and name not in ("without", *rows):
            continue
        with served(system, folder, flags) as url:
            ask(url, tokens(random.Random(1), 64), 4)  # what is compiled on the way is nobody's
            asked, texts = returning(url, plan)
        expected = expected or texts
        ttft = sorted(1e3 * each.ttft_s for each in asked)
        found[name] = {
            "TTFT mean ms": statistics.mean(ttft),
            "of it onboarding": statistics.mean(each.onboard_ms for each in asked),
            "TTFT p90 ms": ttft[int(0.9 * (len(ttft) - 1))],
            "cached share": statistics.mean(each.cached / plan.prefix_tokens for each in asked),
            "same text": sum(map(str.__eq__, expected, texts)) / len(texts),
        }
        print(name, json.dumps(found[name]), flush=True)
    for name in found.keys() - {"without"}:
        found[name]["TTFT without / with"] = found["without"]["TTFT mean ms"] / found[name]["TTFT mean ms"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv.returning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=["copies", "disk", "returning", "fresh"])
    parser.add_argument(
        "--disk",
        action="store_true",
        help="on a device: with a disk as well, by both ways (48 GiB in $TMPDIR)",
    )
    parser.add_argument(
        "--rows", nargs="*", default=[], metavar="NAME", help="of `returning`, besides `without`"
    )
    parser.add_argument("--out", type=Path, help="default: results/returning_cpu.json")
    options = parser.parse_args()
    is_gpu = options.device != "cpu"
    plan = GPU if is_gpu else CPU
    if is_gpu and options.disk:
        plan = msgspec.structs.replace(plan, small_host="4GiB", disk="48GiB", is_straight=True)
    with tempfile.TemporaryDirectory(prefix="returning-") as name:
        folder = Path(name)
        arguments: dict[str, str | int] = {
            "served_name": "m",
            "block_size": 16,
            "kv_blocks": plan.device_blocks,
        }
        model = "smollm2-135m"
        if is_gpu:
            model = str(tiny_checkpoint(folder / "model", num_shards=4, **LLAMA_8B))
            arguments |= {"device": options.device, "dtype": "bfloat16", "max_num_seqs": 32}
        else:
            arguments |= {"dtype": "float32"}
        system = System(model=model, arguments=arguments)
        results: dict[str, Any] = {}
        if is_gpu and options.only in (None, "copies"):
            results["copies"] = copies(options.device)
        if is_gpu and options.only in (None, "disk"):
            results["disk"] = disk_reads(options.device, folder / "disk")
        if options.only in (None, "returning"):
            results["returning"] = returned(plan, system, folder, options.rows)
        if options.only in (None, "fresh"):
            results["fresh"] = fresh(plan, system, folder)
    out = options.out or RESULTS / "returning_cpu.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"plan": msgspec.to_builtins(plan), **results}, indent=1) + "\n")
    is_same = all(each["same text"] == 1.0 for each in results.get("returning", {}).values())
    return 0 if is_same or is_gpu else 1  # in bfloat16 a sum in another order is another number


if __name__ == "__main__":
    sys.exit(main())
