"""What the workers of an endpoint said of themselves when they registered.

Read off once per change of the instances, not once per request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.ids import InstanceId
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.wire import MALFORMED

log = logging.getLogger(__name__)

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


class Registered:
    """Of one endpoint, for as long as its client lives."""

    def __init__(self, client: EndpointClient) -> None:
        self._client = client
        self._infos: dict[InstanceId, EngineInfo | None] | None = None
        self.version = 0
        """Another one whenever they may have changed."""
        client.on_change(self._forget)

    def _forget(self) -> None:
        self._infos = None
        self.version += 1

    def infos(self) -> Mapping[InstanceId, EngineInfo | None]:
        """Of all that are registered, reachable or not; None for one that cannot be read."""
        if self._infos is None:
            self._infos = {instance.id: _info_of(instance) for instance in self._client.instances()}
        return self._infos

    def has_taints(self, instance_id: InstanceId, taints: tuple[str, ...]) -> bool:
        """All of them."""
        info = self.infos().get(instance_id)
        return info is not None and set(taints) <= set(info.taints)


def _info_of(instance: Instance) -> EngineInfo | None:
    try:
        return _decode_info(instance.info)
    except MALFORMED:
        log.warning("instance %s says of itself what cannot be read", instance.id)
        return None
