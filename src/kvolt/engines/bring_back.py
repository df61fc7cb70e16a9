"""A request on its way into an engine by way of the tiers below it: what they have of its prompt is brought first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvolt.core.errors import EngineFailed, KvoltError
from kvolt.core.ids import BlockKey, RequestId
from kvolt.core.request import Request
from kvolt.engines.tiering import Onboarded, Tiering
from kvolt.engines.worker_metrics import FAILED
from kvolt.engines.worker_open import OpenRequests

log = logging.getLogger(__name__)


async def bring_back(
    tiering: Tiering,
    request: Request,
    keys: tuple[BlockKey, ...],
    requests: OpenRequests,
    submit: Callable[[Request], None],
    then: Coroutine[Any, Any, None] | None,
) -> None:
    """Bring what tiers have of a prompt, then give the request to the engine, or go on with `then`."""
    request_id = request.request_id
    is_begun = False
    try:
        onboarded = await tiering.onboard(request, keys)
        is_begun = then is not None
        if then is not None:
            tiering.submitted(request_id)
            try:
                await then
            except asyncio.CancelledError:
                if not request.prefill_only:  # of that the blocks may be others' by now
                    tiering.let_go(request_id)
                raise
            return
        entry = requests.get(request_id)
        if entry is None:  # its caller has gone meanwhile
            tiering.let_go(request_id)
            return
        if onboarded.num_blocks:
            entry.stages = onboarded.stages
        requests.enter(entry)
        submit(request)
        tiering.submitted(request_id, lambda came: _tell_stages(requests, request_id, came))
    except Exception as error:  # one request's, whatever it was
        failure = (
            error if isinstance(error, KvoltError) else EngineFailed(f"it failed ({type(error).__name__})")
        )
        if failure is not error:
            log.exception("bringing back KV for %s failed", request_id)
        tiering.let_go(request_id)
        entry = requests.close(request_id, FAILED)
        if entry is not None:
            entry.stream.end(failure)
    finally:
        if then is not None and not is_begun:
            then.close()


def _tell_stages(requests: OpenRequests, request_id: RequestId, came: Onboarded) -> None:
    entry = requests.get(request_id)
    if entry is not None:
        entry.stages = came.stages
