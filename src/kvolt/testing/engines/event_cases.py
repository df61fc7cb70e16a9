"""Tier `events`, for KvEvents engines: the published blocks are those that requests find in the cache.

`replica` checks every KV event against the contract; the cases compare the replica with the cached tokens that
requests report.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.contract import KvEvents
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.harness import (
    Answer,
    Case,
    Harness,
    NotRun,
    Run,
    block_hashes,
    engine_run,
    renamed,
)

_ROOM = 200
"""Longest prompt in tokens: the cases fit a context of 256."""
_MOST_TO_FILL = 64
"""Maximum number of requests to fill a pool."""


def blocks_that_fit(run: Run, max_blocks: int) -> int:
    """Full blocks of the longest possible prompt, with one more token."""
    num_blocks = min(max_blocks, (_ROOM - 1) // run.info.block_size)
    if not num_blocks:
        raise NotRun(f"blocks of {run.info.block_size} tokens are too large for these cases")
    return num_blocks


def blocks_request(run: Run, name: str, num_blocks: int, **fields: int) -> Request:
    """Build a request with `num_blocks` full blocks of prompt and one more token."""
    return run.request(name, prompt=num_blocks * run.info.block_size + 1, **fields)


async def answer_matching_events(run: Run, request: Request) -> Answer:
    """Run a request and check that its cached tokens are those that the engine had published."""
    block_size = run.info.block_size
    await run.settle()
    num_published = run.replica.num_leading(block_hashes(request, block_size))
    usable = min(
        num_published, (len(request.token_ids) - 1) // block_size
    )  # the last token is always computed
    answer = await run.answer(request)
    assert answer.cached is not None, f"{request.request_id} did not report its cached tokens"
    assert answer.cached == usable * block_size, (
        f"{request.request_id} found {answer.cached} tokens, but {usable} blocks of {block_size} were published"
    )
    await run.settle()
    num_published = run.replica.num_leading(block_hashes(request, block_size))
    assert num_published >= len(request.token_ids) // block_size, (
        f"{request.request_id}: blocks were not published"
    )
    return answer


def kv_events(run: Run) -> KvEvents:
    engine = run.engine
    assert isinstance(engine, KvEvents)
    return engine


async def repeated_prompt_is_cached(harness: Harness) -> None:
    """A repeated prompt is cached and has the same answer."""
    async with engine_run(harness) as run:
        request = blocks_request(run, "first", blocks_that_fit(run, 3), tokens=6)
        first = await answer_matching_events(run, request)
        assert first.cached == 0
        second = await answer_matching_events(run, renamed(request, "second"))
        assert second.cached
        assert second.tokens == first.tokens, "the answer from cached blocks differs"
        usage = second.usage[0]
        assert usage.cached_tokens in (0, second.cached), "usage and delta disagree about cached tokens"


async def common_prefix_is_shared(harness: Harness) -> None:
    """Exactly the equal full blocks are shared; the last token is always computed."""
    async with engine_run(harness) as run:
        num_blocks = blocks_that_fit(run, 3)
        block_size = run.info.block_size
        request = blocks_request(run, "whole", num_blocks)
        await answer_matching_events(run, request)
        ids = request.token_ids
        for length in sorted({max(block_size - 1, 1), block_size, block_size + 1, num_blocks * block_size}):
            part = renamed(request, f"part{length}", token_ids=ids[:length])
            await answer_matching_events(run, part)
        turned = renamed(request, "turned", token_ids=ids[1:] + ids[:1])
        assert (await answer_matching_events(run, turned)).cached == 0, (
            "a different prefix was found in the cache"
        )


async def answer_blocks_are_published(harness: Harness) -> None:
    """Only blocks of the prompt and the answer are published, and those of the answer can be found."""
    async with engine_run(harness) as run:
        block_size = run.info.block_size
        num_tokens = min(2 * block_size + 2, _ROOM - block_size)
        request = run.request("r", prompt=5, tokens=num_tokens)
        output = (await answer_matching_events(run, request)).tokens[0]
        possible = set(block_hashes(request, block_size, output))
        unexpected = run.replica.blocks - possible
        assert not unexpected, f"{len(unexpected)} blocks belong neither to the prompt nor to the answer"
        longer = renamed(request, "on", token_ids=(*request.token_ids, *output[:-1]))
        await answer_matching_events(run, longer)


async def salts_isolate_blocks(harness: Harness) -> None:
    async with engine_run(harness) as run:
        request = blocks_request(run, "plain", blocks_that_fit(run, 2))
        plain = await answer_matching_events(run, request)
        for salt in ("one", "two"):
            salted = replace(request, request_id=RequestId(salt), salt=salt)
            answer = await answer_matching_events(run, salted)
            assert answer.cached == 0, "a tenant found blocks of another tenant"
            assert answer.tokens == plain.tokens
        again = renamed(request, "again", salt="one")
        assert (await answer_matching_events(run, again)).cached


async def clear_removes_all_blocks(harness: Harness) -> None:
    """The event is published even if no request runs; later requests find nothing."""
    async with engine_run(harness) as run:
        request = blocks_request(run, "first", blocks_that_fit(run, 3))
        first = await answer_matching_events(run, request)
        num_blocks, num_cleared = len(run.replica.blocks), run.replica.num_cleared
        assert await kv_events(run).clear_kv() == num_blocks
        await run.until(lambda: run.replica.num_cleared > num_cleared)
        assert not run.replica.blocks
        second = await answer_matching_events(run, renamed(request, "second"))
        assert (second.cached, second.tokens) == (0, first.tokens)
        await run.assert_empty()


async def clear_while_computing(harness: Harness) -> None:
    """Running requests continue unharmed, at any step."""
    async with engine_run(harness) as run:
        request = blocks_request(run, "expected", blocks_that_fit(run, 3), tokens=20)
        expected = (await run.answer(request)).tokens
        for num_steps in range(4):
            answers = [run.submit(renamed(request, f"r{num_steps}-{index}")) for index in range(3)]
            await run.advance(num_steps)
            await kv_events(run).clear_kv()
            await run.finish(*answers)
            assert all(answer.tokens == expected for answer in answers)
            probe = renamed(request, f"probe{num_steps}")
            assert (await answer_matching_events(run, probe)).tokens == expected
        await run.assert_empty()


async def evicted_blocks_are_not_found(harness: Harness) -> None:
    """With more prompts than the pool holds, each is cached as far as published."""
    async with engine_run(harness) as run:
        total = run.info.capacity.kv_total_blocks
        num_blocks = blocks_that_fit(run, max(total // 4, 1))
        num_needed = 2 * total // num_blocks
        if num_needed > min(_MOST_TO_FILL, num_blocks * run.info.block_size):
            raise NotRun(f"a pool of {total} blocks is too large to be filled by a test")
        requests = [
            blocks_request(run, f"fill{index}", num_blocks, variant=index, tokens=2)
            for index in range(num_needed)
        ]
        expected = [(await answer_matching_events(run, request)).tokens for request in requests]
        assert run.replica.num_removed, "the pool overflowed but no block was removed"
        num_published = len(run.replica.blocks)
        assert num_published <= total, f"{num_published} blocks are published, the pool has {total}"
        for request, tokens in zip(requests[::-1], expected[::-1], strict=True):
            again = renamed(request, f"{request.request_id}-again")
            assert (await answer_matching_events(run, again)).tokens == tokens
        await run.assert_empty()


async def aborted_blocks_are_published_correctly(harness: Harness) -> None:
    """Blocks of aborted requests may stay cached: then they are published and correct."""
    async with engine_run(harness) as run:
        num_blocks = blocks_that_fit(run, 6)
        request = blocks_request(run, "expected", num_blocks, tokens=12)
        expected = (await run.answer(request)).tokens
        await kv_events(run).clear_kv()
        for num_steps in range(4):
            goes = [
                run.submit(
                    blocks_request(run, f"goes{num_steps}-{index}", num_blocks, variant=index, tokens=12)
                )
                for index in range(4)
            ]
            await run.advance(num_steps)
            for answer in goes:
                run.abort(answer)
            await run.assert_empty()
            probe = renamed(request, f"probe{num_steps}")
            assert (await answer_matching_events(run, probe)).tokens == expected


CASES: tuple[Case, ...] = cases_in(__name__)
