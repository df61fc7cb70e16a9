"""Whether the trtllm engine does what it should with the TensorRT-LLM that is installed here, which kvolt's authors
had none of.

python -m kvolt.testing.engines.trtllm_smoke MODEL [--arg KEY=VALUE]  needs a GPU; two models' memory for the handoff

One line per check: ok, FAILED with the reason, or what was found. Exit code 0 when none failed, 2 when it cannot be
started. The whole suite is `kvolt engine check trtllm --model MODEL --arg seeds=kept`: its requests have seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from kvolt.core.delta import FinishReason
from kvolt.core.errors import ConfigError, KvoltError, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Grammar, GrammarKind, Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec, Prefill
from kvolt.engines.registry import build_engine, parse_argument
from kvolt.testing.engines.event_cases import ask_as_told
from kvolt.testing.engines.harness import Run, engine_run
from kvolt.testing.engines.prompts import Prompts

_GREEDY = Sampling(temperature=0)
_NUM_TOKENS = 24


class SmokeHarness:
    """The engine by name, with prompts of its model's vocabulary."""

    def __init__(self, model: str, arguments: dict[str, Any], deadline_s: float, role: Role) -> None:
        self._spec = EngineSpec(model=model, role=role)
        self._arguments = arguments
        self.deadline_s = deadline_s
        self.settle_s = 0.5
        self.prompts: Prompts | None = None

    def engine(self) -> Any:
        return build_engine("trtllm", self._spec, self._arguments)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        assert self.prompts is not None, "an engine first: its card has the vocabulary"
        return self.prompts.ordinary(num_tokens)

    def ending_prompt(self) -> tuple[int, ...]:
        raise NotImplementedError


def _greedy(run: Run, name: str, *, prompt: int = 40, tokens: int = _NUM_TOKENS) -> Request:
    request = run.request(name, prompt=prompt, tokens=tokens)
    return replace(request, sampling=_GREEDY)


async def it_answers(run: Run) -> str:
    answer = await run.answer(_greedy(run, "answers"))
    assert len(answer.tokens[0]) == _NUM_TOKENS, f"{len(answer.tokens[0])} tokens"
    assert answer.finishes == {0: FinishReason.LENGTH}
    return f"{_NUM_TOKENS} tokens, {run.info.capacity.kv_total_blocks} KV blocks"


async def a_stop_token_is_the_last(run: Run) -> str:
    whole = (await run.answer(_greedy(run, "whole"))).tokens[0]
    stopping = _greedy(run, "stops")
    stop = StopConditions(max_tokens=_NUM_TOKENS, stop_token_ids=(whole[5],), ignore_eos=True)
    answer = await run.answer(replace(stopping, stop=stop))
    assert answer.tokens[0] == whole[: whole.index(whole[5]) + 1], "it is not where it should be"
    assert answer.stop_reasons == {0: whole[5]}
    return "told with its reason"


async def logprobs_come(run: Run) -> str:
    request = replace(_greedy(run, "logprobs"), sampling=replace(_GREEDY, logprobs=3))
    rows = (await run.answer(request)).logprobs[0]
    assert all(len(row.top) == 3 for row in rows), f"{[len(row.top) for row in rows]} of 3"
    return "three for every token"


async def a_grammar_holds(run: Run) -> str:
    prompts = run.harness.prompts  # type: ignore[attr-defined]  # it is ours
    request = replace(_greedy(run, "grammar"), grammar=Grammar(GrammarKind.CHOICE, '["yes", "no"]'))
    request = replace(request, stop=StopConditions(max_tokens=_NUM_TOKENS))
    tokens = (await run.answer(request)).tokens[0]
    text = prompts._tokenizer.decode(tokens).strip()
    assert text in ("yes", "no"), f"it said {text!r}"
    return f"it said {text!r}"


async def an_abort_frees_everything(run: Run) -> str:
    answer = run.submit(_greedy(run, "goes", tokens=100))
    await run.until(lambda: bool(answer.tokens))
    run.abort(answer)
    await run.answer(_greedy(run, "after", tokens=3))
    left = (run.load.running, run.load.waiting, run.load.kv_used_blocks)
    assert left == (0, 0, 0), f"running, waiting, blocks in use: {left}"
    return "nothing is left"


