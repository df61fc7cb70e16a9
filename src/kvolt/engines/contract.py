"""The engine contract: what a worker asks of whatever computes.

Engines own their scheduling. `submit` only hands a request over; everything that comes of it leaves
through `steps`, one StepOutput for all sequences of a step. Each submitted request ends exactly once:
with a delta that has a finish reason for each of its choices, or in `StepOutput.failed`; an aborted or
withdrawn one just stops.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.ids import RequestId
from kvolt.core.request import Request


class Engine(Protocol):
    """The port. Capability protocols (Prefill, KvMovable, ...) are separate and optional."""

    @property
    def card(self) -> ModelCard:
        """The model served; the same for every instance that serves it. Known before `start`."""
        ...

    async def start(self) -> EngineInfo:
        """Load and be ready to compute."""
        ...

    def submit(self, request: Request) -> None:
        """Take a request. InvalidRequest or Unsupported when it can never run here; Overloaded when full."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Stop a request wherever it is and free what it holds. Unknown ids are no error."""
        ...

    async def withdraw(self, request_id: RequestId) -> bool:
        """Take a request back if it has not started; whether that was so."""
        ...

    def steps(self) -> AsyncIterator[StepOutput]:
        """The engine's output, without end. One reader. When it raises, the engine is dead."""
        ...

    async def close(self) -> None:
        """Stop computing and free everything; `steps` ends."""
        ...
