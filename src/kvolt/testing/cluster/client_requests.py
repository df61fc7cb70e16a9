"""Requests of a virtual cluster's clients, and the check of their responses.

Clients are random: some read slowly, disconnect, have a short deadline, or send invalid requests. Prompts share
prefixes, so that KV is reused, moved and onboarded from tiers; tenants share none. The expected response is computed
without an engine (`engines.sim.script`).
"""

from __future__ import annotations

import asyncio
import random
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

import msgspec

from kvolt.core.delta import Delta, FinishReason, Usage
from kvolt.core.errors import KvoltError
from kvolt.core.hashing import local_hashes, request_seed, sequence_hashes
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.engines.sim.model import word_token_ids
from kvolt.engines.sim.script import answer_tokens
from kvolt.journey.journey import JourneyContext
from kvolt.runtime.clock import new_id
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.testing.cluster.checked_router import CheckedRouter
from kvolt.testing.cluster.deltas import Deltas
from kvolt.testing.cluster.kv_check import KvCheck
from kvolt.testing.cluster.tally import Tally

MODEL = "sim-tiny"
BLOCK_SIZE = 16
SLACK_S = 0.5
"""Tolerance of the deadline check: latency of the last timer."""
_HOLD_ABOVE = 2
"""Unread deltas of a slow reader: few, so that credit runs out and deltas merge."""
_NUM_PREFIXES = 3
_PREFIX_TOKENS = 10 * BLOCK_SIZE
_LONG = 160
_HASTY_S = 1.0
_INVALID_LOGPROBS = 999


class Kind(StrEnum):
    PLAIN = "plain"
    SLOW = "slow"
    """Pauses between items."""
    STOPPING = "stopping"
    """Has a stop token."""
    LEAVING = "leaving"
    """Requests a long output and disconnects early."""
    HASTY = "hasty"
    """Requests more than its deadline allows."""
    INVALID = "invalid"


_KINDS = (
    *(Kind.PLAIN,) * 10,
    *(Kind.SLOW,) * 4,
    *(Kind.STOPPING,) * 3,
    Kind.LEAVING,
    Kind.LEAVING,
    Kind.HASTY,
    Kind.INVALID,
)


class Clientele(Protocol):
    """Interface of the cluster for its client requests."""

    seed: int
    tally: Tally
    limits: Deadlines
    must_succeed: bool
    is_healthy: bool
    kv: KvCheck

    def note(self, event: str) -> None: ...

    def fail(self, what: str) -> None: ...

    def left(self, request_id: RequestId, name: str) -> None:
        """Report that a client disconnected."""
        ...

    def stalled_s(self, process: str) -> float: ...


@lru_cache(maxsize=_NUM_PREFIXES)
def _prefix(seed: int, number: int) -> tuple[int, ...]:
    rng = random.Random(f"{seed}/prefix/{number}")
    return tuple(rng.randrange(3, 500) for _ in range(_PREFIX_TOKENS))


def _prompt(seed: int, rng: random.Random) -> tuple[int, ...]:
    shared = _prefix(seed, rng.randrange(_NUM_PREFIXES))
    if rng.random() < 0.2:  # equal blocks after a different first block
        shared = (*_prefix(seed, rng.randrange(_NUM_PREFIXES))[:BLOCK_SIZE], *shared[BLOCK_SIZE:])
    shared = shared[: rng.choice((0, 3, 6, 10)) * BLOCK_SIZE]
    return (*shared, *(rng.randrange(3, 500) for _ in range(rng.randint(1, 60))))


def with_hashes(request: Request) -> Request:
    """Add the block hashes that a frontend computes for routers."""
    seed = request_seed(request.lora, request.salt)
    hashes = sequence_hashes(local_hashes(request.token_ids, BLOCK_SIZE, seed))
    return msgspec.structs.replace(request, block_size=BLOCK_SIZE, sequence_hashes=tuple(hashes))


