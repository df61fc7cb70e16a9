"""Prefill and decode rates of SmolLM2-135M on the CPU: kvolt beside vLLM, transformers and llama.cpp.

    python -m benchmarks.engine.cpu                      all systems, batches of 1, 8 and 32, 3 rounds
    python -m benchmarks.engine.cpu --systems kvolt,kvolt:quantize=int8,transformers-bf16

Peers come from `benchmarks/engine/peers/install`; one that is not there is named and left out. Every system is a
process of its own that stays up; they take turns, batch by batch, in an order that shifts from round to round.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
from benchmarks.engine import cpu_report, cpu_systems
from benchmarks.engine.cpu_report import Row
from benchmarks.engine.cpu_systems import Broken, Missing, System
from benchmarks.engine.cpu_workload import prompts, vocabulary_words
from benchmarks.harness import BrokenRun, numbers, parser_for, run, say
from benchmarks.harness import Missing as NotInstalled
from benchmarks.harness import report as write_report
from benchmarks.processes import NoiseMeter, small_model

_WARM_UP_OUTPUT = 4


class Plan(msgspec.Struct, frozen=True):
    """What to measure."""

    systems: tuple[str, ...]
    batches: tuple[int, ...]
    rounds: int
    prompt_tokens: int
    output_tokens: int
    threads: int


def measure(system: System, plan: Plan, words: list[int], batch: int, round_number: int) -> Row:
    """Two batches: one ends at the first token and is nothing but prefill, one goes on to decode."""
    meter = NoiseMeter(system.pid)
    first = prompts(words, batch, plan.prompt_tokens, f"{round_number}/prefill")
    prefilled = system.generate(first, 1)
    second = prompts(words, batch, plan.prompt_tokens, f"{round_number}/decode")
    decoded = system.generate(second, plan.output_tokens)
    return Row(
        round=round_number,
        system=system.name,
        batch=batch,
        prefill_per_s=cpu_report.prefill_per_s(prefilled, batch * plan.prompt_tokens),
        decode_per_s=cpu_report.decode_per_s(decoded),
        whole_s=max(times[-1] for times in decoded.times),
        others_cores=meter.notes().other_cores,
        first_tokens=tuple(tokens[0] for answer in (prefilled, decoded) for tokens in answer.tokens),
    )


class Bench:
    """The systems that run, and what was found."""

    def __init__(self, plan: Plan, words: list[int], logs: Path) -> None:
        self.plan = plan
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        self.about: dict[str, object] = {}
        self._words = words
        self._logs = logs
        self._running: list[System] = []

    def run(self) -> None:
        try:
            for name in self.plan.systems:
                self._start(name)
            for round_number in range(self.plan.rounds):
                for batch in self.plan.batches:
                    self._turn(round_number, batch)
        finally:
            for system in self._running:
                system.close()

    def _start(self, name: str) -> None:
        say(f"{name}: starting")
        try:
            system = System.start(name, self.plan.threads, self._logs)
        except Missing as error:
            self.left_out.append(str(error))
            say(f"left out: {error}")
            return
        self._running.append(system)
        self.about[name] = system.about
        try:
            for batch in self.plan.batches:
                given = prompts(self._words, batch, self.plan.prompt_tokens, "warm-up")
                system.generate(given, _WARM_UP_OUTPUT)
        except Broken as error:
            self._drop(system, error)

    def _turn(self, round_number: int, batch: int) -> None:
        shift = round_number % max(1, len(self._running))
        for system in self._running[shift:] + self._running[:shift]:
            try:
                row = measure(system, self.plan, self._words, batch, round_number)
            except (Broken, cpu_report.NoWindow) as error:
                self._drop(system, error)
                continue
            self.rows.append(row)
            say(
                f"round {round_number + 1}/{self.plan.rounds}  batch {batch:2}  {system.name:18}"
                f"  prefill {row.prefill_per_s:7,.0f}  decode {row.decode_per_s:6,.1f}"
                f"  whole {row.whole_s:5.1f} s  others {row.others_cores:.2f} cores"
            )

    def _drop(self, system: System, error: Exception) -> None:
        self.left_out.append(f"{system.name}: broke off: {error}")
        say(f"left out: {self.left_out[-1]}")
        self._running.remove(system)
        system.close()


def report(bench: Bench) -> str:
    plan = bench.plan
    about = (
        f"SmolLM2-135M-Instruct, {plan.prompt_tokens} prompt and {plan.output_tokens} output tokens per sequence, "
        f"{plan.threads} threads, {plan.rounds} rounds: median (lowest..highest)"
    )
    parts = [about, cpu_report.cpu_table(bench.rows, plan.systems)]
    parts += ["\n".join(lines) for lines in (cpu_report.cpu_goals(bench.rows),) if lines]
    parts.append(cpu_report.noise(bench.rows))
    parts += [f"left out: {line}" for line in bench.left_out]
    parts.append("\n".join(f"{name}: {about}" for name, about in bench.about.items()))
    return "\n\n".join(parts)


def main() -> None:
    parser = parser_for(__file__, __doc__)
    add = parser.add_argument
    add("--systems", default=",".join(cpu_systems.DEFAULT), help="separated by spaces or commas")
    add("--batches", type=numbers, default=(1, 8, 32))
    add("--rounds", type=int, default=3)
    add("--prompt", type=int, default=512)
    add("--output", type=int, default=64)
    add("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.smoke:
        options.systems, options.batches, options.rounds = cpu_systems.KVOLT, (1, 2), 1
        options.prompt, options.output = 16, 4
    elif not cpu_systems.FOLDER.exists() or not cpu_systems.GGUF.exists():
        raise NotInstalled("weights: run benchmarks/engine/peers/install weights")
    plan = Plan(
        systems=cpu_systems.split_names(options.systems),
        batches=options.batches,
        rounds=options.rounds,
        prompt_tokens=options.prompt,
        output_tokens=options.output,
        threads=options.threads,
    )
    # With fewer threads than cores, as many cores: children inherit the affinity.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: plan.threads])
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        if options.smoke:
            cpu_systems.use_model(Path(small_model(Path(folder), smoke=True)))
            words = list(range(3, 200))
        else:
            words = vocabulary_words(cpu_systems.FOLDER)
        bench = Bench(plan, words, Path(folder))
        bench.run()
    if not bench.rows:
        raise BrokenRun("; ".join(bench.left_out))
    results = {"plan": plan, "systems": bench.about, "left_out": bench.left_out, "rows": bench.rows}
    write_report(options, report(bench), results)


if __name__ == "__main__":
    run(main)
