"""Which rule of eviction a KV tier should have: hit rates on traces by rule and size, beside the best that is possible.

    KVOLT_TRACES=FOLDER python -m benchmarks.kv.eviction    some minutes; results/eviction.{json,txt}

Trace: Mooncake's conversations from the folder that KVOLT_TRACES names (`kvolt trace sources`), whose ids are of 512
tokens, and the project's own chats. Sizes are shares of the different blocks of a trace. A block is a hit
where all before it are; `best` is Belady's rule on single blocks, which nobody can pass. (Azure's public traces have no
block ids: nothing can be found in them.) Nothing depends on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from benchmarks.router.gains_runs import mooncake

from kvolt.bench.traces import make_trace
from kvolt.bench.traces.synthetic import RECIPES
from kvolt.bench.traces.tiers import best_hits, found_in_tiers
from kvolt.core.trace import TraceRecord
from kvolt.kv.tiers.eviction import EVICTIONS

RESULTS = Path(__file__).parent / "results"
SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)


class Row(msgspec.Struct, frozen=True):
    trace: str
    share: float
    capacity: int
    best: float
    rates: dict[str, float]


def rows_of(name: str, records: Sequence[TraceRecord]) -> list[Row]:
    num_different = len({block for record in records for block in record.hash_ids})
    rows = []
    for share in SHARES:
        capacity = max(int(share * num_different), 1)
        num_asked, num_best = best_hits(records, capacity)
        rates = {rule: found_in_tiers(records, [capacity], rule).hit_rate for rule in EVICTIONS}
        rows.append(Row(name, share, capacity, num_best / num_asked, rates))
        print(text_of(rows[-1]), file=sys.stderr, flush=True)
    return rows


def text_of(row: Row) -> str:
    rates = "  ".join(
        f"{rule} {rate:6.1%} ({rate / row.best if row.best else 1:4.0%} of best)"
        for rule, rate in row.rates.items()
    )
    return f"{row.trace:10} {row.share:5.0%} = {row.capacity:>7,} blocks  best {row.best:6.1%}  {rates}"


def main() -> int:
    traces: dict[str, Sequence[TraceRecord]] = {}
    if (public := mooncake()) is not None:
        traces["mooncake"] = public
    traces["chat"] = list(make_trace(msgspec.structs.replace(RECIPES["chat"], requests=10_000)))
    rows = [row for name, records in traces.items() for row in rows_of(name, records)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "eviction.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    (RESULTS / "eviction.txt").write_text("\n".join(map(text_of, rows)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
