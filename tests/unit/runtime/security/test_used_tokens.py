"""Used join tokens survive a restart of the join server."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvolt.core.errors import AccessDenied
from kvolt.runtime.clock import ThreadBlocking
from kvolt.runtime.host.safe_files import locked
from kvolt.runtime.security import used_tokens
from kvolt.runtime.security.used_tokens import UsedToken, UsedTokens

FIRST = UsedToken(b"1", 100.0, b"key")


@pytest.fixture
def blocking() -> Iterator[ThreadBlocking]:
    blocking = ThreadBlocking()
    yield blocking
    blocking.close()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return tmp_path / "cluster.key"


async def test_a_restart_forgets_no_token(key: Path, blocking: ThreadBlocking) -> None:
    await UsedTokens(key, blocking).use(FIRST, 0.0)
    restarted = UsedTokens(key, blocking)
    await restarted.use(FIRST, 1.0)  # the same process asks again: its response was lost
    with pytest.raises(AccessDenied, match="was used before"):
        await restarted.use(UsedToken(b"1", 100.0, b"another key"), 1.0)
    path = key.with_name("cluster.key.used-tokens")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_join_servers_of_one_machine_share_the_file(key: Path, blocking: ThreadBlocking) -> None:
    servers = [UsedTokens(key, blocking) for _ in range(4)]
    uses = [server.use(UsedToken(b"1", 100.0, bytes([each])), 0.0) for each, server in enumerate(servers)]
    results = await asyncio.gather(*uses, return_exceptions=True)
    assert sorted(type(each).__name__ for each in results) == ["AccessDenied"] * 3 + ["NoneType"]


async def test_a_lock_that_is_never_released_occupies_one_thread(
    key: Path, blocking: ThreadBlocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the threads that requests need as well."""
    monkeypatch.setattr(used_tokens, "_TIMEOUT_S", 0.05)
    tokens = UsedTokens(key, blocking)
    with locked(key.with_name("cluster.key.used-tokens")):
        for number in range(5):
            with pytest.raises(AccessDenied, match="cannot be recorded"):
                await tokens.use(UsedToken(bytes([number]), 100.0, b"key"), 0.0)
        assert blocking._num_threads == 1


async def test_expired_tokens_are_dropped_and_others_bounded(
    key: Path, blocking: ThreadBlocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(used_tokens, "MAX_USED_TOKENS", 2)
    tokens = UsedTokens(key, blocking)
    await tokens.use(FIRST, 0.0)
    await tokens.use(UsedToken(b"2", 200.0, b""), 0.0)
    with pytest.raises(AccessDenied, match="too many"):
        await tokens.use(UsedToken(b"3", 300.0, b""), 0.0)
    await tokens.use(UsedToken(b"3", 300.0, b""), 150.0)
    assert b"100.0" not in key.with_name("cluster.key.used-tokens").read_bytes()


@pytest.mark.parametrize("kind", ["damaged", "fifo", "large"])
async def test_a_file_that_cannot_be_used_refuses_tokens(
    key: Path, blocking: ThreadBlocking, kind: str
) -> None:
    path = key.with_name("cluster.key.used-tokens")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(b"[[" if kind == "damaged" else b" " * (5 << 20))
    with pytest.raises(AccessDenied, match="cannot be recorded"):
        await UsedTokens(key, blocking).use(FIRST, 0.0)


async def test_beside_a_key_that_is_mounted_read_only_they_are_in_memory(
    key: Path, blocking: ThreadBlocking, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    tokens = UsedTokens(key, blocking)
    assert "forgotten at a restart" in caplog.text
    await tokens.use(FIRST, 0.0)
    with pytest.raises(AccessDenied, match="was used before"):
        await tokens.use(UsedToken(b"1", 100.0, b"another key"), 1.0)
    assert list(key.parent.iterdir()) == []
