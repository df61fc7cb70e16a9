"""A request that was sent to a worker is asked back before it has begun. Asked at the worker's control endpoint.

If it had not begun, its own stream ends with Unavailable and this reason: that is what counts for whoever waits there,
and comes even where the answer is lost.

A prompt that a worker has computed for others is asked back likewise, when nobody will fetch it: its blocks are let go.
"""

from __future__ import annotations

import msgspec

from kvolt.core.errors import KvoltError, Unavailable
from kvolt.core.ids import RequestId

_REASON = "withdrawn"


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    request_id: RequestId


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """Whether it had not begun; then nothing of it is or will be computed there. Of a prompt that was computed for
    others: whether its blocks were still there to be let go."""

    is_back: bool


def withdrawn_error() -> Unavailable:
    """What ends the stream of a request that was given back."""
    return Unavailable("the request was given back before it had begun", reason=_REASON, gpu_work="none")


def was_withdrawn(error: KvoltError | None) -> bool:
    return isinstance(error, Unavailable) and error.fields.get("reason") == _REASON
