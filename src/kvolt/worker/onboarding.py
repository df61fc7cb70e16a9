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


async def bring_back(
    tiering: Tiering,
    request: Request,
    keys: tuple[BlockKey, ...],
    requests: OpenRequests,
    submit: Callable[[Request], None],
    then: Callable[[], Coroutine[Any, Any, None]] | None,
) -> None:
    """Bring what tiers have of a prompt, then give the request to the engine, or go on with `then`."""
    request_id = request.request_id
    try:
        onboarded = await tiering.onboard(request, keys)
        if then is not None:
            await _meanwhile(tiering, request, then())
            return
        entry = requests.get(request_id)
        if entry is None:  # its caller has gone meanwhile
            tiering.let_go(request_id)
            return
        if onboarded.num_blocks:
            entry.stages = onboarded.stages
        requests.enter(entry)
        submit(request)
        came = await tiering.bring_ahead(request_id)
        if came.num_blocks:
            entry.stages = came.stages
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


async def _meanwhile(tiering: Tiering, request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, while what is to come ahead of the prompt's computation comes: of most requests nothing is."""
    try:
        if not tiering.is_coming(request.request_id):
            await work
            return
        async with Scope("meanwhile") as scope:
            scope.start(tiering.bring_ahead(request.request_id), "bring ahead")
            await work
            scope.cancel()
    except asyncio.CancelledError:
        if not request.prefill_only:  # of that the blocks may be others' by now
            tiering.let_go(request.request_id)
        raise
