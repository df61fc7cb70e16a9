"""Engine conformance suite, core tier: cases for any implementation and any event loop.

Optional capabilities have their own tiers, see `tiers`; `kvolt engine check NAME` runs all. A case is an async function
of a `Harness`; it raises AssertionError when the engine violates the contract. With pytest:

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__) async def test_conformance(case):
        await case(MyHarness())

Cases close every engine they start. In all cases every step is checked against the contract: order, one finish per
choice with its usage, plain tokens consistent with deltas, and logprobs for all tokens of requests that ask for them.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvolt.core.delta import FinishReason
from kvolt.core.errors import InvalidRequest, Overloaded, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling
from kvolt.engines.contract import Engine, check_sampling_fields
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.answer_cases import ANSWER_CASES
from kvolt.testing.engines.cancel_cases import CANCEL_CASES
from kvolt.testing.engines.harness import Case, Harness, NotRun, engine_run, renamed

__all__ = ["CASES", "SAMPLING_VALUES", "Case", "Harness", "NotRun"]

_NUM_CONCURRENT = 200
SAMPLING_VALUES: dict[str, object] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.5,
    "logit_bias": {1: 1.0},
    "allowed_token_ids": (1, 2),
    "seed": 7,
    "num_choices": 2,
    "logprobs": 1,
    "prompt_logprobs": 1,
}
"""A value other than the default for each field of Sampling."""


async def info_agrees_with_card(harness: Harness) -> None:
    async with engine_run(harness) as run:
        card = run.engine.card
        assert (run.info.model, run.info.block_size) == (card.name, card.block_size)
        assert run.info.capacity.max_num_seqs >= 1


async def declares_sampling_fields(harness: Harness) -> None:
    """What the engine declares exists, and a worker refuses the rest."""
    async with engine_run(harness) as run:
        declared, defaults = run.engine.sampling_fields, Sampling()
        assert declared <= set(Sampling.__struct_fields__)
        assert {"temperature", "seed", "num_choices"} <= declared, "the conformance suite depends on these"
        for name in set(Sampling.__struct_fields__) - declared:
            assert name in SAMPLING_VALUES, f"add a value for Sampling.{name} to SAMPLING_VALUES"
            other = replace(defaults, **{name: SAMPLING_VALUES[name]})
            try:
                check_sampling_fields(other, declared, "tested")
            except Unsupported:
                continue
            raise AssertionError(f"{name} is not declared and not refused")


async def streams_in_order_and_stops_at_max_tokens(harness: Harness) -> None:
    async with engine_run(harness) as run:
        for num_tokens in (1, 2, 17):
            answer = await run.answer(run.request(f"r{num_tokens}", tokens=num_tokens))
            assert len(answer.tokens[0]) == num_tokens
            assert answer.finishes == {0: FinishReason.LENGTH}
            usage = answer.usage[0]
            assert (usage.prompt_tokens, usage.completion_tokens) == (20, num_tokens)


async def tokens_are_streamed(harness: Harness) -> None:
    async with engine_run(harness) as run:
        answer = run.submit(run.request("r", tokens=32))
        await run.until(lambda: bool(answer.tokens))
        assert not answer.done, "the first token arrived together with the last"
        await run.finish(answer)


async def same_seed_same_tokens(harness: Harness) -> None:
    async with engine_run(harness) as run:
        alone = await run.answer(run.request("alone", tokens=16, seed=7))
        batched = [run.submit(run.request(f"r{i}", tokens=16, seed=7 + i % 2, prompt=20)) for i in range(6)]
        await run.finish(*batched)
        for index, answer in enumerate(batched):
            assert (answer.tokens == alone.tokens) == (index % 2 == 0)


async def resumes_after_prior_tokens(harness: Harness) -> None:
    async with engine_run(harness) as run:
        request = run.request("whole", tokens=9, seed=3)
        whole = (await run.answer(request)).tokens[0]
        for cut in range(1, len(whole)):
            moved = renamed(request, f"cut{cut}", prior_tokens=tuple(whole[:cut]))
            answer = await run.answer(moved)
            assert whole[:cut] + answer.tokens[0] == whole
            assert answer.usage[0].completion_tokens == len(whole)


async def each_choice_resumes_after_its_own_tokens(harness: Harness) -> None:
    """A finished choice is not computed again."""
    async with engine_run(harness) as run:
        request = run.request("whole", choices=3, tokens=7, seed=3)
        whole = (await run.answer(request)).tokens
        for number, cuts in enumerate(((2, 5, 1), (None, 3, 0), (6, None, None), (0, 0, 4))):
            prior_tokens = tuple(
                None if cut is None else tuple(whole[index][:cut]) for index, cut in enumerate(cuts)
            )
            moved = renamed(request, f"moved{number}", prior_tokens_by_choice=prior_tokens)
            try:
                answer = run.submit(moved)
            except Unsupported as error:
                raise NotRun(f"unsupported by the engine: {error.message}") from error
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


async def withdraws_only_waiting_requests(harness: Harness) -> None:
    async with engine_run(harness) as run:
        running = [run.submit(run.request(f"r{i}", tokens=12)) for i in range(run.info.capacity.max_num_seqs)]
        await run.until(lambda: any(answer.tokens for answer in running))
        waiting = run.submit(run.request("waiting"))
        started = next(answer for answer in running if answer.tokens)
        assert await run.withdraw(waiting), "a waiting request was not withdrawn"
        assert not await run.withdraw(started), "a running request was withdrawn"
        assert not await run.engine.withdraw(RequestId("unknown"))
        await run.finish(*running)
        assert not waiting.tokens
        await run.assert_empty()


async def two_hundred_concurrent_requests(harness: Harness) -> None:
    async with engine_run(harness) as run:
        answers = [
            run.submit(run.request(f"r{i}", prompt=1 + i % 50, tokens=1 + i % 13, seed=i))
            for i in range(_NUM_CONCURRENT)
        ]
        await run.finish(*answers)
        for index, answer in enumerate(answers):
            assert len(answer.tokens[0]) == 1 + index % 13
        await run.assert_empty()


async def rejects_bad_requests(harness: Harness) -> None:
    """`submit` raises a typed error and keeps nothing of the request."""
    async with engine_run(harness) as run:
        good = run.request("r")
        no_prompt = replace(good, token_ids=())
        bad = [
            no_prompt,
            replace(good, stop=replace(good.stop, max_tokens=0)),
            replace(good, stop=replace(good.stop, max_tokens=run.engine.card.context_length)),
            replace(good, sampling=replace(good.sampling, num_choices=0)),
            replace(good, prior_tokens=harness.prompt(good.stop.max_tokens)),
            replace(good, prior_tokens_by_choice=(None,)),
            replace(good, prior_tokens_by_choice=((), harness.prompt(1))),
            replace(good, stop=replace(good.stop, max_tokens=-1)),
        ]
        for request in bad:
            _assert_refused(run.engine, request)
        answer = run.submit(good)
        _assert_refused(run.engine, good)  # duplicate id
        await run.finish(answer)
        assert len(answer.tokens[0]) == good.stop.max_tokens
        await run.assert_empty()


def _assert_refused(engine: Engine, request: Request) -> None:
    try:
        engine.submit(request)
    except (InvalidRequest, Unsupported):
        return
    except Overloaded as error:
        raise AssertionError(f"Overloaded suggests a retry, but the request is invalid: {request}") from error
    raise AssertionError(f"accepted: {request}")


async def request_id_can_be_reused(harness: Harness) -> None:
    async with engine_run(harness) as run:
        first = (await run.answer(run.request("same", tokens=20))).tokens
        answer = run.submit(run.request("same", tokens=20))
        await run.until(lambda: bool(answer.tokens))
        run.abort(answer)
        again = await run.answer(run.request("same", tokens=20))
        assert again.tokens == first


async def close_ends_the_steps(harness: Harness) -> None:
    """Close with a running request; a second close has no effect."""
    async with engine_run(harness) as run:
        answer = run.submit(run.request("r", tokens=100))
        await run.until(lambda: bool(answer.tokens))
        await run.engine.close()


CASES: tuple[Case, ...] = (*cases_in(__name__), *CANCEL_CASES, *ANSWER_CASES)
