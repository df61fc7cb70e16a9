"""Addressing: `namespace.component.endpoint`, and the instances that serve one."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.core.ids import InstanceId

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}")

INSTANCES = "instances/"
"""Discovery prefix of all instances."""


class EndpointAddress(msgspec.Struct, frozen=True, order=True):
    """Address of an endpoint: `namespace.component.endpoint`."""

    namespace: str
    component: str
    endpoint: str

    def __str__(self) -> str:
        return f"{self.namespace}.{self.component}.{self.endpoint}"

    @classmethod
    def parse(cls, text: str) -> EndpointAddress:
        parts = text.split(".")
        if len(parts) != 3 or not all(_NAME.fullmatch(part) for part in parts):
            raise ConfigError(
                f"{text!r} is not an endpoint",
                remedy="write namespace.component.endpoint (letters, digits, _ and -)",
            )
        return cls(*parts)

    @property
    def prefix(self) -> str:
        """Discovery prefix under which this endpoint's instances register."""
        return f"{INSTANCES}{self.namespace}/{self.component}/{self.endpoint}/"


class InstanceState(StrEnum):
    """Whether an instance accepts new requests."""

    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"


class Instance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One live copy of an endpoint, as registered."""

    id: InstanceId
    endpoint: EndpointAddress
    address: str
    """Request plane address, HOST:PORT."""
    process: str = ""
    """Process name, for display."""
    state: InstanceState = InstanceState.READY
    admin: str | None = None
    """Admin server address, HOST:PORT."""
    info: msgspec.Raw = msgspec.Raw(b"\xc0")
    """Component metadata (a worker: its EngineInfo), msgpack."""

    @property
    def key(self) -> str:
        return f"{self.endpoint.prefix}{self.id}"

    @property
    def target(self) -> str:
        """Stream target that matches this instance only, not another one at the same address."""
        return f"{self.endpoint}#{self.id}"


_decode_instance = msgspec.msgpack.Decoder(Instance).decode


def encode_instance(instance: Instance) -> bytes:
    return msgspec.msgpack.encode(instance)


def decode_instance(value: bytes) -> Instance | None:
    """Decode a registration; None when it is malformed or of an unknown version."""
    try:
        return _decode_instance(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
