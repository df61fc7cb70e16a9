"""SglangEngine with a host that is none: what it sends, what it tells, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.external.publisher import AllBlocksCleared, Publisher, payload_of
from tests.unit.engines.sglang.lab import (
    FACTS,
    LENGTH,
    PROMPT,
    RECORDED,
    FakeHost,
    model_folder,
    recorded_batches,
    request,
    row,
    started,
)

from kvolt.core.delta import FinishReason
from kvolt.core.errors import (
    ConfigError,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
    Unsupported,
    to_info,
)
from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import RequestId, SequenceHash
from kvolt.core.kv_events import Cleared, Stored, Tier
from kvolt.core.request import Role, RoutingHints, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.registry import build_engine, check_arguments
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.engine import SglangEngine
from kvolt.engines.sglang.host.messages import (
    Abort,
    Answer,
    Batch,
    Done,
    Fatal,
    Flush,
    KvSource,
    LoadLora,
    RankLoad,
    UnloadLora,
)
from kvolt.engines.sglang.kv_order import KvOrder


async def test_registration_is_what_sglang_says(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        engine = lab.engine
        assert (engine.card.block_size, engine.card.context_length) == (16, 2046)
        assert engine.card.eos_token_ids == (2,)
        engine.submit(request())
        assert len(lab.host.asked) == 1


async def test_recorded_answer_is_converted(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        lab.engine.submit(request(sampling=Sampling(temperature=0.0, logprobs=2)))
        rid = lab.host.asked[0].rid
        for batch in recorded_batches("logprobs"):
            lab.host.say(Batch([replace(each, rid=rid) for each in batch.rows], batch.loads))
        tokens: list[int] = []
        for _ in range(3):
            step = await lab.step()
            ((_, delta),) = step.deltas
            tokens += delta.token_ids
            assert step.load is not None
        assert tokens == [842, 736, 95]
        assert delta.finish is FinishReason.LENGTH
        assert delta.usage is not None
        assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (40, 3)
        assert (step.load.running, step.load.waiting, step.load.kv_used_blocks) == (0, 0, 0)


async def test_load_counts_those_that_run_and_wait(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        lab.engine.submit(request("a"))
        lab.engine.submit(request("b"))
        lab.host.rows(row(lab.host.asked[0].rid, 5), used_tokens=40)
        load = (await lab.step()).load
        assert load is not None
        assert (load.running, load.waiting, load.kv_used_blocks) == (1, 1, 3)


async def test_nothing_comes_after_an_abort(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        lab.engine.submit(request("goes"))
        lab.engine.submit(request("stays"))
        goes, stays = (each.rid for each in lab.host.asked)
        lab.host.rows(row(goes, 5), row(stays, 6))
        lab.engine.abort(RequestId("goes"))
        lab.engine.abort(RequestId("goes"))
        assert [each for each in lab.host.commands if isinstance(each, Abort)] == [Abort(goes)]
        step = await lab.step()
        assert [name for name, _ in step.deltas] == ["stays"]


async def test_only_what_said_nothing_is_withdrawn(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        lab.engine.submit(request("r"))
        lab.host.rows(row(lab.host.asked[0].rid, 5))
        await lab.step()
        lab.engine.submit(request("waits"))
        assert await lab.engine.withdraw(RequestId("waits"))
        assert not await lab.engine.withdraw(RequestId("r"))
        assert not await lab.engine.withdraw(RequestId("nobody"))


async def test_what_is_withdrawn_may_have_left_its_blocks(tmp_path: Path) -> None:
    """Whether it has begun is SGLang's to know. What it has computed of it is there, and routers hear of it: so two
    workers may hold a prompt that one has answered."""
    with Publisher.within(tmp_path) as publisher:
        facts = replace(FACTS, kv_sources=(KvSource(publisher.endpoint, publisher.replay_endpoint),))
        async with started(tmp_path, facts) as lab:
            await asyncio.to_thread(publisher.wait_for_reader)
            lab.engine.submit(request())
            assert await lab.engine.withdraw(RequestId("r"))
            publisher.publish(bytes.fromhex(RECORDED["kv_events"][0][1]))
            step = await lab.step()
            (change,) = step.kv_changes
            assert isinstance(change, Stored)
            assert change.num_blocks == len(PROMPT) // 16
            assert not step.deltas


async def test_sglang_is_aborted_at_an_end_it_does_not_detect(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        stop = StopConditions(max_tokens=9, stop_token_ids=(7,), ignore_eos=True)
        lab.engine.submit(request(stop=stop))
        rid = lab.host.asked[0].rid
        lab.host.rows(row(rid, 7))
        ((_, delta),) = (await lab.step()).deltas
        assert (delta.finish, delta.stop_reason) == (FinishReason.STOP, 7)
        assert lab.host.commands[-1] == Abort(rid)


async def test_a_refusal_ends_the_request_and_its_choices(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        lab.engine.submit(request(sampling=Sampling(seed=1, num_choices=2)))
        first, second = (each.rid for each in lab.host.asked)
        lab.host.rows(replace(recorded_batches("bad")[-1].rows[0], rid=first))
        ((name, error),) = (await lab.step()).failed
        assert (name, error.code) == ("r", "invalid_request")
        assert Abort(second) in lab.host.commands


async def test_full_is_overloaded(tmp_path: Path) -> None:
    async with started(tmp_path, replace(FACTS, max_running_requests=1), max_waiting=1) as lab:
        lab.engine.submit(request("a"))
        lab.engine.submit(request("b"))
        with pytest.raises(Overloaded):
            lab.engine.submit(request("c"))
        with pytest.raises(InvalidRequest):
            lab.engine.submit(request("long", stop=StopConditions(max_tokens=2046)))


async def test_steps_wait_for_their_kv_events(tmp_path: Path) -> None:
    """Recorded events over a socket: tokens come by another one, sooner, and are told with them."""
    with Publisher.within(tmp_path) as publisher:
        facts = replace(FACTS, kv_sources=(KvSource(publisher.endpoint, publisher.replay_endpoint),))
        async with started(tmp_path, facts) as lab:
            await asyncio.to_thread(publisher.wait_for_reader)
            lab.engine.submit(request())
            rid = lab.host.asked[0].rid
            lab.host.say(Batch([row(rid, 842)], kv_number=1))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(lab.engine.steps())
            publisher.publish(bytes.fromhex(RECORDED["kv_events"][0][1]))
            step = await lab.step()
            assert [delta.token_ids for _, delta in step.deltas] == [(842,)]
            (change,) = step.kv_changes
            assert isinstance(change, Stored)
            hasher = SequenceHasher(16, request_seed(None, None))
            hasher.extend(PROMPT)
            assert change.sequence_hashes == tuple(hasher.sequence)
            publisher.publish(bytes.fromhex(RECORDED["kv_events"][1][1]))
            (salted,) = (await lab.step()).kv_changes
            hasher = SequenceHasher(16, request_seed(None, "tenant"))
            hasher.extend(PROMPT)
            assert isinstance(salted, Stored)
            assert salted.sequence_hashes == tuple(hasher.sequence)


async def test_missing_events_delay_steps_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvolt.engines.sglang.kv_order._MAX_POLLS", 3)
    with Publisher.within(tmp_path) as publisher:
        facts = replace(FACTS, kv_sources=(KvSource(publisher.endpoint, ""),))
        async with started(tmp_path, facts) as lab:
            lab.engine.submit(request())
            rid = lab.host.asked[0].rid
            for token in (5, 6):
                lab.host.say(Batch([row(rid, token)], kv_number=4))
            assert [delta.token_ids for _, delta in (await lab.step()).deltas] == [(5,)]
            assert (await lab.step()).plain_tokens == (6,)


async def test_events_before_the_connection_delay_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When it starts it says that it has no blocks. A short prompt makes none either: nothing more would come."""
    with Publisher.within(tmp_path) as publisher:
        publisher.publish(payload_of(AllBlocksCleared()), is_lost=True)
        facts = replace(FACTS, kv_sources=(KvSource(publisher.endpoint, publisher.replay_endpoint),))
        async with started(tmp_path, facts) as lab:
            lab.engine.submit(request())
            lab.host.say(Batch([row(lab.host.asked[0].rid, 842)], kv_number=1))
            assert [delta.token_ids for _, delta in (await lab.step()).deltas] == [(842,)]
    assert "do not come" not in caplog.text


