"""The agent of a process: what it measures is told to those who register it, and not too often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.unit.engines.lab import sim

from kvolt.cli.process import running
from kvolt.cli.worker import transfers
from kvolt.cli.worker.transfers import Transfers
from kvolt.core.card import MeasuredLink
from kvolt.core.errors import ConnectFailed
from kvolt.core.ids import BlockKey
from kvolt.runtime.config.settings import Settings, TransferSettings
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.identity import ProcessRole
from kvolt.transfer.reads import self_test
from kvolt.worker.kv.mover import KvMover

SOON_S = 20.0
KEYS = [BlockKey(bytes([number] * 16)) for number in range(4)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy machines finish their self-tests, too."""
    monkeypatch.setattr(self_test, "LIMIT_S", SOON_S)


class Side:
    """A process, and what it is told of links."""

    def __init__(self, moved: Transfers, mover: KvMover) -> None:
        self.transfers = moved
        self.mover = mover
        self.told: asyncio.Queue[dict[str, MeasuredLink]] = asyncio.Queue()
        moved.add_listener(self.told.put)


@asynccontextmanager
async def side(key: Path | None = None, **transfer: bool) -> AsyncIterator[Side]:
    settings = msgspec.convert(
        {
            "discovery": {"kind": "mem"},
            "events": {"kind": "mem"},
            "admin": {"enabled": False},
            "transfer": transfer,
            "cluster": {} if key is None else {"key": str(key)},
        },
        Settings,
    )
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(running(settings, "side", ProcessRole.WORKER))
        engine = sim()
        await engine.start()
        stack.push_async_callback(engine.close)
        moved = Transfers(process.runtime, settings.transfer)
        stack.push_async_callback(moved.close)
        assert moved.paths is None
        yield Side(moved, moved.mover(engine))


async def carry(source: Side, target: Side, count: int = len(KEYS)) -> str:
    keys = KEYS[:count]
    offer = source.mover.offer(range(count), keys, SOON_S)
    path = await target.mover.pull(offer.ticket, 0, keys, range(count), SOON_S)
    await offer.wait_done()
    return path


async def test_what_a_self_test_measured_is_told() -> None:
    async with side() as source, side() as target:
        assert await carry(source, target) == "shm"
        links = await asyncio.wait_for(target.told.get(), SOON_S)
        assert set(links) == {"shm@127.0.0.1"}
        assert links["shm@127.0.0.1"].bytes_per_s > 0
        assert target.transfers.paths is not None
        assert source.told.empty()


async def test_the_settings_choose_the_path_and_turn_the_self_test_off() -> None:
    async with side() as source, side(shared_memory=False, self_test=False) as target:
        assert target.transfers.paths is not None
        tests: list[None] = []
        target.transfers.paths.on_tested = lambda: tests.append(None)
        assert await carry(source, target) == "tcp"
        assert await carry(source, target) == "tcp"
        await asyncio.sleep(0.1)
        assert not tests
        assert target.transfers.paths.links() == {}


@pytest.mark.parametrize(("every_s", "num_told"), [(3600.0, 0), (0.0, 1)])
async def test_news_in_quick_succession_waits_and_is_told_together(
    monkeypatch: pytest.MonkeyPatch, every_s: float, num_told: int
) -> None:
    monkeypatch.setattr(transfers, "LINKS_INTERVAL_S", every_s)
    async with side(self_test=False) as target:
        paths = target.transfers.paths
        assert paths is not None
        paths.on_speed_change()
        await asyncio.wait_for(target.told.get(), SOON_S)
        for _ in range(50):
            paths.on_speed_change()
        await asyncio.sleep(0.05)
        assert target.told.qsize() == num_told


async def test_transfers_that_nobody_used_are_closed() -> None:
    settings = msgspec.convert(
        {"discovery": {"kind": "mem"}, "events": {"kind": "mem"}, "admin": {"enabled": False}}, Settings
    )
    async with running(settings, "idle", ProcessRole.WORKER) as process:
        await Transfers(process.runtime, TransferSettings()).close()


async def test_blocks_are_encrypted_with_a_cluster_key(tmp_path: Path) -> None:
    key = tmp_path / "kvolt.key"
    key.touch(0o600)
    key.write_bytes(ClusterAuthority.create(time.time()).to_pem())
    options = {"shared_memory": False, "self_test": False}
    async with side(key, **options) as source, side(key, **options) as target, side(**options) as stranger:
        assert await carry(source, target) == "tcp"
        with pytest.raises(ConnectFailed, match="--cluster-key"):
            await carry(source, stranger)
        agent = source.transfers.started_agent
        assert agent is not None
        async with asyncio.timeout(SOON_S):
            while agent.handshakes != {"accepted": 2, "refused": 1}:
                await asyncio.sleep(0.01)
