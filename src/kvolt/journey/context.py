"""Dependencies and counters that all journeys of one model share, and the port that receives an answer."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from kvolt.core.errors import KvoltError
from kvolt.journey.migration import ChoiceTokens
from kvolt.journey.prefill_mode import PrefillModePolicy
from kvolt.router.port import Router
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.histogram import SECONDS, Histogram
from kvolt.runtime.plane.streams import StepSink
from kvolt.runtime.tasks import TaskGroup


class Receiver(Protocol):
    """Receives the answer of one request. Called from the loop's read path: must not raise or block."""

    steps: StepSink | None
    """Receives whole engine steps in place of `on_item`, see `StepSink`."""

    @property
    def has_started(self) -> bool:
        """Whether any part of the answer has arrived. From then on a retry must be a migration."""
        ...

    def received_tokens(self) -> ChoiceTokens:
        """Output tokens received per choice; a migration continues after them."""
        ...

    def on_item(self, delta: Any) -> None: ...

    def on_end(self, error: KvoltError | None) -> None:
        """Called once, after the last delta."""
        ...


class RerouteOutcome(StrEnum):
    """Result of a search for another worker."""

    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"


class RerouteKey(NamedTuple):
    """Labels of a search for another worker."""

    is_migration: bool
    """Whether part of the answer was delivered."""
    outcome: RerouteOutcome


@dataclass(slots=True)
class JourneyStats:
    retries: Counter[str] = field(default_factory=Counter)
    """Retries from the start, by error code."""
    migrations: Counter[str] = field(default_factory=Counter)
    """Migrated answers, by error code."""
    num_prefills: int = 0
    """Prompts computed by prefill workers."""
    prefill_failures: Counter[str] = field(default_factory=Counter)
    """Failed remote prefills, by error code."""
    num_moves: int = 0
    """Waiting requests withdrawn from a worker and sent to another."""
    reroute_s: defaultdict[RerouteKey, Histogram] = field(
        default_factory=lambda: defaultdict(lambda: Histogram(SECONDS))
    )
    """From a failure to the next token, the final error, or cancellation."""


@dataclass(frozen=True, slots=True)
class JourneyContext:
    """Shared by all journeys for one model."""

    router: Router
    client: EndpointClient
    task_group: TaskGroup
    """Runs attempts after the first, withdrawals and releases."""
    max_attempts: int = 3
    max_moves: int = 2
    """How often a waiting request may be withdrawn and sent to another worker; the router may use less."""
    migration_limit: int = 3
    """How often an answer that has started may migrate to another worker."""
    eos_token_ids: tuple[int, ...] = ()
    """EOS tokens of the model: they complete an answer whose worker was lost before it sent the finish reason."""
    stats: JourneyStats = field(default_factory=JourneyStats)
    prefill_modes: PrefillModePolicy = field(default_factory=PrefillModePolicy)
    """Decides where the prompt is computed."""
    is_decode_first: bool = False
    """Decode-first disaggregation: prefill and decode workers get the request at the same time."""
