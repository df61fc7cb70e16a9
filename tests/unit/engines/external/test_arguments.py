"""What is wrong with an engine's own arguments, and what to do about it."""

from __future__ import annotations

import pytest

from kvolt.core.errors import ConfigError
from kvolt.engines.external.requirements import check_names, check_reserved, kv_events_error

KNOWN = ("page_size", "mem_fraction_static")
KEY = "args.engine_args"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("mem-fraction-static", "did you mean 'mem_fraction_static'?"), ("zzz", "see --help")],
)
def test_unknown_name_is_refused_with_the_closest_one(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"SGLang has no argument {name!r}") as caught:
        check_names("SGLang", {"page_size": 1, name: 2}, KNOWN, KEY, "see --help")
    assert caught.value.fields == {"key": f"{KEY}.{name}", "remedy": remedy}


def test_names_that_are_known_pass() -> None:
    check_names("SGLang", KNOWN, KNOWN, KEY, "see --help")


def test_reserved_arguments_are_refused() -> None:
    remedies = {"model": "name it as `model`"}
    check_reserved({"page_size": 1}, remedies, KEY)
    with pytest.raises(ConfigError, match="engine_args must not contain model") as caught:
        check_reserved({"model": "/elsewhere"}, remedies, KEY)
    assert caught.value.fields == {"key": f"{KEY}.model", "remedy": "name it as `model`"}


def test_settings_without_kv_events_are_refused_with_the_remedy() -> None:
    error = kv_events_error("no events", f"{KEY}.publisher")
    assert error.fields["key"] == f"{KEY}.publisher"
    assert "kv_events=false" in str(error.fields["remedy"])
