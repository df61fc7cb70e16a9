"""`kvolt frontend`: whom its requests go to."""

from __future__ import annotations

from typing import Any

import pytest

from kvolt.cli.frontend import _new_router
from kvolt.router.policies import ROUTERS
from kvolt.runtime.settings import FrontendSettings, Settings


class Part:
    """A process of several."""

    new_router = "decided in common"


@pytest.mark.parametrize(
    ("router", "part", "wanted"),
    [
        ("round-robin", None, ROUTERS["round-robin"]),
        ("least-loaded", None, ROUTERS["least-loaded"]),
        ("latency", None, ROUTERS["latency"]),
        ("round-robin", Part(), Part.new_router),
        ("least-loaded", Part(), ROUTERS["least-loaded"]),  # each process by what it has under way itself
    ],
)
def test_the_router_of_the_settings(router: Any, part: Any, wanted: object) -> None:
    assert _new_router(Settings(frontend=FrontendSettings(router=router)), part) is wanted
