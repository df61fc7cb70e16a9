"""PromptTimes: predicted prefill times, for routers that track no loads.

The cost model is that of the KV-aware routers. Cached blocks and other requests are unknown here.
"""

from __future__ import annotations

import numpy as np

from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.policy.cost_model import CostModel
from kvolt.router.registrations import Registrations

_ZERO = np.zeros(1)


class PromptTimes:
    """See the module."""

    def __init__(self, registrations: Registrations) -> None:
        self._registrations = registrations
        self._version: int | None = None
        self._models: dict[InstanceId, CostModel] = {}
        """Cost models of single workers, until the registrations change."""

    def predict_ms(self, instance_id: InstanceId, request: Request) -> float | None:
        """Time to compute the request's prompt and prior tokens at an idle worker. None if the worker has registered
        no step model, or gets the KV from a prefill worker."""
        if request.handoff is not None or request.rendezvous is not None:
            return None
        model = self._model_of(instance_id)
        if not model.has_own_model[0]:
            return None
        num_tokens = request.num_context_tokens
        return 1e3 * float(model.prefill_s(num_tokens, np.array([float(num_tokens)]), _ZERO, _ZERO)[0])

    def _model_of(self, instance_id: InstanceId) -> CostModel:
        infos = self._registrations.infos()
        if self._version != self._registrations.version:
            self._version = self._registrations.version
            self._models.clear()
        model = self._models.get(instance_id)
        if model is None:
            model = self._models[instance_id] = CostModel([infos.get(instance_id)])
        return model
