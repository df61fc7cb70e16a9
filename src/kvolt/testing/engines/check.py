"""Run the engine conformance suite: all tiers that an engine supports, on a real loop, with any model.

python -m kvolt.testing.engines.check NAME [--model M] [--arg K=V]      what `kvolt engine check` runs

Prints one line per case: ok, FAILED with the reason, not run (not possible with this setup), or not offered. Exit
code: 0; 1 if a case failed; 2 if the engine cannot be built.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace
from tokenizers import Tokenizer

from kvolt.core.card import ModelCard
from kvolt.core.delta import FinishReason
from kvolt.core.errors import ConfigError, InvalidRequest, KvoltError
from kvolt.core.request import Request, Role
from kvolt.engines.contract import Engine, EngineSpec, features_of
from kvolt.engines.registry import build_engine, check_arguments, find_engine, merge_arguments
from kvolt.frontend.templates.template import ChatTemplate
from kvolt.testing.engines.harness import Answer, Case, NotRun, Run, engine_run
from kvolt.testing.engines.tiers import TIERS

OK, FAILED, NOT_RUN, NOT_OFFERED = "ok", "FAILED", "not run", "not offered"

_CASE_FACTOR = 10
"""Timeout of a case, as a multiple of the longest wait within it."""
_LONGEST_PROMPT = 128
_LONGEST_ANSWER = 64
_NUM_TRIES = 12
_QUESTIONS = ("Say hi.", "Is water wet? Answer yes or no.", "What is 2 + 2?", "Name a colour.", "Bye!")


class Prompts:
    """Prompts of one model, from its card."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._tokenizer = Tokenizer.from_buffer(card.tokenizer_json)
        special = {*self._tokenizer.get_added_tokens_decoder(), *card.eos_token_ids, card.bos_token_id}
        known = sorted(self._tokenizer.get_vocab(with_added_tokens=False).values())
        rng = random.Random(1)
        usable = [token for token in known if token not in special]
        self._ids = tuple(rng.choices(usable, k=4096))

    def ordinary(self, num_tokens: int) -> tuple[int, ...]:
        """Random tokens without special ones; a longer prompt has the shorter ones as prefix."""
        return self._ids[:num_tokens]

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def likely_to_end(self) -> Iterator[tuple[int, ...]]:
        """Short questions in the chat template, if there is one; then random prompts."""
        template = ChatTemplate(self._card.chat_template) if self._card.chat_template.strip() else None
        for question in _QUESTIONS if template is not None else ():
            assert template is not None
            try:
                yield self.encode(template.render([{"role": "user", "content": question}]))
            except InvalidRequest:
                break
        for length in range(4, 4 + _NUM_TRIES):
            yield self.ordinary(length)


async def find_ending_prompt(
    run: Run, prompts: Prompts, candidate: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """Find a prompt for `Harness.ending_prompt` by trial; None if no candidate fits."""
    candidates = [candidate] if candidate is not None else list(islice(prompts.likely_to_end(), _NUM_TRIES))
    answers = [
        run.submit(_request(run, number, ids))
        for number, ids in enumerate(candidates)
        if 0 < len(ids) <= _LONGEST_PROMPT
    ]
    await run.finish(*answers)
    return next((answer.request.token_ids for answer in answers if _ends_well(answer)), None)


def _request(run: Run, number: int, ids: tuple[int, ...]) -> Request:
    plain = run.request(f"ending{number}", tokens=_LONGEST_ANSWER, choices=2)
    return replace(plain, token_ids=ids, stop=replace(plain.stop, ignore_eos=False))


def _ends_well(answer: Answer) -> bool:
    """Whether both choices end by EOS, after at least 2 tokens and at different lengths."""
    lengths = [len(answer.tokens[index]) for index in (0, 1)]
    ended = all(
        finish is FinishReason.STOP and answer.stop_reasons[index] is None
        for index, finish in answer.finishes.items()
    )
    return ended and min(lengths) >= 2 and lengths[0] != lengths[1]


class CheckHarness:
    """Harness of any registered engine; prompts consist of tokens of its model's vocabulary."""

    def __init__(self, name: str, spec: EngineSpec, arguments: dict[str, Any], deadline_s: float) -> None:
        self._name = name
        self._spec = spec
        self._arguments = arguments
        self.deadline_s = deadline_s
        self.ending: tuple[int, ...] | None = None
        self._prompts: Prompts | None = None

    def engine(self) -> Engine:
        return build_engine(self._name, self._spec, self._arguments)

    def set_card(self, card: ModelCard) -> None:
        """Set the card of a started engine, which has the vocabulary."""
        self._prompts = Prompts(card)

    @property
    def prompts(self) -> Prompts:
        assert self._prompts is not None, "start an engine first: its card has the vocabulary"
        return self._prompts

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return self.prompts.ordinary(num_tokens)

    def ending_prompt(self) -> tuple[int, ...]:
        if self.ending is None:
            raise NotRun("no prompt with a short answer is known (set --ending-prompt)")
        return self.ending


async def inspect_engine(harness: CheckHarness, ending_text: str | None) -> tuple[str, ...]:
    """Start the engine once; return its features and set the harness's ending prompt."""
    async with engine_run(harness) as run:
        harness.set_card(run.engine.card)
        ending_prompt = None if ending_text is None else harness.prompts.encode(ending_text)
        harness.ending = await find_ending_prompt(run, harness.prompts, ending_prompt)
        if ending_prompt is not None and harness.ending is None:
            raise ConfigError(
                "the two choices for the ending prompt do not both end by EOS at different lengths",
                key="ending_prompt",
                remedy="choose another prompt: at most 128 tokens, with answers of 2 to 64 tokens",
            )
        return run.info.features or features_of(run.engine)


async def run_case(case: Case, harness: CheckHarness) -> tuple[str, str]:
    """Run one case; return its verdict and the reason."""
    limit_s = _CASE_FACTOR * harness.deadline_s
    try:
        async with asyncio.timeout(limit_s) as deadline:
            await case(harness)
    except NotRun as reason:
        return NOT_RUN, str(reason)
    except Exception as error:  # an engine may raise anything; continue with the next case
        if isinstance(error, TimeoutError) and deadline.expired():
            return FAILED, f"timed out after {limit_s:g} s"
        return FAILED, _reason(error)
    return OK, ""


def _reason(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    what = str(error) if str(error) else (where.line or "")
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(what.split())[:300]} ({where.filename.rpartition('/')[2]}:{where.lineno})"


def check(harness: CheckHarness, only: Sequence[str], ending_text: str | None) -> int:
    features = asyncio.run(inspect_engine(harness, ending_text))
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
    parser.add_argument("engine", metavar="NAME", help="Engine (see `kvolt engine list`).")
    parser.add_argument("--model", help="Model to serve. Default: the engine's default model.")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="Engine argument.")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="Run cases with TEXT in TIER/CASE."
    )
    parser.add_argument(
        "--ending-prompt", metavar="TEXT", help="Prompt with a short answer. Default: found by trial."
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="Maximum wait within a case."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvolt.testing.engines.check", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        if not __debug__:
            raise ConfigError("assertions are disabled", key="python", remedy="run Python without -O")
        arguments = merge_arguments({}, args.arg)
        check_arguments(args.engine, arguments)
        model = args.model or find_engine(args.engine).default_model
        if model is None:
            raise ConfigError(f"{args.engine} has no default model", key="model", remedy="set --model")
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
