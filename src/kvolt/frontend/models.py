"""Models that this frontend serves: found through discovery, with cards fetched from their workers.

A model is ready when its card is loaded and an instance is reachable. A LoRA adapter is served as a model of its own
name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence

import msgspec

from kvolt.core.card import HASH_SCHEME, EngineInfo, ModelCard
from kvolt.core.endpoints import GENERATE, INSTANCES, EndpointAddress, decode_instance
from kvolt.core.errors import MALFORMED, InvalidRequest, KvoltError
from kvolt.core.request import Role
from kvolt.frontend.model import (
    Model,
    ModelOptions,
    fetch_card,
    list_names,
    no_workers_error,
    starting_error,
    unknown_model_error,
    unreachable_error,
)
from kvolt.frontend.model_builder import ModelBuilder
from kvolt.journey.prefill import RoleTarget
from kvolt.router.port import Router
from kvolt.router.registry import ROUTERS, NewRouter
from kvolt.runtime.discovery.port import Delete, Put, Synced
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_CARD_RETRY_S = 0.2
_CARD_RETRY_MAX_S = 5.0

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


class Models:
    """Registry of served models, kept current by watching discovery namespaces.

    Workers with different cards of one model form different components. During a rollout both exist; the newest
    reachable one serves requests.
    """

    def __init__(
        self,
        runtime: Runtime,
        namespaces: str | Sequence[str],
        options: ModelOptions | None = None,
        new_router: NewRouter = ROUTERS["round-robin"],
    ) -> None:
        self._runtime = runtime
        self._options = options or ModelOptions()
        self._namespaces = (namespaces,) if isinstance(namespaces, str) else tuple(dict.fromkeys(namespaces))
        self._models: dict[str, dict[EndpointAddress, Model]] = {}
        """Model name -> component -> model, oldest component first."""
        self._aliases: dict[str, str] = {}
        self._hidden: set[str] = set()
        """Adapters hidden by a model of the same name, already logged. Bounded by the number of models."""
        self._components: dict[EndpointAddress, None] = {}
        self._registered: dict[EndpointAddress, dict[str, None]] = {}
        """Instance keys of each component, maintained by the watch that starts `_load`."""
        self._loading: dict[EndpointAddress, EngineInfo] = {}
        """Components whose card is being fetched."""
        self._unsynced = set(self._namespaces)
        self._settled = asyncio.Event()
        self._task_group = TaskGroup("models")
        self._builder = ModelBuilder(runtime, self._options, new_router, self._task_group)

    def start(self) -> None:
        for namespace in self._namespaces:
            self._task_group.start(self._watch(namespace), f"watch {namespace}")

    async def close(self) -> None:
        await self._task_group.close()
        self._builder.close()
        for model in self._all_revisions():
            await model.journey_context.router.close()
        for prefill_target in self._builder.prefill_targets.values():
            await prefill_target.router.close()

    async def wait_settled(self, timeout_s: float) -> None:
        """Wait until all registered models are loaded, or until the timeout.

        Afterwards a name without workers is reported as unknown instead of starting.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        if not self._unsynced:
            self._settled.set()

    def ready(self) -> list[Model]:
        return [model for model in self.all() if model.ready]

    def get(self, name: str | None) -> Model:
        """Return a model with reachable (or reconnecting) workers; `single_model` without a name.

        Raises NotFound for an unknown name, Unavailable if no worker is reachable or the model may still be starting.
        """
        model = self.single_model() if name is None else self.find(name)
        if not model.ready and not model.client.recovering():
            raise unreachable_error(model, name or model.name)
        return model

    def find(self, name: str) -> Model:
        """Return a model, reachable or not, by name, then by alias, then by adapter."""
        known = self._aliases.get(name, name) if name not in self._models else name
        if known in self._models:
            return self._newest(known)
        matching = [model for model in self._all_revisions() if model.registrations.registered_with(name)]
        if not matching and name in self.prefill_only():
            raise no_workers_error(name, Role.DECODE)
        if not matching:
            raise self._unknown_model_error(name)
        reached = (model for model in matching if model.registrations.candidates_with(name))
        return next(reached, matching[0]).with_adapter(name)

    def names_of(self, model: Model) -> list[str]:
        """Name and aliases under which requests reach the model."""
        name, aliases = model.card.name, (each for each in model.card.aliases if each not in self._models)
        return [name, *(alias for alias in aliases if self._aliases.get(alias) == name)]

    def all(self) -> list[Model]:
        """All models, ready or not."""
        return [self._newest(name) for name in sorted(self._models)]

    def prefill_only(self) -> dict[str, list[RoleTarget]]:
        """Models with prefill workers for which no decode worker has ever registered."""
        targets: dict[str, list[RoleTarget]] = {}
        for (_, name, _), prefill_target in self._builder.prefill_targets.items():
            if not self._is_model_name(name) and prefill_target.client.instances():
                targets.setdefault(name, []).append(prefill_target)
        return targets

    def adapters(self) -> list[Model]:
        """Reachable adapters, sorted by name."""
        names = {name for model in self._all_revisions() for name in model.registrations.reachable_loras}
        return [self.find(name) for name in sorted(names) if not self._is_model_name(name)]

    def revisions(self, name: str) -> list[Model]:
        """All card revisions of a model, newest first."""
        return list(reversed(self._models.get(name, {}).values()))

    def routers(self) -> list[Router]:
        """Routers of all model revisions and of their prefill workers."""
        return [
            *(model.journey_context.router for model in self._all_revisions()),
            *(prefill_target.router for prefill_target in self._builder.prefill_targets.values()),
        ]

    def single_model(self) -> Model:
        """The model of requests that omit its name: the only ready one, or the only one if none is ready."""
        if not self._models:
            raise starting_error("no model is ready yet")
        candidates = self.ready() or self.all()
        if len(candidates) != 1:
            names = list_names([model.name for model in candidates])
            raise InvalidRequest(f"model is required; known: {names}", param="model")
        return candidates[0]

    def _unknown_model_error(self, name: str) -> KvoltError:
        """Error for a name that is unknown or not known yet."""
        starting = {each for info in self._loading.values() for each in (info.model, *info.loras)}
        if name in starting:
            return starting_error(f"the model {name!r} is starting")
        if not self._models or not self._settled.is_set():
            return starting_error(
                f"the model {name!r} is not known yet: the frontend or its workers are starting"
            )
        known = [*self._models, *self._aliases, *(adapter.name for adapter in self.adapters())]
        return unknown_model_error(name, known)

    def _all_revisions(self) -> list[Model]:
        """All revisions of all models, by name, newest first."""
        return [model for name in sorted(self._models) for model in self.revisions(name)]

    def _is_model_name(self, name: str) -> bool:
        return name in self._models or name in self._aliases

    def _warn_hidden_adapters(self, adapters: Iterable[str]) -> None:
        for name in adapters:
            if self._is_model_name(name) and name not in self._hidden:
                self._hidden.add(name)
                log.warning(
                    "adapter %r is hidden by a model of the same name; load it under another name", name
                )

    def _newest(self, name: str) -> Model:
        models = list(self._models[name].values())
        return next((model for model in reversed(models) if model.ready), models[-1])

    async def _watch(self, namespace: str) -> None:
        async for event in self._runtime.discovery.watch_prefix(f"{INSTANCES}{namespace}/"):
            if isinstance(event, Delete):
                self._remove_instance(event.key)
            if isinstance(event, Synced):
                self._unsynced.discard(namespace)
                self._check_settled()
            if not isinstance(event, Put):
                continue
            instance = decode_instance(event.value)
            if instance is None or instance.endpoint.endpoint != GENERATE:
                continue
            try:
                info = _decode_info(instance.info)
            except MALFORMED:
                log.warning("ignoring worker: key=%s reason=undecodable EngineInfo", event.key)
                continue
            if info.hash_scheme != HASH_SCHEME:
                log.error(
                    "ignoring worker: key=%s hash_scheme=%s expected=%s",
                    event.key,
                    info.hash_scheme,
                    HASH_SCHEME,
                )
            elif info.role is Role.PREFILL:
                if instance.endpoint not in self._components:
                    self._components[instance.endpoint] = None
                    self._task_group.start(
                        self._load_prefill(instance.endpoint, info), f"prefill of {info.model}"
                    )
            elif info.role in (Role.AGGREGATED, Role.DECODE):
                self._registered.setdefault(instance.endpoint, {})[event.key] = None
                self._warn_hidden_adapters(info.loras)
                if instance.endpoint not in self._components:
                    self._components[instance.endpoint] = None
                    self._loading[instance.endpoint] = info
                    self._task_group.start(
                        self._load_and_settle(instance.endpoint, info), f"add {info.model}"
                    )

    def _remove_instance(self, key: str) -> None:
        for endpoint, keys in self._registered.items():
            if key in keys:
                del keys[key]
                if not keys:
                    del self._registered[endpoint]
                return

    def _check_settled(self) -> None:
        if not self._unsynced and not self._loading:
            self._settled.set()

    async def _load_and_settle(self, endpoint: EndpointAddress, info: EngineInfo) -> None:
        try:
            await self._load(endpoint, info)
        finally:
            self._loading.pop(endpoint, None)  # may be gone already if the component left and returned
            self._check_settled()

    async def _load(self, endpoint: EndpointAddress, info: EngineInfo) -> None:
        """Fetch the card from a worker of the component, then serve the model."""
        client = await self._runtime.client(endpoint)
        await client.wait_synced(self._runtime.options.deadlines.connect_s)
        card = await self._wait_for_card(client, info)
        if card is None:
            del self._components[endpoint]  # the workers are gone; retry when they return
            await client.close()
            return
        try:
            model = self._builder.build(card, client, info)
        except Exception as error:  # a foreign tokenizer or template may raise anything
            log.error("model card unusable: model=%s error=%s", info.model, error)
            await client.close()
            return
        revisions = self._models.setdefault(info.model, {})
        revisions[endpoint] = model
        for alias in card.aliases:
            self._aliases.setdefault(alias, card.name)
        log.info("model ready: %s", info.model)
        self._warn_hidden_adapters(
            name for known in self._all_revisions() for name in known.registrations.reachable_loras
        )
        await self._remove_old_revisions(revisions)

    async def _load_prefill(self, endpoint: EndpointAddress, info: EngineInfo) -> None:
        """Add prefill workers for the decode workers with the same card."""
        client = await self._runtime.client(endpoint)
        client.has_fallback = True  # decode workers can prefill locally
        await client.wait_synced(self._runtime.options.deadlines.connect_s)
        self._builder.add_prefill(client, info)
        log.info("prefill workers available: model=%s", info.model)

    async def _remove_old_revisions(self, revisions: dict[EndpointAddress, Model]) -> None:
        """Remove components before the newest that have no workers left."""
        for endpoint in list(revisions)[:-1]:
            if not revisions[endpoint].client.instances():
                old = revisions.pop(endpoint)
                await old.journey_context.router.close()
                await old.client.close()
                self._components.pop(endpoint, None)

    async def _wait_for_card(self, client: EndpointClient, info: EngineInfo) -> ModelCard | None:
        """Retry until a worker returns the card; None when the component has no workers left."""
        pause_s = _CARD_RETRY_S
        is_logged = False
        while client.endpoint in self._registered:
            try:
                return await fetch_card(self._runtime, client, info.card)
            except KvoltError as error:
                if not is_logged:
                    is_logged = True
                    log.warning("model card not available yet: model=%s error=%s", info.model, error.message)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _CARD_RETRY_MAX_S)
        return None
