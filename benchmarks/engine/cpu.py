"""Prefill and decode rates of SmolLM2-135M on the CPU: kvolt beside vLLM, transformers and llama.cpp.

    python -m benchmarks.engine.cpu                      all systems, batches of 1, 8 and 32, 3 rounds
    python -m benchmarks.engine.cpu --systems kvolt kvolt:quantize=int8 transformers-bf16

`benchmarks/engine/peers/install` installs the peers; a missing one is reported and skipped. Each system runs in its own
process for the whole benchmark. The systems alternate batch by batch, in an order that rotates with each round.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from benchmarks.engine import cpu_systems
from benchmarks.engine.cpu_systems import REFERENCE, TRANSFORMERS, Batch, System, is_kvolt
from benchmarks.harness import (
    BrokenRun,
    Figure,
    Missing,
    Rows,
    goal,
    numbers,
    parser_for,
    report,
    run,
    say,
    spread,
    table,
)
from benchmarks.meters import NoiseMeter
from benchmarks.processes import small_model

GOAL_OF_BEST = 1.3
GOAL_OF_BEST_FROM_BATCH = 8
_NOISE_CORES = 0.15
_WARM_UP_OUTPUT = 4
_SPACE = "\u0120"
"""The space before a word in byte-level vocabularies."""


class Plan(msgspec.Struct, frozen=True):
    """Systems, batch sizes and rounds to measure."""

    systems: tuple[str, ...]
    batches: tuple[int, ...]
    rounds: int = 3
    prompt_tokens: int = 512
    output_tokens: int = 64
    threads: int = 2


class Row(msgspec.Struct, frozen=True):
    """One system at one batch size in one round."""

    round: int
    system: str
    batch: int
    prefill_per_s: float
    decode_per_s: float
    whole_s: float
    """Time from submitting the decode batch to its last token."""
    others_cores: float
    """Cores used by other processes during the batch."""
    first_tokens: tuple[int, ...]
    """First token of each sequence. Systems that do the same work agree on it, except for near ties."""


# --- prompts: each word is one token, and no two sequences share a prefix, so that no prefix cache helps


def vocabulary_words(folder: Path) -> list[int]:
    """Tokens of the model in `folder` that are a space and a lower-case ASCII word."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = {
        text.removeprefix(_SPACE): token for text, token in vocabulary.items() if text.startswith(_SPACE)
    }
    return sorted(
        token
        for word, token in words.items()
        if len(word) > 2 and word.isascii() and word.isalpha() and word.islower()
    )


def prompts(words: list[int], batch: int, length: int, name: str) -> list[list[int]]:
    """A batch of prompts, determined by `name`."""
    return [random.Random(f"{name}/{batch}/{number}").choices(words, k=length) for number in range(batch)]


def decode_per_s(answer: Batch) -> float:
    """Decode rate in tokens per second while the whole batch decodes.

    Measured from the last sequence's first token to the end of the first sequence. Where all sequences start and end
    together, these are all tokens except the first."""
    start = max(times[0] for times in answer.times)
    end = min(times[-1] for times in answer.times)
    if end <= start:
        raise BrokenRun("its first sequence ended before its last one began: ask for more output tokens")
    return sum(start < time <= end for times in answer.times for time in times) / (end - start)


def measure(system: System, plan: Plan, words: list[int], batch: int, number: int) -> Row:
    """Measure two batches: one of prefill only, which ends at the first token, and one that also decodes."""
    meter = NoiseMeter(system.pid)
    prefilled = system.generate(prompts(words, batch, plan.prompt_tokens, f"{number}/prefill"), 1)
    second = prompts(words, batch, plan.prompt_tokens, f"{number}/decode")
    decoded = system.generate(second, plan.output_tokens)
    return Row(
        round=number,
        system=system.name,
        batch=batch,
        prefill_per_s=batch * plan.prompt_tokens / max(times[0] for times in prefilled.times),
        decode_per_s=decode_per_s(decoded),
        whole_s=max(times[-1] for times in decoded.times),
        others_cores=meter.notes().other_cores,
        first_tokens=tuple(tokens[0] for answer in (prefilled, decoded) for tokens in answer.tokens),
    )


class Bench:
    """The running systems and their results. A system that fails is skipped in later rounds."""

    def __init__(self, plan: Plan, words: list[int]) -> None:
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        self.about: dict[str, object] = {}
        self._plan = plan
        self._words = words
        self._running: list[System] = []

    def run(self) -> None:
        plan = self._plan
        try:
            for name in plan.systems:
                self._start(name)
            for number in range(plan.rounds):
                for batch in plan.batches:
                    shift = number % max(1, len(self._running))
                    for system in self._running[shift:] + self._running[:shift]:
                        self._turn(system, batch, number)
        finally:
            for system in self._running:
                system.stop()

    def _start(self, name: str) -> None:
        say(f"{name}: starting")
        try:
            system = System(name, self._plan.threads)
        except BrokenRun as error:
            self.left_out.append(str(error))
            return
        self._running.append(system)
        self.about[name] = system.about
        for batch in self._plan.batches:
            warm_up = prompts(self._words, batch, self._plan.prompt_tokens, "warm-up")
            try:
                system.generate(warm_up, _WARM_UP_OUTPUT)
            except BrokenRun as error:
                self._drop(system, error)
                return

    def _turn(self, system: System, batch: int, number: int) -> None:
        try:
            self.rows.append(measure(system, self._plan, self._words, batch, number))
        except BrokenRun as error:
            self._drop(system, error)
        else:
            shown = "  ".join(f"{each.title} {each.value(self.rows[-1]):,.1f}" for each in (*RATES, _WHOLE))
            say(f"round {number + 1}/{self._plan.rounds}  batch {batch:2}  {system.name:18}  {shown}")

    def _drop(self, system: System, error: Exception) -> None:
        self.left_out.append(f"{system.name}: broke off: {error}")
        self._running.remove(system)
        system.stop()


