"""Which instances of an endpoint have which LoRA adapter, as their registrations say.

Read off once per change of the instances, not once per request. Must not know how an adapter is loaded.
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


class Adapters:
    """Of one endpoint, for as long as its client lives."""

    def __init__(self, client: EndpointClient) -> None:
        self._client = client
        self._registered: dict[str, list[InstanceId]] | None = None
        self._reachable: dict[str, list[Instance]] = {}
        client.on_change(self._forget)

    def registered(self, name: str) -> list[InstanceId]:
        """All that have it, whether they can be reached or not."""
        return self._look().get(name, [])

    def holders(self, name: str) -> list[Instance]:
        """The candidates that have it, in order of id."""
        self._look()
        return self._reachable.get(name, [])

    @property
    def names(self) -> list[str]:
        """Those that a request would reach now."""
        self._look()
        return list(self._reachable)

    def _look(self) -> dict[str, list[InstanceId]]:
        if self._registered is None:
            self._registered, self._reachable = {}, {}
            candidates = {instance.id for instance in self._client.candidates()}
            for instance in self._client.instances():
                for name in _loras(instance):
                    self._registered.setdefault(name, []).append(instance.id)
                    if instance.id in candidates:
                        self._reachable.setdefault(name, []).append(instance)
        return self._registered

    def _forget(self) -> None:
        self._registered = None


def _loras(instance: Instance) -> Iterable[str]:
    """Each once; none of who registered something else, or nothing."""
    try:
        return dict.fromkeys(_decode_info(instance.info).loras)
    except MALFORMED:
        return ()
