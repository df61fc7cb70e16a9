"""Where fetched files are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvolt.runtime.host.environment import cache_directory


def test_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_directory({}) == Path("/home/me/.cache/kvolt")
    assert cache_directory({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/kvolt")
    assert cache_directory({"XDG_CACHE_HOME": "relative"}) == Path("/home/me/.cache/kvolt")
    assert cache_directory({"XDG_CACHE_HOME": "/cache", "KVOLT_HOME": "/mine"}) == Path("/mine")
    assert cache_directory({"KVOLT_HOME": "~/mine"}) == Path("/home/me/mine")
    monkeypatch.chdir(tmp_path)
    assert cache_directory({"KVOLT_HOME": "here"}) == tmp_path / "here"


def test_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOLT_HOME", "/mine")
    assert cache_directory() == Path("/mine")
