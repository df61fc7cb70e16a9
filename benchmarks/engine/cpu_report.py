"""Rows to a table, ratios and goals. A ratio is taken within a round, where both sides met the same machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from benchmarks.engine.cpu_systems import REFERENCE, TRANSFORMERS, Batch, is_kvolt
from benchmarks.harness import Spread, goal, spread, table

GOAL_OF_BEST = 1.3
GOAL_OF_BEST_FROM_BATCH = 8
_NOISE_CORES = 0.15


class NoWindow(Exception):
    """A batch of which never all sequences were decoding."""


class Row(msgspec.Struct, frozen=True):
    """One system at one batch size in one round."""

    round: int
    system: str
    batch: int
    prefill_per_s: float
    decode_per_s: float
    whole_s: float
    """From handing over the batch that decodes to its last token."""
    others_cores: float
    """Cores that processes other than the system used at the same time."""
    first_tokens: tuple[int, ...]
    """First token of each sequence: what systems that do the same work agree on, up to near ties."""


Rate = Callable[[Row], float]


def _prefill(row: Row) -> float:
    return row.prefill_per_s


def _decode(row: Row) -> float:
    return row.decode_per_s


RATES: dict[str, Rate] = {"prefill": _prefill, "decode": _decode}


def prefill_per_s(answer: Batch, prompt_tokens: int) -> float:
    """Tokens of all prompts over the time until every sequence had its first token."""
    return prompt_tokens / max(times[0] for times in answer.times)


def decode_per_s(answer: Batch) -> float:
    """Tokens per second while the whole batch decodes: after the last sequence got its first token, until the first
    sequence ends. Where all start and end together that is all tokens but the first."""
    start = max(times[0] for times in answer.times)
    end = min(times[-1] for times in answer.times)
    if end <= start:
        raise NoWindow("its first sequence ended before its last one began: ask for more output tokens")
    return sum(start < time <= end for times in answer.times for time in times) / (end - start)


def cpu_table(rows: Sequence[Row], systems: Sequence[str]) -> str:
    """kvolt x: kvolt's rate over that of the row in the same round; above 1 kvolt is ahead."""
    head = "batch | system | prefill tok/s | kvolt x | decode tok/s | kvolt x | whole s | same 1st"
    body = []
    for batch in sorted({row.batch for row in rows}):
        for system in systems:
            mine = [row for row in rows if (row.batch, row.system) == (batch, system)]
            if not mine:
                continue
            body.append(
                (
                    str(batch),
                    system,
                    spread([row.prefill_per_s for row in mine]).text(",.0f"),
                    _text(_kvolt_over(mine, rows, _prefill)),
                    spread([row.decode_per_s for row in mine]).text(",.1f"),
                    _text(_kvolt_over(mine, rows, _decode)),
                    spread([row.whole_s for row in mine]).text(".1f"),
                    _agreement(mine, rows),
                )
            )
    return table(head, body)


def _text(value: Spread | None) -> str:
    return "-" if value is None else value.text()


def _kvolt_over(mine: Sequence[Row], rows: Sequence[Row], rate: Rate) -> Spread | None:
    """The first system named is kvolt's main one; others of kvolt are rows like any."""
    main = next((row.system for row in rows if is_kvolt(row.system)), None)
    if main is None or mine[0].system == main:
        return None
    kvolt = {row.round: rate(row) for row in rows if (row.system, row.batch) == (main, mine[0].batch)}
    values = [kvolt[row.round] / rate(row) for row in mine if row.round in kvolt]
    return spread(values) if values else None


def _agreement(mine: Sequence[Row], rows: Sequence[Row]) -> str:
    """How many sequences have the first token that the reference gave them."""
    reference = {
        row.round: row.first_tokens for row in rows if (row.system, row.batch) == (REFERENCE, mine[0].batch)
    }
    pairs = [
        (here, there)
        for row in mine
        for here, there in zip(row.first_tokens, reference.get(row.round, ()), strict=False)
    ]
    return f"{sum(here == there for here, there in pairs)}/{len(pairs)}" if pairs else "-"


def cpu_goals(rows: Sequence[Row]) -> list[str]:
    """Each held by the median over the rounds of the ratio within a round, for kvolt's first system."""
    main = next((row.system for row in rows if is_kvolt(row.system)), None)
    told = []
    for batch in sorted({row.batch for row in rows}):
        for what, rate in RATES.items():
            here = [row for row in rows if row.batch == batch]
            ahead = _over_best(here, main, rate, lambda name: name in TRANSFORMERS)
            if ahead is not None:
                text = f"{what} at batch {batch}: ahead of transformers"
                told.append(goal(text, ahead.median > 1, f"{ahead.text()} x"))
            best = _over_best(here, main, rate, lambda name: not is_kvolt(name))
            if best is not None and batch >= GOAL_OF_BEST_FROM_BATCH:
                text = f"{what} at batch {batch}: within {GOAL_OF_BEST:g} x of the best peer"
                told.append(goal(text, best.median >= 1 / GOAL_OF_BEST, f"{best.text()} x"))
    return told


def _over_best(
    rows: Sequence[Row], main: str | None, rate: Rate, is_peer: Callable[[str], bool]
) -> Spread | None:
    values = []
    for row in rows:
        peers = [rate(peer) for peer in rows if peer.round == row.round and is_peer(peer.system)]
        if row.system == main and peers:
            values.append(rate(row) / max(peers))
    return spread(values) if values else None


def noise(rows: Sequence[Row]) -> str:
    worst = max(row.others_cores for row in rows)
    median = spread([row.others_cores for row in rows]).median
    told = f"other processes kept {median:.2f} cores busy (most: {worst:.2f})"
    return told if worst < _NOISE_CORES else f"{told}: not a quiet machine, do not quote these figures"
