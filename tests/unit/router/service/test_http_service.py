"""The router over HTTP: registration, events, decisions, reservations, errors that name the field."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from kvolt.core.kv_events import Cleared, KvChange, Stored, pack_hashes, unpack_hashes
from kvolt.router import hashes_of
from kvolt.router.policy.policy import latency
from kvolt.router.service import http_service
from kvolt.router.service.http_service import RouterHttp
from kvolt.router.service.standalone import Standalone, StandaloneOptions
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.network import SocketNetwork

BLOCK = 4
TOKENS = list(range(1, 4 * BLOCK + 2))
LATENCY = {"base_s": 0.01, "prefill_token_s": 0.001}


class Lines:
    """An engine's events: each line is a hash."""

    def __init__(self, block_size: int) -> None:
        assert block_size == BLOCK

    def __call__(self, payload: bytes) -> tuple[list[KvChange], int | None]:
        if payload == b"bad":
            raise msgspec.DecodeError("no lines")
        if payload == b"clear":
            return [Cleared()], 1
        return [Stored.from_hashes([int(line) for line in payload.split()])], None


class Scene:
    def __init__(self) -> None:
        self.time_s = 0.0
        self.service = RouterHttp(
            SocketNetwork(),
            SystemClock(),
            self._new,
            {"lines": Lines},
            lambda: (b"some_metric 1\n", "text/plain"),
        )

    def _new(self, block_size: int) -> Standalone:
        options = StandaloneOptions(max_workers=8)
        return Standalone(block_size, latency(), lambda: self.time_s, random.Random(1), options=options)


@pytest.fixture
async def scene() -> Scene:
    return Scene()


@pytest.fixture
async def client(scene: Scene) -> AsyncIterator[httpx.AsyncClient]:
    address = await scene.service.start("127.0.0.1:0")
    async with httpx.AsyncClient(base_url=f"http://{address}") as client:
        yield client
    await scene.service.close()


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


