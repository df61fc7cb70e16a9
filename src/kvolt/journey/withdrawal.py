"""Asks a worker for a request back that it has not begun, or to let go of a prompt that it has computed for others."""

from __future__ import annotations

import logging

import msgspec

from kvolt.core.endpoints import CONTROL
from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId
from kvolt.core.withdrawal import Withdraw, Withdrawn
from kvolt.runtime.endpoint.address import EndpointAddress, Instance
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import open_stream
from kvolt.runtime.plane.port import Destination, RequestPlane
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_ASK_S = 2.0
_LIMITS = Deadlines(connect_s=_ASK_S, first_s=_ASK_S, between_s=_ASK_S, total_s=_ASK_S)
"""The other place is kept for it meanwhile."""

_decode_answer = msgspec.msgpack.Decoder(Withdrawn).decode


async def ask_back(plane: RequestPlane, instance: Instance, request_id: RequestId) -> bool:
    """Whether it was given back: then its stream ends, too. A worker that cannot be asked keeps it."""
    endpoint = EndpointAddress(instance.endpoint.namespace, instance.endpoint.component, CONTROL)
    to = Destination(instance.address, str(endpoint))
    try:
        async with await open_stream(plane, to, Withdraw(request_id), _LIMITS, _decode_answer) as answers:
            answer: Withdrawn | None = await anext(answers, None)
    except KvoltError as error:
        log.debug("request %s could not be taken back: %s", request_id, error.message)
        return False
    return answer is not None and answer.is_back


def let_go(crew: Crew, plane: RequestPlane, instance: Instance, request_id: RequestId) -> None:
    """Tell a prefill worker that nobody will fetch the KV of a prompt. Nobody waits for that; what it is not told of it
    keeps until its time is over."""
    if not crew.closed:
        crew.start(ask_back(plane, instance, request_id), f"let go {request_id}")
