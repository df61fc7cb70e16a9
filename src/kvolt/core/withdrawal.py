"""Withdrawal of a dispatched request that has not started, through the worker's control endpoint.

The stream of a withdrawn request ends with Unavailable and reason `withdrawn`. The caller relies on that error, which
arrives even if the response to Withdraw is lost. Withdrawing a prefilled prompt that no decode worker will fetch
releases its blocks.
"""

from __future__ import annotations

import msgspec

from kvolt.core.errors import KvoltError, Unavailable
from kvolt.core.ids import RequestId

_REASON = "withdrawn"


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    request_id: RequestId


class WithdrawResult(msgspec.Struct, frozen=True, tag="withdrawn"):
    """`was_withdrawn`: the request had not started and will not be computed here. For a prefilled prompt: its blocks
    were still held and are released."""

    was_withdrawn: bool


def withdrawn_error() -> Unavailable:
    """Error that ends the stream of a withdrawn request."""
    return Unavailable("the request was withdrawn before it started", reason=_REASON, gpu_work="none")


def was_withdrawn(error: KvoltError | None) -> bool:
    return isinstance(error, Unavailable) and error.fields.get("reason") == _REASON
