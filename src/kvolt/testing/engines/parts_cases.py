"""Cases of tier `kv-placed` about blocks that are reported while their prompt is computed.

With an engine in another process a case may be too slow to see every part, so cases retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from kvolt.core.errors import Cancelled, KvoltError, NotFound
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.contract import HeldKv, KvEvents
from kvolt.runtime.tasks import Scope
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.block_copies import computed, contents, placed, prefill_of, prefilled
from kvolt.testing.engines.event_cases import blocks_request, blocks_that_fit
from kvolt.testing.engines.harness import Case, Harness, NotRun, Run, deadline_of, engine_run, renamed
from kvolt.testing.engines.placed_cases import released

_TRIES = 20
"""Retries: what happens between two steps may be missed on a busy machine."""

Part = tuple[HeldKv, list[bytes]]
"""Reported blocks and their contents at that time."""


async def parts_are_reported_while_computing(harness: Harness) -> None:
    """Each part extends the previous one; the last one is what is held."""
    async with engine_run(harness) as source:
        for number in range(_TRIES):
            request = long_request(source, f"r{number}", variant=number)
            parts = await _computed_in_parts(source, request)
            if len(parts) > 1 or len(request.token_ids) <= source.info.capacity.max_batch_tokens:
                return
        raise AssertionError("blocks of long prompts were reported only at the end")


async def cached_blocks_are_reported_first(harness: Harness) -> None:
    """Cached blocks are reported before the first step.

    Another request is decoded at the same time: an idle engine would start the prompt before the call arrives.
    """
    async with engine_run(harness) as source:
        if not isinstance(source.engine, KvEvents):
            raise NotRun("the cached blocks are unknown without KvEvents")
        for number in range(_TRIES):
            request = long_request(source, f"r{number}", variant=number)
            num_cached = len(request.token_ids) // source.info.block_size // 2
            start = request.token_ids[: num_cached * source.info.block_size + 1]
            await source.answer(renamed(request, f"start{number}", token_ids=start))
            other = source.submit(source.request(f"other{number}", prompt=9, tokens=60, variant=1))
            await source.advance(1)
            (first, _), *_ = await _computed_in_parts(source, request, is_alone=False)
            source.abort(other)
            if len(first.blocks) == num_cached:
                return
        raise AssertionError("cached blocks were not reported first")


async def parts_with_several_choices(harness: Harness) -> None:
    async with engine_run(harness) as source:
        await _computed_in_parts(source, long_request(source, "r", choices=3))


async def parts_stay_while_other_requests_run(harness: Harness) -> None:
    async with engine_run(harness) as source:
        others = [source.request(f"other{each}", prompt=9, tokens=60, variant=1 + each) for each in range(2)]
        running = [source.submit(other) for other in others]
        await source.advance(2)
        await _computed_in_parts(source, long_request(source, "r"), is_alone=False)
        await source.finish(*running)
        await source.assert_empty()


async def released_prompt_has_no_parts(harness: Harness) -> None:
    """Waiting callers get an error when the prompt is released; so does a call for an unknown prompt."""
    async with engine_run(harness) as source:
        for number in range(_TRIES):
            request = long_request(source, f"r{number}", variant=number)
            if await _released_while_computing(source, request):
                break
        else:
            raise AssertionError("released prompts were computed to their end")
        await computed(source, request)
        await released(source, request)
        for request_id in (request.request_id, RequestId("unknown")):
            error = await _error_of(placed(source).computed_kv(request_id, 0))
            assert isinstance(error, NotFound), f"there are parts of {request_id}"


async def parts_can_be_requested_again(harness: Harness) -> None:
    """A cancelled call leaves nothing behind, and a later call succeeds."""
    async with engine_run(harness) as source, Scope("prefill") as scope:
        request = long_request(source, "r")
        scope.start(prefilled(source, request), "prefill")
        await _calls_started()
        async with Scope("parts") as parts:
            parts.start(_part(source, request, 0), "part")
            await _calls_started()
            parts.cancel()
        reported = await _parts(source, request)
        assert reported[-1][0] == await placed(source).held_kv(request.request_id)
        await released(source, request)


def long_request(run: Run, name: str, **fields: int) -> Request:
    """Build a request of several prefill steps, if the engine's step size allows it."""
    info = run.info
    max_blocks = min(
        info.capacity.kv_total_blocks // 4, 3 * info.capacity.max_batch_tokens // info.block_size + 1
    )
    num_blocks = blocks_that_fit(run, max_blocks)
    if num_blocks < 2:
        raise NotRun("a prompt of two blocks does not fit")
    return blocks_request(run, name, num_blocks, tokens=5, **fields)


async def _computed_in_parts(run: Run, request: Request, is_alone: bool = True) -> list[Part]:
    """Prefill a prompt and compare the reported parts with the held blocks."""
    async with Scope("prefill") as scope:
        scope.start(prefilled(run, request), "prefill")
        parts = await _parts(run, request)
        held = await placed(run).held_kv(request.request_id)
        assert parts, "no part was reported"
        assert parts[-1][0] == held, "the last part differs from the held blocks"
        for number, (part, data) in enumerate(parts):
            count = len(part.blocks)
            start = HeldKv(held.blocks[:count], held.keys[:count], held.hashes[:count])
            assert part == start, f"part {number} is not a prefix of the held blocks"
            assert data == contents(run, part.blocks), f"part {number} changed after it was reported"
    if is_alone:
        await released(run, request)
    else:
        await prefill_of(run).release_prefill(request.request_id)
    return parts


async def _parts(run: Run, request: Request) -> list[Part]:
    """All parts of a prompt that is being computed."""
    await _calls_started()
    parts: list[Part] = []
    num_reported = 0
    while len((part := await _part(run, request, num_reported)).blocks) > num_reported:
        parts.append((part, contents(run, part.blocks)))
        num_reported = len(part.blocks)
    assert len(part.blocks) == num_reported, "a part is smaller than the one before"
    return parts


async def _part(run: Run, request: Request, after: int) -> HeldKv:
    async with asyncio.timeout(deadline_of(run.harness)):
        return await placed(run).computed_kv(request.request_id, after)


async def _released_while_computing(run: Run, request: Request) -> bool:
    """Release a prompt while another call waits for its end; return whether it was still being computed."""
    async with Scope("prefill") as scope:
        computing = scope.start(_error_of(prefilled(run, request)), "prefill")
        await _calls_started()
        waiting = scope.start(_error_of(_part(run, request, len(request.token_ids))), "part")
        await _calls_started()
        await prefill_of(run).release_prefill(request.request_id)
        was_computing = isinstance(await computing, Cancelled)
        error = await waiting
        assert isinstance(error, NotFound) or not was_computing, "a released prompt has parts"
    await run.assert_empty()
    return was_computing


async def _calls_started() -> None:
    """Let started tasks make their calls, so that calls keep their order."""
    await asyncio.sleep(0)


async def _error_of(call: Awaitable[object]) -> KvoltError | None:
    try:
        await call
    except KvoltError as error:
        return error
    return None


CASES: tuple[Case, ...] = cases_in(__name__)
