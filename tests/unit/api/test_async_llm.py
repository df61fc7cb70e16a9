"""AsyncLLM: streams, and what is left when one is not read to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvolt import AsyncLLM, SamplingParams
from kvolt.core.errors import InvalidRequest, Unavailable

LONG = SamplingParams(max_tokens=30_000)


@contextlib.asynccontextmanager
async def opened(speed: float = 1000.0) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM("sim-tiny", speed=speed, kv_blocks=8192) as llm:
        yield llm


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def is_idle(llm: AsyncLLM) -> bool:
    """No request is running, and no block is held."""
    server = llm._server
    assert server._worker is not None
    load = server._worker._describe()["load"]
    return not (len(server._requests) or load.get("running") or load.get("kv_used_blocks"))


async def test_parts_join_to_the_whole_output() -> None:
    async with opened() as llm:
        params = SamplingParams(max_tokens=50, n=2, seed=7, logprobs=0)
        parts = [part async for part in llm.generate("Hello", params)]
        assert parts[-1].finished
        assert len(parts) > 1
        for index in (0, 1):
            outputs = [output for part in parts for output in part.outputs if output.index == index]
            assert sum(len(output.token_ids) for output in outputs) == 50
            assert len("".join(output.text for output in outputs).split()) == 50
            assert sum(len(output.logprobs or ()) for output in outputs) == 50
            assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]


async def test_a_chat_streams() -> None:
    async with opened() as llm:
        chat = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=5))
        texts = [part.outputs[0].text async for part in chat]
    assert len("".join(texts).split()) == 5


@pytest.mark.parametrize(("model", "temperature"), [("smollm2-135m", 0.2), ("sim-tiny", 1.0)])
async def test_the_built_in_model_has_its_generation_defaults(model: str, temperature: float) -> None:
    async with AsyncLLM(model, engine="sim") as llm:
        served = llm._server._model
        assert served is not None
        assert served.defaults.temperature == temperature


async def test_leaving_the_loop_frees_the_blocks() -> None:
    async with opened(speed=1.0) as llm:
        async for part in llm.generate("Hello", LONG):
            assert not is_idle(llm)
            if part.outputs:
                break
        await until(lambda: is_idle(llm))


async def test_closing_the_iterator_ends_the_request_before_it_returns() -> None:
    async with opened(speed=1.0) as llm:
        async with contextlib.aclosing(llm.generate("Hello", LONG)) as parts:
            await anext(parts)
        assert not len(llm._server._requests)
        await until(lambda: is_idle(llm))


async def test_cancelling_the_task_frees_the_blocks() -> None:
    async with opened(speed=1.0) as llm:
        has_started = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate("Hello", LONG):
                has_started.set()

        task = asyncio.create_task(read())
        await has_started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: is_idle(llm))


async def test_an_error_does_not_disturb_other_streams() -> None:
    async with opened() as llm:
        good = llm.generate("Hello", SamplingParams(max_tokens=200))
        await anext(good)
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            await anext(llm.generate(""))
        assert [part async for part in good][-1].finished


async def test_prompt_log_probabilities_are_refused() -> None:
    async with opened() as llm:
        with pytest.raises(InvalidRequest, match="prompt_logprobs cannot be streamed"):
            await anext(llm.generate("Hello", SamplingParams(prompt_logprobs=1)))


async def test_wrong_arguments_are_refused_before_the_first_part() -> None:
    wrong: Any = 3
    async with opened() as llm:
        with pytest.raises(InvalidRequest, match="a dict of its fields, not int"):
            llm.generate("Hello", wrong)
        with pytest.raises(InvalidRequest, match="messages is a list of messages, not int"):
            llm.chat(wrong)
        [part] = [part async for part in llm.generate("Hello", {"max_tokens": 1})]
        assert part.finished


async def test_closing_ends_open_streams() -> None:
    async with opened(speed=1.0) as llm:
        parts = llm.generate("Hello", LONG)
        await anext(parts)
    with pytest.raises(Unavailable, match="is closed"):
        async for _ in parts:
            pass


async def test_several_prompts_are_refused() -> None:
    async with opened() as llm:
        with pytest.raises(InvalidRequest, match="not a list of str"):
            llm.generate(["Hello", "there"])  # type: ignore[arg-type]


async def test_it_is_started_once_by_concurrent_tasks() -> None:
    llm = AsyncLLM("sim-tiny")
    results = await asyncio.gather(llm.start(), llm.start(), return_exceptions=True)
    assert results[0] is llm
    assert "started before" in str(results[1])
    await llm.close()


async def test_closing_while_it_starts_leaves_nothing_running() -> None:
    before = asyncio.all_tasks()
    llm = AsyncLLM("sim-tiny")
    start = asyncio.create_task(llm.start())
    await asyncio.sleep(0)
    await llm.close()
    with pytest.raises(Unavailable, match="closed while it started"):
        await start
    assert asyncio.all_tasks() == before


async def test_it_must_be_started() -> None:
    llm = AsyncLLM("sim-tiny")
    with pytest.raises(Unavailable, match="is not started"):
        llm.generate("Hello")
    await llm.start()
    with pytest.raises(Unavailable, match="started before"):
        await llm.start()
    await llm.close()
    with pytest.raises(Unavailable, match="is closed"):
        llm.generate("Hello")
