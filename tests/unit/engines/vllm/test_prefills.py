"""Prompts that the vllm engine computes for others: every way in which one can end, and what a ticket may say."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.engines.vllm.fake_core import (
    BLOCK_BYTES,
    READ_S,
    Core,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from tests.unit.engines.vllm.lab import ARGUMENTS, MOVING, Harness, running, with_args
from tests.unit.engines.vllm.plugins.owner_lab import Owner
from tests.unit.engines.vllm.test_engine import asked, soon

from kvolt.core.delta import StageTimes
from kvolt.core.errors import (
    Cancelled,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    Unavailable,
    Unsupported,
)
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request, RoutingHints, StopConditions
from kvolt.engines.vllm.plugins.kv_holds import DEADLINE_S, HOLD_S
from kvolt.engines.vllm.prefills import MAX_TICKET_BYTES, RELEASE, transfer_params
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.engines.harness import Run

R = RequestId("r")


def engine_of(run: Run) -> Any:
    return run.engine


async def prefilled(run: Run, request: Request) -> Handoff:
    async with asyncio.timeout(10):
        handoff: Handoff = await engine_of(run).prefill(request)
        return handoff


def releases(core: Core) -> list[str]:
    """Whose blocks the core was told to let go."""
    return [
        request.sampling_params.extra_args["kv_transfer_params"][RELEASE]
        for request in core.received
        if request.abort_immediately
    ]


async def test_what_a_handoff_says(model: str) -> None:
    async with running(Harness(model, MOVING)) as (run, core):
        whole = await run.answer(asked("whole", prompt=40, tokens=4))
        handoff = await prefilled(run, asked(prompt=40, tokens=4))
        assert handoff.first_tokens == (whole.tokens[0][0],)
        assert (handoff.expires_in_s, handoff.cached_tokens) == (1.0, 32)
        ticket = msgspec.msgpack.decode(handoff.ticket)
        assert ticket["remote_num_tokens"] == 40
        assert list(core.held) == [ticket["remote_request_id"]]
        await engine_of(run).release_prefill(R)
        await soon(lambda: not core.held)
        await run.assert_empty()


@pytest.mark.parametrize(("deadline_s", "hold_s"), [(None, 60.0), (900.0, 60.0), (7.5, 7.5), (0.0, 1.0)])
async def test_a_hold_ends_with_the_request(model: str, deadline_s: float | None, hold_s: float) -> None:
    async with running(Harness(model, replace(MOVING, hold_s=60.0))) as (run, core):
        handoff = await prefilled(run, replace(asked(), deadline_s=deadline_s))
        assert handoff.expires_in_s == hold_s
        transfer = core.received[0].sampling_params.extra_args["kv_transfer_params"]
        assert (transfer[HOLD_S], transfer[DEADLINE_S]) == (hold_s, deadline_s)
        assert msgspec.msgpack.decode(handoff.ticket)[HOLD_S] == hold_s


async def test_an_answer_reports_how_the_kv_arrived(model: str) -> None:
    async with running(Harness(model, MOVING)) as (source, _), running(Harness(model, MOVING)) as (target, _):
        request = asked(prompt=40)
        handoff = await prefilled(source, request)
        num_blocks = len(msgspec.msgpack.decode(handoff.ticket)["remote_block_ids"][0])
        answer = await target.answer(replace(request, handoff=handoff))
        assert answer.stages == StageTimes(
            transfer_ms=READ_S * 1e3, transfer_bytes=num_blocks * BLOCK_BYTES, transfer_path="nixl"
        )


async def test_no_transfer_is_reported_for_a_prompt_that_decode_computed(model: str) -> None:
    async with running(Harness(model, MOVING)) as (source, _), running(Harness(model, MOVING)) as (target, _):
        request = asked(prompt=40)
        handoff = await prefilled(source, request)
        await engine_of(source).release_prefill(R)
        await soon(lambda: not engine_of(source)._core.held)
        answer = await target.answer(replace(request, handoff=handoff))
        assert answer.stages is None


async def test_the_hold_of_a_request_is_renewed_until_it_begins(model: str) -> None:
    """Also while vLLM's core does not look at it, as during a long step."""
    with Owner() as owner:
        async with (
            running(Harness(model, replace(MOVING, hold_s=0.3))) as (source, _),
            running(Harness(model, MOVING)) as (target, core),
        ):
            engine_of(source)._core.side_channel_port = owner.port
            request = asked(prompt=40)
            handoff = await prefilled(source, request)
            held = msgspec.msgpack.decode(handoff.ticket)
            owner.serve(held["remote_engine_id"], held["remote_request_id"])
            core.pause()
            target.submit(replace(request, handoff=handoff))
            await soon(lambda: owner.num_renewals >= 3)
            core.go_on()
            await soon(lambda: not engine_of(target)._renewals)


