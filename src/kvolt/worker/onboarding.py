"""Onboarding: fetches the blocks of a prompt from lower tiers before the engine gets the request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvolt.core.errors import EngineFailed, KvoltError
from kvolt.core.ids import BlockKey
from kvolt.core.request import Request
from kvolt.runtime.tasks import Scope
from kvolt.worker.metrics import FAILED
from kvolt.worker.open_requests import OpenRequests
from kvolt.worker.tiering import Tiering

log = logging.getLogger(__name__)


async def onboard_then_submit(
    tiering: Tiering,
    request: Request,
    keys: tuple[BlockKey, ...],
    requests: OpenRequests,
    submit: Callable[[Request], None],
    then: Callable[[], Coroutine[Any, Any, None]] | None,
) -> None:
    """Onboard the prompt's blocks, then submit the request to the engine or run `then`."""
    request_id = request.request_id
    try:
        onboarded = await tiering.onboard(request, keys)
        if then is not None:
            await _run_concurrently(tiering, request, then())
            return
        entry = requests.get(request_id)
        if entry is None:  # cancelled while blocks were onboarded
            tiering.release_kept(request_id)
            return
        if onboarded.num_blocks:
            entry.stages = onboarded.stages
        requests.mark_submitted(entry)
        submit(request)
        onboarded = await tiering.onboard_concurrently(request_id)
        if onboarded.num_blocks:
            entry.stages = onboarded.stages
    except Exception as error:  # fails this request only
        failure = (
            error
            if isinstance(error, KvoltError)
            else EngineFailed(f"onboarding failed ({type(error).__name__})")
        )
        if failure is not error:
            log.exception("onboarding failed: request=%s", request_id)
        tiering.release_kept(request_id)
        entry = requests.close(request_id, FAILED)
        if entry is not None:
            entry.stream.end(failure)


async def _run_concurrently(tiering: Tiering, request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Run the handoff, and concurrent onboarding beside it if there is any."""
    try:
        if not tiering.has_concurrent(request.request_id):
            await work
            return
        async with Scope("onboarding") as scope:
            scope.start(tiering.onboard_concurrently(request.request_id), "onboard")
            await work
            scope.cancel()
    except asyncio.CancelledError:
        if not request.prefill_only:  # a prefill-only request may have handed its blocks over
            tiering.release_kept(request.request_id)
        raise