async def events_are_what_is_found(run: Run) -> str:
    size = run.info.block_size
    request = _greedy(run, "first", prompt=3 * size + 1, tokens=4)
    request = replace(request, token_ids=request.token_ids[::-1])  # of which nothing is cached yet
    await ask_as_told(run, request)
    second = await ask_as_told(run, replace(request, request_id=RequestId("second")))
    salted = await ask_as_told(run, replace(request, request_id=RequestId("salted"), salt="somebody"))
    assert not salted.cached, "a tenant found another one's blocks"
    skipped = dict(run.engine._known.poll.translator.skipped)  # type: ignore[attr-defined]  # ours, and not public
    return f"{len(run.replica.blocks)} blocks told, {second.cached} tokens found again; left out: {skipped or 'none'}"


async def seeds_are_kept(run: Run) -> str:
    """Finds out what nothing says."""
    request = run.request("seeded", prompt=40, tokens=12, seed=5)
    try:
        whole = (await run.answer(request)).tokens[0]
    except Unsupported:
        return "not asked; run again with --arg seeds=kept to see whether they are"
    again = (await run.answer(replace(request, request_id=RequestId("again")))).tokens[0]
    assert again == whole, "the same seed gives other tokens: leave seeds=none"
    try:
        moved = await run.answer(replace(request, request_id=RequestId("moved"), resume=tuple(whole[:4])))
    except Unsupported:
        return "they are kept; run again with --arg seeds=by_position to see whether they can be resumed"
    assert whole[:4] + moved.tokens[0] == whole, "it goes on with other tokens: leave seeds=kept"
    return "seeds=by_position is right"


async def a_prompt_is_handed_over(source: Run, target: Run) -> str:
    request = _greedy(source, "moved", prompt=3 * source.info.block_size + 1, tokens=12)
    expected = (await source.answer(replace(request, request_id=RequestId("whole")))).tokens[0]
    prefill = source.engine
    assert isinstance(prefill, Prefill)
    handoff = await prefill.prefill(request)
    assert handoff.first_tokens is not None, "no first token"
    answer = await target.answer(replace(request, handoff=handoff))
    await prefill.release_prefill(request.request_id)
    assert [*handoff.first_tokens, *answer.tokens[0]] == expected, (
        "it says something else than one engine would"
    )
    return f"a ticket of {len(handoff.ticket)} bytes"


_CHECKS: tuple[Callable[[Run], Awaitable[str]], ...] = (
    it_answers,
    a_stop_token_is_the_last,
    logprobs_come,
    a_grammar_holds,
    an_abort_frees_everything,
    events_are_what_is_found,
    seeds_are_kept,
)


async def _tell(name: str, check: Awaitable[str]) -> bool:
    try:
        detail = await check
    except (AssertionError, KvoltError) as error:
        print(f"FAILED  {name}: {error}", flush=True)
        return False
    print(f"ok      {name}: {detail}", flush=True)
    return True


async def smoke(model: str, arguments: dict[str, Any], deadline_s: float, with_handoff: bool) -> bool:
    """Whether all went well."""
    harness = SmokeHarness(model, arguments, deadline_s, Role.AGGREGATED)
    are_well: list[bool] = []
    async with engine_run(harness) as run:
        harness.prompts = Prompts(run.engine.card)
        print(f"offers  {', '.join(run.info.features) or 'the core only'}", flush=True)
        for check in _CHECKS:
            are_well.append(await _tell(check.__name__, check(run)))
    if with_handoff:
        sides = [SmokeHarness(model, arguments, deadline_s, role) for role in (Role.PREFILL, Role.DECODE)]
        async with engine_run(sides[0]) as source, engine_run(sides[1]) as target:
            sides[0].prompts = sides[1].prompts = harness.prompts
            name = a_prompt_is_handed_over.__name__
            are_well.append(await _tell(name, a_prompt_is_handed_over(source, target)))
    return all(are_well)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvolt.testing.engines.trtllm_smoke", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="engine argument")
    parser.add_argument("--no-handoff", action="store_true", help="only one engine")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="longest wait")
    args = parser.parse_args(argv)
    try:
        arguments = dict(parse_argument(text) for text in args.arg)
        is_well = asyncio.run(smoke(args.model, arguments, args.timeout, not args.no_handoff))
    except ConfigError as error:
        remedy = error.fields.get("remedy")
        print(f"kvolt: {error.message}" + (f" ({remedy})" if remedy else ""), file=sys.stderr)
        return 2
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
