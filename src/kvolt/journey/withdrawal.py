"""Withdrawal of a waiting request from its worker, and release of a prompt held for decode."""

from __future__ import annotations

import logging

import msgspec

from kvolt.core.endpoints import CONTROL
from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId
from kvolt.core.withdrawal import Withdraw, WithdrawResult
from kvolt.runtime.endpoint.address import EndpointAddress, Instance
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import open_stream
from kvolt.runtime.plane.port import Destination, RequestPlane
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_WITHDRAW_S = 2.0
_LIMITS = Deadlines(connect_s=_WITHDRAW_S, first_s=_WITHDRAW_S, between_s=_WITHDRAW_S, total_s=_WITHDRAW_S)
"""Short: an alternative worker stays reserved during the call."""

_decode_result = msgspec.msgpack.Decoder(WithdrawResult).decode


async def withdraw_request(plane: RequestPlane, instance: Instance, request_id: RequestId) -> bool:
    """Return whether the worker gave up the request; its stream then ends as well. Without an answer it keeps it."""
    endpoint = EndpointAddress(instance.endpoint.namespace, instance.endpoint.component, CONTROL)
    to = Destination(instance.address, str(endpoint))
    try:
        async with await open_stream(plane, to, Withdraw(request_id), _LIMITS, _decode_result) as results:
            result: WithdrawResult | None = await anext(results, None)
    except KvoltError as error:
        log.debug("withdrawal failed: request=%s reason=%s", request_id, error.message)
        return False
    return result is not None and result.was_withdrawn


def release_prompt(
    task_group: TaskGroup, plane: RequestPlane, instance: Instance, request_id: RequestId
) -> None:
    """Release a prompt's KV on a prefill worker, in the background. If the message is lost the hold expires."""
    if not task_group.closed:
        task_group.start(withdraw_request(plane, instance, request_id), f"release {request_id}")
