"""Runs an engine through the suite: every tier that it offers, on a real loop, with whatever model it serves.

python -m kvolt.testing.engines.check NAME [--model M] [--arg K=V]      what `kvolt engine check` runs

One line per case: ok, FAILED with the reason, not run (this setup cannot show it), not offered. Exit code 0 when
none failed, 1 when one did, 2 when the engine cannot be built.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvolt.core.card import ModelCard
from kvolt.core.errors import ConfigError, KvoltError
from kvolt.core.request import Role
from kvolt.engines.contract import Engine, EngineSpec, features_of
from kvolt.engines.registry import build_engine, check_arguments, find_engine, merge_arguments
from kvolt.testing.engines.harness import Case, NotRun, engine_run
from kvolt.testing.engines.prompts import Prompts, find_ending_prompt
from kvolt.testing.engines.tiers import TIERS

OK, FAILED, NOT_RUN, NOT_OFFERED = "ok", "FAILED", "not run", "not offered"

_CASE_FACTOR = 10
"""A whole case may take so many times the longest wait within it."""


class CheckHarness:
    """Any registered engine, with prompts made of its model's own vocabulary."""

    def __init__(self, name: str, spec: EngineSpec, arguments: dict[str, Any], deadline_s: float) -> None:
        self._name = name
        self._spec = spec
        self._arguments = arguments
        self.deadline_s = deadline_s
        self.ending: tuple[int, ...] | None = None
        self._prompts: Prompts | None = None

    def engine(self) -> Engine:
        return build_engine(self._name, self._spec, self._arguments)

    def learn(self, card: ModelCard) -> None:
        """Of an engine that has started: its card has the vocabulary."""
        self._prompts = Prompts(card)

    @property
    def prompts(self) -> Prompts:
        assert self._prompts is not None, "an engine first: its card has the vocabulary"
        return self._prompts

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return self.prompts.ordinary(num_tokens)

    def ending_prompt(self) -> tuple[int, ...]:
        if self.ending is None:
            raise NotRun("no prompt known to end (give one with --ending-prompt)")
        return self.ending


async def look(harness: CheckHarness, ending_text: str | None) -> tuple[str, ...]:
    """What the engine offers. Finds the harness a prompt whose answer ends, on the way."""
    async with engine_run(harness) as run:
        harness.learn(run.engine.card)
        given = None if ending_text is None else harness.prompts.encode(ending_text)
        harness.ending = await find_ending_prompt(run, harness.prompts, given)
        if given is not None and harness.ending is None:
            raise ConfigError(
                "the two answers to the ending prompt do not both end by themselves, one after the other",
                key="ending_prompt",
                remedy="give another one: 128 tokens at most, answers of 2 to 64 tokens",
            )
        return run.info.features or features_of(run.engine)


async def run_case(case: Case, harness: CheckHarness) -> tuple[str, str]:
    """How it went, and why."""
    limit_s = _CASE_FACTOR * harness.deadline_s
    try:
        async with asyncio.timeout(limit_s) as deadline:
            await case(harness)
    except NotRun as reason:
        return NOT_RUN, str(reason)
    except Exception as error:  # whatever a foreign engine raises is its failure, and the next case is due
        if isinstance(error, TimeoutError) and deadline.expired():
            return FAILED, f"not over after {limit_s:g} s"
        return FAILED, _reason(error)
    return OK, ""


def _reason(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    what = str(error) if str(error) else (where.line or "")
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(what.split())[:300]} ({where.filename.rpartition('/')[2]}:{where.lineno})"


def check(harness: CheckHarness, only: Sequence[str], ending_text: str | None) -> int:
    features = asyncio.run(look(harness, ending_text))
    print(f"offers {', '.join(features) or 'the core only'}", flush=True)
    verdicts: Counter[str] = Counter()
    for tier in TIERS:
        missing = tier.missing(features)
        for case in tier.cases:
            name = case.__name__
            if only and not any(text in f"{tier.name}/{name}" for text in only):
                continue
            started = time.perf_counter()
            if missing:
                verdict, detail = NOT_OFFERED, f"needs {', '.join(missing)}"
            else:
                verdict, detail = asyncio.run(run_case(case, harness))
            detail = detail or f"{time.perf_counter() - started:.2f} s"
            verdicts[verdict] += 1
            print(f"{tier.name:<11}{verdict:<12}{name}: {detail}", flush=True)
    print(", ".join(f"{verdicts[each]} {each}" for each in (OK, FAILED, NOT_RUN, NOT_OFFERED)))
    return 1 if verdicts[FAILED] else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", metavar="NAME", help="an engine of `kvolt engine list`")
    parser.add_argument("--model", help="model to serve (default: the engine's own)")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="engine argument")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases with TEXT in TIER/CASE"
    )
    parser.add_argument(
        "--ending-prompt", metavar="TEXT", help="a prompt that is answered shortly (default: looked for)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="longest wait within a case"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvolt.testing.engines.check", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        if not __debug__:
            raise ConfigError("assertions are off", key="python", remedy="run without -O: the cases assert")
        arguments = merge_arguments({}, args.arg)
        check_arguments(args.engine, arguments)
        model = args.model or find_engine(args.engine).default_model
        if model is None:
            raise ConfigError(
                f"{args.engine} has no model of its own", key="model", remedy="name one by --model"
            )
        spec = EngineSpec(model=model, role=Role.AGGREGATED)
        return check(CheckHarness(args.engine, spec, arguments, args.timeout), args.only, args.ending_prompt)
    except KvoltError as error:
        remedy = error.fields.get("remedy")
        print(f"kvolt: {error.message}" + (f" ({remedy})" if remedy else ""), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
