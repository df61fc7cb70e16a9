"""The direct router: the named worker only."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import Lab, make_request, until

from kvolt.core.errors import InvalidRequest, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Role, RoutingHints
from kvolt.router.port import RouterContext
from kvolt.router.registry import ROUTERS
from kvolt.testing import run_virtual


def test_only_the_named_worker() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}") for number in range(3)]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == 3)
            router = ROUTERS["direct"](RouterContext(client, await lab.runtime("f1"), 16))

            async def where(name: str, dp_rank: int | None = None) -> tuple[str, int | None]:
                routing = RoutingHints(pins={Role.AGGREGATED: InstanceId(name)}, pinned_dp_rank=dp_rank)
                decision = await router.route(replace(make_request(), routing=routing))
                router.mark_first_token(decision, None)
                router.release(decision, None)
                return decision.instance.id, decision.dp_rank

            for instance in client.candidates():
                assert await where(instance.id) == (instance.id, None)
                assert await where(instance.id, 0) == (instance.id, 0)
            with pytest.raises(Unavailable, match="pinned instance nobody"):
                await where("nobody")
            with pytest.raises(InvalidRequest, match="needs a worker") as caught:
                await router.route(make_request())
            assert caught.value.fields["param"] == "nvext.backend_instance_id"
            await router.close()

    run_virtual(scenario)
