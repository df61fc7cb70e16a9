"""Decode-first: who computes a prompt and who answers have a request at the same time.

Knows the order of things: a place among the prefill workers, then a number by which the two find each other, then both
are at it. What is known of the prompt is `Prompt`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kvolt.core.errors import Cancelled, DeadlineExceeded, KvoltError
from kvolt.core.ids import RequestId
from kvolt.core.request import LinkCosts, Rendezvous, Request
from kvolt.journey.prefill import PrefillCall
from kvolt.journey.remote_prompt import Prompt
from kvolt.journey.rendezvous import new_meeting
from kvolt.runtime.endpoint.call import Deadlines

_PLACE_S = 5.0
"""For a prefill worker to have room, while a decode worker has the request already."""


async def meet(
    prompt: Prompt,
    request: Request,
    attempt: int,
    links: LinkCosts | None,
    time_left: Callable[[], Deadlines],
    is_over: Callable[[], bool],
) -> Request:
    """The request as its decode worker gets it: with where it meets who computes the prompt, who has it at the same
    time. Where nobody does, it computes the prompt itself. `links`: to where it is answered. `is_over`: whether nobody
    wants it any more."""
    alone = msgspec.structs.replace(request, rendezvous=None)
    prompt.stop()  # for a decode worker that has failed
    if request.is_resumed or not prompt.leg.candidates():
        return alone
    # By a name of its own: the prompt of an attempt before may still be let go of there.
    request_id = prompt.request.request_id
    call = prompt.new_call(RequestId(f"{request_id}/{attempt}"))
    wait_s = min(_PLACE_S, time_left().total_s)
    try:
        async with asyncio.timeout(wait_s):
            decision = await call.place(frozenset(), links)
    except TimeoutError:
        late = f"no prefill worker has room within {wait_s:g} s"
        prompt.fail(DeadlineExceeded(late, stage="route", after_s=wait_s))
        return alone
    except KvoltError as error:
        prompt.fail(error)
        return alone
    meeting = new_meeting(decision.instance)
    if meeting is None or is_over():
        call.give_up()
        return alone
    prompt.begin(call)
    prompt.crew.start(_push(prompt, call, meeting, time_left), f"prompt {request_id}")
    return msgspec.structs.replace(request, rendezvous=meeting)


async def _push(
    prompt: Prompt, call: PrefillCall, meeting: Rendezvous, time_left: Callable[[], Deadlines]
) -> None:
    """Beside the answer, which comes without it as well."""
    is_computed = False
    try:
        await call.compute(time_left(), meeting)
        is_computed = True
    except KvoltError as error:
        if not isinstance(error, Cancelled):
            prompt.fail(error)
    finally:
        prompt.end(call, is_computed)
