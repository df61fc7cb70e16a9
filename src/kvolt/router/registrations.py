"""Registered engine metadata of the workers of an endpoint, and their LoRA adapters.

Decoded once per change of the instances, not per request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.endpoints import Instance
from kvolt.core.errors import MALFORMED
from kvolt.core.ids import InstanceId
from kvolt.runtime.endpoint.client import EndpointClient

log = logging.getLogger(__name__)

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


class Registrations:
    """EngineInfo by instance, and instances by adapter; lives as long as its client."""

    def __init__(self, client: EndpointClient) -> None:
        self._client = client
        self._infos: dict[InstanceId, EngineInfo | None] | None = None
        self._with_lora: dict[str, list[InstanceId]] = {}
        """Registered instances by adapter."""
        self._loras: dict[str, list[Instance]] = {}
        """Candidates by adapter, in order of id."""
        self.version = 0
        """Incremented when the registrations may have changed."""
        client.on_change(self._invalidate)

    def _invalidate(self) -> None:
        self._infos = None
        self.version += 1

    def infos(self) -> Mapping[InstanceId, EngineInfo | None]:
        """All registered instances, reachable or not; None if the metadata cannot be decoded."""
        if self._infos is None:
            infos = self._infos = {instance.id: _info_of(instance) for instance in self._client.instances()}
            self._with_lora, self._loras = {}, {}
            candidates = {instance.id: instance for instance in self._client.candidates()}
            for instance_id, info in infos.items():
                for name in dict.fromkeys(info.loras) if info is not None else ():
                    self._with_lora.setdefault(name, []).append(instance_id)
                    if instance_id in candidates:
                        self._loras.setdefault(name, []).append(candidates[instance_id])
        return self._infos

    def has_taints(self, instance_id: InstanceId, taints: tuple[str, ...]) -> bool:
        """Whether the instance has all of these taints."""
        info = self.infos().get(instance_id)
        return info is not None and set(taints) <= set(info.taints)

    def registered_with(self, lora: str) -> list[InstanceId]:
        """All registered instances with an adapter, reachable or not."""
        self.infos()
        return self._with_lora.get(lora, [])

    def candidates_with(self, lora: str) -> list[Instance]:
        """Candidates with an adapter, in order of id."""
        self.infos()
        return self._loras.get(lora, [])

    @property
    def reachable_loras(self) -> list[str]:
        """Adapters of the candidates."""
        self.infos()
        return list(self._loras)


def _info_of(instance: Instance) -> EngineInfo | None:
    try:
        return _decode_info(instance.info)
    except MALFORMED:
        log.warning("cannot decode the registration: instance=%s", instance.id)
        return None