async def test_an_aborted_request_renews_nothing(model: str) -> None:
    async with (
        running(Harness(model, MOVING)) as (source, _),
        running(Harness(model, MOVING)) as (target, core),
    ):
        request = asked(prompt=40)
        handoff = await prefilled(source, request)
        core.pause()
        answer = target.submit(replace(request, handoff=handoff))
        assert engine_of(target)._renewals
        target.abort(answer)
        assert not engine_of(target)._renewals
        core.go_on()


async def test_blocks_are_released_by_their_rank(model: str) -> None:
    async with running(Harness(model, with_args(MOVING, data_parallel_size=2))) as (run, core):
        await prefilled(run, replace(asked(prompt=40), routing=RoutingHints(pinned_dp_rank=1)))
        await engine_of(run).release_prefill(R)
        await soon(lambda: len(core.received) == 2)
        assert [request.data_parallel_rank for request in core.received] == [1, 1]


async def test_only_one_choice_is_kept(model: str) -> None:
    """The others are computed for their first tokens, by the same blocks."""
    async with running(Harness(model, MOVING)) as (run, core):
        handoff = await prefilled(run, asked(prompt=40, choices=3))
        assert len(handoff.first_tokens or ()) == 3
        assert len(core.held) == 1
        assert [bool(request.sampling_params.extra_args) for request in core.received] == [True, False, False]


@pytest.mark.parametrize("kind", ["stop", "logprobs", "only"])
async def test_first_tokens_that_decode_has_to_tell(model: str, kind: str) -> None:
    async with running(Harness(model, MOVING)) as (run, _):
        first = (await run.answer(asked("whole"))).tokens[0][0]
        request = asked(tokens=1 if kind == "only" else 8)
        if kind == "stop":
            request = replace(request, stop=StopConditions(max_tokens=8, stop_token_ids=(first,)))
        if kind == "logprobs":
            request = replace(request, sampling=replace(request.sampling, logprobs=0))
        handoff = await prefilled(run, request)
        assert handoff.first_tokens is None
        assert transfer_params(handoff) is not None


async def test_a_prompt_is_computed_once(model: str) -> None:
    async with running(Harness(model, MOVING)) as (run, core):
        core.pause()
        task_group = TaskGroup("prefill")
        task_group.start(engine_of(run).prefill(asked()), "prefill")
        await soon(lambda: core.received)
        with pytest.raises(InvalidRequest, match="exists already"):
            await engine_of(run).prefill(asked())
        await task_group.close()


async def test_without_a_connector_there_are_none(model: str) -> None:
    async with running(Harness(model)) as (run, core):
        assert "Prefill" not in run.info.features
        with pytest.raises(Unsupported, match="connector"):
            await prefilled(run, asked())
        assert core.received == []


# --- ends


async def test_a_cancelled_prompt_is_computed_no_more(model: str) -> None:
    async with running(Harness(model, MOVING)) as (run, core):
        core.pause()
        task_group = TaskGroup("prefill")
        task_group.start(engine_of(run).prefill(asked(choices=2)), "prefill")
        await soon(lambda: len(core.received) == 2)
        names = [request.request_id for request in core.received]
        await task_group.close()
        await soon(lambda: core.aborted)
        assert core.aborted == names
        assert not core.waiting
        core.go_on()
        assert (await prefilled(run, asked())).first_tokens, "the same id again"


