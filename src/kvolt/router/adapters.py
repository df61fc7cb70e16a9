"""LoRA adapters of the instances of an endpoint, from their registrations.

Computed once per change of the instances, not per request.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.ids import InstanceId
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.wire import MALFORMED

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


class LoraIndex:
    """Instances by LoRA adapter; lives as long as its client."""

    def __init__(self, client: EndpointClient) -> None:
        self._client = client
        self._registered: dict[str, list[InstanceId]] | None = None
        self._reachable: dict[str, list[Instance]] = {}
        client.on_change(self._invalidate)

    def registered_instances(self, name: str) -> list[InstanceId]:
        """All registered instances with the adapter, reachable or not."""
        return self._refresh().get(name, [])

    def candidates(self, name: str) -> list[Instance]:
        """Candidates with the adapter, in order of id."""
        self._refresh()
        return self._reachable.get(name, [])

    @property
    def reachable_names(self) -> list[str]:
        """Adapters of the reachable candidates."""
        self._refresh()
        return list(self._reachable)

    def _refresh(self) -> dict[str, list[InstanceId]]:
        if self._registered is None:
            self._registered, self._reachable = {}, {}
            candidates = {instance.id for instance in self._client.candidates()}
            for instance in self._client.instances():
                for name in _loras(instance):
                    self._registered.setdefault(name, []).append(instance.id)
                    if instance.id in candidates:
                        self._reachable.setdefault(name, []).append(instance)
        return self._registered

    def _invalidate(self) -> None:
        self._registered = None


def _loras(instance: Instance) -> Iterable[str]:
    """Distinct adapters of an instance; none if its registration cannot be decoded."""
    try:
        return dict.fromkeys(_decode_info(instance.info).loras)
    except MALFORMED:
        return ()
