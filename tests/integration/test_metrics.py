"""What a real cluster exports is documented, and has Dynamo's names on request."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from tests.integration.processes import PATIENCE_S, Bench, until_ready

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


async def exported(client: httpx.AsyncClient, address: str) -> set[str]:
    text = (await client.get(f"http://{address}/metrics")).text
    return set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))


async def test_every_metric_is_on_the_page_and_aliases_are_served(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        plain = bench.worker("plain")
        bench.worker("aliased", "--set", "metrics.aliases=dynamo")
        _, url = await bench.frontend("--set", "metrics.aliases=dynamo")
        await until_ready(url)
        router = bench.start("router", "--http-port", "0", "--name", "router", "--set", "log.format=human")
        over_http = (await router.says(r"listening on http://(\S+)"))[1]
        views = await bench.until_seen("frontend", "plain", "aliased", "router")
        body = {"model": "sim-tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            assert (await client.post(f"{url}/v1/chat/completions", json=body)).status_code == 200
            worker = {"worker": "w", "block_size": 16}
            assert (await client.post(f"http://{over_http}/v1/workers", json=worker)).is_success
            names = {name: await exported(client, str(view.admin)) for name, view in views.items()}
            served = await exported(client, url.removeprefix("http://"))
        assert "kvolt_router_http_workers" in names["router"]
        ours = {name for each in (*names.values(), served) for name in each if name.startswith("kvolt_")}
        undocumented = {name for name in ours if f"`{name}`" not in PAGE and not name.endswith("_created")}
        assert not undocumented, "run `python tools/metrics_page.py`"
        assert plain.exit_code is None
        assert not any(name.startswith("dynamo_") for name in names["plain"])
        assert {"dynamo_component_requests_total", "dynamo_worker_prefill_latency_ms"} <= names["aliased"]
        assert {
            "dynamo_frontend_requests_total",
            "dynamo_frontend_inflight_requests",
            "dynamo_router_kv_cache_hit_ratio",
            "dynamo_component_router_requests_total",
        } <= served