async def refused(client: httpx.AsyncClient, status: int, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


async def register(client: httpx.AsyncClient, worker: str, **more: Any) -> Any:
    return await post(client, "/v1/workers", worker=worker, block_size=BLOCK, latency=LATENCY, **more)


async def requests(client: httpx.AsyncClient, model: str = "default") -> dict[str, float]:
    loads = (await client.get("/v1/loads")).json()[model]["worker_ranks"]
    return {load["instance"]: load["requests"] for load in loads}


async def test_from_registering_to_freeing(client: httpx.AsyncClient) -> None:
    for worker in ("a", "b"):
        assert (await register(client, worker))["is_new"]
    assert not (await register(client, "a"))["is_new"]

    assert await post(
        client,
        "/v1/workers/b/kv_events",
        events=[{"change": {"type": "stored", "token_ids": TOKENS}, "event_id": 0}],
    ) == {"applied": 1, "unknown_ranks": 0}

    seen = await post(client, "/v1/query", token_ids=TOKENS)
    assert (seen["worker"], seen["overlap_blocks"], seen["cached_tokens"]) == ("b", 4, 16)
    assert seen["predicted_ttft_ms"] == pytest.approx(11.0)
    assert seen["reservation"] is None
    assert await requests(client) == {"a": 0, "b": 0}

    hashes = hashes_of(TOKENS, BLOCK)
    by_hash = await post(client, "/v1/route", hashes=hashes, num_tokens=len(TOKENS))
    assert (by_hash["worker"], by_hash["overlap_blocks"]) == ("b", 4)
    assert await requests(client) == {"a": 0, "b": 1}
    path = f"/v1/reservations/{by_hash['reservation']}"
    await post(client, f"{path}/first_token", cached_tokens=16)
    loads = (await client.get("/v1/loads", params={"model": "default"})).json()["default"]
    assert [place["decoding"] for place in loads["worker_ranks"]] == [0, 1]
    assert loads["reservations"] == 1
    await post(client, f"{path}/release", completion_tokens=7, prompt_tokens=17)
    assert await requests(client) == {"a": 0, "b": 0}
    assert (await client.delete(path)).status_code == 404

    at_a = await post(client, "/v1/reserve", worker="a", token_ids=TOKENS)
    assert at_a["worker"] == "a"
    assert (await client.delete(f"/v1/reservations/{at_a['reservation']}")).status_code == 200

    rows = (await post(client, "/v1/explain", token_ids=TOKENS))["candidates"]
    assert [(row["instance"], row["is_chosen"]) for row in rows] == [("b", True), ("a", False)]
    assert rows[1]["prefill_s"] > rows[0]["prefill_s"]

    assert (await client.delete("/v1/workers/b")).status_code == 200
    assert (await post(client, "/v1/query", token_ids=TOKENS))["overlap_blocks"] == 0
    assert (await client.delete("/v1/workers/a")).status_code == 200
    assert (await client.get("/health")).json() == {"status": "ok", "models": 0, "workers": 0}


async def test_reservations_last_as_long_as_was_chosen(client: httpx.AsyncClient, scene: Scene) -> None:
    await register(client, "a")
    short = await post(client, "/v1/route", token_ids=TOKENS, ttl_s=5)
    assert short["ttl_s"] == 5
    lasting = await post(client, "/v1/route", token_ids=TOKENS)
    scene.time_s = 4.0
    await post(client, f"/v1/reservations/{short['reservation']}/renew", ttl_s=5)
    scene.time_s = 8.0
    assert await requests(client) == {"a": 2}
    scene.time_s = 9.5
    assert await requests(client) == {"a": 1}
    over = await refused(client, 404, f"/v1/reservations/{short['reservation']}/renew", ttl_s=5)
    assert "released, expired" in over["message"]
    scene.time_s = 1e6
    assert await requests(client) == {"a": 1}
    assert (await client.delete(f"/v1/reservations/{lasting['reservation']}")).status_code == 200


async def test_events_in_all_their_forms(client: httpx.AsyncClient) -> None:
    await register(client, "a", dp_ranks=[0, 1])
    encoded = base64.b64encode(pack_hashes([1, 2, 2**64 - 1])).decode()
    changes = [
        {"change": {"type": "stored", "hashes": encoded}},
        {"change": {"type": "removed", "hashes": [2]}},
        {"change": {"type": "stored", "hashes": [5], "tier": "host"}},
        {"change": {"type": "stored", "hashes": [6]}, "dp_rank": 1},
        {"change": {"type": "cleared"}, "dp_rank": 1},
        {"change": {"type": "stored", "hashes": [7]}, "dp_rank": 9},
    ]
    assert await post(client, "/v1/workers/a/kv_events", events=changes) == {
        "applied": 5,
        "unknown_ranks": 1,
    }
    dump = (await client.get("/v1/dump", params={"worker": "a", "hashes": "true"})).json()
    held = {
        (each["dp_rank"], each["tier"]): unpack_hashes(base64.b64decode(each["hashes"]))
        for each in dump["blocks"]
    }
    assert held == {(0, "device"): (1, 2**64 - 1), (0, "host"): (5,)}
    short = (await client.get("/v1/dump")).json()["default"]
    assert [(each["num_blocks"], each.get("tier")) for each in short["workers"]["a"]] == [
        (2, None),
        (1, "host"),
    ]
    assert short["index_bytes"] > 0
    blocks = [{"hashes": [3]}, {"hashes": [4]}, {"hashes": [5], "dp_rank": 1}]
    answer = await client.put("/v1/workers/a/blocks", json={"blocks": blocks, "epoch": 2, "next_id": 8})
    assert answer.json() == {"blocks": 3}
    event = {"change": {"type": "stored", "hashes": [9]}, "epoch": 2, "event_id": 9}
    missed = await client.post("/v1/workers/a/kv_events", json={"events": [event]})
    assert missed.status_code == 409
    assert missed.json()["expected"] == {"epoch": 2, "event_id": 8}
    assert "expected event 8" in missed.json()["error"]["message"]


async def test_an_engines_own_events(client: httpx.AsyncClient) -> None:
    await register(client, "a", dp_ranks=[0, 1])
    for rank, payload in (("0", b"1 2"), ("1", b"3")):
        answer = await client.post(
            f"/v1/workers/a/engine_events?format=lines&dp_rank={rank}", content=payload
        )
        assert answer.json()["applied"] == 1
    cleared = await client.post("/v1/workers/a/engine_events?format=lines", content=b"clear")
    assert cleared.json()["applied"] == 1
    (listed,) = (await client.get("/v1/workers")).json()["workers"]
    assert (listed["worker"], listed["blocks"], listed["is_approximate"]) == ("a", 2, False)
    for query, content, param in (
        ("format=other", b"1", "format"),
        ("format=lines&dp_rank=7", b"1", "dp_rank"),
        ("format=lines&dp_rank=x", b"1", "dp_rank"),
        ("format=lines", b"bad", "body"),
    ):
        answer = await client.post(f"/v1/workers/a/engine_events?{query}", content=content)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    await client.delete("/v1/workers/a")


async def test_load_reports_count(client: httpx.AsyncClient) -> None:
    for worker in ("a", "b"):
        await register(client, worker, max_num_seqs=4)
    await post(client, "/v1/workers/a/load", running=3, waiting=2, kv_used_blocks=50)
    assert await requests(client) == {"a": 5, "b": 0}
    assert (await post(client, "/v1/query", token_ids=TOKENS))["worker"] == "b"
    await post(client, "/v1/workers/b/load", running=9)
    for worker in ("a", "b"):
        await post(client, "/v1/reserve", worker=worker, token_ids=TOKENS)
    assert (await post(client, "/v1/query", token_ids=TOKENS))["is_saturated"]
    full = await refused(client, 429, "/v1/route", token_ids=TOKENS, refuse_saturated=True)
    assert "are saturated" in full["message"]


async def test_the_answer_limit_counts(client: httpx.AsyncClient) -> None:
    await register(client, "a", kv_total_blocks=1000)
    held = []
    for more in ({}, {"max_tokens": 8}, {"expected_output_tokens": 400}):
        routed = await post(client, "/v1/route", token_ids=TOKENS, **more)
        (place,) = (await client.get("/v1/loads")).json()["default"]["worker_ranks"]
        held.append(place["blocks"])
        await post(client, f"/v1/reservations/{routed['reservation']}/release")
    unknown, short, long = held
    assert short == pytest.approx(5 + 8 / BLOCK)
    assert long == pytest.approx(5 + 400 / BLOCK)
    assert short < unknown < long


async def test_models_are_separate_and_workers_may_have_no_events(client: httpx.AsyncClient) -> None:
    await register(client, "a", model="x", kv_events=False, loras=["sql"], taints=["spot"])
    await post(client, "/v1/workers", worker="a", block_size=8, model="y")
    listed = (await client.get("/v1/workers")).json()["workers"]
    assert [(each["model"], each["block_size"], each["is_approximate"]) for each in listed] == [
        ("x", BLOCK, True),
        ("y", 8, False),
    ]
    sent = await post(client, "/v1/route", model="x", token_ids=TOKENS, lora="sql", required_taints=["spot"])
    await post(client, f"/v1/reservations/{sent['reservation']}/first_token")
    await post(client, f"/v1/reservations/{sent['reservation']}/release")
    assert (await post(client, "/v1/query", model="x", token_ids=TOKENS, lora="sql"))["overlap_blocks"] == 4
    assert (await post(client, "/v1/query", model="x", token_ids=TOKENS))["overlap_blocks"] == 0
    answer = await client.post("/v1/workers/a/kv_events?model=x", json={"events": []})
    assert answer.json()["error"]["param"] == "kv_events"
    assert (await client.get("/metrics")).text == "some_metric 1\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/workers", {"worker": "", "block_size": 4}, "worker"),
        ("/v1/workers", {"worker": "c"}, "block_size"),
        ("/v1/workers", {"worker": "c", "block_size": 4, "colour": 1}, "colour"),
        ("/v1/workers", {"worker": "c", "block_size": 4, "dp_ranks": []}, "dp_ranks"),
        ("/v1/workers", {"worker": "c", "block_size": 4, "dp_ranks": [-1]}, "dp_ranks[0]"),
        ("/v1/workers", {"worker": "c", "block_size": 5}, "block_size"),
        ("/v1/workers", {"worker": "c", "block_size": 4, "hash_scheme": "md5"}, "hash_scheme"),
        ("/v1/query", {}, "token_ids"),
        ("/v1/query", {"token_ids": [1], "hashes": [1]}, "token_ids"),
        ("/v1/query", {"token_ids": []}, "token_ids"),
        ("/v1/query", {"token_ids": [1, 2, 3, -1]}, "token_ids"),
        ("/v1/query", {"token_ids": [1, 2, "x"]}, "token_ids[2]"),
        ("/v1/query", {"hashes": [-1]}, "hashes"),
        ("/v1/query", {"hashes": [2**64]}, "hashes"),
        ("/v1/query", {"hashes": "no base64!"}, "hashes"),
        ("/v1/query", {"hashes": "AAAA"}, "hashes"),
        ("/v1/query", {"hashes": []}, "num_tokens"),
        ("/v1/query", {"hashes": [1, 2], "num_tokens": 7}, "num_tokens"),
        ("/v1/route", {"token_ids": [1], "ttl_s": 0}, "ttl_s"),
        ("/v1/reserve", {"token_ids": [1]}, "worker"),
        ("/v1/workers/a/kv_events", {"events": [{"change": {"type": "stored"}}]}, "hashes"),
        ("/v1/workers/a/kv_events", {"events": [{"change": {"type": "lost"}}]}, "events[0].change.type"),
        ("/v1/workers/a/load", {"running": -1}, "running"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, path: str, body: Any, param: str) -> None:
    await register(client, "a")
    error = await refused(client, 400, path, **body)
    assert error["param"] == param, error
    assert error["message"]


