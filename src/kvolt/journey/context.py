"""What a journey is given: the road that all requests for one model share, and who gets an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from kvolt.core.errors import KvoltError
from kvolt.journey.migration import Heard
from kvolt.journey.prefill_mode import OneWay, Ways
from kvolt.journey.stats import JourneyStats
from kvolt.router.port import Router
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.streams import StepSink
from kvolt.runtime.tasks import Crew


class Receiver(Protocol):
    """Who gets the answer. Called from the loop's read path: must not raise or block."""

    steps: StepSink | None
    """Takes whole steps in its place, see `StepSink`."""

    @property
    def has_begun(self) -> bool:
        """Whether any of the answer has come: from then on it cannot be begun again elsewhere, only gone on with."""
        ...

    def so_far(self) -> Heard:
        """All that has come of each choice, for who goes on with it when its worker was lost."""
        ...

    def on_item(self, delta: Any) -> None: ...

    def on_end(self, error: KvoltError | None) -> None:
        """Once, after the last delta."""
        ...


@dataclass(frozen=True, slots=True)
class Road:
    """What all journeys for one model share."""

    router: Router
    client: EndpointClient
    crew: Crew
    """For attempts after the first, which nobody waits for."""
    max_attempts: int = 3
    max_moves: int = 2
    """How often a request may be taken back that has not begun; its router may want less."""
    migration_limit: int = 3
    """How often an answer that has begun may go on at another worker."""
    eos_token_ids: tuple[int, ...] = ()
    """Of the model: by what an answer is over whose worker was lost before it said so."""
    stats: JourneyStats = field(default_factory=JourneyStats)
    ways: Ways = field(default_factory=OneWay)
    """Whether somebody else computes a prompt than answers it."""
    is_decode_first: bool = False
    """Then who answers has the request at the same time, and fetches the prompt's KV while it is computed."""
