"""Query-only requests: return the workers that a request would be routed to, without sending it.

The response has no choices. `nvext.worker_id` and `nvext.token_ids` match Dynamo's response to `query_instance_id`, so
that a gateway can send the tokenized request to that worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from kvolt.core.errors import DeadlineExceeded, InvalidRequest, KvoltError
from kvolt.core.request import Handoff, Request
from kvolt.frontend.answers.answer import AnswerSpec, decode_worker_fields, prefill_worker_fields
from kvolt.frontend.openai_api.serializer import DONE, Envelope
from kvolt.journey.journey import JourneyContext
from kvolt.journey.links import with_link_costs
from kvolt.journey.prefill_mode import PrefillMode
from kvolt.router.port import Decision, Router


async def query_body(
    spec: AnswerSpec, journey_context: JourneyContext, request: Request, timeout_s: float, streams: bool
) -> bytes:
    """Route the request and build the response body, as an event if streamed. Raises routing errors."""
    try:
        async with asyncio.timeout(timeout_s):
            workers, decision = await _workers(journey_context, request)
    except TimeoutError:
        raise DeadlineExceeded(
            f"no worker was available within {timeout_s:g} s (stage: route)", stage="route", after_s=timeout_s
        ) from None
    routed: dict[str, float] = {"overlap_blocks": decision.overlap_blocks}
    if decision.predicted_ms is not None:
        routed["predicted_ttft_ms"] = decision.predicted_ms
    nvext = {"worker_id": workers, "token_ids": spec.prompts[0], "routed": routed}
    kind = spec.serializer.chunk if streams else spec.serializer.whole
    envelope = Envelope(spec.envelope_fields(kind), False)
    if streams:
        return envelope.last_event({"nvext": nvext}) + DONE
    num_tokens = len(spec.prompts[0])
    usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    return envelope.body([], usage, {"nvext": nvext})


async def _workers(journey_context: JourneyContext, request: Request) -> tuple[dict[str, Any], Decision]:
    """Route as the journey does."""
    mode, prefill_target = journey_context.prefill_modes.plan(request)
    if prefill_target is None or mode is not PrefillMode.REMOTE:
        router = (
            prefill_target.router
            if prefill_target is not None and mode is PrefillMode.PREFILL_WORKER
            else journey_context.router
        )
        decision = await _route(router, request)
        return decode_worker_fields(decision), decision
    prefill_fields: dict[str, Any] = {}
    with contextlib.suppress(KvoltError):  # on failure the decode worker prefills locally
        prompt = await prefill_target.route_prompt(msgspec.structs.replace(request, prefill_only=True))
        prefill_target.router.release(prompt, None)
        prefill_fields = prefill_worker_fields(prompt)
        handoff = Handoff(ticket=b"", prefill_instance=prompt.instance.id)
        request = msgspec.structs.replace(request, handoff=handoff)
        request = with_link_costs(request, journey_context.prefill_modes.link_costs_from(prompt.instance.id))
    decision = await _route(journey_context.router, request)
    return prefill_fields | decode_worker_fields(decision), decision


async def _route(router: Router, request: Request) -> Decision:
    decision = await router.route(request)
    router.release(decision, None)
    return decision


def check_one(requests: list[Request], param: str) -> Request:
    """Raise InvalidRequest unless there is exactly one prompt."""
    if len(requests) > 1:
        raise InvalidRequest("a query-only request must have exactly one prompt", param=param)
    return requests[0]
