"""A random order of tests that follows from a seed: `pytest --order-seed N`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def shuffled(items: Sequence[T], modules: Sequence[str], seed: int) -> list[T]:
    """The items in random order by module, and at random within each: fixtures of a module are set up once."""
    by_module: dict[str, list[T]] = {}
    for item, module in zip(items, modules, strict=True):
        by_module.setdefault(module, []).append(item)
    rng = random.Random(seed)
    groups = list(by_module.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    return [item for group in groups for item in group]
