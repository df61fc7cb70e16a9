"""Server that `kvolt chat` and `kvolt bench` use: an explicit address, the running cluster, or an error."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvolt.cli import health
from kvolt.cli.health import api_url
from kvolt.core.errors import Unavailable
from kvolt.runtime.config.loader import LoadedConfig, Override, load
from kvolt.runtime.config.settings import Settings

DEFAULT = "http://127.0.0.1:8000/v1"
NOTHING = argparse.Namespace(url=None, api_key=None)


def loaded(**settings: str) -> LoadedConfig:
    overrides = [
        Override(key.replace("__", "."), text, f"--{key.rpartition('__')[2]}")
        for key, text in settings.items()
    ]
    return load(environ={}, cwd=Path("/"), overrides=overrides)


def url_of(config: LoadedConfig) -> str:
    return api_url(NOTHING, config, {}).text


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    urls: list[str] = []

    async def running_urls(settings: Settings) -> list[str]:
        return urls

    monkeypatch.setattr(health, "running_urls", running_urls)
    return urls


def test_the_default_address_is_used_if_nothing_runs(running: list[str]) -> None:
    assert url_of(loaded()) == DEFAULT


@pytest.mark.parametrize("key", ["namespace", "discovery__join", "discovery__path"])
def test_an_explicit_cluster_without_a_frontend_is_an_error(running: list[str], key: str) -> None:
    config = loaded(**{key: "f24" if key == "namespace" else "127.0.0.1:1"})
    with pytest.raises(Unavailable, match="nothing runs in namespace"):
        url_of(config)
    running.append("http://127.0.0.1:9")
    assert url_of(config) == "http://127.0.0.1:9/v1"


def test_the_environment_chooses_a_cluster_too(running: list[str]) -> None:
    config = load(environ={"KVOLT_NAMESPACE": "other"}, cwd=Path("/"))
    with pytest.raises(Unavailable, match="namespace 'other'"):
        url_of(config)


def test_an_explicit_port_is_used_as_it_is(running: list[str]) -> None:
    assert url_of(loaded(namespace="other", frontend__port="9")) == "http://127.0.0.1:9/v1"
