"""Text form of an agent's address, for registrations and requests.

    AGENT@HOST:PORT/UNIX    3f2a90c1d4e5b677@10.0.0.7:41213/kvolt-transfer-3f2a90c1d4e5b677

HOST is numeric, in brackets for IPv6. An agent without a Unix socket omits the slash and what follows.
"""

from __future__ import annotations

import re

from kvolt.core.errors import InvalidRequest
from kvolt.transfer.peer.sockets import is_numeric
from kvolt.transfer.peer.wire import Address

_PATTERN = re.compile(
    r"(?P<agent>[\w-]{1,64})@(?:\[(?P<ipv6>[^\[\]\s]{2,64})\]|(?P<ipv4>[\d.]{7,15}))"
    r":(?P<port>\d{1,5})(?:/(?P<unix>[\w-]{1,100}))?",
    re.ASCII,
)


def format_address(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    unix = f"/{address.unix}" if address.unix else ""
    return f"{address.agent}@{host}:{address.port}{unix}"


def parse_address(text: str) -> Address:
    """Parse `format_address` output. InvalidRequest if malformed."""
    match = _PATTERN.fullmatch(text)
    if match is not None:
        host, port = match["ipv6"] or match["ipv4"], int(match["port"])
        is_ipv6 = match["ipv6"] is not None
        if is_numeric(host) and (":" in host) == is_ipv6 and 0 < port < 1 << 16:
            return Address(match["agent"], host, port, match["unix"] or "")
    raise InvalidRequest(
        f"{text[:200]!r} is not an agent address: expected AGENT@HOST:PORT/UNIX",
        param="address",
    )
