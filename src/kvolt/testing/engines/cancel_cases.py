"""Cases of the engine suite about aborted requests: they leave nothing behind, in any state."""

from __future__ import annotations

from kvolt.core.ids import RequestId
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.harness import Case, Harness, engine_run

_LONG_PROMPT = 200
_MOST_REQUESTS = 190


async def abort_frees_everything(harness: Harness) -> None:
    """Abort at each of the first steps, while another request runs undisturbed."""
    async with engine_run(harness) as run:
        expected = (await run.answer(run.request("expected", tokens=40))).tokens
        for num_steps in range(8):
            stays = run.submit(run.request(f"stays{num_steps}", tokens=40))
            goes = run.submit(run.request(f"goes{num_steps}", prompt=60, tokens=40, choices=2, seed=5))
            await run.advance(num_steps)
            run.abort(goes)
            run.abort(goes)
            await run.finish(stays)
            assert stays.tokens == expected
            assert not goes.done
        await run.assert_empty()


async def abort_of_unknown_request_is_ignored(harness: Harness) -> None:
    async with engine_run(harness) as run:
        run.engine.abort(RequestId("unknown"))
        ended = await run.answer(run.request("ended"))
        run.engine.abort(ended.request.request_id)
        await run.assert_empty()


async def abort_while_waiting(harness: Harness) -> None:
    """The request leaves the queue and later ones move up."""
    async with engine_run(harness) as run:
        running = [run.submit(run.request(f"r{i}", tokens=12)) for i in range(run.info.capacity.max_num_seqs)]
        await run.until(lambda: any(answer.tokens for answer in running))
        waiting = [run.submit(run.request(f"w{i}", choices=1 + i % 2)) for i in range(6)]
        for answer in waiting[::2]:
            run.abort(answer)
        await run.finish(*running, *waiting[1::2])
        assert not any(answer.tokens for answer in waiting[::2])
        await run.assert_empty()


async def abort_during_prefill(harness: Harness) -> None:
    """With more prompt tokens than a step computes: some requests are started, some half done, some waiting."""
    async with engine_run(harness) as run:
        expected = (await run.answer(run.request("expected", prompt=_LONG_PROMPT, tokens=4))).tokens
        budget = run.info.capacity.max_batch_tokens
        num_requests = min(3 * budget // _LONG_PROMPT + 2, _MOST_REQUESTS)
        for num_steps in (1, 2):
            answers = [
                run.submit(run.request(f"p{num_steps}-{i}", prompt=_LONG_PROMPT, tokens=4, variant=i + 1))
                for i in range(num_requests)
            ]
            await run.advance(num_steps)
            for answer in answers[::-1]:
                if not answer.done:
                    run.abort(answer)
            await run.assert_empty()
        again = await run.answer(run.request("again", prompt=_LONG_PROMPT, tokens=4))
        assert again.tokens == expected, "an aborted prompt changed a later answer"


async def abort_storms(harness: Harness) -> None:
    """Abort many different requests at once while others run undisturbed."""
    async with engine_run(harness) as run:
        expected = (await run.answer(run.request("expected", prompt=40, tokens=24))).tokens
        for storm in range(3):
            stays = [run.submit(run.request(f"stays{storm}-{i}", prompt=40, tokens=24)) for i in range(2)]
            goes = [
                run.submit(
                    run.request(
                        f"goes{storm}-{i}",
                        prompt=1 + (37 * i) % 150,
                        tokens=30,
                        choices=1 + i % 3,
                        seed=i,
                        variant=i % 2,
                    )
                )
                for i in range(60)
            ]
            for part in range(3):
                await run.advance(1 + storm)
                for answer in goes[part::3]:
                    if not answer.done:
                        run.abort(answer)
            await run.finish(*stays)
            assert all(answer.tokens == expected for answer in stays)
        await run.assert_empty()


CANCEL_CASES: tuple[Case, ...] = cases_in(__name__)
