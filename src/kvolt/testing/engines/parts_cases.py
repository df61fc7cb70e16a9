"""The cases of the kv-placed tier about blocks that are told of while their prompt is computed.

Of an engine in another process a case may be too slow to hear of every part: what comes of that it tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from msgspec.structs import replace

from kvolt.core.errors import Cancelled, KvoltError, NotFound
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.contract import KvEvents, KvHeld
from kvolt.runtime.tasks import Scope
from kvolt.testing.engines.event_cases import blocks_request, blocks_that_fit
from kvolt.testing.engines.handoff_cases import prefill_of, prefilled
from kvolt.testing.engines.harness import Case, Harness, NotRun, Run, deadline_of, engine_run
from kvolt.testing.engines.placed_cases import computed, contents, placed, released

_TRIES = 20
"""What is to be seen between two steps is not always seen on a busy machine."""

Part = tuple[KvHeld, list[bytes]]
"""What was told, and what lay there at that moment."""


async def parts_come_as_they_are_computed(harness: Harness) -> None:
    """Each has what was told before at its start and more behind it; the last is what is held in the end."""
    async with engine_run(harness) as source:
        for number in range(_TRIES):
            request = long_request(source, f"r{number}", variant=number)
            parts = await _computed_in_parts(source, request)
            if len(parts) > 1 or len(request.token_ids) <= source.info.capacity.max_batch_tokens:
                return
        raise AssertionError("prompts of several steps were told of at their end only")


async def cached_blocks_are_told_first(harness: Harness) -> None:
    """Of a prompt that begins with what is here: nobody waits for a step to hear of that.

    Another request is decoded beside it: an idle engine would start the prompt before the question has come.
    """
    async with engine_run(harness) as source:
        if not isinstance(source.engine, KvEvents):
            raise NotRun("nobody knows what it finds in its cache")
        for number in range(_TRIES):
            request = long_request(source, f"r{number}", variant=number)
            num_cached = len(request.token_ids) // source.info.block_size // 2
            start = request.token_ids[: num_cached * source.info.block_size + 1]
            await source.answer(replace(request, request_id=RequestId(f"start{number}"), token_ids=start))
            other = source.submit(source.request(f"other{number}", prompt=9, tokens=60, variant=1))
            await source.advance(1)
            (first, _), *_ = await _computed_in_parts(source, request, is_alone=False)
            source.abort(other)
            if len(first.blocks) == num_cached:
                return
        raise AssertionError("what was cached was not told by itself")


async def parts_of_several_choices_are_those_of_the_first(harness: Harness) -> None:
    async with engine_run(harness) as source:
        await _computed_in_parts(source, long_request(source, "r", choices=3))


async def parts_stay_while_others_compute(harness: Harness) -> None:
    async with engine_run(harness) as source:
        others = [source.request(f"other{each}", prompt=9, tokens=60, variant=1 + each) for each in range(2)]
        running = [source.submit(other) for other in others]
        await source.advance(2)
        await _computed_in_parts(source, long_request(source, "r"), is_alone=False)
        await source.finish(*running)
        await source.assert_empty()


async def a_prompt_that_is_let_go_has_no_parts(harness: Harness) -> None:
    """While it is computed, and after: who waits for it hears of that. Nor has an unknown one any."""
    async with engine_run(harness) as source:
        for number in range(_TRIES):
            request = long_request(source, f"r{number}", variant=number)
            if await _is_let_go_in_time(source, request):
                break
        else:
            raise AssertionError("prompts that were let go were computed to their end")
        await computed(source, request)
        await released(source, request)
        for request_id in (request.request_id, RequestId("nobody")):
            error = await _error_of(placed(source).computed_kv(request_id, 0))
            assert isinstance(error, NotFound), f"there are parts of {request_id}"


async def parts_may_be_given_up_and_asked_for_again(harness: Harness) -> None:
    """Who waited leaves nothing; who asks later is told all the same."""
    async with engine_run(harness) as source, Scope("prefill") as scope:
        request = long_request(source, "r")
        scope.start(prefilled(source, request), "prefill")
        await _begun()
        async with Scope("parts") as parts:
            parts.start(_part(source, request, 0), "part")
            await _begun()
            parts.cancel()
        told = await _parts(source, request)
        assert told[-1][0] == await placed(source).hold_kv(request.request_id)
        await released(source, request)


def long_request(run: Run, name: str, **fields: int) -> Request:
    """Of more than one step, where the engine's steps are not too large for that."""
    info = run.info
    wanted = min(
        info.capacity.kv_total_blocks // 4, 3 * info.capacity.max_batch_tokens // info.block_size + 1
    )
    num_blocks = blocks_that_fit(run, wanted)
    if num_blocks < 2:
        raise NotRun("a prompt of two blocks does not fit")
    return blocks_request(run, name, num_blocks, tokens=5, **fields)


async def _computed_in_parts(run: Run, request: Request, is_alone: bool = True) -> list[Part]:
    """Compute a prompt and hold what is told of it against what is there in the end."""
    async with Scope("prefill") as scope:
        scope.start(prefilled(run, request), "prefill")
        parts = await _parts(run, request)
        held = await placed(run).hold_kv(request.request_id)
        assert parts, "nothing was told of a prompt"
        assert parts[-1][0] == held, "what was told last is not what is held"
        for number, (part, data) in enumerate(parts):
            count = len(part.blocks)
            start = KvHeld(held.blocks[:count], held.keys[:count], held.hashes[:count])
            assert part == start, f"part {number} lies elsewhere than it was told"
            assert data == contents(run, part.blocks), f"part {number} has changed since it was told"
    if is_alone:
        await released(run, request)
    else:
        await prefill_of(run).release_prefill(request.request_id)
    return parts


async def _parts(run: Run, request: Request) -> list[Part]:
    """Of a prompt whose computing was started, to its end."""
    await _begun()
    parts: list[Part] = []
    num_told = 0
    while len((part := await _part(run, request, num_told)).blocks) > num_told:
        parts.append((part, contents(run, part.blocks)))
        num_told = len(part.blocks)
    assert len(part.blocks) == num_told, "a part is smaller than the one before"
    return parts


async def _part(run: Run, request: Request, after: int) -> KvHeld:
    async with asyncio.timeout(deadline_of(run.harness)):
        return await placed(run).computed_kv(request.request_id, after)


async def _is_let_go_in_time(run: Run, request: Request) -> bool:
    """Let go of a prompt that somebody waits for the end of; whether it was still computed."""
    async with Scope("prefill") as scope:
        computing = scope.start(_error_of(prefilled(run, request)), "prefill")
        await _begun()
        waiting = scope.start(_error_of(_part(run, request, len(request.token_ids))), "part")
        await _begun()
        await prefill_of(run).release_prefill(request.request_id)
        is_in_time = isinstance(await computing, Cancelled)
        error = await waiting
        assert isinstance(error, NotFound) or not is_in_time, "there are parts of what was let go"
    await run.assert_empty()
    return is_in_time


async def _begun() -> None:
    """What was started has made its call: from then on calls keep their order."""
    await asyncio.sleep(0)


async def _error_of(call: Awaitable[object]) -> KvoltError | None:
    try:
        await call
    except KvoltError as error:
        return error
    return None


CASES: tuple[Case, ...] = (
    parts_come_as_they_are_computed,
    cached_blocks_are_told_first,
    parts_of_several_choices_are_those_of_the_first,
    parts_stay_while_others_compute,
    a_prompt_that_is_let_go_has_no_parts,
    parts_may_be_given_up_and_asked_for_again,
)
