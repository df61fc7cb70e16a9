"""Requests with remote prefill: the worker's part before the engine gets them, or instead.

Runs in a task per request, since it waits for a peer. Other requests have no task.
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
from kvolt.engines.contract import Engine, KvAddressable, Prefill
from kvolt.worker.engine_handoffs import EngineHandoffs
from kvolt.worker.handoffs import Handoffs, PullResult
from kvolt.worker.kv_moving import KvMover
from kvolt.worker.metrics import FAILED, FINISHED
from kvolt.worker.open_requests import OpenRequests
from kvolt.worker.rendezvous import RendezvousEngine

log = logging.getLogger(__name__)


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
    request_id = request.request_id
    failure: KvoltError
    pulled: PullResult | None
    try:
        rendezvous = request.rendezvous
        if request.prefill_only:
            if rendezvous is None:
                handoff = await handoffs.serve_prefill(request, instance)
            else:
                handoff = await handoffs.serve_rendezvous(request, rendezvous, instance)
            entry = requests.close(request_id, FINISHED)
            if entry is not None:
                requests.on_first_token(entry, handoff.cached_tokens or 0)
                entry.stream.send(Delta(handoff=handoff, cached_tokens=handoff.cached_tokens))
                entry.stream.end()
            return
        if rendezvous is not None:
            received = await handoffs.pull_rendezvous(request, rendezvous, keep_for=request_id)
            pulled = received
            if (entry := requests.get(request_id)) is not None:
                entry.transferred_blocks = received.num_blocks
        else:
            assert request.handoff is not None
            pulled = await handoffs.pull(request.handoff, keep_for=request_id)
        entry = requests.get(request_id)
        if entry is not None:  # not cancelled during the pull
            entry.stages = None if pulled is None else pulled.stages
            requests.mark_submitted(entry)
            submit(request)
        else:
            handoffs.release_kept(request_id)
        return
    except KvoltError as error:
        failure = error
    except Exception as error:  # fails this request only
        log.exception("handoff failed: request=%s", request_id)
        failure = EngineFailed(f"the handoff failed ({type(error).__name__})")
    if not request.prefill_only:
        handoffs.release_kept(request_id)  # the engine did not get the request
    entry = requests.close(request_id, FAILED)
    if entry is not None:
        entry.stream.end(failure)


def without_transferred(delta: Delta, num_tokens: int) -> Delta:
    """Do not report transferred prompt tokens as cached: a prefill worker computed them for this request."""
    if delta.cached_tokens is not None:
        delta = msgspec.structs.replace(delta, cached_tokens=max(delta.cached_tokens - num_tokens, 0))
    if delta.usage is not None:
        cached_tokens = max(delta.usage.cached_tokens - num_tokens, 0)
        usage = msgspec.structs.replace(delta.usage, cached_tokens=cached_tokens)
        delta = msgspec.structs.replace(delta, usage=usage)
    return delta
