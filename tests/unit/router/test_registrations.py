"""Registrations: decoded once per change, None for undecodable metadata."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from tests.unit.router.selection.test_roster import info

from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.ids import InstanceId
from kvolt.router.registrations import Registrations

ENDPOINT = EndpointAddress("n", "c", "e")


class Client:
    """As much of an EndpointClient as is looked at."""

    def __init__(self, **infos: bytes) -> None:
        self.infos = infos
        self.listeners: list[Any] = []
        self.num_asked = 0

    def on_change(self, listener: Any) -> None:
        self.listeners.append(listener)

    def instances(self) -> list[Instance]:
        self.num_asked += 1
        return [
            Instance(id=InstanceId(name), endpoint=ENDPOINT, address="x", info=told)
            for name, told in self.infos.items()
        ]

    def candidates(self) -> list[Instance]:
        return []


def test_read_once_until_they_change(caplog: pytest.LogCaptureFixture) -> None:
    good = msgspec.msgpack.encode(info(taints=("gpu", "eu")))
    client = Client(a=good, b=b"nonsense")
    registered = Registrations(client)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert registered.infos()[InstanceId("b")] is None
    assert client.num_asked == len(caplog.records) == 1
    assert registered.has_taints(InstanceId("a"), ("eu",))
    assert not registered.has_taints(InstanceId("a"), ("eu", "cpu"))
    assert not registered.has_taints(InstanceId("b"), ("eu",))
    assert not registered.has_taints(InstanceId("c"), ())
    version = registered.version
    client.infos = {"c": good}
    for listener in client.listeners:
        listener()
    assert registered.version != version
    assert list(registered.infos()) == ["c"]


def test_an_adapter_is_found_without_a_search_of_all_workers() -> None:
    number = 200
    told = msgspec.msgpack.encode(info(loras=tuple(f"lora-{index}" for index in range(number))))
    registered = Registrations(Client(**{f"w{index:03}": told for index in range(number)}))  # type: ignore[arg-type]
    assert len(registered.registered_with("lora-0")) == number
    comparisons = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return str.__eq__(self, other)

    assert registered.registered_with(Name("unknown")) == []
    assert len(registered.registered_with(Name(f"lora-{number - 1}"))) == number
    assert comparisons < number
