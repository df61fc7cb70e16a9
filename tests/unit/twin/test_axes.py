"""Axes of a sweep: any setting by its name, every combination once, and clear words for what cannot be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvolt.core.errors import ConfigError
from kvolt.core.latency import LatencyModel
from kvolt.engines.sim.engine import SimArguments
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.scheduler.step_plan import Scheduling
from kvolt.twin.axes import PointSetup, axis_names, check_axes, num_points, parse_axis, points_of, setup_of
from kvolt.twin.cluster import TwinSettings

BASE = PointSetup(settings=TwinSettings(num_workers=3, engine=SimArguments(block_size=32), seed=5))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("workers=1,2,4", [1, 2, 4]),
        ("router=round-robin,least-loaded", ["round-robin", "least-loaded"]),
        ("link_s=1e-4, 0.01", [1e-4, 0.01]),
        ("scheduling=sglang", ["sglang"]),
        (
            'latency={"base_s":0.1},{"base_s":0.2,"batch_s":1}',
            [{"base_s": 0.1}, {"base_s": 0.2, "batch_s": 1}],
        ),
        ("preset=a/b.json,x", ["a/b.json", "x"]),
        ("answer_text=null,word", [None, "word"]),
    ],
)
def test_axes_as_they_are_typed(text: str, values: list[Any]) -> None:
    assert parse_axis(text) == (text.partition("=")[0], values)


@pytest.mark.parametrize("text", ["workers", "=1,2"])
def test_what_is_no_axis(text: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME=V1,V2"):
        parse_axis(text)


def test_the_grid_has_every_combination_once() -> None:
    axes = {"workers": [1, 2], "block_size": [16, 32, 64]}
    points = points_of(axes)
    assert len(points) == num_points(axes) == 6
    assert points[:2] == [{"workers": 1, "block_size": 16}, {"workers": 1, "block_size": 32}]
    assert len({tuple(point.values()) for point in points}) == 6


def test_points_drawn_are_of_the_grid_and_always_the_same() -> None:
    axes = {"workers": list(range(1, 101)), "block_size": [16, 32, 64], "seed": list(range(1000))}
    some = points_of(axes, 50, seed=1)
    assert len(some) == 50
    assert some == points_of(axes, 50, seed=1) != points_of(axes, 50, seed=2)
    few = {"workers": [1, 2], "block_size": [16, 32]}
    drawn = points_of(few, 3)
    assert [point for point in points_of(few) if point in drawn] == drawn
    assert points_of(few, 9) == points_of(few)


def test_a_point_changes_what_it_names_and_nothing_else() -> None:
    point = {
        "workers": 7,
        "gpus": 2,
        "router": "least-loaded",
        "kv_blocks": 99,
        "scheduling": "sglang",
        "arrivals": 2,
        "latency": {"base_s": 0.5},
        "router.temperature": 0.5,
    }
    setup = setup_of(BASE, point)
    settings = setup.settings
    assert (settings.num_workers, settings.gpus_per_worker, settings.router) == (7, 2, "least-loaded")
    assert (settings.engine.kv_blocks, settings.engine.scheduling) == (99, Scheduling.SGLANG)
    assert settings.engine.latency == LatencyModel(base_s=0.5)
    assert settings.routing == RouterSettings(temperature=0.5)
    assert (settings.engine.block_size, settings.seed, setup.arrivals) == (32, 5, 2.0)
    assert setup_of(BASE, {}) == BASE


def test_every_name_can_be_given_its_own_value() -> None:
    """Whatever becomes a setting becomes an axis; those of the cluster by the names of the flags."""
    names = axis_names()
    assert {"workers", "gpus", "router", "seed", "arrivals", "block_size", "kv_blocks", "preset"} <= set(
        names
    )
    assert len(names) == len(set(names))
    of_engine = {field.name for field in msgspec.structs.fields(SimArguments)}
    for name in of_engine - {"eos_token", "bos_token"}:
        value = msgspec.to_builtins(getattr(BASE.settings.engine, name))
        assert setup_of(BASE, {name: value}) == BASE


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({}, "at least one axis"),
        ({"worker": [1]}, "did you mean 'workers'"),
        ({"zzz": [1]}, "known: workers"),
        ({"workers": []}, "has no values"),
        ({"workers": [1, ""]}, "has no values"),
        ({"workers": list(range(200)), "seed": list(range(100))}, "20000 points"),
    ],
)
def test_axes_that_cannot_be(axes: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_axes(axes)
    assert words in f"{caught.value.message} {caught.value.fields['remedy']}"


def test_of_very_many_points_some_may_be_drawn() -> None:
    axes = {"workers": list(range(200)), "seed": list(range(100))}
    check_axes(axes, sample=100)
    with pytest.raises(ConfigError):
        check_axes(axes, sample=15_000)


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"workers": 0}, "invalid value workers=0"),
        ({"workers": "many"}, "invalid value workers=many"),
        ({"router": "nobody"}, "known: latency, classic"),
        ({"block_size": 0}, "block_size"),
        ({"preset": "h200"}, "preset"),
        ({"arrivals": 0}, "arrivals=0 is not a factor"),
        ({"arrivals": "fast"}, "arrivals=fast is not a factor"),
        ({"max_num_seqs": 4, "max_batch_tokens": 2}, "max_batch_tokens"),
        ({"latency": {"bas_s": 1}}, "bas_s"),
        ({"router.temperature": -1}, "router.temperature=-1"),
    ],
)
def test_values_that_cannot_be(point: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        setup_of(BASE, point)
