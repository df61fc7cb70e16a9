"""QueuedRequest: a request in the router's queue, its cost and the constraints on its worker."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable

from kvolt.core.errors import KvoltError
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.port import Decision
from kvolt.router.queue.priority_level import QueueEntry

_GUESSED_OUTPUT_TOKENS = 256


class QueuedRequest(QueueEntry):
    """A waiting request and the future of its decision."""

    __slots__ = ("decision", "excluded", "request")

    def __init__(
        self, request: Request, excluded: frozenset[InstanceId], now: float, max_wait_s: float | None
    ) -> None:
        routing = request.routing
        patience_s = min(
            (each for each in (max_wait_s, request.deadline_s) if each is not None), default=math.inf
        )
        super().__init__(
            tokens_of(request),
            now,
            routing.tenant,
            routing.priority,
            constraints_of(request, excluded),
            now + patience_s,
            routing.tenant_share,
        )
        self.request = request
        self.excluded = excluded
        self.decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()

    def refuse(self, error: KvoltError) -> None:
        """End the wait with an error."""
        if not self.decision.done():
            self.decision.set_exception(error)


def tokens_of(request: Request) -> int:
    """Tokens charged to the tenant: the prompt and the expected output."""
    expected_tokens = request.routing.expected_output_tokens or _GUESSED_OUTPUT_TOKENS
    return (
        request.num_prompt_tokens
        + min(expected_tokens, request.stop.max_tokens) * request.sampling.num_choices
    )


def constraints_of(request: Request, excluded: frozenset[InstanceId]) -> Hashable:
    """Everything that restricts the workers of a request; None if any worker may take it."""
    routing = request.routing
    constraints = (
        excluded,
        request.lora,
        tuple(routing.pins.items()),
        routing.pinned_dp_rank,
        routing.allowed,
        routing.required_taints,
    )
    return constraints if any(each not in (None, (), frozenset()) for each in constraints) else None