async def test_release_while_it_is_computed(model: str) -> None:
    async with running(Harness(model, MOVING)) as (run, core):
        core.pause()
        outcome = asyncio.gather(engine_of(run).prefill(asked()), return_exceptions=True)
        await soon(lambda: core.received)
        await engine_of(run).release_prefill(R)
        async with asyncio.timeout(10):
            [error] = await outcome
        assert isinstance(error, Cancelled)
        await soon(lambda: core.aborted)
        core.go_on()
        await run.assert_empty()


async def test_prompt_completed_before_the_abort_is_released(model: str) -> None:
    """The abort comes too late for the core, the answer too late for us: its blocks would stay for their lease."""
    async with running(Harness(model, MOVING)) as (run, core):
        core.pause()
        task_group = TaskGroup("prefill")
        task_group.start(engine_of(run).prefill(asked()), "prefill")
        await soon(lambda: core.received)
        name = core.received[0].request_id
        await task_group.close()
        ready = EngineCoreOutput(name, [50], finish_reason=FinishReason.LENGTH)
        ready.kv_transfer_params = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
        core.put(EngineCoreOutputs(outputs=[ready]))
        await soon(lambda: not core.num_unread)
        core.go_on()
        await run.answer(asked("after"))
        assert releases(core) == [name]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
async def test_a_prompt_that_vllm_gives_up_on(model: str, reason: FinishReason) -> None:
    async with running(Harness(model, MOVING)) as (run, core):
        core.gives_up = reason
        with pytest.raises(EngineFailed, match=f"vLLM ended the prompt: {reason}"):
            await prefilled(run, asked(choices=2))
        await run.assert_empty()
        assert not core.held
        assert (await prefilled(run, asked())).first_tokens


@pytest.mark.parametrize("end", ["close", "die"])
async def test_prompts_end_with_the_engine(model: str, end: str) -> None:
    engine: Any = Harness(model, MOVING).engine()
    await engine.start()
    core = engine._core
    core.pause()
    outcome = asyncio.gather(engine.prefill(asked()), return_exceptions=True)
    await soon(lambda: core.received)
    if end == "die":
        core.die(RuntimeError("gone"))
    else:
        await engine.close()
    async with asyncio.timeout(10):
        [error] = await outcome
    assert isinstance(error, EngineDied)
    await engine.release_prefill(R)
    with pytest.raises(EngineDied):
        await engine.prefill(asked())
    await engine.close()


async def test_release_is_reported_once(model: str) -> None:
    async with running(Harness(model, MOVING)) as (run, core):
        await prefilled(run, asked())
        [name] = core.held
        for _ in range(2):
            await engine_of(run).release_prefill(R)
        await engine_of(run).release_prefill(RequestId("nobody"))
        await run.assert_empty()
        assert releases(core) == [name]


async def test_a_prompt_outlives_its_adapter(model: str, tmp_path: Any) -> None:
    async with running(Harness(model, with_args(MOVING, enable_lora=True))) as (run, core):
        await engine_of(run).load_lora("poet", str(tmp_path))
        await prefilled(run, asked(lora="poet"))
        await engine_of(run).unload_lora("poet")
        await engine_of(run).release_prefill(R)
        await soon(lambda: not core.held)


async def test_too_many_prompts(model: str) -> None:
    arguments = replace(with_args(MOVING, max_num_seqs=2), max_waiting=1)
    async with running(Harness(model, arguments)) as (run, core):
        core.pause()
        task_group = TaskGroup("prefill")
        for number in range(3):
            task_group.start(engine_of(run).prefill(asked(f"r{number}")), "prefill")
        await soon(lambda: len(core.received) == 3)
        try:
            with pytest.raises(Overloaded):
                async with asyncio.timeout(0.2):
                    await engine_of(run).prefill(asked("late"))
        finally:
            await task_group.close()


