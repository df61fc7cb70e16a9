"""Loads and unloads LoRA adapters at all workers of a model, for the admin port. Bodies are as vLLM's.

An answer comes once this frontend would route by it, or after a moment: who loads an adapter may ask for it next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvolt.core.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from kvolt.frontend.admin.worker_commands import Outcome, ask_workers
from kvolt.frontend.models import Model, Models
from kvolt.frontend.openai_api.decoding import RequestDecoder
from kvolt.runtime.runtime import Runtime
from kvolt.worker.control import LoadLora, UnloadLora

_LOOK_S = 0.02
_MAX_LOOKS = 100
"""Two seconds for the news to come back through discovery."""

_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: _Name
    """What clients will call it."""
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """A folder with adapter_config.json and adapter_model.safetensors, on each worker's machine."""
    model: str | None = None
    """The model that it changes; may be left out where there is one."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: _Name
    model: str | None = None
    """Only there; everywhere if left out."""


class AdapterChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of it at one worker."""

    model: str
    instance: str
    process: str
    loras: tuple[str, ...] = ()
    """The adapters that it has now."""
    error: str | None = None


_load = RequestDecoder(LoadAdapter)
_unload = RequestDecoder(UnloadAdapter)


async def load_adapter(runtime: Runtime, models: Models, body: bytes) -> list[AdapterChange]:
    """One result for each worker. When none of them took it, the first one's error."""
    asked = _load.decode(body).request
    model = models.only() if asked.model is None else _base(models, asked.model)
    name = asked.lora_name
    _check_free(models, name, model)
    # The engine says itself how long loading may take.
    limits = msgspec.structs.replace(runtime.options.deadlines, first_s=runtime.options.deadlines.total_s)
    generations = models.generations(model.card.name)
    outcomes = await ask_workers(runtime, generations, LoadLora(name, asked.lora_path), limits)
    if not outcomes:
        raise Unavailable(
            f"{model.card.name!r} has no workers now", endpoint=model.card.name, reason="no_workers"
        )
    done = _done(outcomes)
    await _hear(generations, name, done, present=True)
    return [_change(outcome) for outcome in outcomes]


async def unload_adapter(runtime: Runtime, models: Models, body: bytes) -> list[AdapterChange]:
    """One result for each worker that had it, or could not be asked. NotFound when there is no such worker."""
    asked = _unload.decode(body).request
    name = asked.lora_name
    bases = models.all() if asked.model is None else [_base(models, asked.model)]
    generations = [model for base in bases for model in models.generations(base.card.name)]
    # All are asked, not only those that are known to have it: the news of a load may be on its way.
    outcomes = [
        outcome
        for outcome in await ask_workers(runtime, generations, UnloadLora(name))
        if not isinstance(outcome.error, NotFound | Unsupported)
    ]
    if not outcomes:
        known = ", ".join(model.name for model in models.adapters()) or "none"
        raise NotFound(
            f"no adapter {name!r} is loaded (there are: {known})", kind="lora", name=name, param="lora_name"
        )
    done = _done(outcomes)
    await _hear(generations, name, done, present=False)
    return [_change(outcome) for outcome in outcomes]


def _base(models: Models, name: str) -> Model:
    model = models.find(name)
    if model.lora is not None:
        raise InvalidRequest(f"{name!r} is an adapter of {model.card.name!r}: name that model", param="model")
    return model


def _check_free(models: Models, name: str, model: Model) -> None:
    """InvalidRequest for a name by which clients would get something else."""
    try:
        found = models.find(name)
    except NotFound:
        return
    if found.lora is None or found.card.name != model.card.name:
        what = "a model" if found.lora is None else f"an adapter of {found.card.name!r}"
        raise InvalidRequest(f"{what} has the name {name!r}: choose another", param="lora_name")


def _done(outcomes: Sequence[Outcome]) -> set[str]:
    """Who did it. When nobody did, the error of the first."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) < len(outcomes):
        return {outcome.instance.id for outcome in outcomes if outcome.error is None}
    if isinstance(errors[0], InvalidRequest):  # in the words of who asked
        raise InvalidRequest(errors[0].message, param="lora_path") from errors[0]
    raise errors[0]


async def _hear(generations: Sequence[Model], name: str, done: set[str], *, present: bool) -> None:
    """Wait until those workers are known to have it, or not to; give up quietly, since the news will come."""

    for _ in range(_MAX_LOOKS):
        having = {holder for model in generations for holder in model.adapters.registered(name)}
        if done <= having if present else not done & having:
            return
        await asyncio.sleep(_LOOK_S)


def _change(outcome: Outcome) -> AdapterChange:
    instance, error = outcome.instance, outcome.error
    return AdapterChange(
        outcome.model,
        instance.id,
        instance.process,
        outcome.answer.loras,
        error.message if error is not None else None,
    )
