"""The models that this frontend can serve now: found through discovery, cards fetched from workers.

Ready means routable: a model is listed once its card is here and an instance can be reached.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from kvolt.core.card import HASH_SCHEME, EngineInfo, ModelCard, card_hash
from kvolt.core.errors import KvoltError, NotFound, Unavailable
from kvolt.core.ids import CardHash
from kvolt.core.request import Role
from kvolt.frontend.text import Codec
from kvolt.journey.journey import Journey
from kvolt.router.port import RoundRobinRouter
from kvolt.runtime.address import INSTANCES, EndpointAddress, Instance, decode_instance
from kvolt.runtime.client import Destination, EndpointClient, open_stream
from kvolt.runtime.discovery import Put
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_GENERATE = "generate"
_CARD = "card"
_CARD_RETRY_S = 0.5

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode
_decode_card = msgspec.msgpack.Decoder(ModelCard).decode


@dataclass(slots=True)
class Model:
    """A model with all that is needed to answer for it."""

    card: ModelCard
    codec: Codec
    client: EndpointClient
    journey: Journey

    @property
    def ready(self) -> bool:
        return bool(self.client.candidates())


class Models:
    """Watches a namespace; `get` and `ready` answer from memory."""

    def __init__(self, runtime: Runtime, namespace: str) -> None:
        self._runtime = runtime
        self._namespace = namespace
        self._models: dict[str, Model] = {}
        self._coming: dict[str, None] = {}
        self._crew = Crew("models")

    def start(self) -> None:
        self._crew.start(self._watch(), "watch")

    async def close(self) -> None:
        await self._crew.close()

    def ready(self) -> list[Model]:
        return [model for name, model in sorted(self._models.items()) if model.ready]

    def get(self, name: str) -> Model:
        """NotFound for a name nobody serves; Unavailable when its workers cannot be reached now."""
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"the model {name!r} does not exist", kind="model", name=name)
        if not model.ready:
            raise Unavailable(f"no worker of {name!r} can be reached now", endpoint=name, reason="no_workers")
        return model

    async def _watch(self) -> None:
        async for event in self._runtime.discovery.watch_prefix(f"{INSTANCES}{self._namespace}/"):
            if not isinstance(event, Put):
                continue
            instance = decode_instance(event.value)
            if instance is None or instance.endpoint.endpoint != _GENERATE:
                continue
            try:
                info = _decode_info(instance.info)
            except msgspec.MsgspecError:
                log.warning("%s registered an engine that this version does not understand", event.key)
                continue
            if info.hash_scheme != HASH_SCHEME:
                log.error("%s hashes blocks by %s, we by %s", event.key, info.hash_scheme, HASH_SCHEME)
            elif info.role is Role.AGGREGATED and info.model not in self._coming:
                self._coming[info.model] = None
                self._crew.start(self._add(instance, info), f"add {info.model}")

    async def _add(self, instance: Instance, info: EngineInfo) -> None:
        """Fetch the card from any worker of the component, for as long as it takes, then serve the model."""
        client = await self._runtime.client(instance.endpoint)
        await client.wait_synced(self._runtime.options.deadlines.connect_s)
        while True:
            try:
                card = await self._fetch_card(client, info.card)
                break
            except KvoltError as error:
                log.warning("no card of %s yet: %s", info.model, error.message)
                await asyncio.sleep(_CARD_RETRY_S)
        journey = Journey(RoundRobinRouter(client), client)
        self._models[info.model] = Model(card, Codec(card), client, journey)
        log.info("model %s is ready", info.model)

    async def _fetch_card(self, client: EndpointClient, wanted: CardHash) -> ModelCard:
        address = client.round_robin().address
        endpoint = EndpointAddress(self._namespace, client.endpoint.component, _CARD)
        limits = self._runtime.options.deadlines
        to = Destination(address, str(endpoint))
        async with await open_stream(self._runtime.connections, to, wanted, limits, _decode_card) as stream:
            card: ModelCard = await anext(stream)
        if card_hash(card) != wanted:
            raise KvoltError(f"the card of {card.name} is not the one announced")
        return card