class ClientRequest:
    """One request and the check of its response."""

    def __init__(
        self, cluster: Clientele, journey_context: JourneyContext, frontend: str, rng: random.Random
    ) -> None:
        self._cluster = cluster
        self._journey_context = journey_context
        self._frontend = frontend
        self._name = f"{frontend} {new_id(rng)[:8]}"
        kind = self._kind = rng.choice(_KINDS)
        self._pause_s = 0.2 if kind is Kind.SLOW else 0.0
        self._leave_after = rng.randint(1, 24)
        num_tokens = _LONG if kind in (Kind.LEAVING, Kind.HASTY) else rng.randint(1, 24)
        prompt = _prompt(cluster.seed, rng)
        seed = rng.getrandbits(32)
        answer = answer_tokens(prompt, seed, num_tokens, word_token_ids())
        stop_token_ids: tuple[int, ...] = ()
        if kind is Kind.STOPPING:
            stop_token_ids = (rng.choice(answer),)
            answer = answer[: answer.index(stop_token_ids[0]) + 1]
        self._answer = answer
        """Expected output tokens."""
        self._finish = FinishReason.STOP if stop_token_ids else FinishReason.LENGTH
        limits = cluster.limits
        self._limits = msgspec.structs.replace(limits, total_s=_HASTY_S) if kind is Kind.HASTY else limits
        self._usage: Usage | None = None
        self._request = with_hashes(
            Request(
                request_id=RequestId(new_id(rng)),
                model=MODEL,
                token_ids=prompt,
                salt=rng.choice((None, None, None, "tenant")),
                stop=StopConditions(max_tokens=num_tokens, stop_token_ids=stop_token_ids),
                sampling=Sampling(
                    seed=seed, prompt_logprobs=_INVALID_LOGPROBS if kind is Kind.INVALID else None
                ),
            )
        )
        cluster.kv.contents.add_request(self._request, answer)

    @property
    def request_id(self) -> RequestId:
        return self._request.request_id

    async def run(self) -> None:
        cluster, tally = self._cluster, self._cluster.tally
        loop = asyncio.get_running_loop()
        started, stalled_s = loop.time(), cluster.stalled_s(self._frontend)
        must_succeed = cluster.must_succeed
        tally.started += 1
        try:
            got = await self._read()
        except KvoltError as error:
            tally.failed[error.code] = tally.failed.get(error.code, 0) + 1
            cluster.note(f"{self._name} {error.code}")
            if must_succeed and not self._is_expected(error):
                cluster.fail(f"{self._name} ({self._kind}) ended with {error!r} in a healthy cluster")
            if cluster.is_healthy and self._kind is Kind.INVALID:
                self._check_one_attempt()
        except asyncio.CancelledError:
            tally.cut_short += 1
            raise
        else:
            tally.ok += 1
            cluster.note(f"{self._name} ok {got}")
        took_s = loop.time() - started - (cluster.stalled_s(self._frontend) - stalled_s)
        if took_s > self._limits.total_s + SLACK_S + self._pause_s * len(self._answer):
            cluster.fail(f"{self._name} ({self._kind}) took {took_s:.3f} s, over its deadline")

    def _check_one_attempt(self) -> None:
        router = self._journey_context.router
        if isinstance(router, CheckedRouter) and (number := router.num_routed[self.request_id]) > 1:
            self._cluster.fail(f"{self._name} is an invalid request and was sent to {number} workers")

    def _is_expected(self, error: KvoltError) -> bool:
        if self._kind is Kind.INVALID:
            return error.code == "invalid_request"
        return self._kind is Kind.HASTY and error.code == "deadline_exceeded"

    async def _read(self) -> int:
        """Read and check all tokens; return their number. Errors of the system propagate."""
        got = 0
        finish: FinishReason | None = None
        fail = self._cluster.fail
        async with await Deltas.of(self._journey_context, self._request, self._limits, _HOLD_ABOVE) as deltas:
            async for delta in deltas:
                if finish is not None:
                    fail(f"{self._name} received a delta after its end")
                got = self._check(delta, got)
                finish = delta.finish
                if self._kind is Kind.LEAVING and got >= self._leave_after:
                    self._cluster.left(self.request_id, self._name)
                    return got
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)
        if self._kind is Kind.INVALID:
            fail(f"{self._name} is invalid but was answered")
        if got != len(self._answer) or finish is not self._finish:
            fail(f"{self._name} ended as {finish} after {got} of {len(self._answer)} tokens")
        self._check_usage()
        return got

    def _check(self, delta: Delta, got: int) -> int:
        if delta.usage is not None:
            self._usage = delta.usage
        for token in delta.token_ids:
            if got >= len(self._answer) or token != self._answer[got]:
                self._cluster.fail(f"{self._name}: token {got} is wrong")
            got += 1
        return got

    def _check_usage(self) -> None:
        usage = self._usage
        counts = None if usage is None else (usage.prompt_tokens, usage.completion_tokens)
        expected = (len(self._request.token_ids), len(self._answer))
        if counts != expected:
            self._cluster.fail(f"{self._name} has usage {counts}, not {expected}")
