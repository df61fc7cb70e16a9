"""Decisions of kvolt's router in a process of their own: from the hashes of a prompt to its reservation.

    python -m benchmarks.router.decision_side '{"policy": "latency", "shape": [256, 512, 1024, false], "num": 2000}'

Prints one line of JSON. The index holds `workload`'s history. Every worker decodes eight requests, and a quarter of
them, 64 at most, compute a prompt of which nothing is in the index yet. A reservation is released again, outside
of the measured time.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from benchmarks.router.workload import Shape, history, prompts

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.ids import CardHash, InstanceId, RequestId, SequenceHash
from kvolt.core.request import Request, Role, StopConditions
from kvolt.latency.presets import find_model
from kvolt.router.index.prefix_index import IS_NATIVE, BlockIndex
from kvolt.router.policy.policy import Policy, classic, latency
from kvolt.router.selection.selector import Selector

BLOCK_SIZE = 64
NUM_DECODING, MOST_PREFILLING = 8, 64
_SHORT = 16
"""Blocks of a request that decodes: only its numbers matter."""
_POLICIES: dict[str, Policy] = {"latency": latency(), "classic": classic()}


class Held:
    """The PrefixIndex of a Selector: workers are the slots of an index, in order."""

    slots_version = 1

    def __init__(self, shape: Shape) -> None:
        self._index = BlockIndex(32 << 30)
        self.ids = tuple(InstanceId(f"w{number:04}") for number in range(shape.num_workers))
        self._slots = {each: self._index.add_worker() for each in self.ids}
        for change in history(shape):
            if change.local is not None:
                self._index.store(change.worker, change.sequence)
            else:
                self._index.remove(change.worker, change.sequence)

    def find(self, hashes: Any) -> npt.NDArray[np.int32]:
        return self._index.find(hashes)

    def find_local_tiers(self, hashes: Any) -> None:
        return None

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        return self._slots[instance_id]


def measured(policy: str, shape: Shape, num: int) -> dict[str, Any]:
    held = Held(shape)
    selector = Selector(held, _POLICIES[policy], time.monotonic, random.Random(1))
    info = EngineInfo(
        engine="bench",
        role=Role.AGGREGATED,
        model="bench",
        card=CardHash(""),
        block_size=BLOCK_SIZE,
        capacity=Capacity(max_num_seqs=256, max_batch_tokens=8192, kv_total_blocks=1 << 20),
        latency=find_model("h200-llama-8b"),  # type: ignore[arg-type]
    )
    selector.set_workers(dict.fromkeys(held.ids, info))
    _make_busy(selector, held, shape)
    requests = [_request(each.sequence, at) for at, each in enumerate(prompts(shape, min(num, 100)))]
    for request in requests:  # once unmeasured
        selector.release(selector.reserve(selector.choose(request, held.ids)), None)
    gc.collect()
    gc.freeze()
    gc.disable()
    took: dict[str, list[int]] = {"decision": [], "choose": [], "find": []}
    for at in range(num):
        request = requests[at % len(requests)]
        started = time.perf_counter_ns()
        choice = selector.choose(request, held.ids)
        chosen = time.perf_counter_ns()
        ticket = selector.reserve(choice)
        reserved = time.perf_counter_ns()
        selector.release(ticket, None)
        took["decision"].append(reserved - started)
        took["choose"].append(chosen - started)
        started = time.perf_counter_ns()
        held.find(request.sequence_hashes)
        took["find"].append(time.perf_counter_ns() - started)
    return {
        f"{name}_{percent}_us": float(np.percentile(times, at) / 1e3)
        for name, times in took.items()
        for percent, at in (("p50", 50), ("p99", 99))
    }


def _make_busy(selector: Selector, held: Held, shape: Shape) -> None:
    for at, instance_id in enumerate(held.ids):
        for number in range(NUM_DECODING):
            short = [(at << 20) + (number << 10) + block for block in range(_SHORT)]
            selector.mark_first_token(_reserve(selector, short, instance_id), 0)
    num_prefilling = min(len(held.ids) // 4, MOST_PREFILLING)
    for number, instance_id in enumerate(held.ids[:num_prefilling]):
        start = (1 << 50) + (number << 20)
        _reserve(selector, list(range(start, start + shape.num_blocks)), instance_id)


def _reserve(selector: Selector, hashes: list[int], instance_id: InstanceId) -> int:
    return selector.reserve(selector.choose(_request(hashes, hashes[0]), (instance_id,)))


def _request(hashes: list[int], number: int) -> Request:
    return Request(
        request_id=RequestId(f"r{number}"),
        model="bench",
        token_ids=(),
        trace_prompt_length=len(hashes) * BLOCK_SIZE + 1,
        block_size=BLOCK_SIZE,
        sequence_hashes=tuple(map(SequenceHash, hashes)),
        stop=StopConditions(max_tokens=256),
    )


def main() -> None:
    argument = sys.argv[1]
    job = msgspec.json.decode(sys.stdin.buffer.read() if argument == "-" else argument.encode())
    if not IS_NATIVE:
        raise RuntimeError("the native index is not built: install a C compiler, then `pip install -e .`")
    figures = measured(job["policy"], Shape(*job["shape"]), job["num"])
    print(msgspec.json.encode(figures).decode())


if __name__ == "__main__":
    main()
