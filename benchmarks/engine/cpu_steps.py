"""A step log of the native engine on this CPU under a mixed load, for `kvolt fit`.

    python -m benchmarks.engine.cpu_steps --out benchmarks/engine/results/cpu_steps.jsonl

Poisson arrivals at three rates, prompts of 20 to 2000 tokens, answers of 10 to 120, SmolLM2-135M with its defaults.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.loading import load_core

MODEL = "smollm2-135m"
RATES_PER_S = (0.3, 0.8, 1.5)
PROMPT, ANSWER = (20, 2000), (10, 120)


def arrivals(part_s: float, vocabulary: int, seed: int) -> Iterator[tuple[float, Request]]:
    rng = random.Random(seed)
    at = 0.0
    for part, rate in enumerate(RATES_PER_S):
        while at < (part + 1) * part_s:
            at += rng.expovariate(rate)
            length = int(math.exp(rng.uniform(*map(math.log, PROMPT))))
            yield (
                at,
                Request(
                    request_id=RequestId(f"r{at:.6f}"),
                    model=MODEL,
                    token_ids=tuple(rng.randrange(vocabulary) for _ in range(length)),
                    sampling=Sampling(temperature=0.0),
                    stop=StopConditions(max_tokens=rng.randint(*ANSWER), ignore_eos=True),
                ),
            )


def run(core: EngineCore, part_s: float, seed: int) -> int:
    """All of them, answered; how many."""
    pending = list(arrivals(part_s, core.runner.model.config.vocab_size, seed))[::-1]
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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the log; replaced")
    parser.add_argument("--seconds", type=float, default=40.0, help="for each of the rates")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    given.out.unlink(missing_ok=True)
    arguments = NativeArguments(device="cpu", threads=given.threads, step_log=str(given.out))
    core = load_core(EngineSpec(model=MODEL, role=Role.AGGREGATED), arguments)
    try:
        num_requests = run(core, given.seconds, given.seed)
    finally:
        core.close()
    with given.out.open() as log:
        print(f"{num_requests} requests, {sum(1 for _ in log) - 1} steps in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
