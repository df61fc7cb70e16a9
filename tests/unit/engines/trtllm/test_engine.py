"""What the suite does not ask: what TensorRT-LLM is told, what it refuses, how it dies, what a ticket is without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.trtllm import stand_in
from tests.unit.engines.trtllm.lab import ARGUMENTS, BLOCK_SIZE, Harness, with_blocks, with_llm_args

from kvolt.core.delta import FinishReason
from kvolt.core.errors import (
    Cancelled,
    ConfigError,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unsupported,
)
from kvolt.core.request import Grammar, GrammarKind, Handoff, Role, Sampling
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external import requirements
from kvolt.engines.registry import build_engine, check_arguments
from kvolt.engines.trtllm.arguments import Seeds, TrtllmArguments
from kvolt.engines.trtllm.engine import TrtllmEngine
from kvolt.engines.trtllm.launch import llm_args
from kvolt.engines.trtllm.tickets import decode_ticket
from kvolt.testing.engines.event_cases import answer_matching_events, blocks_request
from kvolt.testing.engines.harness import Run, engine_run

SPEC = EngineSpec(model="m", role=Role.AGGREGATED)


@asynccontextmanager
async def ran(model: str, arguments: TrtllmArguments = ARGUMENTS) -> AsyncIterator[tuple[Run, Any]]:
    async with engine_run(Harness(model, arguments)) as run:
        yield run, stand_in.LLM.made[-1]


# --- start


def test_what_it_is_started_with() -> None:
    found = llm_args(
        SPEC, TrtllmArguments(llm_args={"kv_cache_config": {"tokens_per_block": 64}}), Path("/m")
    )
    assert found["model"] == "/m"
    assert found["kv_cache_config"] == {
        "enable_block_reuse": True,
        "event_buffer_max_size": 65536,
        "enable_partial_reuse": False,
        "tokens_per_block": 64,
    }
    assert "cache_transceiver_config" not in found
    prefill = llm_args(EngineSpec(model="m", role=Role.PREFILL), TrtllmArguments(hold_s=2), Path("/m"))
    assert prefill["cache_transceiver_config"]["kv_transfer_timeout_ms"] == 2000
    assert prefill["disable_overlap_scheduler"]
    silent = llm_args(SPEC, TrtllmArguments(kv_events=False, loras={"a": "/a"}), Path("/m"))
    assert silent["kv_cache_config"] == {"enable_block_reuse": True}
    assert silent["enable_lora"]


@pytest.mark.parametrize(
    "given",
    [
        {"model": "other"},
        {"kv_cache_config": "?"},
        {"kv_cache_config": {"enable_block_reuse": False}},
        {"kv_cache_config": {"event_buffer_max_size": 0}},
        {"enable_attention_dp": True},
        {"orchestrator_type": "ray"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_settings_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        llm_args(SPEC, TrtllmArguments(llm_args=given), Path("/m"))


@pytest.mark.parametrize("given", [{"strange": 1}, {"kv_cache_config": {"strange": 1}}])
async def test_what_it_refuses_at_the_start(model: str, given: dict[str, Any]) -> None:
    engine = Harness(model, TrtllmArguments(llm_args=given)).engine()
    with pytest.raises(ConfigError, match="strange"):
        await engine.start()
    await engine.close()


async def test_without_the_package(tmp_path: Path) -> None:
    engine = TrtllmEngine(SPEC, TrtllmArguments())
    with pytest.raises(ConfigError, match="not installed"):
        await engine.start()
    with pytest.raises(EngineFailed):
        _ = engine.card
    await engine.close()


async def test_a_version_that_lacks_something(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(stand_in.LLM, "get_kv_cache_events_async")
    engine = Harness(model).engine()
    with pytest.raises(ConfigError, match="get_kv_cache_events_async"):
        await engine.start()
    await engine.close()


def test_the_symbols_are_those_of_the_stand_in(model: str) -> None:
    from kvolt.engines.trtllm.launch import REQUIREMENT

    assert requirements.check_requirement(REQUIREMENT) == "1.2.1"


def test_it_is_registered() -> None:
    arguments = check_arguments("trtllm", {"llm_args": {"max_seq_len": 5}})
    assert isinstance(arguments, TrtllmArguments)


async def test_it_is_built_by_name() -> None:
    assert isinstance(build_engine("trtllm", SPEC, {}), TrtllmEngine)


async def test_it_is_registered_as_it_runs(model: str) -> None:
    async with ran(model) as (run, _):
        assert run.info.features == ("KvEvents", "Prefill")
        assert run.info.capacity.kv_total_blocks == 200
        assert (run.info.engine, run.engine.card.eos_token_ids) == ("trtllm", (stand_in.EOS,))


async def test_it_cannot_answer(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in.LLM, "_open", lambda self: (_ for _ in ()).throw(RuntimeError("no GPU")))
    engine = Harness(model).engine()
    with pytest.raises(EngineFailed, match="no GPU"):
        await engine.start()
    await engine.close()
    assert stand_in.LLM.made[-1].is_shut


async def test_closed_while_it_loads(model: str) -> None:
    engine = Harness(model).engine()
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineFailed):
        await starting
    assert all(llm.is_shut for llm in stand_in.LLM.made)


# --- requests


async def test_arguments_passed_to_the_engine(model: str) -> None:
    async with ran(model) as (run, llm):
        request = replace(run.request("r", tokens=2), salt="tenant", grammar=Grammar(GrammarKind.REGEX, "a"))
        await run.answer(request)
        call = llm.calls[-1]
        assert (call.inputs, call.cache_salt, call.streaming) == (list(request.token_ids), "tenant", True)
        assert call.params.guided_decoding.regex == "a"


async def test_refusals_of_the_engine(model: str) -> None:
    async with ran(model, with_llm_args(guided_decoding_backend=None, enable_chunked_prefill=False)) as (
        run,
        _,
    ):
        good = run.request("r")
        for request, kind in (
            (replace(good, grammar=Grammar(GrammarKind.JSON_OBJECT, "")), Unsupported),
            (replace(good, lora="nobody"), InvalidRequest),
            (replace(good, token_ids=(stand_in.VOCAB_SIZE,)), InvalidRequest),
            (run.request("long", prompt=65), InvalidRequest),
        ):
            with pytest.raises(kind):
                run.engine.submit(request)
        with pytest.raises(Unsupported):
            await run.engine.load_lora("a", "/")
        with pytest.raises(Unsupported):
            await run.engine.clear_kv()


async def test_what_it_refuses_itself_ends_the_request(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ran(model) as (run, llm):
        monkeypatch.setattr(
            llm, "generate_async", lambda *given, **more: (_ for _ in ()).throw(ValueError("?"))
        )
        answer = run.submit(run.request("r"), may_fail=True)
        await run.finish(answer)
        assert answer.error is not None
        assert answer.error.code == "invalid_request"


async def test_too_many_wait(model: str) -> None:
    async with ran(model, replace(with_llm_args(max_batch_size=1), max_waiting=2)) as (run, _):
        answers = [run.submit(run.request(f"r{index}", tokens=20)) for index in range(3)]
        with pytest.raises(Overloaded):
            run.engine.submit(run.request("more"))
        await run.finish(*answers)


async def test_other_requests_continue_after_a_failure(model: str) -> None:
    async with ran(model) as (run, llm):
        goes = run.submit(run.request("goes", tokens=30, choices=2), may_fail=True)
        await run.until(lambda: bool(goes.tokens))
        llm.error = "out of luck"
        await run.finish(goes)
        assert goes.error is not None
        assert (goes.error.code, "out of luck" in goes.error.message) == ("engine_failed", True)
        await run.assert_empty()


async def test_it_dies(model: str) -> None:
    engine = Harness(model).engine()
    await engine.start()
    engine.submit(Run(engine, engine._launched.launched.info, Harness(model)).request("r", tokens=100))
    stand_in.LLM.made[-1].collapse = RuntimeError("a rank was lost")
    with pytest.raises(EngineFailed, match="a rank was lost"):
        async for _ in engine.steps():
            pass
    with pytest.raises(EngineDied):
        engine.submit(Run(engine, engine._launched.launched.info, Harness(model)).request("s"))
    await engine.close()


async def test_it_says_nothing_any_more(model: str) -> None:
    """As one whose processes were killed: nothing else tells of it."""
    engine = Harness(model, replace(ARGUMENTS, stall_s=0.2)).engine()
    await engine.start()
    stand_in.LLM.made[-1].is_stalled = True
    await asyncio.sleep(0.4)  # at rest that is no fault
    engine.submit(Run(engine, engine._launched.launched.info, Harness(model)).request("r"))
    since = asyncio.get_running_loop().time()
    async with asyncio.timeout(5):
        with pytest.raises(EngineFailed, match="no output for"):
            async for _ in engine.steps():
                pass
    assert asyncio.get_running_loop().time() - since > 0.15
    await engine.close()


async def test_what_it_is_busy_with(model: str) -> None:
    """By its own figures while it runs."""
    async with ran(model, with_llm_args(max_batch_size=2)) as (run, llm):
        answers = [run.submit(run.request(f"r{i}", prompt=100, tokens=60, variant=i)) for i in range(3)]
        await run.until(lambda: run.load.kv_used_blocks == llm.cache.used > 12)
        assert (run.load.running, run.load.waiting, run.load.kv_total_blocks) == (2, 1, 200)
        await run.finish(*answers)
        await run.assert_empty()


# --- adapters


async def test_adapters(model: str, tmp_path: Path) -> None:
    arguments = replace(ARGUMENTS, loras={"first": str(tmp_path)})
    async with ran(model, arguments) as (run, llm):
        engine = run.engine
        assert "Lora" in run.info.features
        assert engine.loras() == ("first",)
        await engine.load_lora("second", str(tmp_path))
        await engine.load_lora("second", str(tmp_path))
        for name, path in (("first", "/elsewhere"), ("third", "/not/there")):
            with pytest.raises(InvalidRequest):
                await engine.load_lora(name, path)
        plain = blocks_request(run, "plain", 2)
        tokens = (await answer_matching_events(run, plain)).tokens
        adapted = await answer_matching_events(run, replace(plain, request_id="adapted", lora="second"))
        assert adapted.cached == 0
        assert adapted.tokens != tokens
        assert llm.calls[-1].lora.lora_name == "second"
        again = await answer_matching_events(run, replace(plain, request_id="again", lora="second"))
        assert again.cached == 2 * BLOCK_SIZE
        await engine.unload_lora("second")
        with pytest.raises(NotFound):
            await engine.unload_lora("second")
        with pytest.raises(InvalidRequest):
            engine.submit(replace(plain, request_id="late", lora="second"))
        await engine.load_lora("second", str(tmp_path))
        await run.until(lambda: run.replica.num_removed >= 2)
        anew = await answer_matching_events(run, replace(plain, request_id="anew", lora="second"))
        assert anew.cached == 0, "a number is used once"


# --- events


async def test_lost_events(model: str) -> None:
    cache = {**ARGUMENTS.llm_args["kv_cache_config"], "event_buffer_max_size": 2}
    async with ran(model, with_llm_args(kv_cache_config=cache)) as (run, _):
        for number in range(3):
            answers = [run.submit(blocks_request(run, f"r{number}-{i}", 3, variant=i)) for i in range(8)]
            await run.finish(*answers)
        translator = run.engine._launched.poll.translator
        assert translator.num_lost
        assert run.replica.num_cleared
        await run.assert_empty()


async def test_no_events_are_asked_for(model: str) -> None:
    async with ran(model, replace(ARGUMENTS, kv_events=False)) as (run, llm):
        assert not run.info.publishes_kv_events
        assert llm.args.kv_cache_config.event_buffer_max_size == 0
        await run.answer(blocks_request(run, "r", 3))
        assert not run.replica.blocks


async def test_aborted_requests_leave_right_blocks(model: str) -> None:
    """The suite's case without clearing, which TensorRT-LLM cannot."""
    async with ran(model) as (run, _):
        for num_steps in range(4):
            goes = [
                run.submit(blocks_request(run, f"g{num_steps}-{i}", 6, variant=i + 8 * num_steps, tokens=12))
                for i in range(4)
            ]
            await run.advance(num_steps)
            for answer in goes:
                run.abort(answer)
            await run.assert_empty()
            await answer_matching_events(
                run, blocks_request(run, f"probe{num_steps}", 6, variant=60 + num_steps)
            )


