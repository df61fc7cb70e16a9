"""One history of KV events and the prompts asked for in it, the same for every index, in any interpreter.

A prompt is a system prompt that all share (an eighth), the rules of one of eight applications (a quarter) and a
session's own text. A session lives on one worker, every third one on two. Workers drop the second half of every fourth
session again, the last block first, as engines do: nothing is removed under something that stays, which is where
Dynamo's tree and an exact index give the same answers. Blocks are named by arithmetic: nothing of kvolt is needed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

EVENT_BLOCKS = 64
NUM_GROUPS = 8
_DEPTH_BITS = 24
_EVERYONE = 0
_FIRST_SESSION = 1 + NUM_GROUPS
_NOBODYS = 1 << 32
"""Streams from this number on are in no history."""


class Shape(NamedTuple):
    num_workers: int
    num_blocks: int
    """Blocks per prompt."""
    num_sessions: int
    is_shared: bool = False
    """Every worker holds every session; there are few sessions."""


class Change(NamedTuple):
    """Blocks that a worker has stored, or removed where `local` is None."""

    worker: int
    parent: int | None
    sequence: list[int]
    local: list[int] | None


class Prompt(NamedTuple):
    sequence: list[int]
    local: list[int]


class Part(NamedTuple):
    """A stretch of a prompt: blocks of one stream, from a depth to another."""

    stream: int
    start: int
    stop: int

    def names(self, kind: int) -> np.ndarray:
        depths = np.arange(self.start, self.stop, dtype=np.uint64)
        return _mix((np.uint64(self.stream << _DEPTH_BITS) + depths) * np.uint64(2) + np.uint64(kind))


def session_parts(shape: Shape, session: int) -> list[Part]:
    system, rules = shape.num_blocks // 8, shape.num_blocks // 8 * 3
    return [
        Part(_EVERYONE, 0, system),
        Part(1 + session % NUM_GROUPS, system, rules),
        Part(_FIRST_SESSION + session, rules, shape.num_blocks),
    ]


def history(shape: Shape) -> Iterator[Change]:
    known: set[tuple[int, int]] = set()
    for session in range(shape.num_sessions):
        for worker in _homes(shape, session):
            parent: int | None = None
            for part in session_parts(shape, session):
                sequence = part.names(0)
                if (worker, part.stream) not in known:
                    known.add((worker, part.stream))
                    yield from _stored(worker, parent, sequence, part.names(1))
                parent = int(sequence[-1])
            if session % 4 == 1 and not shape.is_shared:
                gone = sequence[len(sequence) // 2 :][::-1]
                for start in range(0, len(gone), EVENT_BLOCKS):
                    yield Change(worker, None, gone[start : start + EVENT_BLOCKS].tolist(), None)


def prompts(shape: Shape, num: int) -> list[Prompt]:
    """Of ten prompts: five served before, three that differ in the last quarter, two of new sessions."""
    requests = []
    for at in range(num):
        session = at * 7919 % shape.num_sessions
        parts = session_parts(shape, session)
        if at % 10 >= 8:
            parts[2] = parts[2]._replace(stream=_NOBODYS + at)
        elif at % 10 >= 5:
            turn = shape.num_blocks - shape.num_blocks // 4
            parts[2:] = [parts[2]._replace(stop=turn), Part(_NOBODYS + at, turn, shape.num_blocks)]
        requests.append(
            Prompt(*(np.concatenate([part.names(kind) for part in parts]).tolist() for kind in (0, 1)))
        )
    return requests


def _homes(shape: Shape, session: int) -> list[int]:
    if shape.is_shared:
        return list(range(shape.num_workers))
    homes = [session % shape.num_workers]
    second = (session * 7 + 3) % shape.num_workers
    return [*homes, second] if session % 3 == 0 and second not in homes else homes


def _stored(worker: int, parent: int | None, sequence: np.ndarray, local: np.ndarray) -> Iterator[Change]:
    for start in range(0, len(sequence), EVENT_BLOCKS):
        stop = start + EVENT_BLOCKS
        yield Change(worker, parent, sequence[start:stop].tolist(), local[start:stop].tolist())
        parent = int(sequence[min(stop, len(sequence)) - 1])


def _mix(keys: np.ndarray) -> np.ndarray:
    mixed = keys + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
