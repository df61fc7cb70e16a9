"""Adapters by name, as every engine of others has them."""

from __future__ import annotations

import pytest

from kvolt.core.errors import InvalidRequest, NotFound
from kvolt.engines.foreign.loras import LoadedLoras


def test_they_are_found_by_name_until_they_are_taken() -> None:
    loaded = LoadedLoras[str]()
    loaded.add("b", "/b")
    loaded.add("a", "/a")
    assert loaded.names == ("b", "a"), "the order of loading"
    assert (loaded.find("a"), loaded.get("a"), loaded.get("c")) == ("/a", "/a", None)
    assert loaded.take("a") == "/a"
    assert loaded.names == ("b",)
    with pytest.raises(NotFound):
        loaded.take("a")


@pytest.mark.parametrize("none", [None, ""])
def test_a_request_need_not_name_one(none: str | None) -> None:
    assert LoadedLoras[str]().find(none) is None


def test_a_request_that_names_another_hears_which_there_are() -> None:
    loaded = LoadedLoras[str]()
    with pytest.raises(InvalidRequest, match="there are: none"):
        loaded.find("c")
    loaded.add("a", "/a")
    loaded.add("b", "/b")
    with pytest.raises(InvalidRequest, match="there are: a, b"):
        loaded.find("c")
