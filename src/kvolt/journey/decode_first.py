"""Decode-first: prefill and decode worker have a request at the same time.

A prefill worker is reserved, a rendezvous is created, then both workers start. `RemotePrompt` tracks the prefill.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.errors import Cancelled, DeadlineExceeded, KvoltError
from kvolt.core.ids import RequestId
from kvolt.core.request import RENDEZVOUS_ADDRESS_KEY, LinkCosts, Rendezvous, Request
from kvolt.journey.prefill import PrefillCall
from kvolt.journey.remote_prompt import RemotePrompt
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.plane.wire import MALFORMED

_RESERVE_S = 5.0
"""Longest wait for a prefill worker; the decode worker is reserved already."""
_MAILBOX_BITS = 62
"""Mailboxes of a prompt's parts are numbered from the rendezvous' and must fit 64 bits."""

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


async def open_rendezvous(
    prompt: RemotePrompt,
    request: Request,
    attempt: int,
    links: LinkCosts | None,
    time_left: Callable[[], Deadlines],
    is_done: Callable[[], bool],
) -> Request:
    """Start prefill and return the request for the decode worker, with the rendezvous address.

    Without a prefill worker the decode worker computes the prompt itself. `links`: transfer costs to the decode worker.
    `is_done`: whether the journey has ended.
    """
    local_request = msgspec.structs.replace(request, rendezvous=None)
    prompt.cancel()  # prefill for a decode worker that failed
    if request.has_prior_tokens or not prompt.target.candidates():
        return local_request
    # An id per attempt: the previous attempt's prompt may still be released on the same worker.
    request_id = prompt.request.request_id
    call = prompt.new_call(RequestId(f"{request_id}/{attempt}"))
    wait_s = min(_RESERVE_S, time_left().total_s)
    try:
        async with asyncio.timeout(wait_s):
            decision = await call.reserve(frozenset(), links)
    except TimeoutError:
        late = f"no prefill worker has room within {wait_s:g} s"
        prompt.count_failure(DeadlineExceeded(late, stage="route", after_s=wait_s))
        return local_request
    except KvoltError as error:
        prompt.count_failure(error)
        return local_request
    rendezvous = _new_rendezvous(decision.instance)
    if rendezvous is None or is_done():
        call.release()
        return local_request
    prompt.start_call(call)
    prompt.task_group.start(_run_prefill(prompt, call, rendezvous, time_left), f"prompt {request_id}")
    return msgspec.structs.replace(request, rendezvous=rendezvous)


def _new_rendezvous(prefill: Instance) -> Rendezvous | None:
    """None if the worker published no rendezvous address."""
    try:
        address = _decode_info(prefill.info).transfer_addresses.get(RENDEZVOUS_ADDRESS_KEY)
    except MALFORMED:
        return None
    return None if address is None else Rendezvous(secrets.randbits(_MAILBOX_BITS), address)


async def _run_prefill(
    prompt: RemotePrompt, call: PrefillCall, rendezvous: Rendezvous, time_left: Callable[[], Deadlines]
) -> None:
    is_computed = False
    try:
        await call.compute(time_left(), rendezvous)
        is_computed = True
    except KvoltError as error:
        if not isinstance(error, Cancelled):
            prompt.count_failure(error)
    finally:
        prompt.finish_call(call, is_computed)
