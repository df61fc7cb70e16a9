"""`kvolt frontend`: whom its requests go to."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.engines.lab import NAMESPACE, Lab

from kvolt.cli.frontend.command import _check_processor, _new_router
from kvolt.core.errors import ConfigError
from kvolt.router.port import Router, RouterContext
from kvolt.router.queue.queue_router import deciding_router
from kvolt.router.registry import ROUTERS
from kvolt.router.service.client import RemoteRouter
from kvolt.router.service.link import RouterLink
from kvolt.runtime.config.settings import FrontendSettings, Settings
from kvolt.testing import run_virtual


def settings_of(router: Any) -> Settings:
    return Settings(frontend=FrontendSettings(router=router))


@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "latency"])
def test_one_process_decides_for_itself(router: str) -> None:
    assert _new_router(settings_of(router), None) is ROUTERS[router]


@pytest.mark.parametrize("router", list(ROUTERS))
def test_several_ask_their_router_and_can_decide_alone_without_an_index_each(router: str) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            worker = await lab.worker("w0")
            client = await lab.client(worker)
            runtime = await lab.runtime("edge")
            link = await RouterLink.to(runtime, NAMESPACE)
            await link.wait_synced(1.0)
            context = RouterContext(client, runtime, 16)
            made = _new_router(settings_of(router), link)(context)
            assert isinstance(made, RemoteRouter)
            alone = ROUTERS[router](context)
            assert type(made._local) is type(alone)
            assert not has_index(made._local)
            assert has_index(alone) == (router in ("latency", "classic"))
            await made.close()
            await alone.close()
            await link.close()

    run_virtual(scenario)


def has_index(router: Router) -> bool:
    """Whether it follows the workers' KV events."""
    ingest: Any = getattr(deciding_router(router), "ingest", None)
    return ingest is not None and ingest._stream is not None


@pytest.mark.parametrize(
    "wrong", [{"processor": "nobody"}, {"tool_parser": "nobody"}, {"reasoning_parser": "nobody"}]
)
def test_a_processor_or_parser_that_nobody_knows_is_told_at_the_start(wrong: dict[str, Any]) -> None:
    _check_processor(FrontendSettings())
    with pytest.raises(ConfigError, match="nobody"):
        _check_processor(FrontendSettings(**wrong))
