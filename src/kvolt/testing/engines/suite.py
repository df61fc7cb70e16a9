"""What every engine must do, as cases for any implementation and any loop. This is the core tier.

What an engine may offer besides has tiers of its own, see `engine_tiers`; `kvolt engine check NAME` runs them all.
A case is an async function of a `Harness`; it raises AssertionError when the engine is wrong. With pytest:

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    async def test_conformance(case):
        await case(MyHarness())

Cases close every engine they start. Whatever a case is about, each step it sees is held against the
contract: order, one end per choice with its usage, plain tokens that agree with the deltas, logprobs for
all tokens of those who asked.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvolt.core.delta import FinishReason
from kvolt.core.errors import InvalidRequest, Overloaded, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.contract import Engine
from kvolt.testing.engines.answer_cases import ANSWER_CASES
from kvolt.testing.engines.cancel_cases import CANCEL_CASES
from kvolt.testing.engines.harness import Case, Harness, NotRun, engine_run

__all__ = ["CASES", "Case", "Harness", "NotRun"]

_NUM_CONCURRENT = 200


async def info_agrees_with_the_card(harness: Harness) -> None:
    async with engine_run(harness) as run:
        card = run.engine.card
        assert (run.info.model, run.info.block_size) == (card.name, card.block_size)
        assert run.info.capacity.max_num_seqs >= 1


async def streams_in_order_and_stops_at_max_tokens(harness: Harness) -> None:
    async with engine_run(harness) as run:
        for num_tokens in (1, 2, 17):
            answer = await run.answer(run.request(f"r{num_tokens}", tokens=num_tokens))
            assert len(answer.tokens[0]) == num_tokens
            assert answer.finishes == {0: FinishReason.LENGTH}
            usage = answer.usage[0]
            assert (usage.prompt_tokens, usage.completion_tokens) == (20, num_tokens)


async def tokens_come_while_it_computes(harness: Harness) -> None:
    async with engine_run(harness) as run:
        answer = run.submit(run.request("r", tokens=32))
        await run.until(lambda: bool(answer.tokens))
        assert not answer.done, "the first token came together with the last"
        await run.finish(answer)


async def same_seed_same_tokens(harness: Harness) -> None:
    async with engine_run(harness) as run:
        alone = await run.answer(run.request("alone", tokens=16, seed=7))
        among = [run.submit(run.request(f"r{i}", tokens=16, seed=7 + i % 2, prompt=20)) for i in range(6)]
        await run.finish(*among)
        for index, answer in enumerate(among):
            assert (answer.tokens == alone.tokens) == (index % 2 == 0)


async def resumes_as_if_nothing_happened(harness: Harness) -> None:
    async with engine_run(harness) as run:
        request = run.request("whole", tokens=9, seed=3)
        whole = (await run.answer(request)).tokens[0]
        for cut in range(1, len(whole)):
            moved = replace(request, request_id=RequestId(f"cut{cut}"), resume=tuple(whole[:cut]))
            answer = await run.answer(moved)
            assert whole[:cut] + answer.tokens[0] == whole
            assert answer.usage[0].completion_tokens == len(whole)


async def each_choice_resumes_after_its_own_tokens(harness: Harness) -> None:
    """And one that is over is not computed again."""
    async with engine_run(harness) as run:
        request = run.request("whole", choices=3, tokens=7, seed=3)
        whole = (await run.answer(request)).tokens
        for number, cuts in enumerate(((2, 5, 1), (None, 3, 0), (6, None, None), (0, 0, 4))):
            given = tuple(
                None if cut is None else tuple(whole[index][:cut]) for index, cut in enumerate(cuts)
            )
            moved = replace(request, request_id=RequestId(f"moved{number}"), resume_choices=given)
            try:
                answer = run.submit(moved)
            except Unsupported as error:
                raise NotRun(f"it refuses that: {error.message}") from error
            await run.finish(answer)
            left = {index: whole[index][cut:] for index, cut in enumerate(cuts) if cut is not None}
            assert answer.tokens == left
            assert {usage.completion_tokens for usage in answer.usage.values()} == {7}
        await run.assert_empty()


async def every_choice_ends(harness: Harness) -> None:
    async with engine_run(harness) as run:
        answer = await run.answer(run.request("r", choices=3, tokens=6))
        assert {index: len(tokens) for index, tokens in answer.tokens.items()} == {0: 6, 1: 6, 2: 6}
        assert len({tuple(tokens) for tokens in answer.tokens.values()}) > 1, "all choices are the same"


async def withdraws_only_what_has_not_started(harness: Harness) -> None:
    async with engine_run(harness) as run:
        running = [run.submit(run.request(f"r{i}", tokens=12)) for i in range(run.info.capacity.max_num_seqs)]
        await run.until(lambda: any(answer.tokens for answer in running))
        waiting = run.submit(run.request("waiting"))
        started = next(answer for answer in running if answer.tokens)
        assert await run.withdraw(waiting), "a request that waits was not given back"
        assert not await run.withdraw(started), "a request that had tokens was given back"
        assert not await run.engine.withdraw(RequestId("nobody"))
        await run.finish(*running)
        assert not waiting.tokens
        await run.assert_empty()


async def two_hundred_at_once(harness: Harness) -> None:
    async with engine_run(harness) as run:
        answers = [
            run.submit(run.request(f"r{i}", prompt=1 + i % 50, tokens=1 + i % 13, seed=i))
            for i in range(_NUM_CONCURRENT)
        ]
        await run.finish(*answers)
        for index, answer in enumerate(answers):
            assert len(answer.tokens[0]) == 1 + index % 13
        await run.assert_empty()


async def refuses_bad_requests(harness: Harness) -> None:
    """By `submit`, with an error that says what is wrong; nothing of them stays."""
    async with engine_run(harness) as run:
        good = run.request("r")
        no_prompt = replace(good, token_ids=())
        bad = [
            no_prompt,
            replace(good, stop=replace(good.stop, max_tokens=0)),
            replace(good, stop=replace(good.stop, max_tokens=run.engine.card.context_length)),
            replace(good, sampling=replace(good.sampling, num_choices=0)),
            replace(good, resume=harness.prompt(good.stop.max_tokens)),
            replace(good, resume_choices=(None,)),
            replace(good, resume_choices=((), harness.prompt(1))),
            replace(good, stop=replace(good.stop, max_tokens=-1)),
        ]
        for request in bad:
            _assert_refused(run.engine, request)
        answer = run.submit(good)
        _assert_refused(run.engine, good)  # a second one with its id
        await run.finish(answer)
        assert len(answer.tokens[0]) == good.stop.max_tokens
        await run.assert_empty()


def _assert_refused(engine: Engine, request: Request) -> None:
    try:
        engine.submit(request)
    except (InvalidRequest, Unsupported):
        return
    except Overloaded as error:
        raise AssertionError(f"no other time is better for {request}") from error
    raise AssertionError(f"taken: {request}")


async def an_id_can_be_used_again(harness: Harness) -> None:
    async with engine_run(harness) as run:
        first = (await run.answer(run.request("same", tokens=20))).tokens
        answer = run.submit(run.request("same", tokens=20))
        await run.until(lambda: bool(answer.tokens))
        run.abort(answer)
        again = await run.answer(run.request("same", tokens=20))
        assert again.tokens == first


async def close_ends_the_steps(harness: Harness) -> None:
    """With requests inside, and twice."""
    async with engine_run(harness) as run:
        answer = run.submit(run.request("r", tokens=100))
        await run.until(lambda: bool(answer.tokens))
        await run.engine.close()


CASES: tuple[Case, ...] = (
    info_agrees_with_the_card,
    streams_in_order_and_stops_at_max_tokens,
    tokens_come_while_it_computes,
    same_seed_same_tokens,
    resumes_as_if_nothing_happened,
    each_choice_resumes_after_its_own_tokens,
    every_choice_ends,
    withdraws_only_what_has_not_started,
    two_hundred_at_once,
    refuses_bad_requests,
    an_id_can_be_used_again,
    close_ends_the_steps,
    *CANCEL_CASES,
    *ANSWER_CASES,
)
