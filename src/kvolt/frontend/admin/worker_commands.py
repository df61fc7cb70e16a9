"""Asks workers what an operator wants of them, over their control endpoint, and tells what came of it at each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from kvolt.core.endpoints import CONTROL
from kvolt.core.errors import KvoltError
from kvolt.frontend.models import Model
from kvolt.runtime.endpoint.address import EndpointAddress, Instance
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import open_stream
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.runtime import Runtime
from kvolt.worker.control import WorkerAnswer, WorkerCommand

_decode_answer = msgspec.msgpack.Decoder(WorkerAnswer).decode
_NO_ANSWER = WorkerAnswer()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one worker said: an answer or an error."""

    model: str
    instance: Instance
    answer: WorkerAnswer = _NO_ANSWER
    error: KvoltError | None = None


async def ask_workers(
    runtime: Runtime, models: Iterable[Model], command: WorkerCommand, deadlines: Deadlines | None = None
) -> list[Outcome]:
    """Ask all workers of these models, cordoned ones and those that only prefill too, one after the other. One that
    fails keeps no other from being asked."""
    limits = deadlines or runtime.options.deadlines
    outcomes: list[Outcome] = []
    for model in models:
        for instance in model.workers():
            try:
                answer = await _ask(runtime, instance, command, limits)
            except KvoltError as error:
                outcomes.append(Outcome(model.card.name, instance, error=error))
            else:
                outcomes.append(Outcome(model.card.name, instance, answer))
    return outcomes


async def _ask(
    runtime: Runtime, instance: Instance, command: WorkerCommand, limits: Deadlines
) -> WorkerAnswer:
    endpoint = EndpointAddress(instance.endpoint.namespace, instance.endpoint.component, CONTROL)
    to = Destination(instance.address, str(endpoint))
    async with await open_stream(runtime.plane, to, command, limits, _decode_answer) as stream:
        answer: WorkerAnswer | None = await anext(stream, None)
    if answer is None:
        raise KvoltError(f"{instance.process or instance.address} ended without an answer")
    return answer
