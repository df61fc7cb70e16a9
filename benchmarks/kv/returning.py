"""Conversations that return after their KV was evicted from the device: TTFT with and without KV tiers.

    python -m benchmarks.kv.returning                          on the CPU, SmolLM2-135M; some ten minutes
    PYTHONPATH=src python3 -u -m benchmarks.kv.returning --device cuda:0 --out gpu
                                                               a CUDA device with 80 GiB, a model of Llama 8B's shape
                                                               with random weights; some minutes

The servers run side by side. `returning`: more conversations than the device holds, each with a long prefix of its own,
requested one after the other, again and again in that order, so that a device alone never has the next one cached.
`host`: the host's memory holds all of them; `disk`: a small host tier in front of a disk; `direct` (`--disk`, on a
device): blocks read from disk by NIXL and GPUDirect Storage. Greedy; every answer must equal that of the run without
tiers. TTFT is the client's, of all rounds but the first.
`fresh`: new prompts, which no tier holds: tokens per second with tiers over without, in interleaved rounds. `copies` (a
device only): the tier's copies of blocks, checksums included, beside one plain copy of as many bytes. `disk`: blocks
from a disk through the host's memory, and directly by NIXL, beside plain reads of a file on the same disk into the
host's memory, all without the page cache. Ratios are of one run.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.harness import parser_for, report, run, say
from benchmarks.kv.tier_blocks import tier_blocks
from benchmarks.processes import Answer, System, complete, served, small_model

from kvolt.core.kv_events import Tier
from kvolt.kv.disk.direct_reads import DirectReads
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.testing.tiny_models import tiny_checkpoint
from kvolt.transfer.memory.slabs import Slab

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
    """Concurrent prompts of `fresh`."""
    fresh_tokens: int
    fresh_answer: int
    is_direct: bool = False
    fresh_rounds: int = 9
    """The first is not counted; the median of the others is."""


CPU = Plan(8, 1000, 16, 3, 200, "40blocks", "1000blocks", "1000blocks", 4, 128, 128)
GPU = Plan(10, 20_000, 64, 3, 4500, "", "48GiB", "", 16, 512, 512)
SMOKE = Plan(3, 160, 16, 2, 24, "8blocks", "", "100blocks", 2, 32, 8, fresh_rounds=2)


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, 200) for _ in range(count)]


def returning(url: str, plan: Plan) -> tuple[list[Answer], list[str]]:
    """Answers of all rounds but the first, and all texts."""
    draw = random.Random(11)
    sessions = [tokens(draw, plan.prefix_tokens) for _ in range(plan.sessions)]
    answers: list[Answer] = []
    for _ in range(plan.rounds):
        answers += [complete(url, [*session, *tokens(draw, plan.turn_tokens)], 8) for session in sessions]
        time.sleep(0.5)
    return answers[plan.sessions :], [answer.text for answer in answers]


def returned(plan: Plan, urls: Mapping[str, str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    expected: list[str] | None = None
    for name, url in urls.items():
        complete(url, tokens(random.Random(1), 64), 4)  # compiles
        answers, texts = returning(url, plan)
        expected = expected or texts
        ttft = sorted(1e3 * each.ttft_s for each in answers)
        results[name] = {
            "TTFT mean ms": statistics.mean(ttft),
            "of it onboarding": statistics.mean(each.timing.get("kv_onboard_ms", 0.0) for each in answers),
            "TTFT p90 ms": ttft[int(0.9 * (len(ttft) - 1))],
            "cached share": statistics.mean(each.cached_tokens / plan.prefix_tokens for each in answers),
            "same text": sum(map(str.__eq__, expected, texts)) / len(texts),
        }
        say(f"{name} {json.dumps(results[name])}")
    for name in results.keys() - {"without"}:
        results[name]["TTFT without / with"] = (
            results["without"]["TTFT mean ms"] / results[name]["TTFT mean ms"]
        )
    return results


def fresh_round(url: str, plan: Plan, draw: random.Random) -> float:
    """Tokens per second of answers to new prompts."""
    prompts = [tokens(draw, plan.fresh_tokens) for _ in range(plan.fresh)]
    started = time.perf_counter()
    with ThreadPoolExecutor(plan.fresh) as pool:
        list(pool.map(lambda prompt: complete(url, prompt, plan.fresh_answer), prompts))
    return plan.fresh * plan.fresh_answer / (time.perf_counter() - started)


def fresh(plan: Plan, urls: Mapping[str, str]) -> dict[str, Any]:
    draw = random.Random(13)
    rates: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(plan.fresh_rounds):
        for name, url in urls.items():
            rate = fresh_round(url, plan, draw)
            if number:  # the first round compiles
                rates[name].append(rate)
    results: dict[str, Any] = {
        name: {"tokens/s": statistics.median(rounds)} for name, rounds in rates.items()
    }
    for name in rates.keys() - {"without"}:
        pairs = [with_it / without for with_it, without in zip(rates[name], rates["without"], strict=True)]
        results[name] |= {"with / without": statistics.median(pairs), "of single rounds": sorted(pairs)}
    return results


def copies(device: str) -> dict[str, float]:
    """GB/s of a tier's copies of blocks of 2 MiB, checksums included, beside one plain copy of as many bytes."""
    import torch

    from kvolt.transfer.cuda.memory import CudaMemory

    memory = torch.randint(0, 255, (NUM_COPIED * COPIED_BYTES,), dtype=torch.uint8, device=device)
    slab = Slab.on_device(CudaMemory(memory), COPIED_BYTES)
    plain = torch.empty(memory.nbytes, dtype=torch.uint8, pin_memory=True)

    def best(act: Callable[[], object]) -> float:
        took = []
        for _ in range(4):
            torch.cuda.synchronize()
            started = time.perf_counter()
            act()
            torch.cuda.synchronize()
            took.append(time.perf_counter() - started)
        return memory.nbytes / min(took) / 1e9

    async def tier() -> tuple[float, float]:
        cache = TieredCache.for_slabs([slab], 5 * NUM_COPIED)
        down, up = [], []
        await cache.start()
        for number in range(5):
            blocks = tier_blocks(str(number), NUM_COPIED)
            started = time.perf_counter()
            assert await cache.offload(blocks, range(NUM_COPIED)) == NUM_COPIED
            down.append(time.perf_counter() - started)
        before = memory.clone()
        memory.zero_()
        torch.cuda.synchronize()
        for number in range(5):
            blocks = tier_blocks(str(number), NUM_COPIED)
            started = time.perf_counter()
            assert (await cache.onboard(blocks, range(NUM_COPIED))).num_blocks == NUM_COPIED
            up.append(time.perf_counter() - started)
        await cache.close()
        assert torch.equal(memory, before)
        return memory.nbytes / min(down) / 1e9, memory.nbytes / min(up) / 1e9

    rates = {"plain down": best(lambda: plain.copy_(memory)), "plain up": best(lambda: memory.copy_(plain))}
    rates["offload"], rates["onboard"] = asyncio.run(tier())
    rates["offload / plain"] = rates["offload"] / rates["plain down"]
    rates["onboard / plain"] = rates["onboard"] / rates["plain up"]
    return rates


