"""States, events and actions of the journey machine. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvolt.core.errors import KvoltError
from kvolt.core.ids import InstanceId
from kvolt.router.port import Decision


class JourneyState(StrEnum):
    NEW = "new"
    PREFILLING = "prefilling"
    """A prefill worker computes the prompt, or one is being routed to."""
    ROUTING = "routing"
    OPENING = "opening"
    WAITING = "waiting"
    """A worker has the request and has sent no token."""
    STREAMING = "streaming"
    REROUTING = "rerouting"
    """The worker was lost mid-answer; another one is being chosen."""
    REOPENING = "reopening"
    MIGRATING = "migrating"
    """Another worker has the request and has sent no further token."""
    DONE = "done"


class GpuWork(StrEnum):
    """GPU work spent on a failed request."""

    NONE = "none"
    UNKNOWN = "unknown"
    """A worker had the request and was lost or failed before the first token."""
    SOME = "some"


# --- events


class Start(NamedTuple):
    is_remote_prefill: bool = False
    """Prefill-first: the prompt is computed by a prefill worker before the answer is routed."""


class Prefilled(NamedTuple):
    """The prompt's KV is ready for a decode worker."""


class PrefillFailed(NamedTuple):
    error: KvoltError
    instance_id: InstanceId | None
    """Worker that failed; None if the request was sent to none."""


class Routed(NamedTuple):
    decision: Decision


class Opened(NamedTuple):
    pass


class Delivered(NamedTuple):
    """New output has reached the receiver. Reported no later than the end of the call."""


class Failed(NamedTuple):
    error: KvoltError


class WithdrawalConfirmed(NamedTuple):
    """The worker returned the waiting request; another worker is reserved for it."""

    decision: Decision


class Finished(NamedTuple):
    pass


class Stopped(NamedTuple):
    """The caller cancelled."""


Event = (
    Start
    | Prefilled
    | PrefillFailed
    | Routed
    | Opened
    | Delivered
    | Failed
    | WithdrawalConfirmed
    | Finished
    | Stopped
)


# --- actions


class Prefill(NamedTuple):
    excluded: frozenset[InstanceId]
    """Workers that failed to compute this prompt."""


class Route(NamedTuple):
    excluded: frozenset[InstanceId]
    """Instances that failed this request."""
    unreachable: frozenset[InstanceId] = frozenset()
    """Excluded only because they were unreachable: candidates again once they are back, if no other is left."""


class Open(NamedTuple):
    decision: Decision


class Wait(NamedTuple):
    pass


class End(NamedTuple):
    error: KvoltError | None


Action = Prefill | Route | Open | Wait | End
