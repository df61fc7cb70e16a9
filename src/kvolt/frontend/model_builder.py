"""ModelBuilder: what a frontend needs to serve one component of workers: text processor, router, prefill target."""

from __future__ import annotations

from collections.abc import Callable

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.endpoints import EndpointAddress
from kvolt.core.ids import CardHash
from kvolt.core.request import Role
from kvolt.frontend.kv_pair_filter import with_kv_filter
from kvolt.frontend.model import Model, ModelOptions
from kvolt.frontend.openai_api.generation import generation_defaults
from kvolt.frontend.templates.process import Renderer
from kvolt.frontend.tokenization.preprocess import ProcessorSpec, new_large_texts
from kvolt.journey.journey import JourneyContext
from kvolt.journey.prefill import RoleTarget
from kvolt.journey.prefill_mode import PrefillModePolicy, PrefillModeSelector
from kvolt.router.port import Router, RouterContext
from kvolt.router.registrations import Registrations
from kvolt.router.registry import NewRouter
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup

_PrefillKey = tuple[str, str, CardHash]


def _prefill_key(endpoint: EndpointAddress, info: EngineInfo) -> _PrefillKey:
    """Key of prefill and decode workers that belong together: same namespace, model and card."""
    return endpoint.namespace, info.model, info.card


class ModelBuilder:
    """See the module. The template process and the threads for large texts are shared by all models."""

    def __init__(
        self, runtime: Runtime, options: ModelOptions, new_router: NewRouter, task_group: TaskGroup
    ) -> None:
        self._runtime = runtime
        self._options = options
        self._new_router = new_router
        self._task_group = task_group
        self._renderer = Renderer(runtime.ports.blocking)
        self._large_texts = new_large_texts(runtime.ports.blocking)
        self.prefill_targets: dict[_PrefillKey, RoleTarget] = {}
        """Prefill workers by namespace, model and card."""

    def close(self) -> None:
        self._renderer.close()

    def add_prefill(self, client: EndpointClient, info: EngineInfo) -> None:
        """Add prefill workers for the decode workers with the same card."""
        context = RouterContext(client, self._runtime, info.block_size, self._options.router, Role.PREFILL)
        self.prefill_targets[_prefill_key(client.endpoint, info)] = RoleTarget(
            self._new_router(context), client
        )

    def build(self, card: ModelCard, client: EndpointClient, info: EngineInfo) -> Model:
        """The model of a component: processor, router and journey context of its card and workers."""
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
        prefill_target = self._prefill_target_for(client, info)
        client.may_migrate = options.migration_limit > 0
        journey_context = JourneyContext(
            router,
            client,
            self._task_group,
            options.max_attempts,
            migration_limit=options.migration_limit,
            eos_token_ids=card.eos_token_ids,
            prefill_modes=self._prefill_mode_policy(router, prefill_target, info),
            is_decode_first=not {info.model, "*"}.isdisjoint(options.decode_first),
        )
        defaults = generation_defaults(card.defaults)
        return Model(
            card,
            processor,
            client,
            journey_context,
            defaults,
            info.capacity,
            Registrations(client),
            root=info.root or card.name,
            role=info.role,
            get_prefill_target=prefill_target,
        )

    def _prefill_target_for(
        self, decode: EndpointClient, info: EngineInfo
    ) -> Callable[[], RoleTarget | None]:
        """Return a getter of these workers' prefill workers; it returns None until one has registered."""
        key = _prefill_key(decode.endpoint, info)
        prefill_role_target: RoleTarget | None = None

        def prefill_target() -> RoleTarget | None:
            nonlocal prefill_role_target
            if prefill_role_target is None and info.role is Role.DECODE and key in self.prefill_targets:
                prefill_role_target = with_kv_filter(self.prefill_targets[key], decode)
            return prefill_role_target

        return prefill_target

    def _prefill_mode_policy(
        self, router: Router, prefill_target: Callable[[], RoleTarget | None], info: EngineInfo
    ) -> PrefillModePolicy:
        if info.role is not Role.DECODE:
            return PrefillModePolicy()
        now = self._runtime.ports.clock.monotonic
        return PrefillModeSelector(router, prefill_target, info.block_size, self._options.prefill, now=now)
