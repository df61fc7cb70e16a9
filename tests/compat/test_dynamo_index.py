"""Our index answers as Dynamo's RadixTree on histories that both can follow: parents first, leaves removed first.

What Dynamo answered is in data/dynamo_index.json. `python -m tests.compat.test_dynamo_index`, from the repository's
root, asks it again in its own environment (KVOLT_PEER, default ~/.cache/kvolt-peer; `python -m benchmarks.router.index`
installs it).
"""

from __future__ import annotations

import json
import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import peer_folder
from benchmarks.router.index import run_side
from benchmarks.router.sides import DYNAMO
from benchmarks.router.workload import Change, Prompt, Shape, history, prompts

from kvolt.core.kv_events import mix_hash
from kvolt.router.index import prefix_index as index
from kvolt.router.index import prefix_index_python as index_python

PYTHON = peer_folder() / "dyn" / "bin" / "python"
IMPLEMENTATIONS = [index_python.BlockIndex, *([index.BlockIndex] if index.IS_NATIVE else [])]

ANSWERS = Path(__file__).parent / "data" / "dynamo_index.json"
SEEDS = range(6)
SHAPE = Shape(num_workers=24, num_blocks=96, num_sessions=100)


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
    mixed = list(accumulate(branch, lambda chain, name: mix_hash(chain ^ name), initial=0))[1:]
    return Prompt(mixed, [name + 1 for name in branch])


def histories() -> dict[str, tuple[int, list[Change], list[Prompt]]]:
    """By name: the number of workers, what they told, what is asked."""
    found = {f"random {seed}": (16, *random_history(seed, 16)) for seed in SEEDS}
    return found | {"of the benchmark": (SHAPE.num_workers, list(history(SHAPE)), prompts(SHAPE, 50))}


@pytest.mark.parametrize("name", [*(f"random {seed}" for seed in SEEDS), "of the benchmark"])
def test_the_answers_are_dynamos(name: str) -> None:
    expected = json.loads(ANSWERS.read_bytes())["answers"][name]
    assert any(expected)
    num_workers, changes, asked = histories()[name]
    for make in IMPLEMENTATIONS:
        assert ours(make, num_workers, changes, asked) == expected


if __name__ == "__main__":
    told = {name: theirs(*each) for name, each in histories().items()}
    ANSWERS.write_text(json.dumps({"system": DYNAMO, "answers": told}, separators=(",", ":")) + "\n")
