"""Where would this request go? An answer without choices that names the worker; nothing is sent to it.

`nvext.worker_id` and `nvext.token_ids` are as Dynamo's answers to `query_instance_id`, so that whoever asks can send
the request to that worker with its prompt as it was tokenized here.
"""

from __future__ import annotations

import asyncio

from kvolt.core.errors import DeadlineExceeded, InvalidRequest
from kvolt.core.request import Request
from kvolt.frontend.answer import Plan, workers_told
from kvolt.frontend.openai_api.wording import DONE, Envelope
from kvolt.router.port import Router


async def query_body(plan: Plan, router: Router, request: Request, timeout_s: float, streams: bool) -> bytes:
    """The body of the answer, an event if it is asked for as a stream. Raises what routing raises."""
    try:
        async with asyncio.timeout(timeout_s):
            decision = await router.route(request)
    except TimeoutError:
        raise DeadlineExceeded(
            f"no worker within {timeout_s:g} s (route)", stage="route", after_s=timeout_s
        ) from None
    router.free(decision, None)
    routed: dict[str, float] = {"overlap_blocks": decision.overlap_blocks}
    if decision.predicted_ms is not None:
        routed["predicted_ttft_ms"] = decision.predicted_ms
    told = {"worker_id": workers_told(decision), "token_ids": plan.prompts[0], "routed": routed}
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


def check_one(requests: list[Request], param: str) -> Request:
    """InvalidRequest for several: an answer names one worker."""
    if len(requests) > 1:
        raise InvalidRequest("a query for a worker has one prompt", param=param)
    return requests[0]
