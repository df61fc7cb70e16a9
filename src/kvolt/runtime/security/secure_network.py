"""Networks over TLS: between processes of a cluster, for operators, and for clients of an HTTP server.

One listener of a cluster may also serve peers without a certificate that ask for one (`enrollment`), by a protocol of
its own.
"""

from __future__ import annotations

import asyncio
import ssl

from kvolt.core.errors import ConfigError, ConnectFailed, ProtocolError
from kvolt.runtime.network import Listener, ProtocolFactory, SocketNetwork, connect_error, split_address
from kvolt.runtime.security.credentials import ENROLLMENT_PROTOCOL, Credentials, ServerCertificate
from kvolt.runtime.security.enrollment import EnrollmentServer
from kvolt.runtime.security.identity import peer_identity
from kvolt.runtime.security.tls_listener import Admission, CountOutcome, ProtocolOf, TlsListener, bind


class SecureNetwork:
    """Mutual TLS 1.3 between processes: both ends show a certificate of the cluster."""

    def __init__(
        self,
        credentials: Credentials,
        count_outcome: CountOutcome = lambda outcome: None,
        enrollment: tuple[str, EnrollmentServer] | None = None,
    ) -> None:
        """`enrollment`: address of the listener that also serves enrollment, and its server."""
        self._credentials = credentials
        self._count_outcome = count_outcome
        self._enrollment = enrollment

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        sockets, credentials = await bind(address), self._credentials
        if self._enrollment is None or self._enrollment[0] != address:
            return TlsListener(
                sockets, lambda: credentials.server_context, identified(factory), self._count_outcome
            )
        server = self._enrollment[1]

        def protocol_of(stream: asyncio.Transport) -> asyncio.Protocol:
            alpn = stream.get_extra_info("ssl_object").selected_alpn_protocol()
            return server.accept() if alpn == ENROLLMENT_PROTOCOL else identified(factory)(stream)

        listener = TlsListener(sockets, lambda: credentials.join_context, protocol_of, self._count_outcome)
        return _EnrollmentListener(listener, server)

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        try:
            host, port = split_address(address)
        except ConfigError as error:  # malformed registration: to the caller it is an unreachable address
            raise ConnectFailed(error.message, address=address) from error
        loop = asyncio.get_running_loop()
        admission = Admission(identified(factory))
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(
                    lambda: admission, host, port, ssl=self._credentials.client_context
                )
        except TimeoutError:
            raise ConnectFailed(f"{address} did not answer within {timeout_s:g} s", address=address) from None
        except ssl.SSLError as error:
            raise _handshake_error(address, error) from error
        except (OSError, UnicodeError) as error:
            raise connect_error(address, error) from error
        if admission.refusal is not None:
            raise ConnectFailed(f"{address}: {admission.refusal.message}", address=address)
        assert admission.protocol is not None
        return admission.protocol


class _EnrollmentListener:
    """Listener that ends its enrollment with itself."""

    def __init__(self, listener: TlsListener, server: EnrollmentServer) -> None:
        self._listener = listener
        self._server = server

    @property
    def address(self) -> str:
        return self._listener.address

    async def close(self) -> None:
        await self._listener.close()
        await self._server.close()


def identified(factory: ProtocolFactory) -> ProtocolOf:
    """The factory's protocols, for peers with an identity of the cluster."""

    def protocol_of(stream: asyncio.Transport) -> asyncio.Protocol:
        if peer_identity(stream) is None:
            raise ProtocolError("the peer has no certificate", rule="identity")
        return factory()

    return protocol_of


class AdminNetwork(SocketNetwork):
    """Listens for operators with a certificate of the cluster, and for probes without one; connects without TLS."""

    def __init__(self, credentials: Credentials, count_outcome: CountOutcome = lambda outcome: None) -> None:
        super().__init__()
        self._credentials = credentials
        self._count_outcome = count_outcome

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        credentials = self._credentials
        return TlsListener(
            await bind(address),
            lambda: credentials.probe_context,
            lambda stream: factory(),
            self._count_outcome,
        )


class HttpsNetwork(SocketNetwork):
    """Listens for HTTPS clients; connects without TLS."""

    def __init__(
        self,
        certificate: ServerCertificate,
        count_outcome: CountOutcome = lambda outcome: None,
        reuse_port: bool = False,
    ) -> None:
        super().__init__()
        self._certificate = certificate
        self._count_outcome = count_outcome
        self._reuse_https_port = reuse_port

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        sockets = await bind(address, self._reuse_https_port)
        return TlsListener(sockets, self._certificate.context, lambda stream: factory(), self._count_outcome)


def _handshake_error(address: str, error: ssl.SSLError) -> ConnectFailed:
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"the certificate of {address} is not of this cluster: {error.verify_message}"
    else:
        problem = f"{address} did not complete a TLS handshake: {(error.reason or str(error)).lower()}"
    return ConnectFailed(
        problem, address=address, remedy="start all processes of the cluster with the same --cluster-key"
    )
