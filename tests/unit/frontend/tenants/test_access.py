"""API keys at the HTTP API: authentication, permissions, tenants, and hostile clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast
from unittest.mock import Mock

import pytest
from tests.unit.engines.lab import MODEL, Answer, Frontend, Lab, RunningWorker, sim
from tests.unit.frontend.serving import served

from kvolt.frontend.app import FrontendApp
from kvolt.frontend.openai_api.errors import InvalidApiKey
from kvolt.frontend.tenants.access import AccessGuard, _is_local
from kvolt.frontend.tenants.budgets import Budgets
from kvolt.frontend.tenants.live_keys import LiveKeys
from kvolt.frontend.tenants.records import ApiKey, Scope, Tenant, new_secret, secret_hash
from kvolt.frontend.tenants.store import MemoryKeyStore
from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.http.protocol import HttpRequest
from kvolt.testing import run_virtual


class Keys:
    """A store with tenants `acme` and `beta`, and the secrets of their keys."""

    def __init__(self, **limits: Any) -> None:
        self.store = MemoryKeyStore()
        self.store.put_tenant(Tenant(name="acme", **limits))
        self.store.put_tenant(Tenant(name="beta"))
        self.acme = self.add("acme")
        self.beta = self.add("beta")

    def add(self, tenant: str, key_id: str | None = None, **fields: Any) -> str:
        secret = new_secret()
        self.store.put_key(
            ApiKey(id=key_id or tenant, tenant=tenant, sha256=secret_hash(secret), created=1, **fields)
        )
        return secret


def bearer(secret: str, **more: str) -> dict[str, str]:
    return {
        "authorization": f"Bearer {secret}",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


def checked(keys: Keys, body: Callable[[Frontend, RunningWorker], Awaitable[None]], **frontend: Any) -> None:
    async def wrapped(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        await body(edge, running)

    served(wrapped, keys=keys.store, **frontend)


def error(answer: Answer) -> tuple[int, str, str]:
    body = answer.json["error"]
    return answer.status, body["type"], body["code"]


INVALID = (401, "invalid_request_error", "invalid_api_key")


def test_a_key_is_accepted_in_both_headers() -> None:
    keys = Keys()

    async def body(edge: Frontend, running: RunningWorker) -> None:
        for headers in (
            {"authorization": f"Bearer {keys.acme}"},
            {"authorization": f"bearer  {keys.acme} "},
            {"x-api-key": keys.acme},
            {"authorization": f"Bearer {keys.acme}", "x-api-key": "other"},
        ):
            assert (await edge.chat(headers, max_tokens=1)).status == 200
        assert edge.sample("kvolt_tenant_requests_total", tenant="acme") == 4

    checked(keys, body)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer kvolt-sk-" + "A" * 43},
        {"authorization": "Basic a3ZvbHQ6a3ZvbHQ="},
        {"authorization": "Bearer " + "\xff\xfe" * 50},
        {"authorization": "Bearer " + "A" * 30_000},
        {"authorization": "A" * 30_000},
        {"x-api-key": "{}[]\\\"'%00"},
    ],
)
def test_other_headers_are_refused_before_the_body_is_parsed(headers: dict[str, str]) -> None:
    keys = Keys()

    async def body(edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.ask("/v1/chat/completions", b"{not json", headers)
        assert error(answer) == INVALID
        assert answer.headers["www-authenticate"] == "bearer"
        assert len(answer.body) < 300

    checked(keys, body)


def test_a_header_longer_than_the_limit_is_a_431() -> None:
    keys = Keys()

    async def body(edge: Frontend, running: RunningWorker) -> None:
        assert (await edge.ask("/v1/models", None, bearer("A" * 100_000))).status == 431
        assert (await edge.ask("/v1/models", None, bearer(keys.acme))).status == 200

    checked(keys, body)


def test_routes_need_the_documented_scopes() -> None:
    keys = Keys()
    admin = keys.add("beta", "admin", scopes=(Scope.ADMIN,))

    async def body(edge: Frontend, running: RunningWorker) -> None:
        for path in ("/health", "/live", "/ready", "/ping", "/version", "/", "/docs", "/openapi.json"):
            assert (await edge.ask(path)).status == 200
        for path in (
            "/v1/models",
            f"/v1/models/{MODEL}",
            f"/v1/models/{MODEL}/ready",
            "/metrics",
            "/busy_threshold",
        ):
            assert (await edge.ask(path)).status == 401
        for path in ("/v1/models", f"/v1/models/{MODEL}", f"/v1/models/{MODEL}/ready"):
            assert (await edge.ask(path, None, bearer(keys.acme))).status == 200
        refusal = (403, "invalid_request_error", "insufficient_permissions")
        threshold = {"model": MODEL, "active_decode_blocks_threshold": 0.5}
        for path, data in (("/metrics", None), ("/busy_threshold", None), ("/busy_threshold", threshold)):
            assert error(await edge.ask(path, data, bearer(keys.acme))) == refusal
            assert (await edge.ask(path, data, bearer(admin))).status == 200
        assert error(await edge.ask("/v1/models", None, bearer(admin))) == refusal
        for path in ("/tokenize", "/detokenize"):
            assert (await edge.ask(path, {"model": MODEL, "prompt": "a", "tokens": [1]})).status == 401
            data = {"model": MODEL, "prompt": "a", "tokens": [1]}
            assert (await edge.ask(path, data, bearer(keys.acme))).status == 200

    checked(keys, body)


@pytest.mark.parametrize(
    ("peer", "headers", "expected"),
    [
        ("127.0.0.1:5", {}, True),
        ("[::1]:5", {}, True),
        ("[::ffff:127.0.0.1]:5", {}, True),
        ("10.0.0.1:5", {}, False),
        ("", {}, False),
        ("127.0.0.1:5", {"x-forwarded-for": "10.0.0.1"}, False),
        ("127.0.0.1:5", {"forwarded": "for=10.0.0.1"}, False),
    ],
)
def test_a_proxy_on_this_machine_is_not_a_local_client(
    peer: str, headers: dict[str, str], expected: bool
) -> None:
    assert _is_local(HttpRequest("GET", "/metrics", headers, peer=peer)) is expected


def test_without_keys_handlers_are_not_wrapped() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        assert (await edge.chat({"authorization": "Bearer wrong"}, max_tokens=1)).status == 200
        assert edge.sample("kvolt_tenant_requests_total") == 0

    served(body)
    app = FrontendApp.__new__(FrontendApp)
    app._generation = type("G", (), {"access": None})()  # type: ignore[assignment]
    handler = app._list_models
    assert app._guarded("GET", "/v1/models", handler) == handler


def test_a_header_that_names_another_tenant_is_refused() -> None:
    keys = Keys()

    async def body(edge: Frontend, running: RunningWorker) -> None:
        for name in ("x-kvolt-tenant-id", "x-tenant-id"):
            answer = await edge.chat(bearer(keys.acme, **{name: "beta"}), max_tokens=1)
            assert error(answer) == (403, "invalid_request_error", "insufficient_permissions")
            assert (await edge.chat(bearer(keys.acme, **{name: "acme"}), max_tokens=1)).status == 200
        both = bearer(keys.acme, x_kvolt_tenant_id="acme", x_tenant_id="beta")
        assert (await edge.chat(both, max_tokens=1)).status == 403
        assert edge.sample("kvolt_tenant_refused_total", tenant="acme", reason="tenant") == 3

    checked(keys, body)


def test_tenants_share_no_cached_prefix() -> None:
    keys = Keys()
    prompt = "water " * 64

    async def cached(edge: Frontend, secret: str, **fields: Any) -> int:
        answer = await edge.complete(bearer(secret), prompt=prompt, max_tokens=1, **fields)
        assert answer.status == 200
        return int((answer.json["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def body(edge: Frontend, running: RunningWorker) -> None:
        assert await cached(edge, keys.acme) == 0
        assert await cached(edge, keys.acme) > 0
        assert await cached(edge, keys.beta) == 0
        for salt in ("acme", "acme\n"):
            answer = await edge.complete(bearer(keys.beta), prompt=prompt, max_tokens=1, cache_salt=salt)
            details = answer.json.get("usage", {}).get("prompt_tokens_details") or {}
            assert not details.get("cached_tokens")
        assert await cached(edge, keys.beta) > 0

    checked(keys, body)


def test_tenants_with_one_salt_share_prefixes() -> None:
    keys = Keys(cache_salt="team")
    keys.store.put_tenant(Tenant(name="beta", cache_salt="team"))
    prompt = "water " * 64

    async def body(edge: Frontend, running: RunningWorker) -> None:
        await edge.complete(bearer(keys.acme), prompt=prompt, max_tokens=1)
        answer = await edge.complete(bearer(keys.beta), prompt=prompt, max_tokens=1)
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    checked(keys, body)


def test_only_allowed_models_are_listed_and_served() -> None:
    keys = Keys(models=("other",))

    async def body(edge: Frontend, running: RunningWorker) -> None:
        assert (await edge.ask("/v1/models", None, bearer(keys.acme))).json["data"] == []
        assert len((await edge.ask("/v1/models", None, bearer(keys.beta))).json["data"]) == 1
        denied = (403, "invalid_request_error", "model_not_found")
        messages = []
        for model in (MODEL, "made-up"):
            for answer in (
                await edge.chat(bearer(keys.acme), model=model),
                await edge.ask(f"/v1/models/{model}", None, bearer(keys.acme)),
                await edge.ask(f"/v1/models/{model}/ready", None, bearer(keys.acme)),
                await edge.ask("/tokenize", {"model": model, "prompt": "a"}, bearer(keys.acme)),
            ):
                assert error(answer) == denied
                messages.append(answer.json["error"]["message"].replace(model, ""))
        assert len(set(messages)) == 1  # an existing model looks like one that does not exist
        assert (await edge.chat(bearer(keys.acme), model="other")).status == 404

    checked(keys, body)


def test_the_priority_is_reduced_to_the_tenants() -> None:
    keys = Keys(max_priority=2)

    async def body(edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.chat(bearer(keys.acme), max_tokens=1, priority=9)
        assert answer.headers["x-kvolt-warning"] == "priority 9 reduced to 2, the maximum of this tenant"
        assert "x-kvolt-warning" not in (await edge.chat(bearer(keys.beta), max_tokens=1, priority=9)).headers

    checked(keys, body)


def test_a_revoked_key_ends_with_its_stream() -> None:
    keys = Keys()

    async def body(edge: Frontend, running: RunningWorker) -> None:
        stream = asyncio.ensure_future(
            edge.complete(bearer(keys.acme), max_tokens=300, ignore_eos=True, stream=True)
        )
        await asyncio.sleep(0.5)
        keys.store.remove_key("acme")
        await asyncio.sleep(1.1)
        assert not stream.done()
        assert error(await edge.complete(bearer(keys.acme), max_tokens=1)) == INVALID
        answer = await stream
        assert answer.events[-1] == "[DONE]"
        assert len(answer.chunks) > 200
        assert edge.sample("kvolt_tenant_output_tokens_total", tenant="acme") == 300

    checked(keys, body)


def test_a_rotated_key_is_valid_until_its_grace_ends() -> None:
    keys = Keys()

    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0", sim())
            edge = await lab.frontend(keys=keys.store)
            await edge.ready()
            now = int(edge.runtime.ports.clock.wall())
            old = keys.add("acme", "old", expires=now + 60)
            new = keys.add("acme", "new")
            await asyncio.sleep(1.1)
            assert (await edge.chat(bearer(old), max_tokens=1)).status == 200
            assert (await edge.chat(bearer(new), max_tokens=1)).status == 200
            await asyncio.sleep(60)
            refused = await edge.chat(bearer(old), max_tokens=1)
            assert error(refused) == INVALID
            assert "expired" in refused.json["error"]["message"]
            assert (await edge.chat(bearer(new), max_tokens=1)).status == 200
            assert edge.sample("kvolt_tenant_refused_total", tenant="acme", reason="expired_key") == 1

    run_virtual(scenario)


async def test_a_key_in_many_forms_is_kept_once() -> None:
    keys, blocking = Keys(), ThreadBlocking()
    live = LiveKeys(keys.store, blocking)
    await live.start()
    access = AccessGuard(live, cast(Budgets, Mock()), SystemClock())
    for number in range(1, 20):
        for scheme in ("Bearer", "bearer"):
            caller = access.authenticate({"authorization": scheme + " " * number + keys.acme})
            assert caller.tenant.name == "acme"
    assert len(access._callers) == 1
    await live.close()
    blocking.close()


async def test_thousands_of_wrong_keys_use_no_memory_and_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    blocking = ThreadBlocking()
    live = LiveKeys(Keys().store, blocking)
    await live.start()
    clock = SystemClock()
    access = AccessGuard(live, cast(Budgets, Mock()), clock)
    for _ in range(5000):
        with pytest.raises(InvalidApiKey):
            access.authenticate({"authorization": f"Bearer {new_secret()}"})
    assert list(access.usage.describe()) == ["(none)"]
    assert access.usage.of("(none)").refused == {"invalid_key": 5000}
    assert access._callers == {}
    assert caplog.text.count("refused") == 1
    assert "kvolt-sk-" not in caplog.text
    await live.close()
    blocking.close()
