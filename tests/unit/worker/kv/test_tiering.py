"""An engine with tiers below it: what left its device comes back, and answers are the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvolt.core.delta import Delta, StageTimes
from kvolt.core.errors import KvoltError
from kvolt.core.hashing import SequenceHasher
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import KvChange, Stored, Tier
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Request, Role, RoutingHints, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.admission import TierAdmission
from kvolt.kv.tiers.cache import OnboardResult, TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.runtime.tasks import Scope
from kvolt.worker.kv import tiering as tiering_module
from kvolt.worker.kv.tiering import Tiering

BLOCK = 16
ENGINE = SimArguments(speed=1000.0, block_size=BLOCK, kv_blocks=24)


def _num_blocks(stages: StageTimes | None) -> int:
    return 0 if stages is None else stages.onboard_blocks or 0


@dataclass
class Tiered:
    """An engine, its tiers, and what it says."""

    engine: SimEngine
    cache: TieredCache
    tiering: Tiering
    said: dict[RequestId, list[Delta]] = field(default_factory=dict)
    told: list[KvChange] = field(default_factory=list)
    came: list[int] = field(default_factory=list)
    """Blocks onboarded while prompts were computed."""
    expected: list[int] = field(default_factory=list)

    async def answer(self, request: Request) -> tuple[list[int], int]:
        """As a worker does it. Returns the tokens and the number of onboarded blocks."""
        stages: StageTimes | None = None
        if keys := self.tiering.find_offloaded(request):
            stages = await self.tiering.onboard(request, keys)
        said = self.said[request.request_id] = []
        self.engine.submit(request)
        async with asyncio.timeout(20), Scope("ahead") as scope:
            bringing = scope.start(self.onboard_concurrently(request), "bring ahead")
            while not (said and said[-1].finish):
                await asyncio.sleep(0.001)
            bringing.cancel()
        return [token for delta in said for token in delta.token_ids], _num_blocks(stages)

    async def onboard_concurrently(self, request: Request) -> None:
        came = await self.tiering.onboard_concurrently(request.request_id)
        if came is not None:
            self.came.append(_num_blocks(came))

    def cached(self, name: str) -> int | None:
        return self.said[RequestId(name)][0].cached_tokens


@asynccontextmanager
async def tiered(
    num_host: int = 64,
    folder: Path | None = None,
    model: LatencyModel | None = None,
    admission: TierAdmission | None = None,
    arguments: SimArguments = ENGINE,
) -> AsyncIterator[Tiered]:
    engine = SimEngine(EngineSpec(model="sim-tiny", role=Role.AGGREGATED), arguments)
    await engine.start()
    slabs = engine.kv_slabs()
    shape = BlockShape.of(slabs)
    lower = [] if folder is None else [(DiskTier(DiskFiles(folder, shape, 256)), 1)]
    cache = TieredCache.for_slabs(slabs, num_host, lower)
    told: list[KvChange] = []
    tiering = Tiering(
        engine,
        cache,
        time.monotonic,
        told.extend,
        model,
        BLOCK,
        arguments.max_batch_tokens,
        admission=admission,
    )
    found = Tiered(engine, cache, tiering, told=told)

    async def listen() -> None:
        async for step in engine.steps():
            for request_id, delta in step.deltas:
                found.said.setdefault(request_id, []).append(delta)
            for request_id, token in zip(step.plain_ids, step.plain_tokens, strict=True):
                found.said.setdefault(request_id, []).append(Delta(token_ids=(token,)))
            tiering.on_engine_changes(step.kv_changes)

    await tiering.start()
    async with Scope("tiered") as scope:
        scope.start(listen(), "listen")
        try:
            yield found
            cache.host.check_integrity()
        finally:
            await tiering.close()
            await engine.close()
            scope.cancel()


def request(name: str, first: int, num_tokens: int = 8 * BLOCK + 3, max_tokens: int = 8) -> Request:
    return asked(name, tuple(range(first, first + num_tokens)), max_tokens)


def asked(name: str, tokens: tuple[int, ...], max_tokens: int) -> Request:
    hasher = SequenceHasher(BLOCK)
    hasher.extend(tokens)
    return Request(
        request_id=RequestId(name),
        model="sim-tiny",
        token_ids=tokens,
        sequence_hashes=tuple(hasher.sequence),
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


async def until_offloaded(at: Tiered, num_blocks: int) -> None:
    await until(lambda: len(at.cache.host.slot_table) >= num_blocks)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.002)


async def at_rest(at: Tiered) -> None:
    """Nothing stays held, once what is being copied is."""
    async with asyncio.timeout(10):
        while at.engine.load().kv_used_blocks:
            await asyncio.sleep(0.002)


async def test_a_prompt_that_left_the_device_comes_back_from_the_host() -> None:
    async with tiered() as at:
        expected, onboarded = await at.answer(request("first", 10))
        assert onboarded == 0
        await until_offloaded(at, 8)
        for number in range(4):  # the device holds 24 blocks
            await at.answer(request(f"other {number}", 1000 + 200 * number))
        assert await at.engine.match(request("again", 10)) == 0
        tokens, onboarded = await at.answer(request("again", 10))
        assert tokens == expected
        assert (onboarded, at.tiering.onboarded) == (8, {Tier.HOST: 8})
        assert at.cached("again") == 8 * BLOCK
        await at_rest(at)


async def test_answers_are_kept_as_prompts_are() -> None:
    """The next turn of a conversation begins with them."""
    async with tiered() as at:
        first = request("first", 10, 4 * BLOCK, max_tokens=3 * BLOCK)
        tokens, _ = await at.answer(first)
        await until_offloaded(at, 6)
        for number in range(4):
            await at.answer(request(f"other {number}", 1000 + 200 * number))
        again = asked("turn", (*first.token_ids, *tokens, *range(5)), 4)
        _, onboarded = await at.answer(again)
        assert onboarded == 6


async def test_only_missing_blocks_are_onboarded() -> None:
    async with tiered() as at:
        await at.answer(request("long", 10))
        await until_offloaded(at, 8)
        assert (await at.answer(request("again", 10)))[1] == 0, "the device has it"
        await at.engine.clear_kv()
        await at.answer(request("short", 10, 3 * BLOCK))
        assert (await at.answer(request("once more", 10)))[1] >= 5


async def test_a_restart_finds_what_the_disk_has(tmp_path: Path) -> None:
    async with tiered(folder=tmp_path) as at:
        expected, _ = await at.answer(request("first", 10))
        await until_offloaded(at, 8)
    async with tiered(folder=tmp_path) as at:
        tokens, onboarded = await at.answer(request("again", 10))
        assert tokens == expected
        assert (onboarded, at.tiering.onboarded) == (8, {Tier.DISK: 8})
        stored = [change for change in at.told if isinstance(change, Stored) and change.tier is Tier.DISK]
        assert sum(change.num_blocks for change in stored) >= 8, "who routes hears of it"


async def test_blocks_that_are_faster_to_compute_are_not_onboarded() -> None:
    instant = LatencyModel(base_s=1e-6, prefill_token_s=1e-9)
    async with tiered(model=instant) as at:
        expected, _ = await at.answer(request("first", 10))
        await until_offloaded(at, 8)
        await at.engine.clear_kv()
        tokens, onboarded = await at.answer(request("again", 10))
        assert tokens == expected
        assert onboarded == 0
        assert at.tiering.report().num_declined == 8
    slow = LatencyModel(base_s=1e-3, prefill_token_s=1e-2)
    async with tiered(model=slow) as at:
        await at.answer(request("first", 10))
        await until_offloaded(at, 8)
        await at.engine.clear_kv()
        assert (await at.answer(request("again", 10)))[1] == 8


async def test_who_is_cancelled_holds_nothing(tmp_path: Path) -> None:
    async with tiered(folder=tmp_path) as at:
        await at.answer(request("first", 10))
        await until_offloaded(at, 8)
        await at.engine.clear_kv()
        for delay_s in (0.0, 0.0005, 0.002):
            gone = request("gone", 10)
            onboarding = asyncio.ensure_future(at.tiering.onboard(gone, at.engine.kv_keys(gone)))
            await asyncio.sleep(delay_s)
            onboarding.cancel()
            await asyncio.wait([onboarding])
            if not onboarding.cancelled():
                at.tiering.release_kept(RequestId("gone"))
        await at_rest(at)


@pytest.mark.parametrize("num_host", [2, 5])
async def test_a_small_host_under_many_requests_gives_right_answers(num_host: int, tmp_path: Path) -> None:
    async with tiered() as alone:
        expected = [
            (await alone.answer(request(f"r{index}", 10 + 100 * (index % 5))))[0] for index in range(5)
        ]
    async with tiered(num_host=num_host, folder=tmp_path) as at:

        async def ask(index: int) -> None:
            tokens, _ = await at.answer(request(f"r{index}", 10 + 100 * (index % 5)))
            assert tokens == expected[index % 5]

        for _ in range(3):
            await asyncio.gather(*(ask(index) for index in range(2)))
            await asyncio.gather(*(ask(index) for index in range(2, 5)))
            at.said.clear()


async def test_whatever_goes_wrong_below_the_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: object) -> None:
        raise OSError("no memory")

    async with tiered() as at:
        expected, _ = await at.answer(request("first", 10))
        await until_offloaded(at, 8)
        await at.engine.clear_kv()
        monkeypatch.setattr(at.cache, "onboard", broken)
        tokens, onboarded = await at.answer(request("again", 10))
        assert tokens == expected
        assert onboarded == 0
        await at_rest(at)


async def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    async with tiered(model=LatencyModel(base_s=1e-3, prefill_token_s=1e-5)) as at:
        await at.answer(request("first", 10))
        await until_offloaded(at, 8)
        at.cache.host.stats[Tier.HOST].block_s = 10.0
        brought = []
        for number in range(40):
            await at.engine.clear_kv()
            brought.append((await at.answer(request(f"again {number}", 10)))[1])
        assert brought[0] == 0
        assert brought[-1] == 8, "by then it is known to be quick"


async def test_only_what_is_admitted_goes_down() -> None:
    async with tiered(admission=TierAdmission(depth=3, tenants=["gold"])) as at:
        await at.answer(request("nobody's", 400))
        gold = replace(request("gold", 10), routing=RoutingHints(tenant="gold"))
        expected, _ = await at.answer(gold)
        await until_offloaded(at, 3)
        await asyncio.sleep(0.05)
        assert len(at.cache.host.slot_table) == 3
        await at.engine.clear_kv()
        tokens, onboarded = await at.answer(replace(gold, request_id=RequestId("again")))
        assert (tokens, onboarded) == (expected, 3)


async def test_a_few_blocks_wait_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time a device is taken from who computes."""
    monkeypatch.setattr(tiering_module, "_GATHER_S", 3600.0)
    monkeypatch.setattr(tiering_module, "_POOL_PARTS", 8)
    async with tiered() as at:
        await at.answer(request("few", 10, num_tokens=BLOCK + 1, max_tokens=1))
        await at.answer(request("more", 300, num_tokens=BLOCK + 1, max_tokens=1))
        await asyncio.sleep(0.05)
        assert len(at.cache.host.slot_table) == 0
        await at.answer(request("enough", 500, num_tokens=BLOCK + 1, max_tokens=1))
        await until_offloaded(at, 3)


