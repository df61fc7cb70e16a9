"""Identity of a process in its certificate: a URI `kvolt://ROLE/PROCESS` in the subject alternative names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from kvolt.core.errors import ProtocolError

SCHEME = "kvolt"
_URI = re.compile(rf"{SCHEME}://([a-z]{{1,32}})/(\w[\w.-]{{0,127}})", re.ASCII)


class ProcessRole(StrEnum):
    """What a process is for; `access` lists what each role may do."""

    FRONTEND = "frontend"
    ROUTER = "router"
    WORKER = "worker"
    POOL = "pool"
    """A `kvolt cache serve`."""
    CLIENT = "client"
    """Commands for operators, such as `kvolt status`."""


class Identity(msgspec.Struct, frozen=True):
    role: ProcessRole
    process: str

    @classmethod
    def of(cls, role: ProcessRole, name: str) -> Identity:
        """The identity of a process with any name."""
        safe = re.sub(r"[^\w.-]", "-", name, flags=re.ASCII).lstrip(".-")[:128]
        return cls(role, safe or str(role))

    @property
    def uri(self) -> str:
        return f"{SCHEME}://{self.role}/{self.process}"


def parse_identity(uri: str) -> Identity | None:
    """The identity of a URI; None if it is not one of kvolt."""
    match = _URI.fullmatch(uri)
    role = next((role for role in ProcessRole if match is not None and role == match[1]), None)
    return None if match is None or role is None else Identity(role, match[2])


def identity_of(certificate: Mapping[str, Any] | None) -> Identity:
    """The identity of a verified peer, from `ssl.SSLObject.getpeercert()`.

    Raises ProtocolError if it has none: a company's own authority may have signed many other certificates.
    """
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        identity = parse_identity(value) if kind == "URI" else None
        if identity is not None:
            return identity
    raise ProtocolError(f"the peer's certificate has no {SCHEME}://ROLE/PROCESS name", rule="identity")


def certificate_identity(transport: asyncio.BaseTransport) -> Identity | None:
    """Identity of a client of HTTPS; None if it has no certificate, or one that names no process of kvolt."""
    try:
        return peer_identity(transport)
    except ProtocolError:
        return None


def peer_identity(transport: asyncio.BaseTransport) -> Identity | None:
    """Identity of the peer of a TLS connection; None without TLS. Raises ProtocolError if it has none."""
    certificate = transport.get_extra_info("peercert")
    return identity_of(certificate) if certificate is not None else None
