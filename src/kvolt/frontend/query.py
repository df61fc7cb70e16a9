"""Where would this request go? An answer without choices that names the worker, and the one that would compute its
prompt if that is another; nothing is sent to either.

`nvext.worker_id` and `nvext.token_ids` are as Dynamo's answers to `query_instance_id`, so that whoever asks can send
the request to that worker with its prompt as it was tokenized here.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from kvolt.core.errors import DeadlineExceeded, InvalidRequest, KvoltError
from kvolt.core.request import Handoff, Request
from kvolt.frontend.answers.answer import Plan, prefill_told, workers_told
from kvolt.frontend.openai_api.serializer import DONE, Envelope
from kvolt.journey.journey import Road
from kvolt.journey.links import with_links
from kvolt.journey.prefill_mode import Way
from kvolt.router.port import Decision, Router


async def query_body(plan: Plan, road: Road, request: Request, timeout_s: float, streams: bool) -> bytes:
    """The body of the answer, an event if it is asked for as a stream. Raises what routing raises."""
    try:
        async with asyncio.timeout(timeout_s):
            workers, decision = await _workers(road, request)
    except TimeoutError:
        raise DeadlineExceeded(
            f"no worker within {timeout_s:g} s (route)", stage="route", after_s=timeout_s
        ) from None
    routed: dict[str, float] = {"overlap_blocks": decision.overlap_blocks}
    if decision.predicted_ms is not None:
        routed["predicted_ttft_ms"] = decision.predicted_ms
    told = {"worker_id": workers, "token_ids": plan.prompts[0], "routed": routed}
    wording = plan.wording
    fields = {
        "id": wording.id_prefix + plan.request_id,
        "object": wording.chunk if streams else wording.whole,
        "created": plan.created,
        "model": plan.model,
    }
    if streams:
        return Envelope(fields, False).last_event({"nvext": told}) + DONE
    num_tokens = len(plan.prompts[0])
    usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    return Envelope(fields, False).body([], usage, {"nvext": told})


async def _workers(road: Road, request: Request) -> tuple[dict[str, Any], Decision]:
    """As the journey would find them."""
    way, leg = road.ways.plan(request)
    if leg is None or way is not Way.SPLIT:
        router = leg.router if leg is not None and way is Way.THERE else road.router
        decision = await _route(router, request)
        return workers_told(decision), decision
    told: dict[str, Any] = {}
    with contextlib.suppress(KvoltError):  # then whoever answers computes the prompt
        prompt = await leg.place(msgspec.structs.replace(request, prefill_only=True))
        leg.router.free(prompt, None)
        told = prefill_told(prompt)
        handoff = Handoff(ticket=b"", prefill_instance=prompt.instance.id)
        request = msgspec.structs.replace(request, handoff=handoff)
        request = with_links(request, road.ways.links_from(prompt.instance.id))
    decision = await _route(road.router, request)
    return told | workers_told(decision), decision


async def _route(router: Router, request: Request) -> Decision:
    decision = await router.route(request)
    router.free(decision, None)
    return decision


def check_one(requests: list[Request], param: str) -> Request:
    """InvalidRequest for several: an answer names one worker."""
    if len(requests) > 1:
        raise InvalidRequest("a query for a worker has one prompt", param=param)
    return requests[0]
