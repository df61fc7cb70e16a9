"""Available and missing worker roles of each model.

Only decode or aggregated workers are required: without prefill workers, decode workers compute prompts themselves.
"""

from __future__ import annotations

import msgspec

from kvolt.core.request import Role
from kvolt.frontend.models import Model, Models
from kvolt.frontend.openai_api.headers import RequestHints
from kvolt.frontend.openai_api.responses import ModelReady, NamespaceReady
from kvolt.journey.prefill import RoleTarget


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


def missing_roles_of(model: Model) -> list[str]:
    """Roles that the model lacks to serve requests."""
    return [] if model.ready else [model.role.value]


def missing_roles(models: Models) -> dict[str, list[str]]:
    """Missing roles of every model that cannot be served now."""
    known = {model.card.name: missing_roles_of(model) for model in models.all() if not model.ready}
    return known | {name: [Role.DECODE.value] for name in models.prefill_only()}


def readiness(models: Models, name: str) -> ModelReady:
    """Readiness of a model by namespace; raises NotFound for an unknown name."""
    targets = models.prefill_only().get(name)
    if targets is not None:
        return ModelReady(
            model=name,
            ready=False,
            namespaces={
                prefill_target.client.endpoint.namespace: _prefill_only_readiness(prefill_target)
                for prefill_target in targets
            },
        )
    model = models.find(name)
    namespace = NamespaceReady(
        ready=model.ready, workers=count_workers(model), missing=missing_roles_of(model)
    )
    return ModelReady(
        model=model.name, ready=model.ready, namespaces={model.client.endpoint.namespace: namespace}
    )


def _prefill_only_readiness(prefill_target: RoleTarget) -> NamespaceReady:
    workers = {Role.PREFILL.value: len(prefill_target.client.candidates()), Role.DECODE.value: 0}
    return NamespaceReady(ready=False, workers=workers, missing=[Role.DECODE.value])