@pytest.mark.parametrize("end", ["released", "cancelled"])
async def test_nothing_of_a_prompt_stays_in_the_figures(model: str, end: str) -> None:
    async with running(Harness(model, MOVING)) as (run, core):
        if end == "released":
            await prefilled(run, asked())
            await engine_of(run).release_prefill(R)
        else:
            core.pause()
            task_group = TaskGroup("prefill")
            task_group.start(engine_of(run).prefill(asked()), "prefill")
            await soon(lambda: core.received)
            await task_group.close()
            core.go_on()
        await run.assert_empty()
        assert engine_of(run)._request_stats._requests == {}


async def test_a_cache_with_blocks_for_others_cannot_be_cleared_now(model: str) -> None:
    async with running(Harness(model, MOVING)) as (run, _):
        await prefilled(run, asked(prompt=40))
        with pytest.raises(Unavailable):
            await engine_of(run).clear_kv()


# --- tickets


TICKET = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "192.0.2.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 33,
    "transfer_mode": "pull",
    "kvolt_hold_s": 30.0,
}


def handoff_of(ticket: bytes) -> Handoff:
    return Handoff(ticket=ticket, prefill_instance=InstanceId("p"))


def test_a_ticket_is_what_the_connector_said() -> None:
    assert transfer_params(handoff_of(msgspec.msgpack.encode(TICKET))) == TICKET


@pytest.mark.parametrize(
    "ticket",
    [
        b"",
        b"\xc1",
        b"nobody's",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({1: 2}),
        msgspec.msgpack.encode({"remote_block_ids": []}),
        msgspec.msgpack.encode({"remote_engine_id": "e"}),
        msgspec.msgpack.encode({**TICKET, "remote_block_ids": [[1], 2]}),
        msgspec.msgpack.encode({**TICKET, "remote_port": "x"}),
        msgspec.msgpack.encode({**TICKET, RELEASE: "another's"}),
        msgspec.msgpack.encode({name: value for name, value in TICKET.items() if name != HOLD_S}),
        msgspec.msgpack.encode({**TICKET, HOLD_S: 0}),
        msgspec.msgpack.encode({**TICKET, "more": b"x" * MAX_TICKET_BYTES}),
        b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0",
        b"\x81\xa2\xff\xff\xc0",
    ],
    ids=[
        "empty",
        "no type",
        "text",
        "list",
        "numbers",
        "no blocks",
        "no ids",
        "no groups",
        "no port",
        "release",
        "no hold",
        "no time",
        "long",
        "deep",
        "utf",
    ],
)
def test_of_any_other_nothing_is_fetched(ticket: bytes) -> None:
    assert transfer_params(handoff_of(ticket)) is None


async def test_decode_needs_no_connector_to_take_a_handoff(model: str) -> None:
    """It computes the prompt then, and goes on after what was told."""
    async with running(Harness(model, MOVING)) as (source, _), running(Harness(model)) as (target, core):
        request = asked(prompt=40)
        whole = await target.answer(replace(request, request_id=RequestId("whole")))
        handoff = await prefilled(source, request)
        answer = await target.answer(replace(request, handoff=replace(handoff, ticket=b"\xc1")))
        assert [*(handoff.first_tokens or ()), *answer.tokens[0]] == whole.tokens[0]
        assert core.received[-1].sampling_params.extra_args == {"kvolt_resumed": 1}


async def test_logprobs_of_a_prompt_that_was_handed_over(model: str) -> None:
    async with (
        running(Harness(model, MOVING)) as (source, _),
        running(Harness(model, replace(MOVING, kv_events=False))) as (target, _),
    ):
        request = asked(prompt=40)
        request = replace(request, sampling=replace(request.sampling, prompt_logprobs=1))
        handoff = await prefilled(source, request)
        answer = await target.answer(replace(request, handoff=handoff))
        assert answer.prompt_logprobs is not None
        assert len(answer.prompt_logprobs) == 40


async def test_arguments_have_a_lease(model: str) -> None:
    """Whole seconds of vLLM's, never less than what the ticket says."""
    async with running(Harness(model, replace(MOVING, hold_s=1.5))) as (run, core):
        handoff = await prefilled(run, asked())
        assert handoff.expires_in_s == 1.5
        assert core.config.kv_transfer_config.kv_connector_extra_config == {"kv_lease_duration": 2}
        assert ARGUMENTS.hold_s == 1.0
