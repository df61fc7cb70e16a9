"""Where the two workers of a request meet that have it at the same time (decode-first)."""

from __future__ import annotations

import secrets

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.request import MEETING, Rendezvous
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.plane.wire import MALFORMED

SOMEWHERE = Rendezvous(room=0, address="")
"""For a router, before it is known where: its prompt need not be computed where it is answered."""

_ROOM_BITS = 62
"""So that those after it, one for each part of a prompt, are numbers of 64 bits as well."""

_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


def new_meeting(prefill: Instance) -> Rendezvous | None:
    """None where that worker cannot be met."""
    try:
        address = _decode_info(prefill.info).transfer_addresses.get(MEETING)
    except MALFORMED:
        return None
    return None if address is None else Rendezvous(secrets.randbits(_ROOM_BITS), address)