# --- prompts for others


async def prefilled(run: Run, request: Any) -> Handoff:
    return await run.engine.prefill(request)


async def test_no_handoff_that_cannot_be_continued(model: str) -> None:
    """The ticket says so, and decode computes the prompt by itself."""
    arguments = replace(ARGUMENTS, seeds=Seeds.KEPT)
    async with ran(model, arguments) as (source, llm), ran(model, arguments) as (target, _):
        seeded = blocks_request(source, "seeded", 2)
        unseeded = replace(seeded, request_id="unseeded", sampling=Sampling(temperature=0))
        guided = replace(unseeded, request_id="guided", grammar=Grammar(GrammarKind.REGEX, "a"))
        expected = await source.answer(replace(seeded, request_id="expected"))
        num_calls = len(llm.calls)
        for request in (seeded, guided, replace(unseeded, request_id="l", sampling=Sampling(logprobs=1))):
            handoff = await prefilled(source, request)
            ticket = decode_ticket(handoff.ticket)
            assert ticket is not None
            assert (ticket.choices, handoff.first_tokens) == ((), None)
        assert len(llm.calls) == num_calls
        answer = await target.answer(replace(seeded, handoff=await prefilled(source, seeded)))
        assert answer.tokens == expected.tokens
        moved = await prefilled(source, unseeded)
        assert moved.first_tokens is not None
        with pytest.raises(InvalidRequest):
            await prefilled(source, unseeded)
        await target.answer(replace(unseeded, handoff=moved))
        assert stand_in.LLM.made[-1].calls[-1].disaggregated.request_type == "generation_only"


