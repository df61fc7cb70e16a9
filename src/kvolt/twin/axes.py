"""Axes of a sweep: names with values, the points of their grid, and the cluster of each point. Pure.

An axis is a name of `_OF_CLUSTER`, a router setting (`router.temperature`), or an argument of the sim engine.
"""

from __future__ import annotations

import difflib
import json
import math
import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import msgspec
from msgspec.structs import replace

from kvolt.core.errors import ConfigError
from kvolt.engines.registry import check_arguments
from kvolt.engines.sim.arguments import SimArguments
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.twin.cluster import TwinSettings

Axes = Mapping[str, Sequence[Any]]
Point = dict[str, Any]
"""One value per axis."""

ARRIVALS = "arrivals"
_OF_CLUSTER = {
    "workers": "num_workers",
    "prefill": "num_prefill",
    "prefill_choice": "prefill_choice",
    "prefill_min_tokens": "prefill_min_tokens",
    "target_ttft_s": "target_ttft_s",
    "target_itl_s": "target_itl_s",
    "kv_link_bytes_per_s": "kv_link_bytes_per_s",
    "num_racks": "num_racks",
    "rack_link_bytes_per_s": "rack_link_bytes_per_s",
    "gpus": "gpus_per_worker",
    "router": "router",
    "link_s": "link_s",
    "seed": "seed",
}
"""Field of TwinSettings by axis."""
_OF_ROUTER = "router."
"""Prefix of axes that are router settings."""

MAX_POINTS = 10_000
_EXAMPLE = "for example --axis workers=2,4,8 --axis kv_blocks=4096,16384"


class PointSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster settings and arrival speed-up of a point."""

    settings: TwinSettings
    arrivals: float = 1.0


def axis_names() -> list[str]:
    own = set(_OF_CLUSTER.values())
    engine = [field.name for field in msgspec.structs.fields(SimArguments) if field.name not in own]
    router = [_OF_ROUTER + field.name for field in msgspec.structs.fields(RouterSettings)]
    return [*_OF_CLUSTER, ARRIVALS, *engine, *router]


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Parse `NAME=V1,V2,...`; each value is JSON or a string."""
    name, equals, values = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f"--axis {text!r}: expected NAME=V1,V2,...", key="axis", remedy=_EXAMPLE)
    try:
        return name, list(json.loads(f"[{values}]"))
    except ValueError:
        return name, [_value(word.strip()) for word in values.split(",")]


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def check_axes(axes: Axes, sample: int | None = None) -> None:
    """Raise ConfigError for an unknown axis, an axis without values, or too many points without `sample`."""
    if not axes:
        raise ConfigError("a sweep needs at least one axis", key="axis", remedy=_EXAMPLE)
    known = axis_names()
    for name, values in axes.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown axis {name!r}", key="axis", remedy=hint)
        if not values or "" in values:
            raise ConfigError(f"axis {name!r} has no values", key="axis", remedy=_EXAMPLE)
    if min(num_points(axes), sample or MAX_POINTS + 1) > MAX_POINTS:
        raise ConfigError(
            f"the axes have {num_points(axes)} points, the maximum is {MAX_POINTS}",
            key="axis",
            remedy="remove values, or use --sample N",
        )


def num_points(axes: Axes) -> int:
    return math.prod(len(values) for values in axes.values())


def points_of(axes: Axes, sample: int | None = None, seed: int = 0) -> list[Point]:
    """All combinations, the last axis varying fastest, or a random sample of them in the same order."""
    total = num_points(axes)
    if sample is None or sample >= total:
        return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    places = sorted(random.Random(f"{seed}/axes").sample(range(total), sample))
    return [_point_at(axes, place) for place in places]


def _point_at(axes: Axes, place: int) -> Point:
    """Point at an index of the grid."""
    point: Point = {}
    left = place
    for name in reversed(list(axes)):
        left, at = divmod(left, len(axes[name]))
        point[name] = axes[name][at]
    return {name: point[name] for name in axes}


def setup_of(base: PointSetup, point: Point) -> PointSetup:
    """The base setup with the point's values. Raises ConfigError with the axis of an invalid value."""
    settings = msgspec.to_builtins(base.settings)
    engine = settings.pop("engine")
    arrivals = base.arrivals
    for name, value in point.items():
        if name == ARRIVALS:
            arrivals *= _factor(value)
        elif name in _OF_CLUSTER:
            settings[_OF_CLUSTER[name]] = value
        elif name.startswith(_OF_ROUTER):
            settings["routing"][name.removeprefix(_OF_ROUTER)] = value
        else:
            engine[name] = value
    arguments = check_arguments("sim", {name: value for name, value in engine.items() if value is not None})
    assert isinstance(arguments, SimArguments)
    try:
        made = msgspec.convert(settings, TwinSettings)
    except msgspec.ValidationError as error:
        assignment = ", ".join(
            f"{name}={value}"
            for name, value in point.items()
            if name in _OF_CLUSTER or name.startswith(_OF_ROUTER)
        )
        raise ConfigError(
            f"invalid value {assignment}: {error}", key="axis", remedy="correct the value"
        ) from error
    return PointSetup(settings=replace(made, engine=arguments), arrivals=arrivals)


def _factor(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(
            f"arrivals={value} is not a factor", key="axis", remedy="use numbers above 0: 2 is twice as fast"
        )
    return float(value)
