"""Endpoints: names, addresses and instances; components and event topics; the withdrawal of a request."""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum

import msgspec

from kvolt.core.errors import MALFORMED, ConfigError, KvoltError, Unavailable
from kvolt.core.ids import CardHash, InstanceId, RequestId
from kvolt.core.request import Role

GENERATE = "generate"
"""Requests in, deltas out."""
CARD = "card"
"""Returns the ModelCard of a hash."""
CONTROL = "control"
"""Operator commands to one worker. Not registered: it shares the address of `generate`, and is served while the
worker is cordoned."""
KV = "kv"
"""Requests between workers: reads and offers of KV blocks. Not registered, like `control`."""
KV_POOL = "kv-pool"
"""Component of the shared KV pools. A pool registers its `control` endpoint, where routers query its contents."""
LOAD_TOPIC = "load"
"""Event plane topic of load reports."""
KV_TOPIC = "kv"
"""Event plane topic of KV events: each payload is a KvEventBatch."""
ROUTER_LOAD_TOPIC = "router-load"
"""Event plane topic of the load exchange between routers: each payload is a LoadVector."""
ATTACHED_DETAILS = "attached"
"""Section of a frontend's status with the state of each attached server."""
QUEUE_DETAILS = "router_queue"
"""Section of a frontend's or router process's status with the requests and tokens that wait in its routers."""

INSTANCES = "instances/"
"""Discovery prefix of all instances."""
EVENT_PUBLISHERS = "events/"
"""Discovery prefix of all event publishers."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}")
_WITHDRAWN = "withdrawn"


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
    identity: str = ""
    """URI in the certificate of the process; empty without a cluster key."""
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
    except MALFORMED:
        return None


class PublisherRegistration(msgspec.Struct, frozen=True, omit_defaults=True):
    """Registration of a publisher. Fields of newer versions are ignored."""

    address: str
    version: int
    """Of the transport: `zmq_sockets.MESSAGE_VERSION` or `plane_events.VERSION`."""
    identity: str = ""
    """URI in the certificate of the process; empty without a cluster key."""


def publishers_prefix(namespace: str) -> str:
    return f"{EVENT_PUBLISHERS}{namespace}/"


def decode_publisher(value: bytes) -> PublisherRegistration | None:
    """None if it is malformed."""
    try:
        return _decode_publisher(value)
    except MALFORMED:
        return None


_decode_publisher = msgspec.msgpack.Decoder(PublisherRegistration).decode


def component_name(model: str, role: Role, card: CardHash) -> str:
    """Component name of interchangeable workers: same model, role and card.

    A changed card (new template, other block size) gives another component, so a rollout never mixes the two.
    """
    slug = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-").lower()[:32] or "model"
    digest = hashlib.blake2b(f"{len(model)}:{model}/{role}/{card}".encode(), digest_size=5).hexdigest()
    return f"{slug}-{role}-{digest}"


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Control request: withdraw a dispatched request that has not started.

    Its stream ends with Unavailable and reason `withdrawn`. The caller relies on that error, which arrives even if the
    response to Withdraw is lost. Withdrawing a prefilled prompt that no decode worker will fetch releases its blocks.
    """

    request_id: RequestId


class WithdrawResult(msgspec.Struct, frozen=True, tag="withdrawn"):
    """`was_withdrawn`: the request had not started and will not be computed here. For a prefilled prompt: its blocks
    were still held and are released."""

    was_withdrawn: bool


def withdrawn_error() -> Unavailable:
    """Error that ends the stream of a withdrawn request."""
    return Unavailable("the request was withdrawn before it started", reason=_WITHDRAWN, gpu_work="none")


def was_withdrawn(error: KvoltError | None) -> bool:
    return isinstance(error, Unavailable) and error.fields.get("reason") == _WITHDRAWN