async def test_a_first_token_that_is_an_end(model: str) -> None:
    async with ran(model) as (run, _):
        request = replace(run.request("r", prompt=40), stop=replace(run.request("r").stop, ignore_eos=False))
        first = (await run.answer(replace(request, request_id="first"))).tokens[0][0]
        ends = replace(request, stop=replace(request.stop, stop_token_ids=(first,)))
        handoff = await prefilled(run, ends)
        assert handoff.first_tokens is None
        answer = await run.answer(replace(ends, handoff=handoff))
        assert (answer.tokens, answer.finishes) == ({0: [first]}, {0: FinishReason.STOP})
        await run.assert_empty()


async def test_prompts_for_others_leave_room(model: str) -> None:
    """As many as come: what they hold never fills the pool, and those that wait come in when some are let go."""
    async with ran(model, replace(with_blocks(30), hold_s=30)) as (run, llm):
        requests = [blocks_request(run, f"p{i}", 4, variant=i, tokens=4) for i in range(8)]
        waiting = [asyncio.ensure_future(prefilled(run, request)) for request in requests]
        await run.until(lambda: sum(each.done() for each in waiting) >= 4)
        await run.answer(run.request("probe", prompt=3, tokens=3))
        assert llm.cache.used <= 26
        assert not all(each.done() for each in waiting)
        for number, request in enumerate(requests):
            await asyncio.wait([waiting[number]])
            await run.engine.release_prefill(request.request_id)
        assert all(each.result().first_tokens for each in waiting)
        await run.assert_empty()


