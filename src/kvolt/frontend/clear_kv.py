"""Clears the KV caches of all workers that this frontend knows, for its admin port."""

from __future__ import annotations

import msgspec

from kvolt.core.errors import KvoltError, Unsupported
from kvolt.engines.endpoints import CONTROL
from kvolt.engines.worker_control import ClearKv, WorkerAnswer
from kvolt.frontend.models import Models
from kvolt.runtime.address import EndpointAddress, Instance
from kvolt.runtime.client import open_stream
from kvolt.runtime.plane import Destination
from kvolt.runtime.runtime import Runtime

_decode_answer = msgspec.msgpack.Decoder(WorkerAnswer).decode


class Clearing(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of it at one worker."""

    model: str
    instance: str
    process: str
    cleared_blocks: int | None = None
    error: str | None = None


async def clear_kv_blocks(runtime: Runtime, models: Models) -> list[Clearing]:
    """Ask one worker after the other. One that fails is told in the list; it keeps no other from being asked.

    Unsupported when there are workers and none of them has such a thing.
    """
    results: list[Clearing] = []
    refusals: list[Unsupported] = []
    for model in models.all():
        for instance in model.client.instances():
            cleared, message = None, None
            try:
                cleared = await _clear(runtime, instance)
            except KvoltError as error:
                message = error.message
                if isinstance(error, Unsupported):
                    refusals.append(error)
            results.append(Clearing(model.card.name, instance.id, instance.process, cleared, message))
    if refusals and len(refusals) == len(results):
        raise refusals[0]
    return results


async def _clear(runtime: Runtime, instance: Instance) -> int | None:
    endpoint = EndpointAddress(instance.endpoint.namespace, instance.endpoint.component, CONTROL)
    to = Destination(instance.address, str(endpoint))
    limits = runtime.options.deadlines
    async with await open_stream(runtime.plane, to, ClearKv(), limits, _decode_answer) as stream:
        answer: WorkerAnswer | None = await anext(stream, None)
    return answer.cleared_blocks if answer is not None else None
