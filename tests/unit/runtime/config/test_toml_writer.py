"""Whatever the settings are, what is written reads back as the same."""

from __future__ import annotations

import tomllib

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvolt.runtime.config.settings import FrontendSettings, Settings, WorkerSettings
from kvolt.runtime.config.toml_writer import to_toml

plain = st.recursive(
    st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_-]*\Z")
workers = st.builds(
    WorkerSettings,
    name=names,
    role=st.sampled_from(["aggregated", "prefill", "decode", "encode"]),
    model=st.text(min_size=1),
    count=st.integers(0, 4096),
    devices=st.lists(st.text(), max_size=3),
    args=st.dictionaries(st.text(), plain, max_size=3),
)
frontends = st.builds(
    FrontendSettings,
    host=st.text(min_size=1),
    port=st.integers(0, 65535),
    request_timeout_s=st.floats(min_value=0, max_value=604800, exclude_min=True),
)


@given(st.builds(Settings, namespace=names, frontend=frontends, workers=st.lists(workers, max_size=3)))
def test_toml_round_trip(settings: Settings) -> None:
    assert msgspec.convert(tomllib.loads(to_toml(settings)), Settings) == settings


def test_toml_leaves_none_out_and_keeps_an_empty_list_of_workers() -> None:
    text = to_toml(Settings(workers=[]))
    assert "advertise" not in text
    assert tomllib.loads(text)["workers"] == []
