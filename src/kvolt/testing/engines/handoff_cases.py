"""Tier `handoff`, for Prefill engines: prefill on one engine and decode on another give the same tokens as one engine.

For KvAddressable engines the case copies the blocks; other engines fetch them with the ticket.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from kvolt.core.errors import InvalidRequest, KvoltError
from kvolt.core.ids import RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import KvAddressable
from kvolt.runtime.tasks import Scope
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.block_copies import move, prefill_of, prefilled
from kvolt.testing.engines.event_cases import blocks_request, blocks_that_fit
from kvolt.testing.engines.harness import Answer, Case, Harness, NotRun, Run, engine_run

_LONGEST_EXPIRY_S = 5.0


async def prefill_and_move(source: Run, target: Run, request: Request) -> Request:
    """Prefill at the source, copy the blocks to the target, and return the request with its handoff."""
    if isinstance(source.engine, KvAddressable) and isinstance(target.engine, KvAddressable):
        return await move(source, target, request)
    return replace(request, handoff=await prefilled(source, request))


def short_expiry(handoff: Handoff) -> float:
    """Seconds until the ticket expires; NotRun if that is too long for a test."""
    if handoff.expires_in_s is None or handoff.expires_in_s > _LONGEST_EXPIRY_S:
        raise NotRun(f"tickets expire after {handoff.expires_in_s} s, too long for a test")
    return handoff.expires_in_s


def whole_answer(answer: Answer) -> dict[int, list[int]]:
    """All tokens, including those sampled by prefill."""
    handoff = answer.request.handoff
    first = handoff.first_tokens if handoff is not None else None
    return {
        index: [*(first[index : index + 1] if first is not None else ()), *tokens]
        for index, tokens in sorted(answer.tokens.items())
    }


async def decode_continues_after_prefill(harness: Harness) -> None:
    """The same tokens as on one engine; each token is reported and counted once."""
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        block_size, num_blocks = whole.info.block_size, blocks_that_fit(whole, 3)
        lengths = (block_size - 1 or 1, block_size, block_size + 1, num_blocks * block_size + 1)
        for index, length in enumerate(lengths):
            request = whole.request(f"r{index}", prompt=length, tokens=12, seed=index, variant=index % 2)
            expected = await whole.answer(request)
            moved = await prefill_and_move(source, target, request)
            assert moved.handoff is not None
            assert moved.handoff.first_tokens is not None, "prefill sampled no first token"
            answer = await target.answer(moved)
            await prefill_of(source).release_prefill(request.request_id)
            assert whole_answer(answer) == expected.tokens, "the tokens differ from those of one engine"
            assert answer.finishes == expected.finishes
            if length > block_size:
                assert answer.cached, "decode computed the prompt again"
        await source.assert_empty()
        await target.assert_empty()


async def each_choice_has_its_first_token(harness: Harness) -> None:
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        request = blocks_request(whole, "r", blocks_that_fit(whole, 2), tokens=9, choices=3, seed=4)
        expected = await whole.answer(request)
        moved = await prefill_and_move(source, target, request)
        assert moved.handoff is not None
        assert len(moved.handoff.first_tokens or ()) == 3
        answer = await target.answer(moved)
        assert whole_answer(answer) == expected.tokens
        await prefill_of(source).release_prefill(request.request_id)
        await source.assert_empty()


async def single_token_is_left_to_decode(harness: Harness) -> None:
    """Prefill samples no token if its finish or logprobs must come with it."""
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        only = blocks_request(whole, "only", blocks_that_fit(whole, 2), tokens=1)
        with_logprobs = blocks_request(whole, "with_logprobs", blocks_that_fit(whole, 2), tokens=5)
        with_logprobs = replace(with_logprobs, sampling=replace(with_logprobs.sampling, logprobs=1))
        for request in (only, with_logprobs):
            expected = await whole.answer(request)
            moved = await prefill_and_move(source, target, request)
            assert moved.handoff is not None
            assert moved.handoff.first_tokens is None, (
                "prefill sampled a token whose finish or logprobs are lost"
            )
            answer = await target.answer(moved)
            assert (answer.tokens, answer.finishes) == (expected.tokens, expected.finishes)
            await prefill_of(source).release_prefill(request.request_id)


async def unknown_ticket_gives_no_wrong_tokens(harness: Harness) -> None:
    """The prompt is computed again or the request ends with a typed error."""
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        request = blocks_request(whole, "r", blocks_that_fit(whole, 2), tokens=9)
        expected = await whole.answer(request)
        handoff = await prefilled(source, request)
        await prefill_of(source).release_prefill(request.request_id)
        for name, ticket in (("released", handoff.ticket), ("garbage", b"\xc1garbage"), ("empty", b"")):
            moved = replace(request, request_id=RequestId(name), handoff=replace(handoff, ticket=ticket))
            answer = await _answer_or_none(target, moved)
            if answer is not None:
                assert whole_answer(answer) == expected.tokens, f"{name}: wrong tokens"
        await target.assert_empty()
        await source.assert_empty()


async def _answer_or_none(run: Run, request: Request) -> Answer | None:
    try:
        answer = run.submit(request, may_fail=True)
    except KvoltError:
        return None
    await run.finish(answer)
    return answer if answer.error is None else None


async def blocks_are_held_until_released(harness: Harness) -> None:
    async with engine_run(harness) as run:
        prefill = prefill_of(run)
        request = blocks_request(run, "r", blocks_that_fit(run, 3))
        await prefilled(run, request)
        await run.answer(run.request("probe", prompt=3, tokens=3, variant=1))
        held = run.load.kv_used_blocks
        assert held >= len(request.token_ids) // run.info.block_size, f"only {held} blocks are held"
        await prefill.release_prefill(request.request_id)
        await prefill.release_prefill(request.request_id)
        await prefill.release_prefill(RequestId("unknown"))
        await run.assert_empty()


async def ticket_expires(harness: Harness) -> None:
    async with engine_run(harness) as run:
        handoff = await prefilled(run, blocks_request(run, "r", blocks_that_fit(run, 3)))
        await asyncio.sleep(short_expiry(handoff) + 0.2)
        await run.assert_empty()


async def cancelled_prefill_frees_everything(harness: Harness) -> None:
    async with engine_run(harness) as run:
        for num_steps in range(3):
            busy = run.submit(run.request(f"busy{num_steps}", tokens=30))
            request = blocks_request(run, f"r{num_steps}", blocks_that_fit(run, 6), variant=num_steps)
            async with Scope("prefill") as scope:
                scope.start(prefill_of(run).prefill(request), "prefill")
                await run.advance(num_steps)
                await asyncio.sleep(0)
                scope.cancel()
            await prefill_of(run).release_prefill(request.request_id)  # it may have completed just before
            await run.finish(busy)
            await run.assert_empty()


async def prefill_rejects_bad_requests(harness: Harness) -> None:
    async with engine_run(harness) as run:
        good = run.request("r")
        bad = (
            replace(good, token_ids=()),
            replace(good, stop=replace(good.stop, max_tokens=run.engine.card.context_length)),
        )
        for request in bad:
            try:
                await prefilled(run, request)
            except InvalidRequest:
                continue
            raise AssertionError(f"accepted: {request}")
        await run.assert_empty()


CASES: tuple[Case, ...] = cases_in(__name__)