def disk_reads(device: str, folder: Path) -> dict[str, float]:
    """GB/s of blocks from a disk into an engine's memory, checksums included, through the host and directly."""
    import torch

    from kvolt.transfer.cuda.memory import CudaMemory

    memory = torch.randint(0, 255, (NUM_READ * COPIED_BYTES,), dtype=torch.uint8, device=device)
    before = memory.clone()
    slab = Slab.on_device(CudaMemory(memory), COPIED_BYTES)
    blocks, numbers = tier_blocks("read", NUM_READ), range(NUM_READ)

    async def read(is_direct: bool, where: Path) -> list[float]:
        disk = DiskTier(DiskFiles(where, BlockShape.of([slab]), 2 * NUM_READ))
        assert disk.files.is_direct, "the disk is read through the page cache"
        direct = DirectReads(disk, [slab]) if is_direct else None
        took: list[float] = []
        for number in range(4):
            # A new host tier, which holds none of them.
            cache = TieredCache.for_slabs([slab], NUM_READ, [(disk, 1)], direct=direct)
            await cache.start()
            if not len(disk):
                await _written(cache, disk, blocks)
            else:
                memory.zero_()
                torch.cuda.synchronize()
                started = time.perf_counter()
                assert (await cache.onboard(blocks, numbers)).by_tier == ((Tier.DISK, NUM_READ),)
                took.append(time.perf_counter() - started)
                assert torch.equal(memory, before)
            await cache.close()
            if number < 3:
                disk = DiskTier(DiskFiles(where, BlockShape.of([slab]), 2 * NUM_READ))
                direct = DirectReads(disk, [slab]) if is_direct else None
        return took

    num_bytes = memory.nbytes / 1e9
    rates: dict[str, float] = {"plain file": num_bytes / min(_plain_reads(folder / "plain", memory.nbytes))}
    for name, is_direct in (("host", False), ("direct", True)):
        rates[name] = num_bytes / min(asyncio.run(read(is_direct, folder / name)))
        rates[f"{name} / plain file"] = rates[name] / rates["plain file"]
    return rates