async def test_steps_wait_as_before_after_events_that_came_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher.within(tmp_path) as publisher:
        facts = replace(FACTS, kv_sources=(KvSource(publisher.endpoint, publisher.replay_endpoint),))
        async with started(tmp_path, facts) as lab:
            await asyncio.to_thread(publisher.wait_for_reader)
            lab.engine.submit(request())
            rid = lab.host.asked[0].rid
            with monkeypatch.context() as patched:
                patched.setattr("kvolt.engines.sglang.kv_order._MAX_POLLS", 3)
                lab.host.say(Batch([row(rid, 5)], kv_number=1))
                assert [delta.token_ids for _, delta in (await lab.step()).deltas] == [(5,)]
            publisher.publish(bytes.fromhex(RECORDED["kv_events"][0][1]))
            assert len((await lab.step()).kv_changes) == 1, "late, but here"
            lab.host.say(Batch([row(rid, 6)], kv_number=2))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(lab.engine.steps())
            publisher.publish(bytes.fromhex(RECORDED["kv_events"][1][1]))
            step = await lab.step()
            assert (step.plain_tokens, len(step.kv_changes)) == ((6,), 1)


async def test_each_rank_has_its_own_steps(tmp_path: Path) -> None:
    """A step without a load is the first rank's: others' KV changes come with one."""
    (tmp_path / "second").mkdir()
    with Publisher.within(tmp_path) as first, Publisher.within(tmp_path / "second") as second:
        sources = tuple(KvSource(each.endpoint, each.replay_endpoint) for each in (first, second))
        async with started(tmp_path, replace(FACTS, num_ranks=2, kv_sources=sources)) as lab:
            await asyncio.to_thread(second.wait_for_reader)
            second.publish(bytes.fromhex(RECORDED["kv_events"][0][1]))
            step = await lab.step()
            assert len(step.kv_changes) == 1
            assert step.load is not None
            assert step.load.dp_rank == 1
            lab.engine.submit(request(routing=RoutingHints(pinned_dp_rank=1)))
            asked = lab.host.asked[0]
            assert asked.fields["routed_dp_rank"] == 1
            loads = [RankLoad(0, 0, 0, 0), RankLoad(1, 1, 0, 40)]
            lab.host.say(Batch([row(asked.rid, 842)], loads, kv_rank=1, kv_number=1))
            steps = [await lab.step(), await lab.step()]
            assert [(each.load.dp_rank, each.load.running) for each in steps if each.load] == [(0, 0), (1, 1)]


