"""Cases of the engine suite about a single answer: finish reasons, stop conditions and logprobs."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.request import Request, StopConditions
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.harness import Answer, Case, Harness, Run, engine_run, renamed


async def ends_at_eos(harness: Harness) -> None:
    """EOS appears only as the last token and has no stop reason."""
    async with engine_run(harness) as run:
        tokens = (await _ended(run, run.short_request("r"))).tokens[0]
        eos = run.engine.card.eos_token_ids
        assert tokens[-1] in eos, f"the last token {tokens[-1]} is no EOS"
        assert not set(eos).intersection(tokens[:-1]), "EOS came before the end"
        just_enough = await _ended(run, run.short_request("exact", tokens=len(tokens)))
        assert just_enough.tokens[0] == tokens, "EOS as the last allowed token is a stop"
        cut = await run.answer(run.short_request("cut", tokens=len(tokens) - 1))
        assert (cut.tokens[0], cut.finishes[0]) == (tokens[:-1], FinishReason.LENGTH)


async def respects_ignore_eos(harness: Harness) -> None:
    async with engine_run(harness) as run:
        tokens = (await _ended(run, run.short_request("r"))).tokens[0]
        longer = _with_stop(run.short_request("on"), max_tokens=len(tokens) + 9, ignore_eos=True)
        answer = await run.answer(longer)
        assert answer.finishes == {0: FinishReason.LENGTH}
        assert len(answer.tokens[0]) == len(tokens) + 9
        assert answer.tokens[0][: len(tokens) - 1] == tokens[:-1]


async def stops_at_a_stop_token(harness: Harness) -> None:
    """The stop token is the last token and the stop reason."""
    async with engine_run(harness) as run:
        request = run.request("whole", tokens=24, seed=3)
        whole = (await run.answer(request)).tokens[0]
        for at in (0, 1, 7, len(whole) - 1):
            stop = whole[at]
            first = whole.index(stop)
            stopping = _with_stop(renamed(request, f"at{at}"), stop_token_ids=(_unused(whole), stop))
            answer = await run.answer(stopping)
            assert answer.tokens[0] == whole[: first + 1]
            assert (answer.finishes[0], answer.stop_reasons[0]) == (FinishReason.STOP, stop)


async def eos_as_a_stop_token(harness: Harness) -> None:
    """EOS as a stop token counts as EOS; with ignore_eos it is a stop token like others."""
    async with engine_run(harness) as run:
        plain = await _ended(run, run.short_request("plain"))
        eos = plain.tokens[0][-1]
        both = await _ended(run, _with_stop(run.short_request("both"), stop_token_ids=(eos,)))
        assert both.tokens == plain.tokens
        ignored = await run.answer(
            _with_stop(run.short_request("ignored"), stop_token_ids=(eos,), ignore_eos=True)
        )
        if ignored.finishes[0] is FinishReason.STOP:
            assert (ignored.tokens[0][-1], ignored.stop_reasons[0]) == (eos, eos)


async def respects_min_tokens(harness: Harness) -> None:
    async with engine_run(harness) as run:
        tokens = (await _ended(run, run.short_request("r"))).tokens[0]
        for num_tokens in (len(tokens) - 1, len(tokens), len(tokens) + 9):
            request = _with_stop(run.short_request(f"min{num_tokens}"), min_tokens=num_tokens)
            answer = await run.answer(request)
            assert len(answer.tokens[0]) > num_tokens or answer.finishes[0] is FinishReason.LENGTH
        request = run.request("stops", tokens=24)
        stops = tuple((await run.answer(renamed(request, "whole"))).tokens[0])
        answer = await run.answer(_with_stop(request, stop_token_ids=stops, min_tokens=9))
        assert len(answer.tokens[0]) > 9


async def short_answer_resumes(harness: Harness) -> None:
    """Also if only EOS is left to generate."""
    async with engine_run(harness) as run:
        request = run.short_request("whole")
        whole = (await _ended(run, request)).tokens[0]
        for cut in range(1, len(whole)):
            moved = renamed(request, f"cut{cut}", prior_tokens=tuple(whole[:cut]))
            assert whole[:cut] + (await _ended(run, moved)).tokens[0] == whole


async def choices_end_separately(harness: Harness) -> None:
    """Each choice ends by its own EOS with its own usage."""
    async with engine_run(harness) as run:
        request = run.short_request("r", choices=2)
        answer = run.submit(request)
        await run.finish(answer)
        assert answer.finishes == {0: FinishReason.STOP, 1: FinishReason.STOP}
        lengths = {index: len(tokens) for index, tokens in answer.tokens.items()}
        assert lengths[0] != lengths[1], "both choices ended at once"
        assert {index: usage.completion_tokens for index, usage in answer.usage.items()} == lengths
        gone = run.submit(renamed(request, "gone"))
        await run.until(lambda: bool(gone.finishes))
        run.abort(gone)
        await run.assert_empty()


async def logprobs_match_the_request(harness: Harness) -> None:
    async with engine_run(harness) as run:
        request = run.request("none", tokens=6)
        silent = await run.answer(request)
        assert not silent.logprobs
        for num_top in (0, 1, 5):
            sampling = replace(request.sampling, logprobs=num_top)
            asking = renamed(request, f"top{num_top}", sampling=sampling)
            answer = await run.answer(asking)
            assert answer.tokens == silent.tokens, "requesting logprobs changed the answer"
            _check_logprobs(answer.logprobs[0], num_top)


async def prompt_logprobs_come_once(harness: Harness) -> None:
    """One entry for each prompt token but the first."""
    async with engine_run(harness) as run:
        request = run.request("r", prompt=70, tokens=4, choices=2)
        asking = replace(request, sampling=replace(request.sampling, prompt_logprobs=2))
        answer = await run.answer(asking)
        logprobs = answer.prompt_logprobs
        assert logprobs is not None
        assert len(logprobs) == 70
        assert logprobs[0] is None
        entries = [entry for entry in logprobs[1:] if entry is not None]
        assert tuple(entry.token_id for entry in entries) == request.token_ids[1:]
        _check_logprobs(entries, 2)
        again = renamed(asking, "again", prior_tokens=tuple(answer.tokens[0][:1]))
        assert (await run.answer(again)).prompt_logprobs is None, "prompt logprobs are repeated"


def _check_logprobs(entries: Iterable[TokenLogprobs], num_top: int) -> None:
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top) == num_top
        assert len({token for token, _ in entry.top}) == num_top, f"duplicate token: {entry}"
        values = [logprob for _, logprob in entry.top]
        assert values == sorted(values, reverse=True), f"not sorted by likelihood: {entry}"
        assert all(logprob <= 0 for logprob in values)
        assert dict(entry.top).get(entry.token_id, entry.logprob) == entry.logprob


async def _ended(run: Run, request: Request) -> Answer:
    """Run a request and check that it ends by EOS."""
    answer = await run.answer(request)
    assert (answer.finishes[0], answer.stop_reasons[0]) == (FinishReason.STOP, None)
    return answer


def _with_stop(
    request: Request,
    *,
    max_tokens: int | None = None,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool | None = None,
) -> Request:
    stop = StopConditions(
        max_tokens=request.stop.max_tokens if max_tokens is None else max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=request.stop.ignore_eos if ignore_eos is None else ignore_eos,
    )
    return replace(request, stop=stop)


def _unused(tokens: list[int]) -> int:
    """A token that is not in `tokens`."""
    return next(token for token in range(len(tokens) + 1) if token not in tokens)


ANSWER_CASES: tuple[Case, ...] = cases_in(__name__)
