"""Requests that say who is to compute their prompt and who is to answer, over real processes."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import httpx
from tests.integration.processes import MODEL, PATIENCE_S, Bench
from tests.integration.test_prefill_decode import FLOWS, PROMPTS, start

NAMES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}


async def ids_by_name(bench: Bench) -> dict[str, str]:
    """The instance of each worker that takes requests."""
    views = await bench.look()
    return {
        name: served.instance
        for name in NAMES
        for served in views[name].status.endpoints  # type: ignore[union-attr]
        if served.endpoint.endswith(".generate")
    }


async def test_a_request_may_name_its_workers(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        _, url = await start(bench, FLOWS["prefill-first"], *NAMES.items())
        ids, numbers = await ids_by_name(bench), count()
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

            async def asked(headers: dict[str, str] | None = None, **nvext: Any) -> httpx.Response:
                # Another one each time, so that nobody has it.
                body = {"model": MODEL, "prompt": f"{next(numbers)} {PROMPTS[0]}", "max_tokens": 4}
                said = {"extra_fields": ["worker_id"], **nvext}
                return await client.post("/v1/completions", json={**body, "nvext": said}, headers=headers)

            async def workers(headers: dict[str, str] | None = None, **nvext: Any) -> tuple[str | None, str]:
                told = (await asked(headers, **nvext)).json()["nvext"]["worker_id"]
                return told.get("prefill_worker_id"), told["decode_worker_id"]

            for name in ("p0", "p1", "p0"):
                assert (await workers(prefill_worker_id=ids[name]))[0] == ids[name]
            both = {"prefill_worker_id": ids["p1"], "decode_worker_id": ids["d0"]}
            assert await workers(**both) == (ids["p1"], ids["d0"])
            header = {"x-dynamo-prefill-instance-id": ids["p1"]}
            assert (await workers(header))[0] == ids["p1"]
            refused = await asked(prefill_worker_id="nobody")
            assert refused.status_code == 503
            assert "pinned prefill worker nobody" in refused.json()["error"]["message"]
            seen = [await workers(router={"allowed_worker_ids": [ids["d1"]]}) for _ in range(4)]
            assert {decode for _, decode in seen} == {ids["d1"]}
            assert {prefill for prefill, _ in seen} <= {ids["p0"], ids["p1"]}
            seen = [await workers(router={"allowed_worker_ids": [ids["p1"]]}) for _ in range(4)]
            assert {prefill for prefill, _ in seen} == {ids["p1"]}
