"""Smoke test of the trtllm engine with the installed TensorRT-LLM; the adapter was written without one.

python -m kvolt.testing.engines.trtllm_smoke MODEL [--arg KEY=VALUE]  needs a GPU; two models' memory for the handoff

Prints one line per check: ok or FAILED, with details. Exit code: 0 if no check failed, 2 if the engine cannot start.
`kvolt engine check trtllm --model MODEL --arg seeds=kept` runs the full suite, whose requests have seeds.
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
from kvolt.core.request import Grammar, GrammarKind, Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec, Prefill
from kvolt.engines.registry import parse_argument
from kvolt.testing.engines.check import CheckHarness
from kvolt.testing.engines.event_cases import answer_matching_events
from kvolt.testing.engines.harness import Run, engine_run, renamed

_GREEDY = Sampling(temperature=0)
_NUM_TOKENS = 24


class SmokeHarness(CheckHarness):
    """Harness of the trtllm engine, which publishes its KV events late."""

    settle_s = 0.5

    def __init__(self, model: str, arguments: dict[str, Any], deadline_s: float, role: Role) -> None:
        super().__init__("trtllm", EngineSpec(model=model, role=role), arguments, deadline_s)


def _greedy(run: Run, name: str, *, prompt: int = 40, tokens: int = _NUM_TOKENS) -> Request:
    request = run.request(name, prompt=prompt, tokens=tokens)
    return replace(request, sampling=_GREEDY)


async def generates_tokens(run: Run) -> str:
    answer = await run.answer(_greedy(run, "answers"))
    assert len(answer.tokens[0]) == _NUM_TOKENS, f"{len(answer.tokens[0])} tokens"
    assert answer.finishes == {0: FinishReason.LENGTH}
    return f"{_NUM_TOKENS} tokens, {run.info.capacity.kv_total_blocks} KV blocks"


async def stops_at_stop_token(run: Run) -> str:
    whole = (await run.answer(_greedy(run, "whole"))).tokens[0]
    stopping = _greedy(run, "stops")
    stop = StopConditions(max_tokens=_NUM_TOKENS, stop_token_ids=(whole[5],), ignore_eos=True)
    answer = await run.answer(replace(stopping, stop=stop))
    assert answer.tokens[0] == whole[: whole.index(whole[5]) + 1], "the stop token is not the last token"
    assert answer.stop_reasons == {0: whole[5]}
    return "with its stop reason"


async def returns_logprobs(run: Run) -> str:
    request = replace(_greedy(run, "logprobs"), sampling=replace(_GREEDY, logprobs=3))
    rows = (await run.answer(request)).logprobs[0]
    assert all(len(row.top) == 3 for row in rows), f"{[len(row.top) for row in rows]} of 3"
    return "three per token"


async def follows_grammar(run: Run) -> str:
    prompts = run.harness.prompts  # type: ignore[attr-defined]  # SmokeHarness
    request = replace(_greedy(run, "grammar"), grammar=Grammar(GrammarKind.CHOICE, '["yes", "no"]'))
    request = replace(request, stop=StopConditions(max_tokens=_NUM_TOKENS))
    tokens = (await run.answer(request)).tokens[0]
    text = prompts._tokenizer.decode(tokens).strip()
    assert text in ("yes", "no"), f"output {text!r}"
    return f"output {text!r}"


async def abort_frees_everything(run: Run) -> str:
    answer = run.submit(_greedy(run, "goes", tokens=100))
    await run.until(lambda: bool(answer.tokens))
    run.abort(answer)
    await run.answer(_greedy(run, "after", tokens=3))
    left = (run.load.running, run.load.waiting, run.load.kv_used_blocks)
    assert left == (0, 0, 0), f"running, waiting, blocks in use: {left}"
    return "nothing is left"


async def events_match_cache(run: Run) -> str:
    size = run.info.block_size
    request = _greedy(run, "first", prompt=3 * size + 1, tokens=4)
    request = replace(request, token_ids=request.token_ids[::-1])  # not cached yet
    await answer_matching_events(run, request)
    second = await answer_matching_events(run, renamed(request, "second"))
    salted = await answer_matching_events(run, renamed(request, "salted", salt="tenant"))
    assert not salted.cached, "a tenant found blocks of another tenant"
    skipped = dict(run.engine._launched.poll.translator.skipped)  # type: ignore[attr-defined]  # private
    return f"{len(run.replica.blocks)} blocks, {second.cached} tokens cached; skipped events: {skipped or 'none'}"


async def seeds_are_deterministic(run: Run) -> str:
    """Determine the right value of the `seeds` argument, which TensorRT-LLM does not document."""
    request = run.request("seeded", prompt=40, tokens=12, seed=5)
    try:
        whole = (await run.answer(request)).tokens[0]
    except Unsupported:
        return "not tested; run again with --arg seeds=kept"
    again = (await run.answer(renamed(request, "again"))).tokens[0]
    assert again == whole, "the same seed gives different tokens: keep seeds=none"
    try:
        moved = await run.answer(renamed(request, "moved", prior_tokens=tuple(whole[:4])))
    except Unsupported:
        return "deterministic; run again with --arg seeds=by_position to test resumed requests"
    assert whole[:4] + moved.tokens[0] == whole, "a resumed request gives different tokens: keep seeds=kept"
    return "seeds=by_position works"


async def prefill_handoff_works(source: Run, target: Run) -> str:
    request = _greedy(source, "moved", prompt=3 * source.info.block_size + 1, tokens=12)
    expected = (await source.answer(renamed(request, "whole"))).tokens[0]
    prefill = source.engine
    assert isinstance(prefill, Prefill)
    handoff = await prefill.prefill(request)
    assert handoff.first_tokens is not None, "no first token"
    answer = await target.answer(replace(request, handoff=handoff))
    await prefill.release_prefill(request.request_id)
    assert [*handoff.first_tokens, *answer.tokens[0]] == expected, (
        "the tokens differ from those of one engine"
    )
    return f"a ticket of {len(handoff.ticket)} bytes"


_CHECKS: tuple[Callable[[Run], Awaitable[str]], ...] = (
    generates_tokens,
    stops_at_stop_token,
    returns_logprobs,
    follows_grammar,
    abort_frees_everything,
    events_match_cache,
    seeds_are_deterministic,
)


async def _report(name: str, check: Awaitable[str]) -> bool:
    try:
        detail = await check
    except (AssertionError, KvoltError) as error:
        print(f"FAILED  {name}: {error}", flush=True)
        return False
    print(f"ok      {name}: {detail}", flush=True)
    return True


async def smoke(model: str, arguments: dict[str, Any], deadline_s: float, with_handoff: bool) -> bool:
    """Run all checks; return whether all passed."""
    harness = SmokeHarness(model, arguments, deadline_s, Role.AGGREGATED)
    results: list[bool] = []
    async with engine_run(harness) as run:
        harness.set_card(run.engine.card)
        print(f"offers  {', '.join(run.info.features) or 'the core only'}", flush=True)
        for check in _CHECKS:
            results.append(await _report(check.__name__, check(run)))
    if with_handoff:
        sides = [SmokeHarness(model, arguments, deadline_s, role) for role in (Role.PREFILL, Role.DECODE)]
        async with engine_run(sides[0]) as source, engine_run(sides[1]) as target:
            for side, side_run in zip(sides, (source, target), strict=True):
                side.set_card(side_run.engine.card)
            name = prefill_handoff_works.__name__
            results.append(await _report(name, prefill_handoff_works(source, target)))
    return all(results)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvolt.testing.engines.trtllm_smoke", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="Engine argument.")
    parser.add_argument("--no-handoff", action="store_true", help="Test one engine only, without handoff.")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="Maximum wait.")
    args = parser.parse_args(argv)
    try:
        arguments = dict(parse_argument(text) for text in args.arg)
        ok = asyncio.run(smoke(args.model, arguments, args.timeout, not args.no_handoff))
    except ConfigError as error:
        remedy = error.fields.get("remedy")
        print(f"kvolt: {error.message}" + (f" ({remedy})" if remedy else ""), file=sys.stderr)
        return 2
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