def main() -> None:
    parser = parser_for(__file__, __doc__)
    parser.add_argument("--systems", nargs="+", default=cpu_systems.DEFAULT, metavar="SYSTEM[:KEY=VALUE,...]")
    parser.add_argument("--batches", type=numbers, default=(1, 8, 32))
    options = parser.parse_args()
    plan = Plan(tuple(options.systems), options.batches)
    if options.smoke:
        plan = Plan((cpu_systems.KVOLT,), (1, 2), 1, 16, 4)
    elif not cpu_systems.FOLDER.exists() or not cpu_systems.GGUF.exists():
        raise Missing("weights: run benchmarks/engine/peers/install weights")
    # With fewer threads than cores, as many cores: children inherit the affinity.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: plan.threads])
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        if options.smoke:
            cpu_systems.use_model(Path(small_model(Path(folder), smoke=True)))
        bench = Bench(plan, list(range(3, 200)) if options.smoke else vocabulary_words(cpu_systems.FOLDER))
        bench.run()
    if not bench.rows:
        raise BrokenRun("; ".join(bench.left_out))
    about = (
        f"SmolLM2-135M-Instruct, {plan.prompt_tokens} prompt and {plan.output_tokens} output tokens per sequence, "
        f"{plan.threads} threads, {plan.rounds} rounds: median (lowest..highest)"
    )
    left_out = (f"left out: {line}" for line in bench.left_out)
    systems = "\n".join(f"{name}: {about}" for name, about in bench.about.items())
    results = {"plan": plan, "systems": bench.about, "left_out": bench.left_out, "rows": bench.rows}
    report(options, "\n\n".join([about, text(bench.rows), noise(bench.rows), *left_out, systems]), results)


# --- the report

RATES = (Figure("prefill tok/s", "prefill_per_s", ",.0f"), Figure("decode tok/s", "decode_per_s", ",.1f"))
_WHOLE = Figure("whole s", "whole_s", ".1f")


def text(rows: Sequence[Row]) -> str:
    """Report as text. `kvolt x`: rate of the first kvolt system over the row's in the same round."""
    main = next((row.system for row in rows if is_kvolt(row.system)), "")
    body, goals = [], []
    for batch, here in sorted(Rows(rows).each("batch")):
        ours, reference = here.where(system=main), here.where(system=REFERENCE)
        for system, mine in here.each("system"):
            ratios = [ours.over(mine, rate) if system != main else None for rate in RATES]
            rates = [each for pair in zip(mine.cells(RATES), ratios, strict=True) for each in pair]
            body.append((str(batch), system, *rates, *mine.cells([_WHOLE]), _agreement(mine, reference)))
        peers = here.only(lambda row: not is_kvolt(row.system))
        for rate in RATES:
            what = f"{rate.title.removesuffix(' tok/s')} at batch {batch}"
            ahead = ours.over(_best(peers.only(lambda row: row.system in TRANSFORMERS), rate), rate)
            if ahead:
                goals.append(goal(f"{what}: ahead of transformers", ahead.median > 1, f"{ahead.text()} x"))
            best = ours.over(_best(peers, rate), rate)
            if best and batch >= GOAL_OF_BEST_FROM_BATCH:
                name = f"{what}: within {GOAL_OF_BEST:g} x of the best peer"
                goals.append(goal(name, best.median >= 1 / GOAL_OF_BEST, f"{best.text()} x"))
    head = "batch | system | prefill tok/s | kvolt x | decode tok/s | kvolt x | whole s | same 1st"
    return "\n\n".join(filter(None, [table(head, body), "\n".join(goals)]))


def _best(peers: Rows[Row], rate: Figure) -> Rows[Row]:
    """Highest rate of each round."""
    return Rows([max(mine.rows, key=rate.value) for _, mine in peers.each("round")])


def _agreement(mine: Rows[Row], reference: Rows[Row]) -> str | None:
    """Number of sequences whose first token equals the reference's."""
    first = {row.round: row.first_tokens for row in reference.rows}
    pairs = [
        pair for row in mine.rows for pair in zip(row.first_tokens, first.get(row.round, ()), strict=False)
    ]
    return f"{sum(here == there for here, there in pairs)}/{len(pairs)}" if pairs else None


def noise(rows: Sequence[Row]) -> str:
    others = spread([row.others_cores for row in rows])
    text = f"other processes kept {others.median:.2f} cores busy (most: {others.high:.2f})"
    return text if others.high < _NOISE_CORES else f"{text}: not a quiet machine, do not quote these figures"


if __name__ == "__main__":
    run(main)
