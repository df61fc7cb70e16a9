"""Credentials of a process that was started with a join token: from a join server, renewed there.

The private key and the certificate are in memory only, so a restarted process needs a new token.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvolt.core.errors import AccessDenied, ConfigError, ConnectFailed
from kvolt.runtime.clock import Clock
from kvolt.runtime.network import connect_error, split_address
from kvolt.runtime.security.authority import Certificate, private_pem
from kvolt.runtime.security.credentials import ENROLLMENT_PROTOCOL, Credentials, tls_context
from kvolt.runtime.security.enrollment import (
    CONNECTION_S,
    LENGTH,
    MAX_RESPONSE_BYTES,
    SERVER_ROLES,
    Enrolled,
    EnrollRequest,
    EnrollResponse,
    Refused,
    Welcome,
    frame,
)
from kvolt.runtime.security.identity import Identity, parse_identity
from kvolt.runtime.security.join_token import JoinToken, parse_token

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_REMEDY = "create a new token with `kvolt cluster token`: each is for one start of one process"


async def enroll(
    address: str, token_text: str, identity: Identity, clock: Clock, timeout_s: float
) -> Credentials:
    """Credentials from the join server at the address.

    Raises ConfigError if the server refuses, is not of the token's cluster, or is unreachable until the timeout.
    """
    token = parse_token(token_text)
    if token.role != identity.role:
        raise ConfigError(
            f"the join token is for a {token.role}, and this process is a {identity.role}",
            key="cluster.join_token",
            remedy=f"create one with `kvolt cluster token --role {identity.role}`",
        )
    client = _EnrollmentClient(address, token, identity, clock)
    started, was_logged = clock.monotonic(), False
    while True:
        try:
            source = EnrolledSource(client, await client.enroll(token_text))
            return Credentials(source, clock, source.fetch)
        except AccessDenied as error:
            raise ConfigError(error.message, key="cluster.join_token", remedy=_REMEDY) from None
        except ConnectFailed as error:
            if clock.monotonic() - started + _RETRY_S >= timeout_s:
                raise ConfigError(
                    f"no certificate from {address}: {error.message}",
                    key="discovery.join",
                    remedy="check the address, or start the process with --discovery-join-listen",
                ) from error
            if not was_logged:
                was_logged = True
                log.warning("join server unreachable: %s; retrying for %g s", error.message, timeout_s)
        await asyncio.sleep(_RETRY_S)


class EnrolledSource:
    """Source of credentials: the last certificate from the join server."""

    paths: tuple[Path, ...] = ()

    def __init__(self, client: _EnrollmentClient, certificate: Certificate) -> None:
        self._client = client
        self._certificate = certificate
        self._failure: str | None = None

    async def fetch(self) -> None:
        """Get a certificate in place of the present one; `load` raises if that fails."""
        try:
            self._certificate = await self._client.renew(self._certificate)
            self._failure = None
        except (AccessDenied, ConnectFailed) as error:
            self._failure = error.message

    def load(self, now: float) -> Certificate:
        if self._failure is not None:
            raise ConfigError(
                self._failure, key="cluster.join_token", remedy="check the join server, or " + _REMEDY
            )
        return self._certificate


class _EnrollmentClient:
    """Requests to a join server. Its errors: AccessDenied if it refuses, ConnectFailed if it cannot be reached."""

    def __init__(self, address: str, token: JoinToken, identity: Identity, clock: Clock) -> None:
        self._address = address
        self._fingerprint = token.fingerprint
        self._identity = identity
        self._clock = clock
        self._key = ec.generate_private_key(ec.SECP256R1())
        """Of the first certificate: the same for all attempts, because the token is used by the first."""

    async def enroll(self, token_text: str) -> Certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # `_check_server` follows
        return await self._request(context, self._key, token_text)

    async def renew(self, present: Certificate) -> Certificate:
        context = tls_context(ssl.PROTOCOL_TLS_CLIENT, present)
        return await self._request(context, ec.generate_private_key(ec.SECP256R1()), None)

    async def _request(
        self, context: ssl.SSLContext, key: ec.EllipticCurvePrivateKey, token_text: str | None
    ) -> Certificate:
        context.set_alpn_protocols([ENROLLMENT_PROTOCOL])
        request = EnrollRequest(_signing_request(key), self._identity.process, token_text)
        try:
            async with asyncio.timeout(CONNECTION_S):
                response = await self._exchange(context, request)
        except TimeoutError:
            raise ConnectFailed(f"{self._address} did not answer", address=self._address) from None
        except (asyncio.IncompleteReadError, msgspec.MsgspecError, UnicodeDecodeError):
            raise ConnectFailed(
                f"{self._address} closed the connection, or is not a join server with a cluster key",
                address=self._address,
            ) from None
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise ConnectFailed(f"TLS with {self._address} failed: {reason}", address=self._address) from None
        except OSError as error:
            raise connect_error(self._address, error) from error
        if isinstance(response, Refused):
            raise AccessDenied(f"{self._address} refused to issue a certificate: {response.reason[:300]}")
        return Certificate(response.chain_pem, private_pem(key), response.trusted_pem, response.expires_at)

    async def _exchange(self, context: ssl.SSLContext, request: EnrollRequest) -> Enrolled | Refused:
        host, port = split_address(self._address)
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            tls = writer.get_extra_info("ssl_object")
            if tls.selected_alpn_protocol() != ENROLLMENT_PROTOCOL:
                raise AccessDenied(f"{self._address} is not a join server with a cluster key")
            welcome = msgspec.msgpack.decode(await _read_frame(reader), type=Welcome)
            self._check_server(tls.getpeercert(binary_form=True) or b"", welcome, request)
            writer.write(frame(request))
            return _decode_response(await _read_frame(reader))
        finally:
            writer.transport.abort()

    def _check_server(self, leaf_der: bytes, welcome: Welcome, request: EnrollRequest) -> None:
        """Raise AccessDenied unless the server may get the request, which may have a token."""
        try:
            leaf = x509.load_der_x509_certificate(leaf_der)
            if request.token is not None:  # TLS has verified the server of a renewal
                self._check_issuer(leaf, welcome.authority)
            names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            raise AccessDenied(f"{self._address} is not of the cluster of the join token") from None
        identities = [parse_identity(uri) for uri in uris]
        if not any(each is not None and each.role in SERVER_ROLES for each in identities):
            raise AccessDenied(f"{self._address} is not a frontend or router, which alone issue certificates")

    def _check_issuer(self, leaf: x509.Certificate, authority_der: bytes) -> None:
        """Check that the authority with the token's fingerprint has issued the certificate, and that it is valid."""
        if hashlib.sha256(authority_der).digest() != self._fingerprint:
            raise ValueError("another authority")
        leaf.verify_directly_issued_by(x509.load_der_x509_certificate(authority_der))
        now = datetime.fromtimestamp(self._clock.wall(), UTC)
        if not leaf.not_valid_before_utc <= now <= leaf.not_valid_after_utc:
            raise AccessDenied(
                f"the certificate of {self._address} is not valid now: check the clocks of both machines"
            )


def _decode_response(body: bytes) -> Enrolled | Refused:
    response: Enrolled | Refused = msgspec.msgpack.decode(body, type=EnrollResponse)
    return response


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if size > MAX_RESPONSE_BYTES:
        raise msgspec.ValidationError("too large")
    return await reader.readexactly(size)


def _signing_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvolt")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)
