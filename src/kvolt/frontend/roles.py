"""The roles of a model's workers: how many of each can be reached now, and which is missing.

Only who answers is needed: a decode worker computes prompts as well while nobody does that for it.
"""

from __future__ import annotations

import msgspec

from kvolt.core.request import Role
from kvolt.frontend.models import Model, Models
from kvolt.frontend.openai_api.headers import RequestHints
from kvolt.frontend.openai_api.responses import ModelReady, NamespaceReady
from kvolt.journey.prefill import Leg


def workers_of(model: Model) -> dict[str, int]:
    """By role; one that is of use to the model is told even where nobody has it."""
    workers = {model.role.value: len(model.candidates())}
    if model.role is Role.DECODE:
        leg = model.prefill()
        workers[Role.PREFILL.value] = 0 if leg is None else len(leg.client.candidates())
    return workers


def with_roles(model: Model, said: RequestHints) -> RequestHints:
    """With the workers that may take a request by what they do for the model: an id of one role says nothing of the
    other. One that nobody has counts for both: whose it was is not known, and no others were allowed."""
    routing = said.routing
    leg = model.prefill() if routing.allowed else None
    if leg is None:
        return said
    prefill = {each.id for each in leg.client.instances()}
    answering = {each.id for each in model.client.instances()}
    by_role = msgspec.structs.replace(
        routing,
        allowed=tuple(each for each in routing.allowed if each not in prefill),
        allowed_prefill=tuple(each for each in routing.allowed if each not in answering),
    )
    return msgspec.structs.replace(said, routing=by_role)


def missing_of(model: Model) -> list[str]:
    """Roles without which nothing can be answered."""
    return [] if model.ready else [model.role.value]


def missing_roles(models: Models) -> dict[str, list[str]]:
    """Of every model that cannot be answered for now."""
    known = {model.card.name: missing_of(model) for model in models.all() if not model.ready}
    return known | {name: [Role.DECODE.value] for name in models.unanswered()}


def readiness(models: Models, name: str) -> ModelReady:
    """NotFound for a name that nobody has anything to do with."""
    legs = models.unanswered().get(name)
    if legs is not None:
        return ModelReady(
            model=name,
            ready=False,
            namespaces={leg.client.endpoint.namespace: _prefilled_only(leg) for leg in legs},
        )
    model = models.find(name)
    namespace = NamespaceReady(ready=model.ready, workers=workers_of(model), missing=missing_of(model))
    return ModelReady(
        model=model.name, ready=model.ready, namespaces={model.client.endpoint.namespace: namespace}
    )


def _prefilled_only(leg: Leg) -> NamespaceReady:
    workers = {Role.PREFILL.value: len(leg.client.candidates()), Role.DECODE.value: 0}
    return NamespaceReady(ready=False, workers=workers, missing=[Role.DECODE.value])
