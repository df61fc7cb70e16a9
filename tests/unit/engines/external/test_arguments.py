"""What is wrong with an engine's own arguments, and what to do about it."""

from __future__ import annotations

import pytest

from kvolt.core.errors import ConfigError
from kvolt.engines.external.arguments import blind, check_names, check_not_given

KNOWN = ("page_size", "mem_fraction_static")
KEY = "args.engine_args"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("mem-fraction-static", "did you mean 'mem_fraction_static'?"), ("zzz", "see --help")],
)
def test_a_name_that_is_none_is_told_with_the_nearest_that_is_one(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"SGLang has no argument {name!r}") as caught:
        check_names("SGLang", {"page_size": 1, name: 2}, KNOWN, KEY, "see --help")
    assert caught.value.fields == {"key": f"{KEY}.{name}", "remedy": remedy}


def test_names_that_are_known_pass() -> None:
    check_names("SGLang", KNOWN, KNOWN, KEY, "see --help")


def test_what_kvolt_says_itself_is_nobody_else_s_to_say() -> None:
    remedies = {"model": "name it as `model`"}
    check_not_given({"page_size": 1}, remedies, KEY)
    with pytest.raises(ConfigError, match="engine_args has a model") as caught:
        check_not_given({"model": "/elsewhere"}, remedies, KEY)
    assert caught.value.fields == {"key": f"{KEY}.model", "remedy": "name it as `model`"}


def test_a_blind_router_is_told_of_with_the_way_out() -> None:
    error = blind("no events", f"{KEY}.publisher")
    assert error.fields["key"] == f"{KEY}.publisher"
    assert "kv_events=false" in str(error.fields["remedy"])