async def test_clear_kv(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        clearing = asyncio.ensure_future(lab.engine.clear_kv())
        await asyncio.sleep(0)
        (flush,) = (each for each in lab.host.commands if isinstance(each, Flush))
        lab.host.say(Done(flush.call))
        assert await clearing == 0
        clearing = asyncio.ensure_future(lab.engine.clear_kv())
        await asyncio.sleep(0)
        lab.host.say(Done(flush.call + 1, "Timed out waiting for idle state."))
        with pytest.raises(Unavailable, match="Timed out"):
            await clearing


async def test_adapters(tmp_path: Path) -> None:
    async with started(tmp_path, replace(FACTS, has_lora=True)) as lab:
        loading = asyncio.ensure_future(lab.engine.load_lora("a", "/a"))
        await asyncio.sleep(0)
        lab.host.say(Done(1))
        await loading
        assert lab.host.commands[-1] == LoadLora(1, "a", "/a")
        await lab.engine.load_lora("a", "/a")
        with pytest.raises(InvalidRequest):
            await lab.engine.load_lora("a", "/b")
        with pytest.raises(NotFound):
            await lab.engine.unload_lora("b")
        lab.engine.submit(request(lora="a"))
        with pytest.raises(InvalidRequest):
            lab.engine.submit(request("other", lora="b"))
        unloading = asyncio.ensure_future(lab.engine.unload_lora("a"))
        await asyncio.sleep(0.05)
        assert not isinstance(lab.host.commands[-1], UnloadLora), "it is in use"
        lab.host.rows(row(lab.host.asked[0].rid, 5, finish=LENGTH))
        await lab.step()
        await asyncio.sleep(0.05)
        assert lab.host.commands[-1] == UnloadLora(2, "a")
        lab.host.say(Done(2))
        await unloading
        assert lab.engine.loras() == ()


async def test_no_adapters_where_sglang_has_none(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        with pytest.raises(Unsupported):
            await lab.engine.load_lora("a", "/a")


async def test_a_host_that_ends_is_the_engine_s_death(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        lab.engine.submit(request())
        lab.host.last_lines = ("RuntimeError: out of memory",)
        lab.host.how = "was killed by SIGKILL"
        lab.host.kill()
        with pytest.raises(EngineFailed, match=r"SIGKILL.*\n.*out of memory"):
            await lab.step()
        with pytest.raises(EngineDied):
            lab.engine.submit(request("late"))
        with pytest.raises(EngineDied):
            await lab.engine.clear_kv()


async def test_close_ends_the_steps_and_comes_twice(tmp_path: Path) -> None:
    async with started(tmp_path) as lab:
        lab.engine.submit(request())
        await lab.engine.close()
        await lab.engine.close()
        with pytest.raises(StopAsyncIteration):
            await lab.step()


class _Late(FakeHost):
    """Takes its time."""

    was_stopped = False

    def __init__(self) -> None:
        super().__init__()
        self.is_starting = asyncio.Event()

    async def start(self, on_answer: Callable[[Answer], None]) -> FakeHost:
        self.is_starting.set()
        try:
            await asyncio.sleep(3600)
        finally:
            self.was_stopped = True
        return await super().start(on_answer)


async def test_no_host_comes_after_the_close(tmp_path: Path) -> None:
    host = _Late()
    spec = EngineSpec(model=str(model_folder(tmp_path)), role=Role.AGGREGATED)
    engine = SglangEngine(spec, SglangArguments(), new_host=host.start)
    starting = asyncio.ensure_future(engine.start())
    await host.is_starting.wait()
    await engine.close()
    with pytest.raises(EngineDied, match="has ended"):
        await starting
    assert host.was_stopped
    assert not host.commands


async def test_a_start_that_fails_late_leaves_no_host(tmp_path: Path) -> None:
    facts = replace(FACTS, kv_sources=(KvSource("tcp://nowhere", ""),))
    host = FakeHost(facts)
    spec = EngineSpec(model=str(model_folder(tmp_path)), role=Role.AGGREGATED)
    engine = SglangEngine(spec, SglangArguments(), new_host=host.start)
    with pytest.raises(EngineFailed, match="SGLang did not start"):
        await engine.start()
    assert host.lost.is_set(), "though nobody has closed the engine"


async def test_what_is_asked_of_one_that_is_not_started() -> None:
    engine = SglangEngine(EngineSpec(model="m", role=Role.AGGREGATED), SglangArguments())
    with pytest.raises(EngineFailed, match="started"):
        await engine.clear_kv()
    await engine.close()


async def test_host_blocks_are_cleared_too(tmp_path: Path) -> None:
    order = KvOrder(lambda: None)
    on_host = Stored.from_hashes([SequenceHash(1)], None, tier=Tier.HOST)
    order._add_changes(0, (Cleared(),))
    assert order.take() == {}, "nobody was told of anything"
    order._add_changes(0, (on_host, Cleared()))
    assert order.take() == {0: [on_host, Cleared()]}
    order._add_changes(0, (on_host,))
    assert order.num_held == 1
    order.take()
    order._add_changes(0, (Cleared(),))
    assert order.take() == {0: [Cleared()]}
    order.close()


class _Failing(FakeHost):
    def send(self, command: Any) -> None:
        self.say(Fatal(to_info(ConfigError("SGLang has no argument 'x'", key="args.engine_args.x"))))
        self.kill()


async def test_start_errors_are_raised_unchanged(tmp_path: Path) -> None:
    spec = EngineSpec(model=str(model_folder(tmp_path)), role=Role.AGGREGATED)
    engine = SglangEngine(spec, SglangArguments(), new_host=_Failing().start)
    with pytest.raises(ConfigError, match="no argument"):
        await engine.start()
    with pytest.raises(EngineFailed, match="once"):
        await engine.start()


def test_it_is_registered() -> None:
    arguments = check_arguments("sglang", {"engine_args": {"tp_size": 2}, "max_waiting": 5})
    assert isinstance(arguments, SglangArguments)
    with pytest.raises(ConfigError, match="max_waitin"):
        check_arguments("sglang", {"max_waitin": 5})
    spec = EngineSpec(model="/nowhere", role=Role.AGGREGATED)
    assert isinstance(build_engine("sglang", spec, {}), SglangEngine)
