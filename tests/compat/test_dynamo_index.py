"""Our index answers as Dynamo's RadixTree on histories that both can follow: parents first, leaves removed first.

Dynamo is asked in its own environment (KVOLT_PEER, default ~/.cache/kvolt-peer); `python -m benchmarks.router.index` or
`benchmarks.frontend.edge` install it. Where it is not there is nothing to hold against.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from benchmarks.frontend import peer
from benchmarks.router.index import run_side
from benchmarks.router.sides import DYNAMO
from benchmarks.router.workload import Change, Prompt, Shape, history, prompts

from kvolt.router import index, index_python

PYTHON = peer.default_folder() / "dyn" / "bin" / "python"
IMPLEMENTATIONS = [index_python.BlockIndex, *([index.BlockIndex] if index.IS_NATIVE else [])]

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="Dynamo is not installed beside")


def ours(make: Any, num_workers: int, changes: list[Change], asked: list[Prompt]) -> list[list[list[int]]]:
    made = make()
    for _ in range(num_workers):
        made.add_worker()
    for change in changes:
        (made.remove if change.local is None else made.store)(change.worker, change.sequence)
    found = [made.find(prompt.sequence).tolist() for prompt in asked]
    return [[[slot, depth] for slot, depth in enumerate(depths) if depth] for depths in found]


def theirs(num_workers: int, changes: list[Change], asked: list[Prompt]) -> Any:
    job = {"system": DYNAMO, "work": "replay", "num_workers": num_workers, "changes": changes, "asked": asked}
    return run_side(PYTHON, job)["scores"]


def random_history(seed: int, num_workers: int) -> tuple[list[Change], list[Prompt]]:
    """A tree of prompts; each worker stores parts of it from the root on, and gives leaves back."""
    rng = random.Random(seed)
    branches: list[list[int]] = []
    for number in range(12):
        trunk = rng.choice(branches)[: rng.randint(1, 30)] if branches else []
        branches.append([*trunk, *(number * 1000 + at for at in range(rng.randint(1, 40)))])
    asked = [_prompt(branch) for branch in branches]
    held: list[set[tuple[int, ...]]] = [set() for _ in range(num_workers)]
    changes = []
    for _ in range(300):
        worker, branch = rng.randrange(num_workers), rng.choice(branches)
        paths = [tuple(branch[: depth + 1]) for depth in range(len(branch))]
        there = sum(path in held[worker] for path in paths)
        if rng.random() < 0.65:
            stop = min(there + rng.randint(1, 30), len(branch))
            new = _prompt(branch)
            parent = new.sequence[there - 1] if there else None
            if stop > there:
                changes.append(Change(worker, parent, new.sequence[there:stop], new.local[there:stop]))
            held[worker].update(paths[there:stop])
        else:
            leaves = []
            while there and not any(
                path[:there] == paths[there - 1] and len(path) > there for path in held[worker]
            ):
                leaves.append(_prompt(branch).sequence[there - 1])
                held[worker].discard(paths[there - 1])
                there -= 1
                if rng.random() < 0.2:
                    break
            if leaves:
                changes.append(Change(worker, None, leaves, None))
    return changes, asked


def _prompt(branch: list[int]) -> Prompt:
    mixed = [hash(tuple(branch[: depth + 1])) % 2**64 for depth in range(len(branch))]
    return Prompt(mixed, [name + 1 for name in branch])


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed: int) -> None:
    changes, asked = random_history(seed, num_workers=16)
    expected = theirs(16, changes, asked)
    assert any(expected)
    for make in IMPLEMENTATIONS:
        assert ours(make, 16, changes, asked) == expected


def test_the_history_of_the_benchmark() -> None:
    shape = Shape(num_workers=24, num_blocks=96, num_sessions=100)
    changes, asked = list(history(shape)), prompts(shape, 50)
    expected = theirs(24, changes, asked)
    for make in IMPLEMENTATIONS:
        assert ours(make, 24, changes, asked) == expected