async def _written(cache: TieredCache, disk: DiskTier, blocks: Sequence[TierBlock]) -> None:
    all_written = asyncio.Event()
    cache.host.set_on_change(lambda: all_written.set() if len(disk) == len(blocks) else None)
    assert await cache.offload(blocks, range(len(blocks))) == len(blocks)
    await all_written.wait()


def _plain_reads(path: Path, num_bytes: int) -> list[float]:
    part = mmap.mmap(-1, 64 << 20)
    path.parent.mkdir(parents=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    took: list[float] = []
    try:
        for start in range(0, num_bytes, len(part)):
            os.pwritev(descriptor, [part], start)
        for _ in range(3):
            started = time.perf_counter()
            for start in range(0, num_bytes, len(part)):
                assert os.preadv(descriptor, [part], start) == len(part)
            took.append(time.perf_counter() - started)
    finally:
        os.close(descriptor)
    return took


def systems(plan: Plan, folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "without", ()
    if plan.host:
        yield "host", ("--kv-host", plan.host)
    disk = ("--kv-host", plan.small_host, "--kv-disk", plan.disk, "--kv-disk-dir")
    if plan.disk:
        yield "disk", (*disk, str(folder / "kv"))
    if plan.is_direct:
        yield "direct", (*disk, str(folder / "direct"), "--kv-disk-direct")


def main() -> int:
    parser = parser_for(__file__, __doc__, results="returning_cpu")
    add = parser.add_argument
    add("--device", default="cpu")
    add("--only", choices=["copies", "disk", "returning", "fresh"])
    add("--disk", action="store_true", help="on a device: with disk tiers as well (48 GiB in $TMPDIR)")
    options = parser.parse_args()
    is_gpu = options.device != "cpu"
    plan = SMOKE if options.smoke else GPU if is_gpu else CPU
    if is_gpu and options.disk:
        plan = msgspec.structs.replace(plan, small_host="4GiB", disk="48GiB", is_direct=True)
    arguments: dict[str, str | int] = {"served_name": "m", "block_size": 16, "kv_blocks": plan.device_blocks}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-returning-") as name, ExitStack() as stack:
        folder = Path(name)
        if is_gpu:
            model = str(tiny_checkpoint(folder / "model", num_shards=4, **LLAMA_8B))
            arguments |= {"device": options.device, "dtype": "bfloat16", "max_num_seqs": 32}
        else:
            model = small_model(folder, options.smoke)
            arguments |= {"dtype": "float32"} | ({"measure_steps": "false"} if options.smoke else {})
        if is_gpu and options.only in (None, "copies"):
            results["copies"] = copies(options.device)
        if is_gpu and options.only in (None, "disk"):
            results["disk"] = disk_reads(options.device, folder / "disk")
        if options.only in (None, "returning", "fresh"):
            system = System(model=model, arguments=arguments)
            urls = {name: stack.enter_context(served(system, flags)) for name, flags in systems(plan, folder)}
            for part, work in (("returning", returned), ("fresh", fresh)):
                if options.only in (None, part):
                    results[part] = work(plan, urls)
    text = "\n".join(f"{part} {json.dumps(result)}" for part, result in results.items())
    report(options, text, {"plan": plan, **results})
    is_same = all(each["same text"] == 1.0 for each in results.get("returning", {}).values())
    return 0 if is_same or is_gpu else 1  # in bfloat16 the order of a sum changes its value


if __name__ == "__main__":
    run(main)
