"""The events tier: what an engine tells of its blocks is what its requests find. For engines that offer KvEvents.

Every change that comes is held against the contract by `engine_replica` as it comes; the cases here hold the
replica against what requests then report as cached.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.contract import KvEvents
from kvolt.testing.engines.harness import Answer, Case, Harness, NotRun, Run, engine_run
from kvolt.testing.engines.replica import block_hashes

_ROOM = 200
"""Tokens of the longest prompt: the cases fit a context of 256."""
_MOST_TO_FILL = 64
"""Requests that a case may need to fill a pool."""


def blocks_that_fit(run: Run, wanted: int) -> int:
    """Full blocks of a prompt, with a token to spare."""
    num_blocks = min(wanted, (_ROOM - 1) // run.info.block_size)
    if not num_blocks:
        raise NotRun(f"blocks of {run.info.block_size} tokens are too large for these cases")
    return num_blocks


def blocks_request(run: Run, name: str, num_blocks: int, **fields: int) -> Request:
    """A request with so many full blocks of prompt and one token more."""
    return run.request(name, prompt=num_blocks * run.info.block_size + 1, **fields)


async def ask_as_told(run: Run, request: Request) -> Answer:
    """Ask, and see that what was found in the cache is what the engine had told to be there."""
    block_size = run.info.block_size
    await run.settle()
    known = run.replica.num_leading(block_hashes(request, block_size))
    usable = min(known, (len(request.token_ids) - 1) // block_size)  # the last token is always computed
    answer = await run.answer(request)
    assert answer.cached is not None, f"{request.request_id} was not told how much of its prompt was cached"
    assert answer.cached == usable * block_size, (
        f"{request.request_id} found {answer.cached} tokens, {usable} blocks of {block_size} were told to be there"
    )
    await run.settle()
    told = run.replica.num_leading(block_hashes(request, block_size))
    assert told >= len(request.token_ids) // block_size, f"{request.request_id}: its blocks were not told"
    return answer


def kv_events(run: Run) -> KvEvents:
    engine = run.engine
    assert isinstance(engine, KvEvents)
    return engine


async def a_prompt_is_found_again(harness: Harness) -> None:
    """The second time it is cached, and the answer is the same."""
    async with engine_run(harness) as run:
        request = blocks_request(run, "first", blocks_that_fit(run, 3), tokens=6)
        first = await ask_as_told(run, request)
        assert first.cached == 0
        second = await ask_as_told(run, replace(request, request_id=RequestId("second")))
        assert second.cached
        assert second.tokens == first.tokens, "the answer from cached blocks is another one"
        usage = second.usage[0]
        assert usage.cached_tokens in (0, second.cached), "two figures for what was cached"


async def a_common_start_is_shared(harness: Harness) -> None:
    """As far as whole blocks are equal, and no further; at its very end one token is still computed."""
    async with engine_run(harness) as run:
        num_blocks = blocks_that_fit(run, 3)
        block_size = run.info.block_size
        request = blocks_request(run, "whole", num_blocks)
        await ask_as_told(run, request)
        ids = request.token_ids
        for length in sorted({max(block_size - 1, 1), block_size, block_size + 1, num_blocks * block_size}):
            part = replace(request, request_id=RequestId(f"part{length}"), token_ids=ids[:length])
            await ask_as_told(run, part)
        turned = replace(request, request_id=RequestId("turned"), token_ids=ids[1:] + ids[:1])
        assert (await ask_as_told(run, turned)).cached == 0, "another start was taken for this one"


async def blocks_of_the_answer_are_told(harness: Harness) -> None:
    """All that is told are blocks of the prompt or the answer; those that the answer fills can be found."""
    async with engine_run(harness) as run:
        block_size = run.info.block_size
        num_tokens = min(2 * block_size + 2, _ROOM - block_size)
        request = run.request("r", prompt=5, tokens=num_tokens)
        output = (await ask_as_told(run, request)).tokens[0]
        possible = set(block_hashes(request, block_size, output))
        strangers = run.replica.blocks - possible
        assert not strangers, f"{len(strangers)} blocks are neither of the prompt nor of the answer"
        longer = replace(request, request_id=RequestId("on"), token_ids=(*request.token_ids, *output[:-1]))
        await ask_as_told(run, longer)


async def salts_share_nothing(harness: Harness) -> None:
    async with engine_run(harness) as run:
        request = blocks_request(run, "plain", blocks_that_fit(run, 2))
        plain = await ask_as_told(run, request)
        for salt in ("one", "two"):
            salted = replace(request, request_id=RequestId(salt), salt=salt)
            answer = await ask_as_told(run, salted)
            assert answer.cached == 0, "a tenant found another one's blocks"
            assert answer.tokens == plain.tokens
        again = replace(request, request_id=RequestId("again"), salt="one")
        assert (await ask_as_told(run, again)).cached


async def clear_forgets_everything(harness: Harness) -> None:
    """Told by a step of its own when nothing runs; what comes after starts from nothing."""
    async with engine_run(harness) as run:
        request = blocks_request(run, "first", blocks_that_fit(run, 3))
        first = await ask_as_told(run, request)
        num_blocks, num_cleared = len(run.replica.blocks), run.replica.num_cleared
        assert await kv_events(run).clear_kv() == num_blocks
        await run.until(lambda: run.replica.num_cleared > num_cleared)
        assert not run.replica.blocks
        second = await ask_as_told(run, replace(request, request_id=RequestId("second")))
        assert (second.cached, second.tokens) == (0, first.tokens)
        await run.assert_empty()


async def clear_while_it_computes(harness: Harness) -> None:
    """Those that run go on unharmed, at whatever step."""
    async with engine_run(harness) as run:
        request = blocks_request(run, "expected", blocks_that_fit(run, 3), tokens=20)
        expected = (await run.answer(request)).tokens
        for num_steps in range(4):
            answers = [
                run.submit(replace(request, request_id=RequestId(f"r{num_steps}-{index}")))
                for index in range(3)
            ]
            await run.advance(num_steps)
            await kv_events(run).clear_kv()
            await run.finish(*answers)
            assert all(answer.tokens == expected for answer in answers)
            probe = replace(request, request_id=RequestId(f"probe{num_steps}"))
            assert (await ask_as_told(run, probe)).tokens == expected
        await run.assert_empty()


async def what_was_removed_is_not_found(harness: Harness) -> None:
    """More prompts than the pool holds; each is found as far as it was told to be still there."""
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
        expected = [(await ask_as_told(run, request)).tokens for request in requests]
        assert run.replica.num_removed, "more was asked than there is room for, and nothing was removed"
        num_told = len(run.replica.blocks)
        assert num_told <= total, f"{num_told} blocks are more than there are"
        for request, tokens in zip(requests[::-1], expected[::-1], strict=True):
            again = replace(request, request_id=RequestId(f"{request.request_id}-again"))
            assert (await ask_as_told(run, again)).tokens == tokens
        await run.assert_empty()


async def what_was_aborted_is_told_right(harness: Harness) -> None:
    """Blocks that a stopped request had filled may stay: then they are told, and right."""
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
            probe = replace(request, request_id=RequestId(f"probe{num_steps}"))
            assert (await ask_as_told(run, probe)).tokens == expected


CASES: tuple[Case, ...] = (
    a_prompt_is_found_again,
    a_common_start_is_shared,
    blocks_of_the_answer_are_told,
    salts_share_nothing,
    clear_forgets_everything,
    clear_while_it_computes,
    what_was_removed_is_not_found,
    what_was_aborted_is_told_right,
)
