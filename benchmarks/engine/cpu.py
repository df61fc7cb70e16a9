"""Prefill and decode rates of SmolLM2-135M on the CPU: kvolt beside vLLM, transformers and llama.cpp.

    python -m benchmarks.engine.cpu                      all systems, batches of 1, 8 and 32, 3 rounds
    python -m benchmarks.engine.cpu --quick              a first look
    python -m benchmarks.engine.cpu --systems kvolt,kvolt:quantize=int8,transformers-bf16

Peers come from `benchmarks/engine/peers/install`; one that is not there is named and left out. Every system is a
process of its own that stays up; they take turns, batch by batch, in an order that shifts from round to round.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
from benchmarks.engine import cpu_report, cpu_systems
from benchmarks.engine.cpu_report import Row
from benchmarks.engine.cpu_systems import Broken, Missing, System
from benchmarks.engine.cpu_workload import prompts, vocabulary_words
from benchmarks.runtime.report import machine

_WARM_UP_OUTPUT = 4
_RESULTS = Path(__file__).parent / "results" / "cpu"


class Plan(msgspec.Struct, frozen=True):
    """What to measure."""

    systems: tuple[str, ...]
    batches: tuple[int, ...]
    rounds: int
    prompt_tokens: int
    output_tokens: int
    threads: int


class Meter:
    """Cores kept busy by processes outside a system's own, from its making to `others`."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._start = time.perf_counter()
        self._busy, self._own = self._machine_s(), self._own_s()

    def others(self) -> float:
        wall = time.perf_counter() - self._start
        foreign = (self._machine_s() - self._busy) - (self._own_s() - self._own)
        return max(0.0, foreign / wall)

    @staticmethod
    def _machine_s() -> float:
        times = psutil.cpu_times()
        return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)

    def _own_s(self) -> float:
        family = (self._process, *self._process.children(recursive=True))
        return float(sum(sum(each.cpu_times()[:2]) for each in family))


def measure(system: System, plan: Plan, words: list[int], batch: int, round_number: int) -> Row:
    """Two batches: one ends at the first token and is nothing but prefill, one goes on to decode."""
    meter = Meter(system.pid)
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
        others_cores=meter.others(),
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
        _tell(f"{name}: starting")
        try:
            system = System.start(name, self.plan.threads, self._logs)
        except Missing as error:
            self.left_out.append(str(error))
            _tell(f"left out: {error}")
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
            _tell(
                f"round {round_number + 1}/{self.plan.rounds}  batch {batch:2}  {system.name:18}"
                f"  prefill {row.prefill_per_s:7,.0f}  decode {row.decode_per_s:6,.1f}"
                f"  whole {row.whole_s:5.1f} s  others {row.others_cores:.2f} cores"
            )

    def _drop(self, system: System, error: Exception) -> None:
        self.left_out.append(f"{system.name}: broke off: {error}")
        _tell(f"left out: {self.left_out[-1]}")
        self._running.remove(system)
        system.close()


def report(bench: Bench, command: str) -> str:
    plan = bench.plan
    about = (
        f"SmolLM2-135M-Instruct, {plan.prompt_tokens} prompt and {plan.output_tokens} output tokens per sequence, "
        f"{plan.threads} threads, {plan.rounds} rounds: median (lowest..highest)"
    )
    parts = [f"$ {command}", about, cpu_report.cpu_table(bench.rows, plan.systems)]
    parts += ["\n".join(lines) for lines in (cpu_report.cpu_goals(bench.rows),) if lines]
    parts.append(cpu_report.noise(bench.rows))
    parts += [f"left out: {line}" for line in bench.left_out]
    parts.append("\n".join(f"{name}: {told}" for name, told in bench.about.items()))
    return "\n\n".join(parts)


def save(bench: Bench, command: str, text: str, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "command": command,
        "machine": machine(),
        "plan": bench.plan,
        "systems": bench.about,
        "left_out": bench.left_out,
        "rows": bench.rows,
    }
    out.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    out.with_suffix(".txt").write_text(text + "\n")
    _tell(f"kept as {out.with_suffix('.json')} and .txt")


def parse(argv: Sequence[str]) -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.cpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--systems", default=",".join(cpu_systems.DEFAULT), help="separated by spaces or commas"
    )
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="one round, batches 1 and 8, 16 output tokens; not kept"
    )
    parser.add_argument("--out", type=Path, default=None, help="where to keep it; .json and .txt are added")
    given = parser.parse_args(argv)
    quick = given.quick
    plan = Plan(
        systems=cpu_systems.split_names(given.systems),
        batches=(1, 8) if quick else tuple(int(text) for text in given.batches.split(",")),
        rounds=1 if quick else given.rounds,
        prompt_tokens=given.prompt,
        output_tokens=16 if quick else given.output,
        threads=given.threads,
    )
    return plan, given.out or (None if quick else _RESULTS)


def main(argv: Sequence[str]) -> int:
    plan, out = parse(argv)
    if not cpu_systems.FOLDER.exists() or not cpu_systems.GGUF.exists():
        print("no weights: run benchmarks/engine/peers/install weights", file=sys.stderr)
        return 2
    # Whoever asks for fewer threads than there are cores gets as many cores: children inherit it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: plan.threads])
    command = shlex.join(("python", "-m", "benchmarks.engine.cpu", *argv))
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as logs:
        bench = Bench(plan, vocabulary_words(cpu_systems.FOLDER), Path(logs))
        bench.run()
    if not bench.rows:
        print("nothing was measured", file=sys.stderr)
        return 1
    text = report(bench, command)
    print(text)
    if out is not None:
        save(bench, command, text, out)
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
