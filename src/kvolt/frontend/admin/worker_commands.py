"""Sends operators' commands to workers over their control endpoint and collects the results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from kvolt.core.endpoints import CONTROL, EndpointAddress, Instance
from kvolt.core.errors import KvoltError, Unsupported
from kvolt.frontend.model import Model
from kvolt.frontend.models import Models
from kvolt.runtime.endpoint.call import Deadlines, open_stream
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.runtime import Runtime
from kvolt.worker.control import ClearKv, CommandResult, WorkerCommand

_decode_answer = msgspec.msgpack.Decoder(CommandResult).decode
_NO_ANSWER = CommandResult()


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """Result of one worker: a response or an error."""

    model: str
    instance: Instance
    answer: CommandResult = _NO_ANSWER
    error: KvoltError | None = None


async def send_to_workers(
    runtime: Runtime, models: Iterable[Model], command: WorkerCommand, deadlines: Deadlines | None = None
) -> list[CommandOutcome]:
    """Send a command to all workers of these models, including cordoned and prefill workers, one after the other.

    A failure of one worker does not affect the others.
    """
    limits = deadlines or runtime.options.deadlines
    outcomes: list[CommandOutcome] = []
    for model in models:
        for instance in model.workers():
            try:
                answer = await _send(runtime, instance, command, limits)
            except KvoltError as error:
                outcomes.append(CommandOutcome(model.card.name, instance, error=error))
            else:
                outcomes.append(CommandOutcome(model.card.name, instance, answer))
    return outcomes


async def _send(
    runtime: Runtime, instance: Instance, command: WorkerCommand, limits: Deadlines
) -> CommandResult:
    endpoint = EndpointAddress(instance.endpoint.namespace, instance.endpoint.component, CONTROL)
    to = Destination(instance.address, str(endpoint), instance.identity)
    async with await open_stream(runtime.plane, to, command, limits, _decode_answer) as stream:
        answer: CommandResult | None = await anext(stream, None)
    if answer is None:
        raise KvoltError(f"{instance.process or instance.address} sent no response")
    return answer


class Clearing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of one worker."""

    model: str
    instance: str
    process: str
    cleared_blocks: int | None = None
    error: str | None = None


async def clear_kv_blocks(runtime: Runtime, models: Models) -> list[Clearing]:
    """Clear the KV blocks of all workers; one result per worker. Raises Unsupported if no worker supports it."""
    outcomes = await send_to_workers(runtime, models.all(), ClearKv())
    refusals = [outcome.error for outcome in outcomes if isinstance(outcome.error, Unsupported)]
    if refusals and len(refusals) == len(outcomes):
        raise refusals[0]
    return [_clearing(outcome) for outcome in outcomes]


def _clearing(outcome: CommandOutcome) -> Clearing:
    instance, error = outcome.instance, outcome.error
    return Clearing(
        outcome.model,
        instance.id,
        instance.process,
        outcome.answer.cleared_blocks,
        error.message if error is not None else None,
    )
