"""Request traces: arrival times, lengths and prefix hashes, without text. Reading, writing, transforming, generating.

`prefixes`, `transforms`, `tokens`, `reuse` and `analysis` are pure; `reading`, `writing` and `sources` access files;
`synthetic` uses its own seeded generator.
"""

from kvolt.bench.traces.analysis import analyze
from kvolt.bench.traces.prefixes import reblock
from kvolt.bench.traces.reading import ReadOptions, read_trace
from kvolt.bench.traces.reuse import Reuse, ReuseMeter
from kvolt.bench.traces.sources import PUBLIC_TRACES, find_public
from kvolt.bench.traces.synthetic import RECIPES, Given, Lognormal, Recipe, make_trace, small_trace
from kvolt.bench.traces.tokens import tokens_of
from kvolt.bench.traces.transforms import (
    LengthBounds,
    cut,
    filter_lengths,
    limit,
    merge,
    own_ids,
    renumber,
    sample,
    scale_time,
    shift,
    sort_by_time,
    start_at_zero,
)
from kvolt.bench.traces.writing import write_trace

__all__ = [
    "PUBLIC_TRACES",
    "RECIPES",
    "Given",
    "LengthBounds",
    "Lognormal",
    "ReadOptions",
    "Recipe",
    "Reuse",
    "ReuseMeter",
    "analyze",
    "cut",
    "filter_lengths",
    "find_public",
    "limit",
    "make_trace",
    "merge",
    "own_ids",
    "read_trace",
    "reblock",
    "renumber",
    "sample",
    "scale_time",
    "shift",
    "small_trace",
    "sort_by_time",
    "start_at_zero",
    "tokens_of",
    "write_trace",
]
