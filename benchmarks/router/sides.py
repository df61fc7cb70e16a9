"""One index under one workload, in its own process: kvolt's, or Dynamo's in the peer's interpreter.

    python -m benchmarks.router.sides '{"system": ..., "work": "ingest" | "find" | "memory" | "replay", ...}'

Prints one line of JSON. For the peer nothing of kvolt is imported: its environment has only numpy and msgspec. Events
are encoded before the measurement; decoding them is measured.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from benchmarks.router.workload import Change, Prompt, Shape, history, prompts

KVOLT, KVOLT_EVENTS, KVOLT_JSON = "kvolt", "kvolt, its events", "kvolt, Dynamo's events"
KVOLT_PYTHON = "kvolt without a compiler"
DYNAMO = "Dynamo RadixTree"


class Index(Protocol):
    def encoded(self, change: Change) -> Any: ...
    def apply(self, encoded: Any) -> None: ...
    def query(self, prompt: Prompt) -> Any: ...
    def find(self, query: Any) -> Any: ...
    def scores(self, answer: Any) -> dict[int, int]: ...
    def num_bytes(self) -> int | None: ...


class Tuples(NamedTuple):
    worker: int
    is_stored: bool
    hashes: tuple[int, ...]


class Kvolt:
    """Hashes as they lie in a decoded event: the index alone."""

    def __init__(self, num_workers: int, make: Any = None) -> None:
        if make is None:
            from kvolt.router.index import prefix_index as index

            if not index.IS_NATIVE:
                raise RuntimeError(
                    "the native index is not built: install a C compiler, then `pip install -e .`"
                )
            make = index.BlockIndex
        self.index = make(32 << 30)
        for _ in range(num_workers):
            self.index.add_worker()

    def encoded(self, change: Change) -> Any:
        return Tuples(change.worker, change.local is not None, tuple(change.sequence))

    def apply(self, encoded: Any) -> None:
        worker, is_stored, hashes = encoded
        if is_stored:
            self.index.store(worker, hashes)
        else:
            self.index.remove(worker, hashes)

    def query(self, prompt: Prompt) -> Any:
        return tuple(prompt.sequence)

    def find(self, query: Any) -> Any:
        return self.index.find(query)

    def scores(self, answer: Any) -> dict[int, int]:
        return {slot: depth for slot, depth in enumerate(answer.tolist()) if depth}

    def num_bytes(self) -> int | None:
        return int(self.index.num_bytes)


class KvoltPython(Kvolt):
    def __init__(self, num_workers: int) -> None:
        from kvolt.router.index.prefix_index_python import BlockIndex

        super().__init__(num_workers, BlockIndex)


class KvoltEvents(Kvolt):
    """The bytes of kvolt's own events, decoded and applied."""

    def __init__(self, num_workers: int) -> None:
        from kvolt.core.kv_events import KvEventBatch, Stored

        super().__init__(num_workers)
        self._decode = msgspec.msgpack.Decoder(KvEventBatch).decode
        self._stored = Stored

    def encoded(self, change: Change) -> Any:
        from kvolt.core.kv_events import KvEvent, KvEventBatch, Removed, Stored

        event: Any = Removed.from_hashes(change.sequence)
        if change.local is not None:
            event = Stored.from_hashes(change.sequence, change.parent)
        return change.worker, msgspec.msgpack.encode(KvEventBatch((KvEvent(1, 1, event),)))

    def apply(self, encoded: Any) -> None:
        worker, raw = encoded
        for event in self._decode(raw).events:
            change = event.change
            if isinstance(change, self._stored):
                self.index.store(worker, change.hashes)
            else:
                self.index.remove(worker, change.hashes)


class _Block(msgspec.Struct):
    block_hash: int
    tokens_hash: int


class _StoredBlocks(msgspec.Struct):
    blocks: list[_Block]
    parent_hash: int | None = None


class _RemovedBlocks(msgspec.Struct):
    block_hashes: list[int]


class _Data(msgspec.Struct, omit_defaults=True):
    stored: _StoredBlocks | None = None
    removed: _RemovedBlocks | None = None


class _Event(msgspec.Struct):
    event_id: int
    data: _Data
    dp_rank: int = 0


def dynamo_event(change: Change) -> bytes:
    """Event in the format of Dynamo's binding."""
    if change.local is None:
        data = _Data(removed=_RemovedBlocks(change.sequence))
    else:
        pairs = zip(change.sequence, change.local, strict=True)
        data = _Data(stored=_StoredBlocks([_Block(*pair) for pair in pairs], change.parent))
    return msgspec.json.encode(_Event(1, data))


