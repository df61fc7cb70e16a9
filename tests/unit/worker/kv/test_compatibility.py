"""Workers that are to exchange KV and cannot: a prefill worker is refused, and says why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, NAMESPACE, Lab, until
from tests.unit.worker.test_roles import Air, engine_of, start

from kvolt.core.block_key import KvLayout
from kvolt.core.card import KvSlabs
from kvolt.core.endpoints import INSTANCES, decode_instance
from kvolt.core.errors import ConfigError, DiscoveryLost
from kvolt.core.request import Role
from kvolt.engines.sim.engine import SimEngine
from kvolt.testing import run_virtual
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.slabs import Slab
from kvolt.worker.kv.compatibility import find_mismatch, slabs_of
from kvolt.worker.worker import Worker

BLOCK = KvLayout(
    name="block-layer-kv-head-token",
    dtype="bfloat16",
    num_layers=2,
    num_kv_heads=4,
    head_dim=8,
    block_size=16,
    block_bytes=2 * 2 * 4 * 16 * 8 * 2,
)


def slabs(degree: int = 1, **more: Any) -> KvSlabs:
    """Of a rank of so many."""
    layout = SlabLayout.of_rank(replace(BLOCK, **more), degree)
    return KvSlabs(block=layout.block, total_kv_heads=layout.total_kv_heads, tp_degree=layout.tp_degree)


# --- who fits whom


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_ranks_may_share_the_heads_differently(degree: int) -> None:
    assert find_mismatch(slabs(2), slabs(degree)) is None


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (
            slabs(dtype="float32", block_bytes=2 * BLOCK.block_bytes),
            "dtype is bfloat16 here and float32 there",
        ),
        (slabs(num_layers=3), "num_layers is 2 here and 3 there"),
        (slabs(name="other"), "order of axes"),
    ],
)
def test_what_differs_is_named(theirs: KvSlabs, field: str) -> None:
    reason = find_mismatch(slabs(), theirs)
    assert reason is not None
    assert field in reason


def test_who_does_not_say_how_its_blocks_lie_is_taken_at_its_word() -> None:
    nonsense = KvSlabs(block=BLOCK, total_kv_heads=3, tp_degree=2)
    for theirs in (None, nonsense):
        assert find_mismatch(slabs(dtype="other"), theirs) is None
        assert find_mismatch(theirs, slabs(dtype="other")) is None


# --- workers


class Eighths(SimEngine):
    """Has the same card, and blocks of another type."""

    def kv_slabs(self) -> tuple[Slab, ...]:
        (slab,) = super().kv_slabs()
        assert slab.layout is not None
        slab.layout = SlabLayout.of_rank(replace(slab.layout.block, dtype="eighths"))
        return (slab,)


def eighths(role: Role) -> SimEngine:
    return engine_of(role, kind=Eighths)


async def refused(lab: Lab, engine: SimEngine, namespace: str = NAMESPACE) -> ConfigError | None:
    """Why a worker with this engine cannot start, if it cannot."""
    runtime = await lab.runtime("late")
    worker = Worker(runtime, engine, namespace, None, Air().mover)
    try:
        await worker.start()
    except ConfigError as error:
        found = await runtime.discovery.get_prefix(f"{INSTANCES}{namespace}/")
        instances = filter(None, map(decode_instance, found.values()))
        assert all(each.process != "late" for each in instances), "nobody may find it"
        return error
    finally:
        await runtime.close()
        await worker.close()
    return None


def test_incompatible_prefill_worker_is_refused() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running, client = await start(lab, Air(), Role.DECODE)
            error = await refused(lab, eighths(Role.PREFILL))
            assert error is not None
            first = running.worker._instance
            for named in (
                "the prefill worker late",
                f"decode worker decode ({first} at",
                "dtype is eighths here",
            ):
                assert named in error.message
            assert "same dtype" in error.fields["remedy"]
            assert [each.id for each in client.candidates()] == [first], "who was there goes on"
            assert await refused(lab, engine_of(Role.PREFILL)) is None, "who fits may come"

    run_virtual(scenario)


def test_a_prefill_worker_that_fits_one_of_them_may_come() -> None:
    """In a rollout there are some of each."""

    async def scenario() -> None:
        async with Lab() as lab:
            await start(lab, Air(), Role.DECODE)
            await lab.worker("new", eighths(Role.DECODE), new_mover=Air().mover)
            assert await refused(lab, eighths(Role.PREFILL)) is None

    run_virtual(scenario)


def test_incompatible_decode_worker_logs_and_serves(caplog: pytest.LogCaptureFixture) -> None:
    """It needs no prefill worker, and what is wrong may be at those."""

    async def scenario() -> None:
        async with Lab() as lab:
            await start(lab, Air(), Role.PREFILL)
            assert await refused(lab, eighths(Role.DECODE)) is None

    run_virtual(scenario)
    (message,) = [
        record.getMessage() for record in caplog.records if record.name == "kvolt.worker.kv.compatibility"
    ]
    assert "worker=late peer=prefill" in message
    assert "dtype is eighths here and sim there" in message


def test_the_engine_of_one_that_is_refused_is_closed() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await start(lab, Air(), Role.DECODE)
            engine, closed = eighths(Role.PREFILL), list[bool]()
            close = engine.close

            async def closing() -> None:
                closed.append(True)
                await close()

            engine.close = closing  # type: ignore[method-assign]
            worker = Worker(await lab.runtime("late"), engine, NAMESPACE, None, Air().mover)
            with pytest.raises(ConfigError):
                await worker.start()
            assert closed

    run_virtual(scenario)


def test_what_a_worker_registers_says_how_its_blocks_lie() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            _, client = await start(lab, Air(), Role.DECODE)
            (instance,) = client.candidates()
            told = slabs_of(instance)
            assert told is not None
            assert (told.block.dtype, told.block.block_size, told.tp_degree) == (
                "sim",
                ARGUMENTS.block_size,
                1,
            )
            # No worker transfers KV to or from this one.
            alone = await lab.worker("alone")
            assert alone.worker.info is not None
            assert alone.worker.info.kv_slabs is None

    run_virtual(scenario)


def test_no_peers_of_another_namespace_or_card() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await start(lab, Air(), Role.DECODE)
            assert await refused(lab, eighths(Role.PREFILL), namespace="other") is None
            arguments = replace(ARGUMENTS, context_length=ARGUMENTS.context_length // 2)
            assert await refused(lab, engine_of(Role.PREFILL, arguments, Eighths)) is None

    run_virtual(scenario)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.AGGREGATED])
def test_no_peers_of_the_same_role(role: Role) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await start(lab, Air(), role)
            assert await refused(lab, eighths(Role.PREFILL)) is None

    run_virtual(scenario)


def test_leaving_worker_is_no_obstacle() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running, client = await start(lab, Air(), Role.DECODE)
            await running.runtime.cordon()
            await until(lambda: not client.candidates())
            assert await refused(lab, eighths(Role.PREFILL)) is None

    run_virtual(scenario)


def test_who_was_lost_stands_in_the_way_for_as_long_as_its_lease() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running, _ = await start(lab, Air(), Role.DECODE)
            key = f"{running.endpoint.prefix}{running.worker._instance}"
            discovery = running.runtime.discovery
            gone = asyncio.get_running_loop().call_later(
                3.0, lambda: lab._task_group.start(discovery.delete(key), "lost")
            )
            assert await refused(lab, eighths(Role.PREFILL)) is None
            assert gone.when() < asyncio.get_running_loop().time()

    run_virtual(scenario)


def test_without_discovery_a_worker_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await start(lab, Air(), Role.DECODE)
            runtime = await lab.runtime("late")

            async def lost(prefix: str) -> None:
                raise DiscoveryLost("away")

            monkeypatch.setattr(runtime.discovery, "get_prefix", lost)
            worker = Worker(runtime, eighths(Role.PREFILL), NAMESPACE, None, Air().mover)
            await worker.start()
            await worker.close()

    run_virtual(scenario)
