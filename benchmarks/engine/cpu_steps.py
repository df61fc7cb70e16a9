"""A step log of the native engine on this CPU under a mixed load, for `kvolt fit`.

    python -m benchmarks.engine.cpu_steps          writes results/cpu_steps.jsonl

Poisson arrivals at three rates, prompts of 20 to 2000 tokens, answers of 10 to 120, SmolLM2-135M with its defaults.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.harness import parser_for, run
from benchmarks.processes import small_model

from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.loading import load_core

RATES_PER_S, PART_S = (0.3, 0.8, 1.5), 40.0
"""Duration of each arrival rate, in seconds."""
PROMPT, ANSWER = (20, 2000), (10, 120)
RESULTS = Path(__file__).parent / "results" / "cpu_steps.jsonl"


def arrivals(part_s: float, vocabulary: int, shrink: int) -> Iterator[tuple[float, Request]]:
    rng, at = random.Random(0), 0.0
    for part, rate in enumerate(rate * shrink for rate in RATES_PER_S):
        while at < (part + 1) * part_s:
            at += rng.expovariate(rate)
            length = max(4, int(math.exp(rng.uniform(*map(math.log, PROMPT)))) // shrink)
            yield (
                at,
                Request(
                    request_id=RequestId(f"r{at:.6f}"),
                    model="m",
                    token_ids=tuple(rng.randrange(vocabulary) for _ in range(length)),
                    sampling=Sampling(temperature=0.0),
                    stop=StopConditions(max_tokens=rng.randint(*ANSWER) // shrink, ignore_eos=True),
                ),
            )


def answer_all(core: EngineCore, arrived: Iterable[tuple[float, Request]]) -> int:
    """Answer all requests and return their number."""
    pending = list(arrived)[::-1]
    num_requests = len(pending)
    started = time.perf_counter()
    while pending or core.has_work:
        now = time.perf_counter() - started
        while pending and pending[-1][0] <= now:
            core.submit(pending.pop()[1])
        if core.has_work:
            core.step()
        elif pending:
            time.sleep(pending[-1][0] - now)
    return num_requests


def main() -> None:
    options = parser_for(__file__, __doc__, results=None).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = options.out or (Path(folder) / "steps.jsonl" if options.smoke else RESULTS)
        log.unlink(missing_ok=True)
        arguments = NativeArguments(device="cpu", threads=2, step_log=str(log))
        model = small_model(Path(folder), options.smoke)
        core = load_core(EngineSpec(model=model, role=Role.AGGREGATED), arguments)
        part_s, shrink = (0.1, 10) if options.smoke else (PART_S, 1)
        try:
            arrived = arrivals(part_s, core.runner.model.config.vocab_size, shrink)
            num_requests = answer_all(core, arrived)
        finally:
            core.close()
        print(f"{num_requests} requests, {len(log.read_bytes().splitlines()) - 1} steps in {log}")


if __name__ == "__main__":
    run(main)