class KvoltJson(Kvolt):
    """The very bytes that Dynamo's binding is given, decoded and applied."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self._decode = msgspec.json.Decoder(_Event).decode

    def encoded(self, change: Change) -> Any:
        return change.worker, dynamo_event(change)

    def apply(self, encoded: Any) -> None:
        worker, raw = encoded
        data = self._decode(raw).data
        if data.stored is not None:
            self.index.store(worker, [block.block_hash for block in data.stored.blocks])
        else:
            self.index.remove(worker, data.removed.block_hashes)


class Dynamo:
    def __init__(self, num_workers: int) -> None:
        from dynamo._core import RadixTree  # type: ignore[import-not-found]

        self._tree = RadixTree()

    def encoded(self, change: Change) -> Any:
        return change.worker, dynamo_event(change)

    def apply(self, encoded: Any) -> None:
        self._tree.apply_event(*encoded)

    def query(self, prompt: Prompt) -> Any:
        return prompt.local

    def find(self, query: Any) -> Any:
        return self._tree.find_matches(query)

    def scores(self, answer: Any) -> dict[int, int]:
        return {worker: depth for (worker, _), depth in answer.scores.items()}

    def num_bytes(self) -> int | None:
        return None


SYSTEMS: dict[str, Any] = {
    KVOLT: Kvolt,
    KVOLT_EVENTS: KvoltEvents,
    KVOLT_JSON: KvoltJson,
    KVOLT_PYTHON: KvoltPython,
    DYNAMO: Dynamo,
}


def ingest(index: Index, shape: Shape) -> dict[str, Any]:
    """Whole history into an empty index. A block of an event is one operation, stored or removed."""
    changes = list(history(shape))
    num_blocks = sum(len(change.sequence) for change in changes)
    encoded = [index.encoded(change) for change in changes]
    del changes
    gc.disable()
    started = time.perf_counter_ns()
    for each in encoded:
        index.apply(each)
    took_ns = time.perf_counter_ns() - started
    return {"num_blocks": num_blocks, "blocks_per_s": num_blocks / took_ns * 1e9}


def find(index: Index, shape: Shape, num_finds: int) -> dict[str, Any]:
    """Run each prompt once unmeasured, then all in turn."""
    _fill(index, history(shape))
    queries = [index.query(prompt) for prompt in prompts(shape, min(num_finds, 100))]
    answers = [sorted(index.scores(index.find(query)).items()) for query in queries]
    gc.disable()
    took_ns = []
    for at in range(num_finds):
        query = queries[at % len(queries)]
        started = time.perf_counter_ns()
        index.find(query)
        took_ns.append(time.perf_counter_ns() - started)
    p50, p99 = np.percentile(took_ns, (50, 99)) / 1e3
    return {"p50_us": float(p50), "p99_us": float(p99), "answers": hash_of(answers)}


def memory(index: Index, shape: Shape) -> dict[str, Any]:
    before = _resident_bytes()
    num_pairs = _fill(index, history(shape))
    gc.collect()
    grown = _resident_bytes() - before
    index_bytes = index.num_bytes()
    return {
        "num_pairs": num_pairs,
        "resident_per_pair": grown / num_pairs,
        "said_per_pair": None if index_bytes is None else index_bytes / num_pairs,
    }


def replay(index: Index, changes: list[Any], queries: list[Any]) -> dict[str, Any]:
    """Scores of these prompts after these changes."""
    _fill(index, (Change(*change) for change in changes))
    answers = [index.scores(index.find(index.query(Prompt(*each)))) for each in queries]
    return {"scores": [sorted(scores.items()) for scores in answers]}


def hash_of(answers: list[Any]) -> str:
    import hashlib

    return hashlib.sha256(msgspec.json.encode(answers)).hexdigest()


def _fill(index: Index, changes: Iterable[Change]) -> int:
    num_pairs = 0
    for change in changes:
        index.apply(index.encoded(change))
        num_pairs += len(change.sequence) if change.local is not None else -len(change.sequence)
    return num_pairs


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read() if sys.argv[1] == "-" else sys.argv[1])
    system, work = job.pop("system"), job.pop("work")
    shape = Shape(*job.pop("shape")) if "shape" in job else None
    index = SYSTEMS[system](job.pop("num_workers", shape.num_workers if shape else 0))
    works: dict[str, Any] = {"ingest": ingest, "find": find, "memory": memory, "replay": replay}
    arguments = job if shape is None else {"shape": shape, **job}
    sys.stdout.buffer.write(msgspec.json.encode(works[work](index, **arguments)) + b"\n")


if __name__ == "__main__":
    main()
