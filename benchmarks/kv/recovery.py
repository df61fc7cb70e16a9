"""Recovery of a disk tier whose process was killed: whether all blocks verify, and how long recovery takes.

    python -m benchmarks.kv.recovery           100 kills and 100,000 blocks, some minutes; results/recovery.{json,txt}

Kills: a process offloads random blocks as fast as it can into a full disk tier, which evicts, and is killed (SIGKILL)
at a random moment. The next one must find a tier in which every block verifies, and continues. Loss of the page cache
is not covered here but by tests/unit/kv/tiers/test_crash.py.

Recovery: from a folder with that many blocks to a tier that answers, with its slot table, in a new process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from benchmarks.harness import goal, parser_for, report, run
from benchmarks.kv.tier_blocks import tier_blocks

from kvolt.core.ids import BlockKey
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.disk.view import find_parts, verify
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock

SHAPE = BlockShape(64 << 10)
SMALL = BlockShape(4096)
"""Block shape for recovery, whose time depends only on the length of the journal."""
NUM_SLOTS = 2048
"""Slots of the tier that is killed: it evicts within a second."""
_BATCH = 64
_CHAIN = 16
GOAL_RECOVERY_S = 2.0


class Kills(msgspec.Struct, frozen=True):
    num_kills: int
    num_bad: int
    """Blocks found that did not verify."""
    num_verified: int
    """Blocks found after all kills together."""
    num_empty: int
    """Kills after which the tier was empty: the process had not written yet."""
    num_new: int
    """Blocks found that were absent after the kill before."""


class Recovery(msgspec.Struct, frozen=True):
    num_blocks: int
    took_s: tuple[float, ...]
    num_found: int

    @property
    def best_s(self) -> float:
        return min(self.took_s)


async def _write(tier: DiskTier, memory: SlotMemory, blocks: Sequence[TierBlock], rng: random.Random) -> None:
    slots = np.arange(len(blocks), dtype=np.int64)
    for slot in range(len(blocks)):
        with memory.block(slot) as view:
            view[:] = rng.randbytes(len(view))
    sums = memory.checksums(slots, [block.key for block in blocks]).tolist()
    await tier.write(blocks, sums, memory, slots)


# --- kills


async def offload_until_killed(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    tier, memory = DiskTier(DiskFiles(folder, SHAPE, NUM_SLOTS)), SlotMemory(SHAPE, _BATCH)
    await tier.start()
    print("ready", flush=True)
    for number in range(1 << 30):
        await _write(tier, memory, tier_blocks(f"{seed}/{number}", _BATCH, _CHAIN), rng)


def kill_often(folder: Path, num_kills: int, longest_s: float = 1.0) -> Kills:
    rng = random.Random(1)
    num_bad, num_verified, num_empty, num_new = 0, 0, 0, 0
    before: set[BlockKey] = set()
    for number in range(num_kills):
        command = [sys.executable, "-m", "benchmarks.kv.recovery", "--offload", str(folder), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.0, longest_s))
            process.kill()
        [part] = find_parts(folder)
        keys = {each.block.key for each in part.blocks}
        num_bad += len(verify(part, lambda _: None))
        num_verified += len(keys)
        num_empty += not keys
        num_new += len(keys - before)
        before = keys
        print(f"\r{number + 1}/{num_kills} kills, {num_bad} bad", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return Kills(num_kills, num_bad, num_verified, num_empty, num_new)


# --- recovery


async def fill(folder: Path, num_blocks: int) -> None:
    tier, memory = DiskTier(DiskFiles(folder, SMALL, num_blocks)), SlotMemory(SMALL, 1024)
    await tier.start()
    rng, blocks = random.Random(2), tier_blocks("all", num_blocks, _CHAIN)
    for start in range(0, num_blocks, 1024):
        await _write(tier, memory, blocks[start : start + 1024], rng)
    await tier.close()
    memory.close()


async def recover(folder: Path, num_blocks: int) -> None:
    started = time.perf_counter()
    tier = DiskTier(DiskFiles(folder, SMALL, num_blocks))
    await tier.start()
    print(time.perf_counter() - started, len(tier), flush=True)
    await tier.close()


def recovery_of(folder: Path, num_blocks: int) -> Recovery:
    asyncio.run(fill(folder, num_blocks))
    took, num_found = [], 0
    for _ in range(3):
        command = [sys.executable, "-m", "benchmarks.kv.recovery", "--recover", str(folder), str(num_blocks)]
        words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        took.append(float(words[0]))
        num_found = int(words[1])
    return Recovery(num_blocks, tuple(took), num_found)


def text_of(kills: Kills, recovery: Recovery) -> str:
    times = ", ".join(f"{each:.2f}" for each in recovery.took_s)
    name = f"{recovery.num_blocks:,} blocks within {GOAL_RECOVERY_S:g} s"
    return "\n".join(
        (
            f"{kills.num_kills} kills during offload: {kills.num_verified:,} blocks found, {kills.num_bad} corrupt",
            f"  {kills.num_new:,} of them new since the kill before; {kills.num_empty} times nothing was found",
            goal("every block found verifies", kills.num_bad == 0, f"{kills.num_bad} do not"),
            f"{recovery.num_found:,} of {recovery.num_blocks:,} blocks recovered in {times} s",
            goal(name, recovery.best_s < GOAL_RECOVERY_S, f"{recovery.best_s:.2f} s"),
        )
    )


def main() -> None:
    parser = parser_for(__file__, __doc__)
    parser.add_argument("--offload", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--recover", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offload:
        asyncio.run(offload_until_killed(Path(options.offload[0]), int(options.offload[1])))
        return
    if options.recover:
        asyncio.run(recover(Path(options.recover[0]), int(options.recover[1])))
        return
    num_kills, longest_s, num_blocks = (2, 0.3, 1000) if options.smoke else (100, 1.0, 100_000)
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
        kills = kill_often(Path(folder) / "killed", num_kills, longest_s)
        recovery = recovery_of(Path(folder) / "many", num_blocks)
    report(options, text_of(kills, recovery), {"kills": kills, "recovery": recovery})


if __name__ == "__main__":
    run(main)
