"""Requests with remote prefill: what a worker does before the engine gets them, or instead of it.

One task for each such request, since it waits for a peer; requests of the usual kind have none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Delta
from kvolt.core.errors import ConfigError, EngineFailed, KvoltError, Unsupported
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.engines.contract import Engine, KvPlaced, Prefill
from kvolt.worker.engine_handoffs import EngineHandoffs
from kvolt.worker.handoffs import Handoffs, Pulled
from kvolt.worker.kv_moving import KvMover
from kvolt.worker.metrics import FAILED, FINISHED
from kvolt.worker.open_requests import OpenRequests
from kvolt.worker.rendezvous import MeetingEngine

log = logging.getLogger(__name__)


def new_handoffs(
    engine: Engine,
    info: EngineInfo,
    new_mover: Callable[[KvPlaced], KvMover] | None,
    now: Callable[[], float],
) -> Handoffs | EngineHandoffs | None:
    """For the roles that need them. ConfigError where the engine cannot move its blocks."""
    if info.role not in (Role.PREFILL, Role.DECODE):
        return None
    features = set(info.features)
    if "Prefill" in features and "KvPlaced" not in features and isinstance(engine, Prefill):
        return EngineHandoffs(engine)
    can = {"KvPlaced", "Prefill"} <= features
    reason = ""
    if can and new_mover is not None and isinstance(engine, KvPlaced):
        try:
            return Handoffs(cast("MeetingEngine", engine), new_mover(engine), now)
        except Unsupported as error:  # its blocks lie where nobody reaches them
            reason = f": {error.message}"
    raise ConfigError(
        f"a {info.role} worker moves KV, which the {info.engine} engine cannot do in this setup{reason}",
        key="role",
        remedy="serve it as aggregated",
    )


def as_expanded(request: Request) -> Request:
    """With its prompt as prefill has expanded it, if it has: nothing of that is done twice."""
    handoff = request.handoff
    if handoff is None or not (handoff.token_ids or handoff.media):
        return request
    return msgspec.structs.replace(
        request, token_ids=handoff.token_ids or request.token_ids, media=handoff.media or request.media
    )


async def hand_over(
    handoffs: Handoffs | EngineHandoffs,
    request: Request,
    requests: OpenRequests,
    submit: Callable[[Request], None],
    instance: InstanceId,
) -> None:
    """Compute a prompt for others, or go on with one that others have computed."""
    request_id = request.request_id
    failure: KvoltError
    pulled: Pulled | None
    try:
        meeting = request.rendezvous
        if request.prefill_only:
            if meeting is None:
                handoff = await handoffs.give(request, instance)
            else:
                handoff = await handoffs.push(request, meeting, instance)
            entry = requests.close(request_id, FINISHED)
            if entry is not None:
                requests.prompt_done(entry, handoff.cached_tokens or 0)
                entry.stream.send(Delta(handoff=handoff, cached_tokens=handoff.cached_tokens))
                entry.stream.end()
            return
        if meeting is not None:
            pulled = received = await handoffs.receive(request, meeting, keep_for=request_id)
            if (entry := requests.get(request_id)) is not None:
                entry.moved_blocks = received.num_blocks
        else:
            assert request.handoff is not None
            pulled = await handoffs.take(request.handoff, keep_for=request_id)
        entry = requests.get(request_id)
        if entry is not None:  # its caller has not gone meanwhile
            entry.stages = None if pulled is None else pulled.stages
            requests.enter(entry)
            submit(request)
        else:
            handoffs.let_go(request_id)
        return
    except KvoltError as error:
        failure = error
    except Exception as error:  # one request's, whatever it was
        log.exception("the handoff of %s failed", request_id)
        failure = EngineFailed(f"the handoff failed ({type(error).__name__})")
    if not request.prefill_only:
        handoffs.let_go(request_id)  # the engine would not have it
    entry = requests.close(request_id, FAILED)
    if entry is not None:
        entry.stream.end(failure)


def without_moved(delta: Delta, num_tokens: int) -> Delta:
    """So many of a prompt's tokens were computed for it elsewhere: they were found here, and nobody had them before."""
    if delta.cached_tokens is not None:
        delta = msgspec.structs.replace(delta, cached_tokens=max(delta.cached_tokens - num_tokens, 0))
    if delta.usage is not None:
        cached_tokens = max(delta.usage.cached_tokens - num_tokens, 0)
        usage = msgspec.structs.replace(delta.usage, cached_tokens=cached_tokens)
        delta = msgspec.structs.replace(delta, usage=usage)
    return delta
