"""Adapters by name, as every engine of others has them."""

from __future__ import annotations

import asyncio

import pytest

from kvolt.core.errors import InvalidRequest, NotFound
from kvolt.core.ids import RequestId
from kvolt.engines.external.loras import LoadedLoras, LoraUsers


def test_they_are_found_by_name_until_they_are_taken() -> None:
    loaded = LoadedLoras[str]()
    loaded.update(b="/b", a="/a")
    assert (loaded.find("a"), loaded.get("a"), loaded.get("c")) == ("/a", "/a", None)
    assert loaded.remove("a") == "/a"
    assert tuple(loaded) == ("b",)
    with pytest.raises(NotFound):
        loaded.remove("a")


@pytest.mark.parametrize("none", [None, ""])
def test_a_request_need_not_name_one(none: str | None) -> None:
    assert LoadedLoras[str]().find(none) is None


def test_a_request_that_names_another_hears_which_there_are() -> None:
    loaded = LoadedLoras[str]()
    with pytest.raises(InvalidRequest, match="loaded: none"):
        loaded.find("c")
    loaded.update(a="/a", b="/b")
    with pytest.raises(InvalidRequest, match="loaded: a, b"):
        loaded.find("c")


async def test_one_is_used_until_its_requests_are_over() -> None:
    running = {RequestId("one"), RequestId("other")}
    users = LoraUsers[int](running.__contains__)
    users.add(RequestId("one"), 1)
    users.add(RequestId("other"), 2)
    assert (users.is_used(1), users.is_used(2), users.is_used(3)) == (True, True, False)
    await users.wait_unused(3)
    gone = asyncio.ensure_future(users.wait_unused(1))
    await asyncio.sleep(0.05)
    assert not gone.done()
    running.discard(RequestId("one"))
    async with asyncio.timeout(5):
        await gone
    assert users.is_used(2)
