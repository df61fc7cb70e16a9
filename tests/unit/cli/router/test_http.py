"""The HTTP service of `kvolt router`: with the engines' own events, and its figures among the process's."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from kvolt.cli.process import running
from kvolt.cli.router.http import router_http
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.settings import AdminSettings, DiscoverySettings, EventsSettings, Settings
from kvolt.runtime.security.identity import ProcessRole

SETTINGS = Settings(
    discovery=DiscoverySettings(kind="mem"),
    events=EventsSettings(kind="mem"),
    admin=AdminSettings(enabled=False),
)


async def test_events_of_engines_decide_and_what_is_reserved_is_counted() -> None:
    async with running(SETTINGS, "router", ProcessRole.ROUTER) as process:
        service = router_http(process, "127.0.0.1", "classic")
        address = await service.start("127.0.0.1:0")
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            for worker in ("a", "b", "c"):
                await client.post("/v1/workers", json={"worker": worker, "block_size": 4})
            tokens = list(range(1, 9))
            vllm = {
                "type": "BlockStored",
                "block_hashes": [11],
                "parent_block_hash": None,
                "token_ids": tokens[:4],
                "block_size": 4,
            }
            sglang = ["BlockStored", [21, 22], None, tokens, 4, None]
            for worker, engine, event in (("b", "vllm", vllm), ("c", "sglang", sglang)):
                answer = await client.post(
                    f"/v1/workers/{worker}/engine_events",
                    params={"format": engine},
                    content=msgspec.msgpack.encode([1.0, [event], 0]),
                )
                assert answer.json()["applied"] == 1, answer.text
            rows = (await client.post("/v1/explain", json={"token_ids": [*tokens, 9]})).json()["candidates"]
            assert {row["instance"]: row["overlap_blocks"] for row in rows} == {"a": 0, "b": 1, "c": 2}
            routed = (await client.post("/v1/route", json={"token_ids": [*tokens, 9]})).json()
            assert routed["worker"] == "c"
            metrics = (await client.get("/metrics")).text
        assert 'kvolt_router_http_workers{model="default"} 3.0' in metrics
        assert 'kvolt_router_http_reservations{model="default"} 1.0' in metrics
        assert 'kvolt_router_http_expired_total{model="default"} 0.0' in metrics
        assert 'kvolt_router_http_index_bytes{model="default"}' in metrics


async def test_a_policy_that_there_is_not_is_told_before_anything_runs() -> None:
    async with running(SETTINGS, "router", ProcessRole.ROUTER) as process:
        with pytest.raises(ConfigError, match="unknown policy: 'round-robin'"):
            router_http(process, "127.0.0.1", "round-robin")
