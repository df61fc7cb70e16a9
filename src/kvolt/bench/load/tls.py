"""TLS connections for https servers."""

from __future__ import annotations

import asyncio
import ssl

from kvolt.core.errors import ConnectFailed
from kvolt.runtime.network import ProtocolFactory, split_address


class TlsDialer:
    """Dialer that connects over the Network port and performs the TLS handshake."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context or ssl.create_default_context()

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, protocol = await loop.create_connection(factory, host, port, ssl=self._context)
        except TimeoutError:
            raise ConnectFailed(
                f"{address} did not respond within {timeout_s:g} s", address=address
            ) from None
        except ssl.SSLCertVerificationError as error:
            raise ConnectFailed(
                f"the certificate of {address} is not trusted: {error.verify_message}; "
                "set SSL_CERT_FILE to a file with its certificate authority",
                address=address,
            ) from error
        except OSError as error:  # SSLError is one
            reason = error.strerror or str(error)
            raise ConnectFailed(f"cannot connect to {address}: {reason}", address=address) from error
        return protocol
