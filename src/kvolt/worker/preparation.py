"""Work on a request before the engine gets it, or instead: onboarding from tiers, and remote prefill.

Runs in a task per request, since it waits for a tier or a peer. Other requests have no task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Delta
from kvolt.core.errors import ConfigError, EngineFailed, KvoltError, Unsupported
from kvolt.core.ids import BlockKey, InstanceId, RequestId
from kvolt.core.request import Request, Role
from kvolt.engines.contract import Engine, KvAddressable, Prefill
from kvolt.runtime.tasks import Scope
from kvolt.worker.kv.handoffs import EngineHandoffs, Handoffs, PullResult
from kvolt.worker.kv.mover import KvMover
from kvolt.worker.kv.rendezvous import RendezvousEngine
from kvolt.worker.kv.tiering import Tiering
from kvolt.worker.metrics import FAILED, FINISHED
from kvolt.worker.open_requests import OpenRequests

log = logging.getLogger(__name__)

Work = Coroutine[Any, Any, None]


def new_handoffs(
    engine: Engine,
    info: EngineInfo,
    new_mover: Callable[[KvAddressable], KvMover] | None,
    now: Callable[[], float],
) -> Handoffs | EngineHandoffs | None:
    """Handoffs for the roles prefill and decode. ConfigError if the engine cannot move its blocks."""
    if info.role not in (Role.PREFILL, Role.DECODE):
        return None
    features = set(info.features)
    if "Prefill" in features and "KvAddressable" not in features and isinstance(engine, Prefill):
        return EngineHandoffs(engine)
    can_move = {"KvAddressable", "Prefill"} <= features
    reason = ""
    if can_move and new_mover is not None and isinstance(engine, KvAddressable):
        try:
            return Handoffs(cast("RendezvousEngine", engine), new_mover(engine), now)
        except Unsupported as error:  # its blocks are in memory that cannot be mapped
            reason = f": {error.message}"
    raise ConfigError(
        f"a {info.role} worker transfers KV, which the {info.engine} engine cannot do in this setup{reason}",
        key="role",
        remedy="serve it as aggregated",
    )


def with_expanded_prompt(request: Request) -> Request:
    """The request with the prompt as expanded by prefill (media), so that it is not expanded twice."""
    handoff = request.handoff
    if handoff is None or not (handoff.token_ids or handoff.media):
        return request
    return msgspec.structs.replace(
        request, token_ids=handoff.token_ids or request.token_ids, media=handoff.media or request.media
    )


async def run_handoff(
    handoffs: Handoffs | EngineHandoffs,
    request: Request,
    requests: OpenRequests,
    submit: Callable[[Request], None],
    instance: InstanceId,
) -> None:
    """Compute a prompt for a decode worker, or pull a remote prompt's KV and submit the request."""
    request_id, rendezvous = request.request_id, request.rendezvous

    def release_kept() -> None:
        if not request.prefill_only:
            handoffs.release_kept(request_id)  # the engine did not get the request

    with _failing_one(requests, request_id, "handoff", release_kept):
        if request.prefill_only:
            if rendezvous is None:
                handoff = await handoffs.serve_prefill(request, instance)
            else:
                handoff = await handoffs.serve_rendezvous(request, rendezvous, instance)
            entry = requests.close(request_id, FINISHED)
            if entry is not None:
                requests.on_first_token(entry, handoff.cached_tokens or 0)
                delta = Delta(handoff=handoff, cached_tokens=handoff.cached_tokens, stages=entry.stages)
                entry.stream.send(delta)
                entry.stream.end()
            return
        pulled: PullResult | None
        if rendezvous is not None:
            received = pulled = await handoffs.pull_rendezvous(request, rendezvous, keep_for=request_id)
            if (entry := requests.get(request_id)) is not None:
                entry.transferred_blocks = received.num_blocks
        else:
            assert request.handoff is not None
            pulled = await handoffs.pull(request.handoff, keep_for=request_id)
        entry = requests.get(request_id)
        if entry is None:  # cancelled during the pull
            handoffs.release_kept(request_id)
            return
        if pulled is not None:
            entry.add_stages(pulled.stages)
        requests.mark_submitted(entry)
        submit(request)


async def onboard_then_submit(
    tiering: Tiering,
    request: Request,
    keys: tuple[BlockKey, ...],
    requests: OpenRequests,
    submit: Callable[[Request], None],
    then: Callable[[], Work] | None,
) -> None:
    """Onboard the prompt's blocks, then submit the request to the engine or run `then`."""
    request_id = request.request_id
    with _failing_one(requests, request_id, "onboarding", lambda: tiering.release_kept(request_id)):
        stages = await tiering.onboard(request, keys)
        entry = requests.get(request_id)
        if entry is not None:
            entry.add_stages(stages)
        if then is not None:
            await _run_concurrently(tiering, request, requests, then())
            return
        if entry is None:  # cancelled while blocks were onboarded
            tiering.release_kept(request_id)
            return
        requests.mark_submitted(entry)
        submit(request)
        entry.add_stages(await tiering.onboard_concurrently(request_id))


@contextmanager
def _failing_one(
    requests: OpenRequests, request_id: RequestId, work: str, release: Callable[[], None]
) -> Iterator[None]:
    """End only this request on an error of its work, after `release`."""
    failure: KvoltError
    try:
        yield
        return
    except KvoltError as error:
        failure = error
    except Exception as error:
        log.exception("%s failed: request_id=%s", work, request_id)
        failure = EngineFailed(f"the {work} failed ({type(error).__name__})")
    release()
    entry = requests.close(request_id, FAILED)
    if entry is not None:
        entry.stream.end(failure)


async def _run_concurrently(tiering: Tiering, request: Request, requests: OpenRequests, work: Work) -> None:
    """Run the handoff, and concurrent onboarding beside it if there is any."""

    async def onboard() -> None:
        stages = await tiering.onboard_concurrently(request.request_id)
        if (entry := requests.get(request.request_id)) is not None:
            entry.add_stages(stages)

    try:
        if not tiering.has_concurrent(request.request_id):
            await work
            return
        async with Scope("onboarding") as scope:
            scope.start(onboard(), "onboard")
            await work
            scope.cancel()
    except asyncio.CancelledError:
        if not request.prefill_only:  # a prefill-only request may have handed its blocks over
            tiering.release_kept(request.request_id)
        raise