async def test_prompt_released_while_it_is_computed(model: str) -> None:
    async with ran(model) as (run, llm):
        llm.is_stalled = True
        await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(prefilled(run, blocks_request(run, "r", 2)))
        await asyncio.sleep(0.01)
        await run.engine.release_prefill("r")
        with pytest.raises(Cancelled):
            await waiting
        llm.is_stalled = False
        await run.assert_empty()


async def test_prefill_needs_a_transceiver(model: str) -> None:
    async with ran(model, with_llm_args(cache_transceiver_config=None)) as (run, _):
        assert "Prefill" not in run.info.features
        with pytest.raises(Unsupported, match="cache_transceiver_config"):
            await prefilled(run, run.request("r"))


async def test_a_prompt_whose_engine_says_too_little(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in.LLM, "_state", lambda self, each: bytes(1 << 20))
    async with ran(model) as (run, _):
        with pytest.raises(EngineFailed, match="context state is invalid"):
            await prefilled(run, run.request("r"))
        await run.assert_empty()


async def test_a_prompt_dies_with_the_engine(model: str) -> None:
    async with ran(model) as (run, llm):
        llm.is_stalled = True
        await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(prefilled(run, blocks_request(run, "r", 2)))
        await asyncio.sleep(0.01)
        await run.engine.close()
        with pytest.raises(EngineDied):
            await waiting


async def test_what_is_handed_over_is_still_checked(model: str) -> None:
    async with ran(model) as (run, _):
        request = replace(run.request("r", prompt=40), sampling=Sampling(temperature=0))
        handoff = await prefilled(run, request)
        assert handoff.first_tokens is not None
        with pytest.raises(Unsupported):
            run.engine.submit(replace(request, handoff=handoff, extra={"logits_processors": ["a"]}))
        await run.engine.release_prefill("r")


async def test_an_answer_that_cannot_be_read_is_stopped_there(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "_logprobs", lambda token, drawn, wanted: {})
    async with ran(model) as (run, llm):
        request = run.request("r", tokens=200)
        answer = run.submit(replace(request, sampling=replace(request.sampling, logprobs=1)), may_fail=True)
        await run.finish(answer)
        assert answer.error is not None
        await run.assert_empty()
        assert not llm._running
