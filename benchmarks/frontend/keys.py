"""CPU that API keys and limits of tenants add to a request: check of the key, tenant, admission, response headers,
settlement.

The code of a frontend from the received request to its end, without HTTP, tokenization and workers. The cost is the
difference to the same request without keys. All requests are admitted; each has 200 input tokens and reserves 64
output tokens, of which it uses half.

Frontends share limits: the oldest is the limiter and spends its buckets directly, the others lease from it. `leased`
is such another frontend. Both are in this process, connected over loopback, so its cost includes the limiter's.

Run as `python -m benchmarks.frontend.keys`. Goal: at most 10 us for a key with all limits.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import uvloop
from benchmarks.harness import Figure, Rows, goal, in_turn, parser_for, report, run, say, table

from kvolt.frontend.openai_api.headers import parse_hints
from kvolt.frontend.tenants.access import AccessGuard, caller_of
from kvolt.frontend.tenants.budgets import TenantRequest
from kvolt.frontend.tenants.live_keys import LiveKeys
from kvolt.frontend.tenants.records import ApiKey, Scope, Tenant, new_secret, secret_hash
from kvolt.frontend.tenants.shared_budgets import SharedBudgets
from kvolt.frontend.tenants.store import MemoryKeyStore
from kvolt.runtime.clock import SystemClock, ThreadBlocking, new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.http.server import HttpRequest, Response
from kvolt.runtime.network import SocketNetwork
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime

GOAL_US = 10.0
NO_KEY = "no keys"
TENANTS = (
    Tenant(name="key", models=()),
    Tenant(name="requests", requests_per_second=1e9),
    Tenant(
        name="all",
        requests_per_second=1e6,
        input_tokens_per_minute=10**11,
        output_tokens_per_minute=10**11,
        concurrency=1000,
    ),
)
CASES = {
    NO_KEY: "no keys",
    "key": "key without limits",
    "requests": "key, requests/s",
    "all": "key, all limits",
    "leased": "key, all limits, leased",
}
_IN_PROGRESS = 16
_RESPONSE = Response(200)


class Row(msgspec.Struct, frozen=True):
    round: int
    case: str
    cpu_us: float
    """Per request, of the whole process."""


class Edge:
    """What a frontend does with the key and the budget of one request."""

    def __init__(self, guard: AccessGuard | None, secret: str) -> None:
        self._guard = guard
        self._unfinished: list[TenantRequest] = []
        self._headers = {
            "host": "127.0.0.1:8000",
            "user-agent": "OpenAI/Python 2.8.0",
            "content-type": "application/json",
            "accept": "application/json",
            "authorization": f"Bearer {secret}",
        }
        self._handler = self._serve if guard is None else guard.protect(self._serve, Scope.INFERENCE)

    async def _serve(self, http: HttpRequest) -> Response:
        guard = self._guard
        charge = None if guard is None else await guard.begin(http)
        caller = caller_of(http)
        parse_hints(http.headers, None, None, None, None if caller is None else caller.tenant)
        if charge is not None:
            await charge.reserve_tokens(200, 64, False)
            headers: dict[str, str] = {}
            headers.update(charge.headers())
            self._unfinished.append(charge)
            if len(self._unfinished) > _IN_PROGRESS:
                self._unfinished.pop(0).end(32, False)
        return _RESPONSE

    async def requests(self, count: int) -> None:
        handler, headers = self._handler, self._headers
        for number in range(count):
            await handler(HttpRequest("POST", "/v1/completions", headers.copy()))
            if number % 64 == 0:
                await asyncio.sleep(0)  # the loop serves others
        for charge in self._unfinished:
            charge.end(32, False)
        self._unfinished.clear()


class Frontends:
    """Two frontends of one namespace; the first is the limiter."""

    def __init__(self) -> None:
        self._discovery, self._bus = MemStore(), MemBus()
        self._clock, self._blocking = SystemClock(), ThreadBlocking()
        self._store = MemoryKeyStore()
        self._secrets = {tenant.name: new_secret() for tenant in TENANTS}
        for tenant in TENANTS:
            self._store.put_tenant(tenant)
            sha256 = secret_hash(self._secrets[tenant.name])
            self._store.put_key(ApiKey(id=tenant.name, tenant=tenant.name, sha256=sha256, created=0))

    @asynccontextmanager
    async def edges(self) -> AsyncIterator[dict[str, Edge]]:
        async with self._frontend(1) as limiter, self._frontend(2) as other:
            await asyncio.sleep(0.2)  # discovery
            edges = {name: Edge(limiter, secret) for name, secret in self._secrets.items()}
            yield {NO_KEY: Edge(None, ""), **edges, "leased": Edge(other, self._secrets["all"])}
        self._blocking.close()

    @asynccontextmanager
    async def _frontend(self, number: int) -> AsyncIterator[AccessGuard]:
        clock, rng = self._clock, random.Random(number)
        ports = Ports(
            clock,
            rng,
            SocketNetwork(),
            self._blocking,
            tcp_plane(SocketNetwork()),
            lambda plane: MemDiscovery(self._discovery, clock, rng),
            lambda discovery, plane, server: MemEvents(self._bus, new_id(rng)),
        )
        runtime = Runtime(ports, ProcessOptions(f"frontend-{number}"))
        await runtime.start()
        keys = LiveKeys(self._store, self._blocking)
        await keys.start()
        budgets = SharedBudgets(runtime, "bench", lambda: keys.table.tenants)
        await budgets.start()
        try:
            yield AccessGuard(keys, budgets, clock)
        finally:
            await budgets.close()
            await keys.close()
            await runtime.close()


async def measure(rounds: int, count: int) -> list[Row]:
    rows: list[Row] = []
    async with Frontends().edges() as edges:
        for edge in edges.values():
            await edge.requests(min(count, 1000))  # warm up
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            for name in in_turn(list(edges), number):
                gc.collect()
                start = time.process_time()
                await edges[name].requests(count)
                rows.append(Row(number, name, (time.process_time() - start) / count * 1e6))
    return rows


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    rounds, count = (1, 50) if options.smoke else (15, 20_000)
    rows = Rows(uvloop.run(measure(rounds, count)))
    cpu = Figure("CPU us per request", "cpu_us")
    base = rows.where(case=NO_KEY).values(cpu)
    added = Figure("added by the key, us", lambda row: row.cpu_us - base[row.round])
    sides = {name: rows.where(case=name) for name in CASES}
    body = [(CASES[name], *side.cells([cpu, added])) for name, side in sides.items()]
    goals = [
        goal(f"{CASES[name]}: at most {GOAL_US:g} us", costs.median <= GOAL_US, costs)
        for name in ("all", "leased")
        if (costs := sides[name].fold(added)) is not None
    ]
    about = f"{rounds} rounds of {count:,} requests"
    text = "\n".join([about, table(("", cpu.title, added.title), body), *goals])
    report(options, text, {"rows": rows.rows})


if __name__ == "__main__":
    run(main)
