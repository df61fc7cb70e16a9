"""Limits at the HTTP API of one frontend process, under virtual time."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.engines.lab import MODEL, Frontend, RunningWorker
from tests.unit.frontend.tenants.test_access import Keys, bearer, checked, error

from kvolt.core.errors import Overloaded
from kvolt.frontend.tenants.budgets import Account, TenantRequest, _duration, ratelimit_headers
from kvolt.frontend.tenants.limits import Amounts, Rules
from kvolt.frontend.tenants.records import Tenant
from kvolt.frontend.tenants.usage import UsageMeter

LIMITED = (429, "rate_limit_error", "rate_limit_exceeded")


def test_requests_per_second() -> None:
    keys = Keys(requests_per_second=2)

    async def body(edge: Frontend, running: RunningWorker) -> None:
        await asyncio.sleep(1)
        first = await edge.complete(bearer(keys.acme), max_tokens=1)
        assert first.status == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].endswith("ms")
        assert "x-ratelimit-limit-tokens" not in first.headers
        answers = await asyncio.gather(*(edge.complete(bearer(keys.acme), max_tokens=1) for _ in range(5)))
        assert sorted(answer.status for answer in answers) == [200, 429, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status == 429)
        assert error(refused) == LIMITED
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await edge.complete(bearer(keys.beta), max_tokens=1)).status == 200
        await asyncio.sleep(1)
        tokens = await edge.ask("/tokenize", {"model": MODEL, "prompt": "a"}, bearer(keys.acme))
        assert tokens.status == 200  # counts too
        assert (await edge.complete(bearer(keys.acme), max_tokens=1)).status == 200
        assert (await edge.ask("/tokenize", {"model": MODEL}, bearer(keys.acme))).status == 429
        assert edge.sample("kvolt_tenant_refused_total", tenant="acme", reason="requests") == 5

    checked(keys, body)


@pytest.mark.parametrize("stream", [False, True])
def test_concurrency_covers_the_whole_answer(stream: bool) -> None:
    keys = Keys(concurrency=1)

    async def body(edge: Frontend, running: RunningWorker) -> None:
        fields = {"max_tokens": 50, "ignore_eos": True, "stream": stream}
        running_request = asyncio.ensure_future(edge.complete(bearer(keys.acme), **fields))
        await asyncio.sleep(0.1)
        assert edge.sample("kvolt_tenant_active_requests", tenant="acme") == 1
        assert error(await edge.complete(bearer(keys.acme), max_tokens=1)) == LIMITED
        assert (await running_request).status == 200
        assert (await edge.complete(bearer(keys.acme), max_tokens=1)).status == 200
        assert edge.sample("kvolt_tenant_active_requests", tenant="acme") == 0

    checked(keys, body)


def test_every_way_out_releases_the_slot() -> None:
    keys = Keys(concurrency=1)

    async def body(edge: Frontend, running: RunningWorker) -> None:
        invalid = await edge.ask("/v1/completions", b"{", bearer(keys.acme))
        assert invalid.status == 400
        assert (await edge.complete(bearer(keys.acme), model="none")).status == 404
        request = b'{"model": "%s", "prompt": "a", "max_tokens": 400, "ignore_eos": true, "stream": true}'
        async with edge.send(
            "POST", "/v1/completions", request % MODEL.encode(), {**bearer(keys.acme)}
        ) as browser:
            while not browser.received:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert (await edge.complete(bearer(keys.acme), max_tokens=1)).status == 200

    checked(keys, body)


def test_input_tokens_per_minute() -> None:
    keys = Keys(input_tokens_per_minute=60)

    async def body(edge: Frontend, running: RunningWorker) -> None:
        tokens = [5] * 40
        assert (await edge.complete(bearer(keys.acme), prompt=tokens, max_tokens=1)).status == 200
        refused = await edge.complete(bearer(keys.acme), prompt=tokens, max_tokens=1)
        assert error(refused) == LIMITED
        assert 19 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-limit-tokens"] == "60"
        await asyncio.sleep(20)
        assert (await edge.complete(bearer(keys.acme), prompt=tokens, max_tokens=1)).status == 200
        large = await edge.complete(bearer(keys.acme), prompt=[5] * 61, max_tokens=1)
        assert error(large) == LIMITED
        assert "too large" in large.json["error"]["message"]
        assert large.headers["x-should-retry"] == "false"
        assert edge.sample("kvolt_tenant_input_tokens_total", tenant="acme") == 80

    checked(keys, body)


def test_output_tokens_are_reserved_and_unused_ones_put_back() -> None:
    keys = Keys(output_tokens_per_minute=100)

    async def body(edge: Frontend, running: RunningWorker) -> None:
        fields = {"max_tokens": 60, "ignore_eos": True}
        first = asyncio.ensure_future(edge.complete(bearer(keys.acme), **fields))
        await asyncio.sleep(0.1)
        assert error(await edge.complete(bearer(keys.acme), **fields)) == LIMITED
        assert (await edge.complete(bearer(keys.acme), max_tokens=20)).status == 200
        assert (await first).status == 200
        spent = edge.sample("kvolt_tenant_output_tokens_total", tenant="acme")
        assert 60 < spent <= 80
        left = int(
            (await edge.complete(bearer(keys.acme), max_tokens=1)).headers["x-ratelimit-remaining-tokens"]
        )
        assert left == pytest.approx(100 - spent, abs=4)
        assert (await edge.complete(bearer(keys.acme), max_tokens=1, n=8)).status == 200
        assert (await edge.complete(bearer(keys.acme), max_tokens=60, n=2)).status == 429

    checked(keys, body)


def test_a_request_without_max_tokens_reserves_at_most_a_full_bucket() -> None:
    keys = Keys(output_tokens_per_minute=60)

    async def body(edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.chat(bearer(keys.acme), ignore_eos=True)
        generated = answer.json["usage"]["completion_tokens"]
        assert generated > 120
        refused = await edge.chat(bearer(keys.acme), max_tokens=1)
        assert error(refused) == LIMITED  # the debt is paid first
        assert int(refused.headers["retry-after"]) == pytest.approx(generated - 60, abs=10)

    checked(keys, body)


def test_a_request_that_the_server_failed_costs_no_tokens() -> None:
    keys = Keys(input_tokens_per_minute=50, output_tokens_per_minute=50)

    async def body(edge: Frontend, running: RunningWorker) -> None:
        edge.admission._max_requests = 0
        for _ in range(5):
            answer = await edge.complete(bearer(keys.acme), prompt=[5] * 40, max_tokens=40)
            assert answer.status == 429
            assert answer.json["error"]["code"] == "overloaded"
        edge.admission._max_requests = 10
        assert (await edge.complete(bearer(keys.acme), prompt=[5] * 40, max_tokens=40)).status == 200

    checked(keys, body)


def test_changed_limits_apply_without_a_restart() -> None:
    keys = Keys(concurrency=1)

    async def body(edge: Frontend, running: RunningWorker) -> None:
        fields = {"max_tokens": 300, "ignore_eos": True}
        first = asyncio.ensure_future(edge.complete(bearer(keys.acme), **fields))
        await asyncio.sleep(0.1)
        keys.store.put_tenant(Tenant(name="acme", concurrency=2))
        await asyncio.sleep(1.1)
        assert (await edge.complete(bearer(keys.acme), max_tokens=1)).status == 200
        await first

    checked(keys, body)


def test_the_tighter_token_limit_is_in_the_headers() -> None:
    tenant = Tenant(name="a", input_tokens_per_minute=100, output_tokens_per_minute=1000)
    levels = Amounts(input_tokens=90, output_tokens=100.7)
    assert ratelimit_headers(Rules.of(tenant), levels) == {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "54s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0123, "13ms"), (1, "1s"), (7.51, "7.6s"), (59.99, "1m0s"), (390, "6m30s")],
)
def test_durations_are_openais(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def test_rate_limits_are_retryable() -> None:
    from kvolt.frontend.openai_api.errors import RateLimited, openai_error

    limited = RateLimited("x", limit="requests", retry_after_s=5.0)
    assert isinstance(limited, Overloaded)
    assert limited.retryable
    assert openai_error(limited).headers["retry-after"] == "5"


class RecordedBudget:
    """Admits everything and records the rest."""

    def __init__(self, tenant: Tenant) -> None:
        self.rules = Rules.of(tenant)
        self.changes: list[tuple[str, Amounts]] = []

    def take(self, amounts: Amounts) -> bool:
        self.changes.append(("take", amounts))
        return True

    async def lease(self, amounts: Amounts) -> None:
        raise AssertionError("all is here")

    def charge(self, amounts: Amounts) -> None:
        self.changes.append(("charge", amounts))

    def put_back(self, amounts: Amounts) -> None:
        self.changes.append(("put_back", amounts))

    def levels(self) -> Amounts:
        return self.rules.capacities


@pytest.mark.parametrize(
    ("num_output", "is_server_error", "settled", "tokens"),
    [
        (30, False, [("put_back", Amounts(concurrency=1, output_tokens=10))], (7, 30)),
        (30, True, [("put_back", Amounts(concurrency=1, output_tokens=10))], (7, 30)),
        (
            0,
            True,
            [("put_back", Amounts(concurrency=1, input_tokens=7, output_tokens=40))],
            (0, 0),
        ),
        (45, False, [("charge", Amounts(output_tokens=5)), ("put_back", Amounts(concurrency=1))], (7, 45)),
    ],
)
async def test_the_end_settles_what_was_reserved(
    num_output: int, is_server_error: bool, settled: list[tuple[str, Amounts]], tokens: tuple[int, int]
) -> None:
    limits = {"input_tokens_per_minute": 100, "output_tokens_per_minute": 100, "concurrency": 5}
    tenant = Tenant(name="acme", **limits)
    budget, usage = RecordedBudget(tenant), UsageMeter()
    request = TenantRequest(Account(tenant, budget, usage.of("acme")))
    await request.begin()
    await request.reserve_tokens(7, 40, is_default=False)
    budget.changes.clear()
    request.end(num_output, is_server_error)
    assert budget.changes == settled
    counted = usage.of("acme")
    assert (counted.requests, counted.active) == (1, 0)
    assert (counted.input_tokens, counted.output_tokens) == tokens


async def test_usage_is_counted_without_limits() -> None:
    usage = UsageMeter()
    request = TenantRequest(Account(Tenant(name="acme", models=("m",)), None, usage.of("acme")))
    await request.begin()
    await request.reserve_tokens(7, 40, is_default=True)
    request.end(30, is_server_error=False)
    assert request.headers() == {}
    assert (usage.of("acme").input_tokens, usage.of("acme").output_tokens) == (7, 30)
