"""A served model with its workers, and which of them may take a request.

Only decode or aggregated workers are required: without prefill workers, decode workers compute prompts themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvolt.core.card import Capacity, ModelCard, card_hash
from kvolt.core.endpoints import CARD, EndpointAddress, Instance
from kvolt.core.errors import InvalidRequest, KvoltError, NotFound, Unavailable
from kvolt.core.ids import CardHash
from kvolt.core.request import Role
from kvolt.frontend.openai_api.generation import GenerationDefaults
from kvolt.frontend.openai_api.headers import RequestHints
from kvolt.frontend.tokenization.preprocess import CardProcessor, NewProcessor, ParserNames, Processor
from kvolt.journey.journey import JourneyContext
from kvolt.journey.prefill import RoleTarget
from kvolt.journey.prefill_mode import PrefillModeRules
from kvolt.router.registrations import Registrations
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.call import open_stream
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.runtime import Runtime

_SHOWN_CHARS = 200
_SHOWN_MODELS = 8
"""Names of models in an error message, and their characters."""
_STARTING_RETRY_S = 1.0
"""Retry-After of requests for a model that is starting."""

_decode_card = msgspec.msgpack.Decoder(ModelCard).decode

_REMEDIES = {
    "vllm_xargs": "omit it, or serve the model with --engine vllm",
    "prompt_embeds": "send a prompt, or serve the model with --engine vllm --arg engine_args.enable_prompt_embeds=true "
    "(and no prefill workers)",
}


class ModelOptions(msgspec.Struct, frozen=True):
    """Operator settings for all models of a frontend."""

    cache_bytes: int = 8 * 1024 * 1024
    """Size of the tokenization cache per model."""
    parsers: ParserNames = ParserNames(None, None)
    """Override of the parsers named by the card or detected from its chat template."""
    max_attempts: int = 3
    router: RouterSettings = RouterSettings()
    migration_limit: int = 3
    """Maximum number of migrations of a started request."""
    prefill: PrefillModeRules = PrefillModeRules()
    """Rules that select prompts for prefill workers."""
    decode_first: tuple[str, ...] = ()
    """Models served decode-first, where a decode worker is reserved before the prompt is prefilled; `*`: all."""
    new_processor: NewProcessor = CardProcessor
    """Factory of the pre- and postprocessor."""


@dataclass(slots=True)
class Model:
    """A served model or LoRA adapter."""

    card: ModelCard
    processor: Processor
    client: EndpointClient
    journey_context: JourneyContext
    defaults: GenerationDefaults
    capacity: Capacity
    """Capacity of one worker; equal for all workers of a component."""
    registrations: Registrations
    root: str
    """Name under which its first worker loaded it."""
    role: Role = Role.AGGREGATED
    """Role of the workers that generate output."""
    get_prefill_target: Callable[[], RoleTarget | None] = lambda: None
    """Returns the prefill workers of the model; None until one has registered."""
    lora: str | None = None
    """Selected adapter; None: the base model."""

    @property
    def name(self) -> str:
        """Served name: the adapter's if one is selected, else the model's."""
        return self.card.name if self.lora is None else self.lora

    @property
    def ready(self) -> bool:
        return bool(self.candidates())

    def candidates(self) -> list[Instance]:
        """Reachable workers that can serve the model or adapter."""
        return (
            self.client.candidates() if self.lora is None else self.registrations.candidates_with(self.lora)
        )

    def workers(self) -> list[Instance]:
        """All registered workers of the model, prefill workers included."""
        prefill_target = self.get_prefill_target()
        return [
            *self.client.instances(),
            *(prefill_target.client.instances() if prefill_target is not None else ()),
        ]

    def with_adapter(self, name: str) -> Model:
        return replace(self, lora=name)

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum length of a sequence: the context, or a worker's KV capacity if that is smaller."""
        kv_capacity = (
            self.capacity.kv_total_blocks * self.card.block_size + 1
        )  # the last token is not computed
        return min(self.card.context_length, kv_capacity)


