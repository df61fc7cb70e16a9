"""Report of the load generators: tables and goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from benchmarks.harness import Spread, goal, spread, table
from benchmarks.load.aiperf import NAME as PEER
from benchmarks.load.client import Delay, Seen
from benchmarks.load.kvolt_bench import NAME as KVOLT

GOAL_COST = 0.1
_WIDEST = 2.0
"""Highest over lowest of one generator's rounds: beyond, the machine was measured."""
_SAME = 0.05
_MIB = 1 << 20


class AgreementRow(msgspec.Struct, frozen=True):
    """One client at the simulated engine in one round."""

    round: int
    client: str
    seen: Seen


class Cost(msgspec.Struct, frozen=True):
    """What a run used, in all and from its first request on."""

    whole_s: float
    work_s: float
    tokens: int


class CostRow(msgspec.Struct, frozen=True):
    """One client under one load in one round: a run with long answers, and one with as many of a single token."""

    round: int
    client: str
    load: str
    long: Cost
    short: Cost

    @property
    def cpu_us_per_token(self) -> float:
        return (self.long.work_s - self.short.work_s) / (self.long.tokens - self.short.tokens) * 1e6

    @property
    def whole_us_per_token(self) -> float:
        """Start, end and requests included."""
        return self.long.whole_s / self.long.tokens * 1e6


class ManyRow(msgspec.Struct, frozen=True):
    """Many streams from one core."""

    streams: int
    peak: int
    """As the server counted them."""
    answers: int
    failed: int
    wall_s: float
    rss_bytes: int
    cost: CostRow


# --- agreement

_DELAYS: tuple[tuple[str, Callable[[Seen], Delay | None]], ...] = (
    ("first token (ttft)", lambda seen: seen.first),
    ("gap between tokens (itl)", lambda seen: seen.gap),
    ("time per token (tpot)", lambda seen: seen.per_token),
)


class AgreementLine(msgspec.Struct, frozen=True):
    figure: str
    ours: Spread
    theirs: Spread
    difference: Spread
    """Ours over theirs, less one, in each round."""

    @property
    def is_same(self) -> bool:
        """Within a few percent, or one spread reaches into the other; wide spreads would reach anything."""
        if max(self.ours.high / self.ours.low, self.theirs.high / self.theirs.low) > _WIDEST:
            return False
        overlaps = self.ours.low <= self.theirs.high and self.theirs.low <= self.ours.high
        return overlaps or abs(self.difference.median) <= _SAME


def agreement_lines(rows: Sequence[AgreementRow]) -> list[AgreementLine]:
    lines = []
    for name, of in _DELAYS:
        for percentile in ("p50", "p90"):

            def values(client: str) -> list[float]:
                found = [of(row.seen) for row in rows if row.client == client]  # noqa: B023 - called at once
                return [getattr(delay, percentile) for delay in found if delay is not None]  # noqa: B023

            ours, theirs = values(KVOLT), values(PEER)
            if not theirs:
                continue
            ratios = [mine / other - 1.0 for mine, other in zip(ours, theirs, strict=True)]
            lines.append(AgreementLine(f"{name} {percentile}", spread(ours), spread(theirs), spread(ratios)))
    return lines


def agreement_text(lines: Sequence[AgreementLine], rows: Sequence[AgreementRow]) -> str:
    head = ("ms", KVOLT, PEER, "difference")
    body = [
        (
            line.figure,
            line.ours.text(),
            line.theirs.text(),
            line.difference.text("+.1%"),
        )
        for line in lines
    ]
    prompts = {row.client: row.seen.input_tokens for row in rows}
    shown = ", ".join(f"{name} {tokens:.0f}" for name, tokens in prompts.items())
    goals = [goal(f"same {line.figure}", line.is_same, f"{line.difference.median:+.1%}") for line in lines]
    return "\n".join([table(head, body), f"prompt tokens of a request: {shown}", *goals])


# --- cost

_TOKENS_ALONE = "of tokens"
_COSTS: tuple[tuple[str, Callable[[CostRow], float]], ...] = (
    (_TOKENS_ALONE, lambda row: row.cpu_us_per_token),
    ("of the whole run", lambda row: row.whole_us_per_token),
)


class CostLine(msgspec.Struct, frozen=True):
    load: str
    figure: str
    clients: dict[str, Spread]
    ratio: Spread | None
    """Ours over theirs in each round: smaller is better."""


def cost_lines(rows: Sequence[CostRow]) -> list[CostLine]:
    lines = []
    for load in dict.fromkeys(row.load for row in rows):
        for figure, of in _COSTS:
            values = {
                name: [of(row) for row in rows if (row.load, row.client) == (load, name)]
                for name in dict.fromkeys(row.client for row in rows)
            }
            ratios = [mine / other for mine, other in zip(values[KVOLT], values.get(PEER, ()), strict=False)]
            clients = {name: spread(found) for name, found in values.items()}
            lines.append(CostLine(load, figure, clients, spread(ratios) if ratios else None))
    return lines


def cost_text(lines: Sequence[CostLine]) -> str:
    names = list(lines[0].clients)
    head = ("load", "CPU us per token", *names, f"{KVOLT} / {PEER}")
    body = [
        (
            line.load,
            line.figure,
            *(line.clients[name].text() for name in names),
            line.ratio.text(".3f") if line.ratio else "-",
        )
        for line in lines
    ]
    goals = [
        goal(
            f"{line.load}: CPU per token at most {GOAL_COST:g} of {PEER}",
            line.ratio.median <= GOAL_COST,
            line.ratio.text(".3f"),
        )
        for line in lines
        if line.figure == _TOKENS_ALONE and line.ratio is not None
    ]
    return "\n".join([table(head, body), *goals])


def many_text(many: ManyRow) -> str:
    long = many.cost.long
    return goal(
        f"{many.streams} streams at once from one core, none failed",
        not many.failed and many.peak == many.answers == many.streams,
        f"{many.answers} whole, {many.peak} at once, {long.tokens / many.wall_s:,.0f} tokens/s, "
        f"{many.cost.cpu_us_per_token:.2f} CPU us per token, {long.whole_s / many.wall_s:.2f} cores, "
        f"{many.rss_bytes / _MIB:.0f} MiB",
    )
