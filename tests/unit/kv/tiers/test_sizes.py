"""Sizes of tiers, as people say them."""

from __future__ import annotations

import pytest

from kvolt.core.errors import ConfigError
from kvolt.kv.tiers.sizes import parse_capacity


@pytest.mark.parametrize(
    ("text", "num_blocks"),
    [("4GiB", 4096), ("1 GB", 953), ("2.5MiB", 2), ("7blocks", 7), ("1 block", 1), ("2x", 200), ("0.5x", 50)],
)
def test_sizes(text: str, num_blocks: int) -> None:
    assert parse_capacity(text, "tiers.host").blocks(2**20, 100) == num_blocks


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "GiB",
        "-1GiB",
        "0GiB",
        "4 parsecs",
        "4Gb",
        "4gb",
        "4gib",
        "4G",
        "2X",
        "0.5blocks",
        "1e400GiB",
        "9" * 400 + "B",
    ],
)
def test_what_is_no_size_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse_capacity(text, "tiers.disk")
    assert "4GiB" in str(told.value.fields["remedy"])
    assert "4GB" in str(told.value.fields["remedy"])
    assert told.value.fields["key"] == "tiers.disk"