def count_workers(model: Model) -> dict[str, int]:
    """Count reachable workers by role; a decode model also reports zero prefill workers."""
    workers = {model.role.value: len(model.candidates())}
    if model.role is Role.DECODE:
        prefill_target = model.get_prefill_target()
        workers[Role.PREFILL.value] = 0 if prefill_target is None else len(prefill_target.client.candidates())
    return workers


def with_allowed_by_role(model: Model, hints: RequestHints) -> RequestHints:
    """Split the allowed worker ids into prefill and decode workers.

    An id restricts only its own role. An unknown id counts for both roles, so that it cannot widen either list.
    """
    routing = hints.routing
    prefill_target = model.get_prefill_target() if routing.allowed else None
    if prefill_target is None:
        return hints
    prefill = {each.id for each in prefill_target.client.instances()}
    decode = {each.id for each in model.client.instances()}
    by_role = msgspec.structs.replace(
        routing,
        allowed=tuple(each for each in routing.allowed if each not in prefill),
        allowed_prefill=tuple(each for each in routing.allowed if each not in decode),
    )
    return msgspec.structs.replace(hints, routing=by_role)


def require_extra(model: Model, hints: RequestHints, name: str) -> RequestHints:
    """Restrict the allowed workers to those that support an extra; raises InvalidRequest if there are none."""
    candidates, infos = model.candidates(), model.registrations.infos()
    supporting = [each.id for each in candidates if (info := infos.get(each.id)) and name in info.extras]
    if len(supporting) == len(candidates):
        return hints
    allowed = hints.routing.allowed
    if allowed:
        supporting = [each for each in supporting if each in allowed]
    if not supporting:
        raise InvalidRequest(
            f"no worker of model {model.name!r} supports {name}: {_REMEDIES.get(name, 'omit it')}", param=name
        )
    routing = msgspec.structs.replace(hints.routing, allowed=tuple(supporting))
    return msgspec.structs.replace(hints, routing=routing)


def unreachable_error(model: Model, name: str) -> Unavailable:
    """Error of a request for a model of which no worker can be reached."""
    infos = model.registrations.infos()
    workers = infos if model.lora is None else model.registrations.registered_with(model.lora)
    if workers and all((info := infos[each]) is not None and info.asleep for each in workers):
        return Unavailable(
            f"every {model.role} worker of model {name!r} is asleep; wake with `kvolt worker wake NAME` "
            "(names: `kvolt status`)",
            endpoint=name,
            reason="asleep",
            role=model.role.value,
        )
    return no_workers_error(name, model.role)


def no_workers_error(name: str, role: Role) -> Unavailable:
    return Unavailable(
        f"no {role} worker of model {name!r} is reachable; try again later",
        endpoint=name,
        reason="no_workers",
        role=role.value,
    )


def starting_error(message: str) -> Unavailable:
    return Unavailable(f"{message}; try again", reason="starting", retry_after_s=_STARTING_RETRY_S)


def unknown_model_error(name: str, known: Sequence[str]) -> NotFound:
    message = f"the model {name[:_SHOWN_CHARS]!r} does not exist; known: {list_names(known)}"
    return NotFound(message, kind="model", name=name, param="model")


def list_names(names: Sequence[str]) -> str:
    """Names of models for an error message."""
    shown = ", ".join(each[:_SHOWN_CHARS] for each in sorted(names)[:_SHOWN_MODELS])
    hidden = len(names) - _SHOWN_MODELS
    return f"{shown} and {hidden} more" if hidden > 0 else shown


async def fetch_card(runtime: Runtime, client: EndpointClient, expected: CardHash) -> ModelCard:
    """Fetch the card from a worker. Raises KvoltError if that fails or the card is not the announced one."""
    address = client.pick_round_robin().address
    endpoint = EndpointAddress(client.endpoint.namespace, client.endpoint.component, CARD)
    limits = runtime.options.deadlines
    to = Destination(address, str(endpoint))
    async with await open_stream(runtime.plane, to, expected, limits, _decode_card) as stream:
        card: ModelCard | None = await anext(stream, None)
    if card is None:
        raise KvoltError(f"{address} returned no card")
    if card_hash(card) != expected:
        raise KvoltError(f"the card of {card.name} is not the one announced")
    return card