async def test_what_is_not_there_is_a_404_and_junk_a_400(client: httpx.AsyncClient) -> None:
    assert "register a worker" in (await refused(client, 404, "/v1/query", token_ids=[1]))["message"]
    await register(client, "a")
    for method, path in (
        ("POST", "/v1/workers/nobody/kv_events"),
        ("DELETE", "/v1/workers/nobody"),
        ("DELETE", "/v1/workers/a?model=other"),
        ("POST", "/v1/reservations/0/first_token"),
        ("GET", "/v1/dump?worker=nobody&hashes=1"),
        ("GET", "/v1/loads?model=other"),
        ("GET", "/v1/nothing"),
    ):
        answer = await client.request(method, path)
        assert answer.status_code == 404, path
    assert (await client.post("/v1/query", content=b"{")).status_code == 400
    assert (await client.post("/v1/query", content=b'"\xff"')).status_code == 400
    nobody = await refused(client, 503, "/v1/query", token_ids=[1], excluded=["a"])
    assert "no registered worker" in nobody["message"]
    assert (await refused(client, 503, "/v1/query", token_ids=[1], dp_rank=3))["message"]


async def test_web_pages_and_too_much_are_refused(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = await client.post("/v1/query", json={}, headers={"origin": "https://elsewhere.example"})
    assert page.status_code == 403
    monkeypatch.setattr(http_service, "MAX_MODELS", 1)
    await register(client, "a")
    assert (
        "1 models"
        in (await refused(client, 429, "/v1/workers", worker="a", block_size=4, model="m"))["message"]
    )
    for number in range(7):
        await register(client, f"w{number}")
    assert "8 workers" in (await refused(client, 429, "/v1/workers", worker="more", block_size=4))["message"]
    large = await client.post("/v1/query", content=b" " * (17 * 1024 * 1024))
    assert large.status_code == 413


async def test_times_end_without_anybody_asking(
    client: httpx.AsyncClient, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register(client, "a")
    await post(client, "/v1/route", token_ids=TOKENS, ttl_s=5)
    model = scene.service.models["default"]
    scene.time_s = 6.0
    looked = [0]
    expire = model.expire

    def noted() -> int:
        looked[0] += expire()
        return looked[0]

    monkeypatch.setattr(model, "expire", noted)
    async with asyncio.timeout(10.0):
        while not looked[0]:
            await asyncio.sleep(0.01)


async def test_without_metrics_there_are_none() -> None:
    service = RouterHttp(SocketNetwork(), SystemClock(), lambda size: Scene()._new(size))
    address = await service.start("127.0.0.1:0")
    async with httpx.AsyncClient(base_url=f"http://{address}") as client:
        assert (await client.get("/metrics")).status_code == 404
    await service.close()


async def test_how_a_request_ended_feeds_the_breaker_of_its_worker(client: httpx.AsyncClient) -> None:
    for worker in ("a", "b"):
        await register(client, worker)

    async def end(**how: Any) -> None:
        placed = await post(client, "/v1/reserve", worker="a", token_ids=TOKENS)
        await post(client, f"/v1/reservations/{placed['reservation']}/release", **how)

    async def candidates() -> set[str]:
        return {
            row["instance"] for row in (await post(client, "/v1/explain", token_ids=TOKENS))["candidates"]
        }

    for _ in range(2):
        await end(outcome="failed")
    for _ in range(4):
        await end(completion_tokens=7)
    await end(outcome="failed")
    assert await candidates() == {"a", "b"}, "it has answered in between"
    for _ in range(3):
        await end(outcome="failed")
    assert await candidates() == {"b"}
    placed = await post(client, "/v1/reserve", worker="a", token_ids=TOKENS)
    wrong = await client.post(f"/v1/reservations/{placed['reservation']}/release", json={"outcome": "bad"})
    assert wrong.status_code == 400
