"""Hit rates of the KV tiers' eviction policies on traces, by size, beside the best possible.

    KVOLT_TRACES=FOLDER python -m benchmarks.kv.eviction    some minutes; results/eviction.{json,txt}

Traces: Mooncake's conversations from the folder in KVOLT_TRACES (`kvolt trace sources`), whose ids are of 512 tokens,
and kvolt's own chats. Sizes are shares of a trace's distinct blocks. A block is a hit if all blocks before it are;
`best` is Belady's rule on single blocks, an upper bound. (Azure's public traces have no block ids.) Results do not
depend on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from benchmarks.harness import parser_for, report, run, say
from benchmarks.router.gains_runs import mooncake

from kvolt.bench.traces import make_trace
from kvolt.bench.traces.synthetic import RECIPES
from kvolt.bench.traces.tiers import best_hits, found_in_tiers
from kvolt.core.trace import TraceRecord
from kvolt.kv.tiers.eviction import EVICTIONS

SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)


class Row(msgspec.Struct, frozen=True):
    trace: str
    share: float
    capacity: int
    best: float
    rates: dict[str, float]


def rows_of(name: str, records: Sequence[TraceRecord], shares: Sequence[float]) -> list[Row]:
    num_distinct = len({block for record in records for block in record.hash_ids})
    rows = []
    for share in shares:
        capacity = max(int(share * num_distinct), 1)
        num_requested, num_best = best_hits(records, capacity)
        rates = {rule: found_in_tiers(records, [capacity], rule).hit_rate for rule in EVICTIONS}
        rows.append(Row(name, share, capacity, num_best / num_requested, rates))
        say(text_of(rows[-1]))
    return rows


def text_of(row: Row) -> str:
    rates = "  ".join(
        f"{rule} {rate:6.1%} ({rate / row.best if row.best else 1:4.0%} of best)"
        for rule, rate in row.rates.items()
    )
    return f"{row.trace:10} {row.share:5.0%} = {row.capacity:>7,} blocks  best {row.best:6.1%}  {rates}"


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    traces: dict[str, Sequence[TraceRecord]] = {}
    if not options.smoke and (public := mooncake()) is not None:
        traces["mooncake"] = public
    num_requests = 300 if options.smoke else 10_000
    traces["chat"] = list(make_trace(msgspec.structs.replace(RECIPES["chat"], requests=num_requests)))
    shares = SHARES[1::2] if options.smoke else SHARES
    rows = [row for name, records in traces.items() for row in rows_of(name, records, shares)]
    report(options, "\n".join(map(text_of, rows)), {"rows": rows})


if __name__ == "__main__":
    run(main)
