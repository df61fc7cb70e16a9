"""The models that this frontend can serve now: found through discovery, cards fetched from workers.

Ready means routable: a model is listed once its card is here and an instance can be reached. A LoRA adapter that
workers of a model have is a name of its own, and the same model in all but that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvolt.core.card import HASH_SCHEME, Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.endpoints import CARD, GENERATE
from kvolt.core.errors import InvalidRequest, KvoltError, NotFound, Unavailable
from kvolt.core.ids import CardHash
from kvolt.core.request import Role, Sampling
from kvolt.frontend.kv_pairs import paired
from kvolt.frontend.openai_api.generation import sampling_defaults
from kvolt.frontend.templates.process import Renderer
from kvolt.frontend.tokenization.preprocess import (
    CardProcessor,
    NewProcessor,
    ParserNames,
    Processor,
    ProcessorSpec,
    new_large_texts,
)
from kvolt.journey.journey import Road
from kvolt.journey.prefill import Leg
from kvolt.journey.prefill_mode import Chooser, OneWay, WayRule, Ways
from kvolt.router.adapters import Adapters
from kvolt.router.port import Router, RouterContext
from kvolt.router.registry import ROUTERS, NewRouter
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.discovery.port import Delete, Put, Synced
from kvolt.runtime.endpoint.address import INSTANCES, EndpointAddress, Instance, decode_instance
from kvolt.runtime.endpoint.client import EndpointClient, open_stream
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_CARD_RETRY_S = 0.2
_CARD_RETRY_MAX_S = 5.0
_STARTING_S = 1.0
"""After which a client is to ask again for a model that is starting."""

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode
_decode_card = msgspec.msgpack.Decoder(ModelCard).decode


@dataclass(slots=True)
class Model:
    """A model, or one of its adapters, with all that is needed to answer for it."""

    card: ModelCard
    processor: Processor
    client: EndpointClient
    road: Road
    defaults: Sampling
    capacity: Capacity
    """Of one worker; they are all alike."""
    adapters: Adapters
    role: Role = Role.AGGREGATED
    """Of those who answer."""
    prefill: Callable[[], Leg | None] = lambda: None
    """Who computes prompts for its workers, if anybody was ever seen that does."""
    lora: str | None = None
    """The adapter that was asked for; None for the model as it is."""

    @property
    def name(self) -> str:
        """What clients call it; `card.name` is the model's, whichever adapter this is."""
        return self.card.name if self.lora is None else self.lora

    @property
    def ready(self) -> bool:
        return bool(self.candidates())

    def candidates(self) -> list[Instance]:
        """Workers that a request would reach now."""
        return self.client.candidates() if self.lora is None else self.adapters.holders(self.lora)

    def workers(self) -> list[Instance]:
        """All that are registered, whatever they do for it."""
        leg = self.prefill()
        return [*self.client.instances(), *(leg.client.instances() if leg is not None else ())]

    def with_adapter(self, name: str) -> Model:
        return replace(self, lora=name)

    @property
    def most_tokens(self) -> int:
        """What one sequence can come to: the context, or less where a worker's memory ends before it."""
        of_memory = self.capacity.kv_total_blocks * self.card.block_size + 1  # the last token is not computed
        return min(self.card.context_length, of_memory)


_Kin = tuple[str, str, CardHash]


def _kin(endpoint: EndpointAddress, info: EngineInfo) -> _Kin:
    """Workers that can go on with each other's prompts: of one namespace, model and card."""
    return endpoint.namespace, info.model, info.card


class ModelOptions(msgspec.Struct, frozen=True):
    """What an operator may set about all models of a frontend."""

    cache_bytes: int = 8 * 1024 * 1024
    """For the tokenization cache of each model."""
    parsers: ParserNames = ParserNames(None, None)
    """In place of what the card says or its template shows."""
    max_attempts: int = 3
    router: RouterSettings = RouterSettings()
    migration_limit: int = 3
    """How often an answer that has begun may go on at another worker."""
    prefill: WayRule = WayRule()
    """Which prompts are computed by prefill workers, where there are any."""
    decode_first: tuple[str, ...] = ()
    """Models whose decode workers have a request while its prompt is computed; `*` for all."""
    new_processor: NewProcessor = CardProcessor
    """Who renders prompts and reads answers."""