async def test_what_an_engine_cannot_give_at_once_goes_down_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of answers are completed one here and one there, each at the end of a long chain."""
    monkeypatch.setattr(tiering_module, "_GATHER_S", 3600.0)
    monkeypatch.setattr(tiering_module, "_POOL_PARTS", 8)
    async with tiered() as at:
        answers = (request(f"{n}", 10 + 100 * n, 2 * BLOCK, max_tokens=3 * BLOCK + 1) for n in range(4))
        await asyncio.gather(*map(at.answer, answers))
        await until_offloaded(at, 18)  # two more may wait for a third


async def test_few_blocks_do_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiering_module, "_POOL_PARTS", 1)
    async with tiered() as at:
        await at.answer(request("few", 10, num_tokens=2 * BLOCK + 1))
        await until_offloaded(at, 2)


async def test_blocks_that_may_not_be_held_any_more_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tiered() as at:
        real = at.engine.pin_sealed

        async def expired(name: RequestId) -> object:
            return tuple(replace(each, expires_in_s=0.0) for each in await real(name))

        monkeypatch.setattr(at.engine, "pin_sealed", expired)
        await at.answer(request("first", 10))
        await asyncio.sleep(0.2)
        assert len(at.cache.host.slot_table) == 0
        await at_rest(at)


# --- while the prompt is computed

SLOW = SimArguments(speed=1.0, block_size=BLOCK, kv_blocks=96, max_batch_tokens=64, max_num_seqs=8)
LONG_PROMPT = 32 * BLOCK + 3
"""Eight steps and a bit, of 10 ms each."""
STEPS = LatencyModel(base_s=0.001, prefill_token_s=0.009 / 64)


@asynccontextmanager
async def computing(folder: Path | None = None, block_s: float = 0.0025) -> AsyncIterator[Tiered]:
    """An engine that takes 80 ms for a prompt which takes as long to bring."""
    arguments = replace(SLOW, latency=STEPS)
    async with tiered(folder=folder, model=STEPS, arguments=arguments, num_host=128) as at:
        fetch = at.cache.onboard

        async def slowly(
            blocks: Sequence[TierBlock], numbers: Sequence[int], timeout_s: float | None = None
        ) -> OnboardResult:
            await asyncio.sleep(block_s * len(blocks))
            return await fetch(blocks, numbers, timeout_s)

        at.cache.onboard = slowly  # type: ignore[method-assign]
        at.expected, _ = await at.answer(request("first", 10, LONG_PROMPT))
        await until_offloaded(at, 32)
        await at.engine.clear_kv()
        at.cache.host.stats[Tier.HOST].block_s = block_s
        yield at


async def test_blocks_come_while_a_prompt_is_computed_until_both_meet() -> None:
    async with computing() as at:
        tokens, onboarded = await at.answer(request("again", 10, LONG_PROMPT))
        assert tokens == at.expected
        assert onboarded == 0, "nothing was waited for"
        await until(lambda: bool(at.came))
        cached = at.cached("again")
        assert cached is not None
        assert 0 < cached < 32 * BLOCK, "some were computed, and some came"
        assert at.came[0] == cached // BLOCK
        await at_rest(at)


async def test_a_part_that_does_not_come_is_computed_with_what_lies_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with computing() as at:
        slowly, num_calls = at.cache.onboard, 0

        async def failing(
            blocks: Sequence[TierBlock], numbers: Sequence[int], timeout_s: float | None = None
        ) -> OnboardResult:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:
                return OnboardResult(1, ((Tier.HOST, 1),))
            return await slowly(blocks, numbers, timeout_s)

        monkeypatch.setattr(at.cache, "onboard", failing)
        tokens, _ = await at.answer(request("again", 10, LONG_PROMPT))
        assert tokens == at.expected
        assert at.cached("again") == 4 * BLOCK, "the last part, an eighth"
        await at_rest(at)


async def test_an_engine_that_fails_to_take_them_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: object) -> None:
        raise KvoltError("no such room")

    async with computing() as at:
        monkeypatch.setattr(at.engine, "attach_kv", broken)
        tokens, _ = await at.answer(request("again", 10, LONG_PROMPT))
        assert tokens == at.expected
        assert at.cached("again") == 0
        await at_rest(at)


async def test_cancelling_leaves_nothing() -> None:
    async with computing() as at:
        for delay_s in (0.0, 0.02, 0.05):
            gone = request("gone", 10, LONG_PROMPT)
            await at.tiering.onboard(gone, at.engine.kv_keys(gone))
            if delay_s == 0.0:
                at.tiering.release_kept(RequestId("gone"))
            else:
                at.engine.submit(gone)
                bringing = asyncio.ensure_future(at.tiering.onboard_concurrently(gone.request_id))
                await asyncio.sleep(delay_s)
                at.engine.abort(gone.request_id)
                bringing.cancel()
                await asyncio.wait([bringing])
            await at_rest(at)
            await at.engine.clear_kv()
        tokens, _ = await at.answer(request("again", 10, LONG_PROMPT))
        assert tokens == at.expected


async def test_what_came_for_one_that_waits_is_found_when_its_turn_comes() -> None:
    async with computing() as at:
        for number in range(8):
            at.engine.submit(request(f"busy {number}", 2000 + 100 * number, BLOCK, max_tokens=110))
        tokens, _ = await at.answer(request("again", 10, LONG_PROMPT))
        assert tokens == at.expected
        assert at.cached("again") == 32 * BLOCK, "all was here before it was its turn"
        await at_rest(at)


async def test_many_at_once_have_right_answers(tmp_path: Path) -> None:
    async with computing(tmp_path) as at:
        others = {}
        for first in (1000, 3000):
            others[first] = (await at.answer(request(f"other {first}", first, LONG_PROMPT)))[0]
        await at.engine.clear_kv()

        async def ask(number: int) -> None:
            first = (10, 1000, 3000)[number % 3]
            tokens, _ = await at.answer(request(f"r{number}", first, LONG_PROMPT))
            assert tokens == others.get(first, at.expected)

        for start in range(0, 9, 3):
            await asyncio.gather(*(ask(start + number) for number in range(3)))
            await at.engine.clear_kv()
        await at_rest(at)


async def test_what_comes_too_late_is_no_hit() -> None:
    """The prompt was computed before its first part was there: that is all that is asked for."""
    async with computing(block_s=60.0) as at:
        at.cache.host.stats[Tier.HOST].block_s = 0.0025  # as it was believed to be
        tokens, _ = await at.answer(request("again", 10, LONG_PROMPT, max_tokens=60))
        assert tokens == at.expected[: len(tokens)] or tokens[: len(at.expected)] == at.expected
        assert at.cached("again") == 0
        assert at.came == []
        assert at.tiering.onboarded.total() == 0
        await at_rest(at)


async def test_a_pool_that_cannot_hold_a_prompt_twice_computes_it_at_once() -> None:
    async with computing(block_s=10.0) as at:
        at.cache.host.stats[Tier.HOST].block_s = 0.0025
        for number in range(2):  # 96 blocks, of which these take 50
            at.engine.submit(request(f"busy {number}", 2000 + 500 * number, 24 * BLOCK, max_tokens=40))
        await asyncio.sleep(0.05)
        tokens, _ = await at.answer(request("again", 10, LONG_PROMPT))
        assert tokens == at.expected
        await at_rest(at)


async def test_it_closes_while_blocks_come(caplog: pytest.LogCaptureFixture) -> None:
    async with computing() as at:
        asked = request("again", 10, LONG_PROMPT)
        await at.tiering.onboard(asked, at.engine.kv_keys(asked))
        at.engine.submit(asked)
        bringing = asyncio.ensure_future(at.tiering.onboard_concurrently(asked.request_id))
        await asyncio.sleep(0.02)
        bringing.cancel()  # as a worker does before it closes its tiers
        await asyncio.wait([bringing])
    assert not caplog.records, caplog.text
