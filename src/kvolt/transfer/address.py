"""Where: an agent's address as a line of text, for registrations and requests.

    AGENT@HOST:PORT/UNIX    3f2a90c1d4e5b677@10.0.0.7:41213/kvolt-transfer-3f2a90c1d4e5b677

HOST is numeric, in brackets for IPv6; what follows the slash is left out by an agent that has no Unix socket.
"""

from __future__ import annotations

import re

from kvolt.core.errors import InvalidRequest
from kvolt.transfer.peer.sockets import is_numeric
from kvolt.transfer.peer.wire import Address

_FORM = re.compile(
    r"(?P<agent>[\w-]{1,64})@(?:\[(?P<ipv6>[^\[\]\s]{2,64})\]|(?P<ipv4>[\d.]{7,15}))"
    r":(?P<port>\d{1,5})(?:/(?P<unix>[\w-]{1,100}))?",
    re.ASCII,
)


def where_of(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    unix = f"/{address.unix}" if address.unix else ""
    return f"{address.agent}@{host}:{address.port}{unix}"


def read_where(text: str) -> Address:
    """InvalidRequest for what is none."""
    found = _FORM.fullmatch(text)
    if found is not None:
        host, port = found["ipv6"] or found["ipv4"], int(found["port"])
        is_ipv6 = found["ipv6"] is not None
        if is_numeric(host) and (":" in host) == is_ipv6 and 0 < port < 1 << 16:
            return Address(found["agent"], host, port, found["unix"] or "")
    raise InvalidRequest(
        f"{text[:200]!r} is no address of an agent: it is written AGENT@HOST:PORT/UNIX, as the agent tells it",
        param="address",
    )