def _nobody_answers(name: str, role: Role) -> Unavailable:
    return Unavailable(
        f"no worker of {name!r} can be reached now that has the role {role}",
        endpoint=name,
        reason="no_workers",
        role=role.value,
    )


def _starting(message: str) -> Unavailable:
    return Unavailable(f"{message}; try again", reason="starting", retry_after_s=_STARTING_S)


class Models:
    """Watches namespaces; `get` and `ready` answer from memory.

    Workers with different cards of one model are different components. While a rollout lasts both are
    here; the newest that can be reached is used.
    """

    def __init__(
        self,
        runtime: Runtime,
        namespaces: str | Sequence[str],
        options: ModelOptions | None = None,
        new_router: NewRouter = ROUTERS["round-robin"],
    ) -> None:
        self._runtime = runtime
        self._new_router = new_router
        self._options = options or ModelOptions()
        self._namespaces = (namespaces,) if isinstance(namespaces, str) else tuple(dict.fromkeys(namespaces))
        self._models: dict[str, dict[EndpointAddress, Model]] = {}
        """By name, oldest component first."""
        self._aliases: dict[str, str] = {}
        self._hidden: set[str] = set()
        """Adapters behind a model's name that were told of: as many as there are such names at most."""
        self._coming: dict[EndpointAddress, None] = {}
        self._registered: dict[EndpointAddress, dict[str, None]] = {}
        """Keys of each component's instances, as the one watch that also starts `_add` has seen them."""
        self._adding: dict[EndpointAddress, EngineInfo] = {}
        """Components whose card is not here yet."""
        self._prefills: dict[_Kin, Leg] = {}
        """Workers that compute prompts for others."""
        self._unsynced = set(self._namespaces)
        self._settled = asyncio.Event()
        self._crew = Crew("models")
        self._renderer = Renderer(runtime.ports.blocking)
        self._large_texts = new_large_texts(runtime.ports.blocking)

    def start(self) -> None:
        for namespace in self._namespaces:
            self._crew.start(self._watch(namespace), f"watch {namespace}")

    async def close(self) -> None:
        await self._crew.close()
        self._renderer.close()
        for model in self._every():
            await model.road.router.close()
        for leg in self._prefills.values():
            await leg.router.close()

    async def settle(self, timeout_s: float) -> None:
        """Wait until what is registered already can be served, or give up quietly: the rest will come. From then on a
        name that no worker serves is unknown, and not one that may be starting."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        if not self._unsynced:
            self._settled.set()

    def ready(self) -> list[Model]:
        newest = [self._newest(name) for name in sorted(self._models)]
        return [model for model in newest if model.ready]

    def get(self, name: str) -> Model:
        """NotFound for an unserved name; Unavailable when no worker of it can be reached or is being redialed, or
        where it may be a model that is still starting."""
        model = self.find(name)
        if not model.ready and not model.client.awaited():
            raise _nobody_answers(name, model.role)
        return model

    def find(self, name: str) -> Model:
        """Whether it can be reached now or not. A model's name is looked for first, then an alias, then an adapter."""
        known = self._aliases.get(name, name) if name not in self._models else name
        if known in self._models:
            return self._newest(known)
        found = [model for model in self._every() if model.adapters.registered(name)]
        if not found and name in self.unanswered():
            raise _nobody_answers(name, Role.DECODE)
        if not found:
            raise self._unknown(name)
        reached = (model for model in found if model.adapters.holders(name))
        return next(reached, found[0]).with_adapter(name)

    def all(self) -> list[Model]:
        """Ready or not."""
        return [self._newest(name) for name in sorted(self._models)]

    def unanswered(self) -> dict[str, list[Leg]]:
        """Models whose prompts could be computed, and that nobody was ever seen to answer for."""
        legs: dict[str, list[Leg]] = {}
        for (_, name, _), leg in self._prefills.items():
            if not self._is_a_models(name) and leg.client.instances():
                legs.setdefault(name, []).append(leg)
        return legs

    def adapters(self) -> list[Model]:
        """The adapters that a request would reach now, by name."""
        names = {name for model in self._every() for name in model.adapters.names}
        return [self.find(name) for name in sorted(names) if not self._is_a_models(name)]

    def generations(self, name: str) -> list[Model]:
        """The model of this name with each of its cards, the newest first."""
        return list(reversed(self._models.get(name, {}).values()))

    def routers(self) -> list[Router]:
        """Of every model with each of its cards, and of those who compute prompts for them."""
        return [
            *(model.road.router for model in self._every()),
            *(leg.router for leg in self._prefills.values()),
        ]

    def only(self) -> Model:
        """The one model there is, for requests that may leave its name out."""
        ready = self.ready()
        if not self._models:
            raise _starting("no model is ready yet")
        if len(ready) != 1:
            raise InvalidRequest("name the model: there is not exactly one", param="model")
        return ready[0]

    def _unknown(self, name: str) -> KvoltError:
        """The model does not exist, as far as that is known by now."""
        coming = {each for info in self._adding.values() for each in (info.model, *info.loras)}
        if name in coming:
            return _starting(f"the model {name!r} is starting")
        if not self._models or not self._settled.is_set():
            return _starting(
                f"the model {name!r} is not known yet: this frontend or its workers are starting"
            )
        return NotFound(f"the model {name!r} does not exist", kind="model", name=name, param="model")

    def _every(self) -> list[Model]:
        """By name, of each the newest first."""
        return [model for name in sorted(self._models) for model in self.generations(name)]

    def _is_a_models(self, name: str) -> bool:
        return name in self._models or name in self._aliases

    def _tell_hidden(self, adapters: Iterable[str]) -> None:
        for name in adapters:
            if self._is_a_models(name) and name not in self._hidden:
                self._hidden.add(name)
                log.warning(
                    "the adapter %r cannot be chosen: a model has that name; load it by another", name
                )

    def _newest(self, name: str) -> Model:
        models = list(self._models[name].values())
        return next((model for model in reversed(models) if model.ready), models[-1])

    async def _watch(self, namespace: str) -> None:
        async for event in self._runtime.discovery.watch_prefix(f"{INSTANCES}{namespace}/"):
            if isinstance(event, Delete):
                self._forget_instance(event.key)
            if isinstance(event, Synced):
                self._unsynced.discard(namespace)
                self._note_settled()
            if not isinstance(event, Put):
                continue
            instance = decode_instance(event.value)
            if instance is None or instance.endpoint.endpoint != GENERATE:
                continue
            try:
                info = _decode_info(instance.info)
            except MALFORMED:
                log.warning("%s registered an engine that this version does not understand", event.key)
                continue
            if info.hash_scheme != HASH_SCHEME:
                log.error("%s hashes blocks by %s, we by %s", event.key, info.hash_scheme, HASH_SCHEME)
            elif info.role is Role.PREFILL:
                if instance.endpoint not in self._coming:
                    self._coming[instance.endpoint] = None
                    self._crew.start(self._add_prefill(instance.endpoint, info), f"prefill of {info.model}")
            elif info.role in (Role.AGGREGATED, Role.DECODE):
                self._registered.setdefault(instance.endpoint, {})[event.key] = None
                self._tell_hidden(info.loras)
                if instance.endpoint not in self._coming:
                    self._coming[instance.endpoint] = None
                    self._adding[instance.endpoint] = info
                    self._crew.start(self._add_noted(instance.endpoint, info), f"add {info.model}")

    def _forget_instance(self, key: str) -> None:
        for endpoint, keys in self._registered.items():
            if key in keys:
                del keys[key]
                if not keys:
                    del self._registered[endpoint]
                return

    def _note_settled(self) -> None:
        if not self._unsynced and not self._adding:
            self._settled.set()

    async def _add_noted(self, endpoint: EndpointAddress, info: EngineInfo) -> None:
        try:
            await self._add(endpoint, info)
        finally:
            self._adding.pop(endpoint, None)  # twice in it, if it went and came back meanwhile
            self._note_settled()

    async def _add(self, endpoint: EndpointAddress, info: EngineInfo) -> None:
        """Fetch the card from any worker of the component, then serve the model."""
        client = await self._runtime.client(endpoint)
        await client.wait_synced(self._runtime.options.deadlines.connect_s)
        card = await self._wait_for_card(client, info)
        if card is None:
            del self._coming[endpoint]  # they are gone; when they come back we try again
            await client.close()
            return
        try:
            model = self._model(card, client, info)
        except Exception as error:  # whatever a foreign tokenizer or template does when it is read
            log.error("the card of %s cannot be used: %s", info.model, error)
            await client.close()
            return
        generations = self._models.setdefault(info.model, {})
        generations[endpoint] = model
        self._note_aliases(card)
        log.info("model %s is ready", info.model)
        self._tell_hidden(name for known in self._every() for name in known.adapters.names)
        await self._forget_old(generations)

    async def _add_prefill(self, endpoint: EndpointAddress, info: EngineInfo) -> None:
        """Workers that compute prompts for all that serve the same card."""
        client = await self._runtime.client(endpoint)
        client.has_fallback = True  # a decode worker computes the prompt
        await client.wait_synced(self._runtime.options.deadlines.connect_s)
        context = RouterContext(client, self._runtime, info.block_size, self._options.router, Role.PREFILL)
        self._prefills[_kin(endpoint, info)] = Leg(self._new_router(context), client)
        log.info("prompts of %s are computed by prefill workers where that is faster", info.model)

    def _leg_for(self, decode: EndpointClient, info: EngineInfo) -> Callable[[], Leg | None]:
        """To those who compute prompts for these workers; None while there was nobody."""
        kin = _kin(decode.endpoint, info)
        found: Leg | None = None

        def leg() -> Leg | None:
            nonlocal found
            if found is None and info.role is Role.DECODE and kin in self._prefills:
                found = paired(self._prefills[kin], decode)
            return found

        return leg

    def _ways(self, router: Router, leg: Callable[[], Leg | None], info: EngineInfo) -> Ways:
        if info.role is not Role.DECODE:
            return OneWay()
        now = self._runtime.ports.clock.monotonic
        return Chooser(router, leg, info.block_size, self._options.prefill, now=now)

    def _model(self, card: ModelCard, client: EndpointClient, info: EngineInfo) -> Model:
        options = self._options
        ports = self._runtime.ports
        processor = options.new_processor(
            card,
            ProcessorSpec(
                blocking=ports.blocking,
                cache_bytes=options.cache_bytes,
                parsers=options.parsers,
                wall=ports.clock.wall,
                monotonic=ports.clock.monotonic,
                renderer=self._renderer,
                large_texts=self._large_texts,
            ),
        )
        context = RouterContext(client, self._runtime, info.block_size, options.router, info.role)
        router = self._new_router(context)
        leg = self._leg_for(client, info)
        client.may_move = options.migration_limit > 0  # else an answer that has begun would end by it
        road = Road(
            router,
            client,
            self._crew,
            options.max_attempts,
            migration_limit=options.migration_limit,
            eos_token_ids=card.eos_token_ids,
            ways=self._ways(router, leg, info),
            is_decode_first=not {info.model, "*"}.isdisjoint(options.decode_first),
        )
        defaults = sampling_defaults(card.defaults)
        return Model(
            card,
            processor,
            client,
            road,
            defaults,
            info.capacity,
            Adapters(client),
            role=info.role,
            prefill=leg,
        )

    def _note_aliases(self, card: ModelCard) -> None:
        for alias in card.aliases:
            self._aliases.setdefault(alias, card.name)

    async def _forget_old(self, generations: dict[EndpointAddress, Model]) -> None:
        """Components before the newest whose workers are all gone."""
        for endpoint in list(generations)[:-1]:
            if not generations[endpoint].client.instances():
                old = generations.pop(endpoint)
                await old.road.router.close()
                await old.client.close()
                self._coming.pop(endpoint, None)

    async def _wait_for_card(self, client: EndpointClient, info: EngineInfo) -> ModelCard | None:
        """Ask until somebody has it; None when nobody of the component is left."""
        pause_s = _CARD_RETRY_S
        told = False
        while client.endpoint in self._registered:
            try:
                return await self._fetch_card(client, info.card)
            except KvoltError as error:
                if not told:
                    told = True
                    log.warning("no card of %s yet: %s", info.model, error.message)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _CARD_RETRY_MAX_S)
        return None

    async def _fetch_card(self, client: EndpointClient, wanted: CardHash) -> ModelCard:
        address = client.round_robin().address
        endpoint = EndpointAddress(client.endpoint.namespace, client.endpoint.component, CARD)
        limits = self._runtime.options.deadlines
        to = Destination(address, str(endpoint))
        async with await open_stream(self._runtime.plane, to, wanted, limits, _decode_card) as stream:
            card: ModelCard | None = await anext(stream, None)
        if card is None:
            raise KvoltError(f"{address} answered without a card")
        if card_hash(card) != wanted:
            raise KvoltError(f"the card of {card.name} is not the one announced")
        return card
