"""Cost of a request in the twin as the cluster grows: one run in its own process.

usage: python -m benchmarks.twin.scaling TRACE REQUESTS COPIES

The first REQUESTS of the trace, each COPIES times at the same moment with hash ids of its own, on 8 x COPIES workers.
Round-robin gives every worker of the large cluster the very requests, at the very times, that one worker of the small
one has: the load per worker is not alike but the same, and so must be what each request sees. (To press the trace's
time together instead would give each worker fewer requests with less to find in its cache: another load.)

CPU is that of this process from the cluster's start to its end, without reading the trace, and after a short run that
does not count: what happens once in a process would weigh on the few requests of the small cluster.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from benchmarks.twin.replays import BLOCK_SIZE, LONGEST_CONTEXT, NUM_BLOCKS
from msgspec.structs import replace

from kvolt.bench.traces import limit, own_ids, read_trace, start_at_zero
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.replay import new_tally, run_twin

FEWEST_WORKERS = 8
_WARM_UP_REQUESTS = 16


class Scaled(msgspec.Struct, frozen=True):
    """One run."""

    num_workers: int
    num_requests: int
    num_whole: int
    cpu_s: float
    peak_rss_bytes: int
    mean_ttft_ms: float
    mean_e2e_ms: float

    @property
    def cpu_us_per_request(self) -> float:
        return self.cpu_s / self.num_requests * 1e6


def copies_of(records: Sequence[TraceRecord], num_copies: int) -> Iterator[TraceRecord]:
    """Repeat each record; copies with the same index share prefixes as the trace's records do."""
    copies = [own_ids(records, f"copy {number}") for number in range(num_copies)]
    for same in zip(*copies, strict=True):
        yield from same


def run_scaled(trace: Path, num_requests: int, num_copies: int) -> Scaled:
    read = list(start_at_zero(limit(read_trace(trace), num_requests)))
    records = list(copies_of(read, num_copies))
    settings = TwinSettings(
        num_workers=FEWEST_WORKERS * num_copies,
        router="round-robin",
        engine=SimArguments(
            preset="dynamo-mocker",
            block_size=BLOCK_SIZE,
            kv_blocks=NUM_BLOCKS,
            context_length=LONGEST_CONTEXT,
        ),
    )
    few = replace(settings, num_workers=FEWEST_WORKERS)
    run_twin(few, read[:_WARM_UP_REQUESTS], new_tally(few))
    tally = new_tally(settings)
    began_s = time.process_time()
    run_twin(settings, records, tally)
    return Scaled(
        settings.num_workers,
        len(records),
        tally.num_complete,
        time.process_time() - began_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        tally.latencies["ttft"].mean * 1e3,
        tally.latencies["e2e"].mean * 1e3,
    )


if __name__ == "__main__":
    found = run_scaled(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.buffer.write(msgspec.json.encode(found))
