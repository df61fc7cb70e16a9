"""What `file` does beyond the conformance suite: hung and full file systems, one voice, clearing up."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waits import MUST_HAPPEN_S

from kvolt.core.errors import DiscoveryLost, PayloadTooLarge
from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.discovery.directory import MAX_VALUE_BYTES, Directory
from kvolt.runtime.discovery.file import FileDiscovery
from kvolt.testing.discovery.observer import observing
from kvolt.testing.virtual.loop import InlineBlocking, VirtualClock, run_virtual

TTL_S = 0.3
HANG_S = 2.0
"""Longer than a busy machine stops a process, so that only calls that hang time out."""


def virtual(directory: Path, seed: int = 1, **options: Any) -> FileDiscovery:
    return FileDiscovery(directory, VirtualClock(), InlineBlocking(), random.Random(seed), **options)


@pytest.fixture
async def blocking() -> AsyncIterator[ThreadBlocking]:
    threads = ThreadBlocking()
    yield threads
    threads.close()


class State:
    """The last thing `on_state` said, to be waited for."""

    def __init__(self) -> None:
        self._events = {True: asyncio.Event(), False: asyncio.Event()}

    def __call__(self, connected: bool) -> None:
        self._events[connected].set()
        self._events[not connected].clear()

    async def until(self, connected: bool) -> None:
        async with asyncio.timeout(MUST_HAPPEN_S):
            await self._events[connected].wait()


def test_loss_and_recovery_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "d"
    states: list[bool] = []

    async def main() -> None:
        caplog.set_level(logging.INFO)
        client = virtual(root, on_state=states.append)
        lease = await client.lease(3.0)
        await client.put("a", b"1", lease)
        async with observing(client, "", "a") as [observer, _]:
            root.rename(tmp_path / "away")
            root.touch()
            with pytest.raises(DiscoveryLost):
                await client.put("b", b"1", lease)
            with pytest.raises(DiscoveryLost):
                await client.get_prefix("")
            await asyncio.sleep(60)
            root.unlink()
            await asyncio.sleep(60)
            assert observer.content == {"a": b"1"}
            assert not observer.deletes
        assert await client.get_prefix("") == {"a": b"1"}
        await client.close()

    run_virtual(main, until_s=600)
    assert states == [True, False, True]
    assert [record.levelname for record in caplog.records if record.name.endswith("store_state")] == [
        "WARNING",
        "WARNING",
    ]


def test_a_full_disk_refuses_puts_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[bool] = []
    full = False
    write = Directory._write

    def write_if_space(self: Directory, *args: Any) -> Any:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *args)

    monkeypatch.setattr(Directory, "_write", write_if_space)

    async def main() -> None:
        nonlocal full
        owner, reader = virtual(tmp_path, 1, on_state=states.append), virtual(tmp_path, 2)
        lease = await owner.lease(3.0)
        await owner.put("a", b"1", lease)
        async with observing(reader, "") as [observer], observing(owner, ""):
            full = True
            with pytest.raises(DiscoveryLost):
                await owner.put("b", b"1", lease)
            await asyncio.sleep(30)
            assert observer.content == {"a": b"1"}
            assert states == [True, False]
            full = False
            await asyncio.sleep(10)
            assert states == [True, False, True]
            await owner.put("b", b"1", lease)
            await observer.until_content({"a": b"1", "b": b"1"})
        await owner.close()
        await reader.close()

    run_virtual(main, until_s=600)


async def test_a_hung_file_system_takes_one_thread_and_not_the_loop(
    tmp_path: Path, blocking: ThreadBlocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, num_hung, state = threading.Event(), 0, State()
    client = FileDiscovery(
        tmp_path, SystemClock(), blocking, random.Random(1), 0.02, timeout_s=HANG_S, on_state=state
    )
    lease = await client.lease(3 * HANG_S)
    await client.put("a", b"1", lease)
    scan, renew = Directory.scan, Directory.renew

    def hang(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal num_hung
            if not gate.is_set():
                num_hung += 1
                gate.wait(MUST_HAPPEN_S)
            return real(*args, **options)

        return call

    try:
        async with observing(client, "") as [observer]:
            await observer.until_content({"a": b"1"})
            monkeypatch.setattr(Directory, "scan", hang(scan))
            monkeypatch.setattr(Directory, "renew", hang(renew))
            await state.until(connected=False)
            for _ in range(5):
                with pytest.raises(DiscoveryLost):
                    await client.get_prefix("")
                with pytest.raises(DiscoveryLost):
                    await client.put("a", b"2", lease)
            await asyncio.sleep(0.3)
            assert num_hung == 1
            assert observer.content == {"a": b"1"}
            gate.set()
            await state.until(connected=True)
            await client.put("a", b"3", lease)
            await observer.until_content({"a": b"3"})
            assert not observer.deletes
    finally:
        gate.set()
        await client.close()


async def test_a_put_given_up_does_not_come_back_as_a_ghost(
    tmp_path: Path, blocking: ThreadBlocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write hangs, the caller is told it failed, then it happens after all."""
    gate, state = threading.Event(), State()
    client = FileDiscovery(
        tmp_path, SystemClock(), blocking, random.Random(1), 0.02, timeout_s=HANG_S, on_state=state
    )
    reader = FileDiscovery(tmp_path, SystemClock(), blocking, random.Random(2), 0.02)
    lease = await client.lease(3 * HANG_S)
    await client.put("changed", b"1", lease)
    write = Directory.write_record

    def hang(*args: Any) -> Any:
        gate.wait(MUST_HAPPEN_S)
        return write(*args)

    try:
        for key in ("ghost", "changed"):
            gate.clear()
            with monkeypatch.context() as patch:
                patch.setattr(Directory, "write_record", hang)
                with pytest.raises(DiscoveryLost):
                    await client.put(key, b"late", lease)
            gate.set()
            await state.until(connected=True)
        assert await reader.get_prefix("") == {"changed": b"1"}
    finally:
        gate.set()
        await client.close()
        await reader.close()


