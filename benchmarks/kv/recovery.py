"""A disk tier after its process was killed: is all that is found whole, and how soon is it found?

    python -m benchmarks.kv.recovery           100 kills and 100,000 blocks, some minutes; results/recovery.{json,txt}
    python -m benchmarks.kv.recovery --quick   5 kills and 5,000 blocks, not kept

Kills: a process offloads random blocks as fast as it can, into a disk tier that is full and has to evict, and is killed
(SIGKILL) at a random moment. The next one has to find a tier in which every block verifies, and goes on. What a page
cache that is lost would do is not seen so: tests/unit/kv/tiers/test_crash.py does that.

Recovery: from a folder with that many blocks to a tier that answers, with its books, in a fresh process.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from benchmarks.frontend.report import goal
from benchmarks.runtime.report import keep_results, machine

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.disk.view import parts_in, verify
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock

_RESULTS = Path(__file__).parent / "results" / "recovery"
SHAPE = BlockShape(64 << 10)
NUM_SLOTS = 2048
"""Of the tier that is killed: it evicts within a second."""
_BATCH = 64
_CHAIN = 16
GOAL_RECOVERY_S = 2.0


class Kills(msgspec.Struct, frozen=True):
    num_kills: int
    num_bad: int
    """Blocks that were found and did not verify."""
    num_verified: int
    """In all looks together."""
    num_empty: int
    """Looks that found nothing: what was killed had not begun."""
    num_new: int
    """Blocks found that were not there at the look before: how much was written between kills."""


class Recovery(msgspec.Struct, frozen=True):
    num_blocks: int
    took_s: tuple[float, ...]
    num_found: int

    @property
    def best_s(self) -> float:
        return min(self.took_s)


# --- blocks


def blocks_of(name: str, count: int) -> Iterator[TierBlock]:
    """In chains: each sixteenth follows none."""
    parent: TierBlock | None = None
    for number in range(count):
        key = BlockKey(hashlib.blake2b(f"{name}/{number}".encode(), digest_size=16).digest())
        above = parent if number % _CHAIN else None
        block = TierBlock(
            key,
            SequenceHash(int.from_bytes(key[:8], "little")),
            above.key if above else None,
            above.sequence_hash if above else None,
            number % _CHAIN,
        )
        yield block
        parent = block


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
        await _write(tier, memory, list(blocks_of(f"{seed}/{number}", _BATCH)), rng)


def kill_often(folder: Path, num_kills: int) -> Kills:
    rng = random.Random(1)
    num_bad, num_verified, num_empty, num_new = 0, 0, 0, 0
    before: set[BlockKey] = set()
    for number in range(num_kills):
        command = [sys.executable, "-m", "benchmarks.kv.recovery", "--offload", str(folder), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.0, 1.0))
            process.kill()
        [part] = parts_in(folder)
        found = {each.block.key for each in part.blocks}
        num_bad += len(verify(part, lambda _: None))
        num_verified += len(found)
        num_empty += not found
        num_new += len(found - before)
        before = found
        print(f"\r{number + 1}/{num_kills} kills, {num_bad} bad", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return Kills(num_kills, num_bad, num_verified, num_empty, num_new)


# --- recovery


async def fill(folder: Path, num_blocks: int) -> None:
    shape = BlockShape(4096)  # only the journal's length matters
    tier, memory = DiskTier(DiskFiles(folder, shape, num_blocks)), SlotMemory(shape, 1024)
    await tier.start()
    rng, blocks = random.Random(2), list(blocks_of("all", num_blocks))
    for start in range(0, num_blocks, 1024):
        await _write(tier, memory, blocks[start : start + 1024], rng)
    await tier.close()
    memory.close()


async def recover(folder: Path, num_blocks: int) -> None:
    began = time.perf_counter()
    tier = DiskTier(DiskFiles(folder, BlockShape(4096), num_blocks))
    await tier.start()
    print(time.perf_counter() - began, len(tier), flush=True)
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


# ---


def text_of(kills: Kills, recovery: Recovery) -> str:
    return "\n".join(
        (
            f"{kills.num_kills} kills during offload: {kills.num_verified:,} blocks found and read,"
            f" {kills.num_bad} not whole",
            f"  {kills.num_new:,} of them new since the kill before; {kills.num_empty} times nothing was found",
            goal("every block found verifies", kills.num_bad == 0, f"{kills.num_bad} do not"),
            f"{recovery.num_found:,} of {recovery.num_blocks:,} blocks found again in "
            + ", ".join(f"{each:.2f}" for each in recovery.took_s)
            + " s",
            goal(
                f"{recovery.num_blocks:,} blocks within {GOAL_RECOVERY_S:g} s",
                recovery.best_s < GOAL_RECOVERY_S,
                f"{recovery.best_s:.2f} s",
            ),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 kills and 5,000 blocks, not kept")
    parser.add_argument("--offload", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--recover", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offload:
        asyncio.run(offload_until_killed(Path(args.offload[0]), int(args.offload[1])))
    elif args.recover:
        asyncio.run(recover(Path(args.recover[0]), int(args.recover[1])))
    else:
        with tempfile.TemporaryDirectory(prefix="bench-recovery-") as text:
            folder, found = Path(text), machine()
            kills = kill_often(folder / "killed", 5 if args.quick else 100)
            recovery = recovery_of(folder / "many", 5_000 if args.quick else 100_000)
        print(text_of(kills, recovery))
        if not args.quick:
            rows = {"kills": kills, "recovery": recovery}
            keep_results(_RESULTS, "benchmarks.kv.recovery", found, text_of(kills, recovery), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
