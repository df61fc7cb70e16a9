"""Loads and unloads LoRA adapters on all workers of a model; for the admin port. Bodies are as vLLM's.

The response is sent once this frontend can route by the change, or after a time-out, so that the client can use the
adapter in its next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvolt.core.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from kvolt.frontend.admin.worker_commands import CommandOutcome, send_to_workers
from kvolt.frontend.model import Model
from kvolt.frontend.models import Models
from kvolt.frontend.openai_api.decoding import RequestDecoder
from kvolt.runtime.runtime import Runtime
from kvolt.worker.control import LoadLora, UnloadLora

_POLL_S = 0.02
_MAX_POLLS = 100
"""Two seconds for the change to arrive through discovery."""

_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: _Name
    """Name of the adapter in requests."""
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Directory with adapter_config.json and adapter_model.safetensors, on each worker's machine."""
    model: str | None = None
    """Base model; may be omitted if there is only one model."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: _Name
    model: str | None = None
    """Base model to unload from; default: all."""


class AdapterChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of one worker."""

    model: str
    instance: str
    process: str
    loras: tuple[str, ...] = ()
    """Adapters that are loaded now."""
    error: str | None = None


_load = RequestDecoder(LoadAdapter)
_unload = RequestDecoder(UnloadAdapter)


async def load_adapter(runtime: Runtime, models: Models, body: bytes) -> list[AdapterChange]:
    """Load an adapter on all workers; one result per worker. If all fail, raises the first error."""
    body_fields = _load.decode(body).request
    model = models.single_model() if body_fields.model is None else _base(models, body_fields.model)
    name = body_fields.lora_name
    _check_free(models, name, model)
    # No time limit here: the engine limits how long loading may take.
    limits = msgspec.structs.replace(runtime.options.deadlines, first_s=runtime.options.deadlines.total_s)
    generations = models.revisions(model.card.name)
    outcomes = await send_to_workers(runtime, generations, LoadLora(name, body_fields.lora_path), limits)
    if not outcomes:
        raise Unavailable(
            f"model {model.card.name!r} has no workers", endpoint=model.card.name, reason="no_workers"
        )
    succeeded = _succeeded(outcomes)
    await _wait_known(generations, name, succeeded, present=True)
    return [_change(outcome) for outcome in outcomes]


async def unload_adapter(runtime: Runtime, models: Models, body: bytes) -> list[AdapterChange]:
    """Unload an adapter; a result for each worker that had it or failed. Raises NotFound if no worker had it."""
    body_fields = _unload.decode(body).request
    name = body_fields.lora_name
    bases = models.all() if body_fields.model is None else [_base(models, body_fields.model)]
    generations = [model for base in bases for model in models.revisions(base.card.name)]
    # Asks all workers, not only those known to have it: a load may not have arrived through discovery yet.
    outcomes = [
        outcome
        for outcome in await send_to_workers(runtime, generations, UnloadLora(name))
        if not isinstance(outcome.error, NotFound | Unsupported)
    ]
    if not outcomes:
        known = ", ".join(model.name for model in models.adapters()) or "none"
        raise NotFound(
            f"adapter {name!r} is not loaded (loaded: {known})", kind="lora", name=name, param="lora_name"
        )
    succeeded = _succeeded(outcomes)
    await _wait_known(generations, name, succeeded, present=False)
    return [_change(outcome) for outcome in outcomes]


def _base(models: Models, name: str) -> Model:
    model = models.find(name)
    if model.lora is not None:
        raise InvalidRequest(
            f"{name!r} is an adapter of {model.card.name!r}: specify that model", param="model"
        )
    return model


def _check_free(models: Models, name: str, model: Model) -> None:
    """Raise InvalidRequest if requests with this name would get another model or adapter."""
    try:
        existing = models.find(name)
    except NotFound:
        return
    if existing.lora is None or existing.card.name != model.card.name:
        kind = "a model" if existing.lora is None else f"an adapter of {existing.card.name!r}"
        raise InvalidRequest(f"the name {name!r} belongs to {kind}: choose another", param="lora_name")


def _succeeded(outcomes: Sequence[CommandOutcome]) -> set[str]:
    """Instances that succeeded. If all failed, raises the first error."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) < len(outcomes):
        return {outcome.instance.id for outcome in outcomes if outcome.error is None}
    if isinstance(errors[0], InvalidRequest):  # with the field name of this API
        raise InvalidRequest(errors[0].message, param="lora_path") from errors[0]
    raise errors[0]


async def _wait_known(generations: Sequence[Model], name: str, succeeded: set[str], *, present: bool) -> None:
    """Wait until these workers are known to have (or not to have) the adapter; return silently after a time-out."""

    for _ in range(_MAX_POLLS):
        holders_now = {
            holder for model in generations for holder in model.registrations.registered_with(name)
        }
        if succeeded <= holders_now if present else not succeeded & holders_now:
            return
        await asyncio.sleep(_POLL_S)


def _change(outcome: CommandOutcome) -> AdapterChange:
    instance, error = outcome.instance, outcome.error
    return AdapterChange(
        outcome.model,
        instance.id,
        instance.process,
        outcome.answer.loras,
        error.message if error is not None else None,
    )