async def test_a_cancelled_put_leaves_the_client_usable(
    tmp_path: Path, blocking: ThreadBlocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()
    client = FileDiscovery(tmp_path, SystemClock(), blocking, random.Random(1), 0.02)
    lease = await client.lease(600)
    write = Directory.write_record

    def slow(*args: Any) -> Any:
        entered.set()
        gate.wait(MUST_HAPPEN_S)
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "write_record", slow)
        putting = asyncio.ensure_future(client.put("a", b"1", lease))
        async with asyncio.timeout(MUST_HAPPEN_S):
            while not entered.is_set():
                await asyncio.sleep(0.001)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
    asyncio.get_running_loop().call_later(0.05, gate.set)
    await client.put("a", b"2", lease)
    assert await client.get_prefix("") == {"a": b"2"}
    await client.close()


def test_all_watches_share_one_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_scans = 0
    scan = Directory.scan

    def counted(self: Directory, relist: bool) -> Any:
        nonlocal num_scans
        num_scans += 1
        return scan(self, relist)

    monkeypatch.setattr(Directory, "scan", counted)

    async def main() -> None:
        client = virtual(tmp_path, poll_s=1.0)
        async with observing(client, *(f"p/{number}" for number in range(20))):
            await asyncio.sleep(10.5)
        await client.close()

    run_virtual(main, until_s=60)
    assert 10 <= num_scans <= 13


def test_idle_polls_do_not_list_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_lists = 0
    list_keys = Directory._list_keys

    def counted(self: Directory) -> None:
        nonlocal num_lists
        num_lists += 1
        list_keys(self)

    async def main() -> None:
        client = virtual(tmp_path, poll_s=0.1)
        lease = await client.lease(30.0)
        for number in range(100):
            await client.put(f"k/{number}", b"x", lease)
        async with observing(client, ""):
            await asyncio.sleep(2)
            monkeypatch.setattr(Directory, "_list_keys", counted)
            await asyncio.sleep(10)
        await client.close()

    run_virtual(main, until_s=60)
    assert 8 <= num_lists <= 12  # the safety net once a second, not ten times


def test_nothing_is_left_lying(tmp_path: Path) -> None:
    """Tombstones go by their owner, dead leases by any reader."""

    async def main() -> None:
        owner, crashing, reader = (virtual(tmp_path, seed) for seed in (1, 2, 3))
        lease = await owner.lease(3.0)
        for number in range(5):
            await owner.put(f"k/{number}", b"x", lease)
            await owner.delete(f"k/{number}")
        await crashing.put("c", b"x", await crashing.lease(3.0))
        await crashing.abandon()
        revoked = await owner.lease(3.0)
        await owner.revoke(revoked)
        assert len(list((tmp_path / "keys").iterdir())) == 6
        async with observing(reader, ""):
            await asyncio.sleep(60)
        assert list((tmp_path / "keys").iterdir()) == []
        assert [path.name for path in (tmp_path / "leases").iterdir()] == [lease]
        assert list((tmp_path / "tmp").iterdir()) == []
        await owner.close()
        await reader.close()

    run_virtual(main, until_s=600)


def test_a_key_lost_alone_is_put_back_unseen(tmp_path: Path) -> None:
    async def main() -> None:
        owner, reader = virtual(tmp_path, 1), virtual(tmp_path, 2)
        lease = await owner.lease(3.0)
        await owner.put("a", b"1", lease)
        async with observing(reader, "") as [observer]:
            for path in ("keys/a", f"leases/{lease}"):
                (tmp_path / path).unlink()
                await asyncio.sleep(5)
                assert (tmp_path / path).exists()
            assert observer.deletes == []
        await owner.close()
        await reader.close()

    run_virtual(main, until_s=60)


def test_a_directory_removed_by_half_is_no_news(tmp_path: Path) -> None:
    async def main() -> None:
        owner, reader = virtual(tmp_path / "d", 1), virtual(tmp_path / "d", 2)
        await owner.put("a", b"1", await owner.lease(3.0))
        async with observing(reader, "") as [observer]:
            for part in ("leases", "keys", "tmp", ""):
                shutil.rmtree(tmp_path / "d" / part)
                await asyncio.sleep(0.5)
                assert observer.deletes == []
            await asyncio.sleep(10)
            assert observer.deletes == []
        assert await reader.get_prefix("") == {"a": b"1"}
        await owner.close()
        await reader.close()

    run_virtual(main, until_s=60)


async def test_a_value_has_a_limit(tmp_path: Path, blocking: ThreadBlocking) -> None:
    client = FileDiscovery(tmp_path, SystemClock(), blocking, random.Random(1))
    lease = await client.lease(TTL_S)
    with pytest.raises(PayloadTooLarge):
        await client.put("a", bytes(MAX_VALUE_BYTES + 1), lease)
    await client.close()
