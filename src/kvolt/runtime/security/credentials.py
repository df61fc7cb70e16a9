"""Credentials of this process: its certificate as TLS contexts.

From the cluster key, of which certificates are issued here and renewed at half their lifetime, or from certificate
files of one's own. Files are read again when they change. New connections use the newest contexts; existing
connections continue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from cryptography import x509

from kvolt.core.errors import ConfigError, KvoltError
from kvolt.runtime.blocking_lane import BlockingLane
from kvolt.runtime.clock import Blocking, Clock, SystemClock
from kvolt.runtime.host.safe_files import read_regular
from kvolt.runtime.security.authority import MAX_FILE_BYTES, Certificate, ClusterAuthority, read_secret
from kvolt.runtime.security.identity import Identity, parse_identity

log = logging.getLogger(__name__)

ENROLLMENT_PROTOCOL = "kvolt-enroll/1"
"""ALPN of connections that ask for a certificate."""
_CHECK_S = 10.0
"""Interval of looking for changed files and certificates to renew."""
_READ_TIMEOUT_S = 10.0
_MAX_AUTHORITIES_BYTES = 1 << 20
"""Of a file with certificates of authorities; a system's own collection has a quarter of it."""
_WARN_BEFORE_S = 7 * 24 * 3600.0


class Source(Protocol):
    """Where certificates come from."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files that are read again when they change."""
        ...

    def load(self, now: float) -> Certificate:
        """Raises ConfigError."""
        ...


class KeySource:
    """Issues certificates from the cluster key."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self._path = path
        self._identity = identity
        self._authority: ClusterAuthority | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self._path,)

    def load(self, now: float) -> Certificate:
        authority = ClusterAuthority.load(self._path)
        certificate = authority.issue(self._identity, now)
        self._authority = authority
        return certificate

    @property
    def authority(self) -> ClusterAuthority:
        """The cluster key as of the last `load`."""
        assert self._authority is not None, "load first"
        return self._authority


class FileSource:
    """Certificates of one's own authority. `chain` has the process's certificate first."""

    def __init__(self, chain: Path, key: Path, trusted: Path) -> None:
        self._chain, self._key, self._trusted = chain, key, trusted

    @property
    def paths(self) -> tuple[Path, ...]:
        return self._chain, self._key, self._trusted

    def load(self, now: float) -> Certificate:
        chain, trusted = _read(self._chain, "cluster.certificate"), _read(self._trusted, "cluster.authority")
        leaf, identity = _read_leaf(chain)
        if leaf is None or identity is None:
            raise ConfigError(
                f"{self._chain} is not a certificate with a kvolt://ROLE/PROCESS name",
                key="cluster.certificate",
                remedy="issue it with the URI as subject alternative name, for example kvolt://worker/worker-0",
            )
        key = read_secret(
            self._key, "cluster.private_key", "name the file with the certificate's private key"
        )
        return Certificate(chain, key, trusted, leaf.not_valid_after_utc.timestamp())


class Credentials:
    """See the module. Created before the event loop starts, or in it."""

    def __init__(
        self, source: Source, clock: Clock, fetch: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Raises ConfigError if the first certificate cannot be loaded or is not valid now.

        `fetch`: called before a renewal, for sources whose certificates come from another process.
        """
        self._source = source
        self._clock = clock
        self._fetch = fetch
        self._modified = self._modification_times()
        self._renew_at = 0.0
        self._tried_at = clock.wall()
        self._load(self._tried_at)

    @property
    def server_context(self) -> ssl.SSLContext:
        return self._server_context

    @property
    def join_context(self) -> ssl.SSLContext:
        """For a listener that also serves enrollment: a peer without a certificate completes its handshake."""
        return self._join_context

    @property
    def client_context(self) -> ssl.SSLContext:
        return self._client_context

    @property
    def probe_context(self) -> ssl.SSLContext:
        """Server context for admin ports: probes have no certificate."""
        return self._probe_context

    @property
    def authority(self) -> ClusterAuthority | None:
        """The cluster key, if this process has it."""
        return self._source.authority if isinstance(self._source, KeySource) else None

    @property
    def expires_at(self) -> float:
        """Wall-clock time."""
        return self._expires_at

    @property
    def identity(self) -> Identity:
        """Identity in this process's certificate."""
        assert self._identity is not None, "sources check it"
        return self._identity

    async def keep_fresh(self, blocking: Blocking) -> None:
        """Renew certificates and read changed files, for ever."""
        lane = BlockingLane(blocking, self._clock, _READ_TIMEOUT_S)
        while True:
            await asyncio.sleep(_CHECK_S)
            now = self._clock.wall()
            if self._fetch is not None and now >= self._renew_at:
                await self._fetch()
            try:
                await lane.run(partial(self.reload, now))
            except KvoltError as error:
                log.error("certificate not renewed: error=%s", error.message)

    def reload(self, now: float | None = None) -> None:
        """Load again if a file has changed, half of the lifetime has passed, or the clock was set back: the certificate
        may not be valid yet. Errors are logged once. May block."""
        if now is None:
            now = self._clock.wall()
        modified = self._modification_times()
        is_due = now >= self._renew_at or now < self._tried_at
        if modified == self._modified and not is_due:
            return
        self._modified, self._tried_at = modified, now
        try:
            self._load(now)
        except ConfigError as error:
            # Not until the files change again or the next half of the time has passed.
            self._renew_at = now + max((self._expires_at - now) / 2, _CHECK_S)
            log.error(
                "certificate not renewed: error=%s remedy=%s expires_in_s=%.0f",
                error.message,
                error.fields.get("remedy"),
                self._expires_at - now,
            )
            return
        log.info("certificate renewed: expires_in_s=%.0f", self._expires_at - now)

    def _load(self, now: float) -> None:
        certificate = self._source.load(now)
        if certificate.expires_at <= now:
            raise ConfigError(
                "the certificate of this process has expired",
                key="cluster.certificate",
                remedy="issue a new one, or check the clock of this machine",
            )
        self._server_context = tls_context(ssl.PROTOCOL_TLS_SERVER, certificate)
        self._client_context = tls_context(ssl.PROTOCOL_TLS_CLIENT, certificate)
        self._probe_context = tls_context(ssl.PROTOCOL_TLS_SERVER, certificate, ssl.CERT_OPTIONAL)
        self._join_context = tls_context(ssl.PROTOCOL_TLS_SERVER, certificate, ssl.CERT_OPTIONAL)
        self._join_context.set_alpn_protocols([ENROLLMENT_PROTOCOL])
        self._identity = _read_leaf(certificate.chain_pem)[1]
        self._expires_at = certificate.expires_at
        lifetime_s = certificate.expires_at - now
        self._renew_at = now + lifetime_s / 2
        if isinstance(self._source, FileSource) and lifetime_s < _WARN_BEFORE_S:
            log.warning("certificate expires soon: days=%.1f", lifetime_s / 86_400)

    def _modification_times(self) -> tuple[object, ...]:
        return tuple(_modification(path) for path in self._source.paths)


class ServerCertificate:
    """Certificate of an HTTPS server, read again when its files change."""

    def __init__(self, chain: Path, key: Path, clients: Path | None) -> None:
        """`clients`: authorities of client certificates, which are then required. Raises ConfigError."""
        self._chain, self._key, self._clients = chain, key, clients
        self._modified = self._modification_times()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        return self._context

    async def keep_fresh(self, blocking: Blocking) -> None:
        """Read changed files, for ever."""
        lane = BlockingLane(blocking, SystemClock(), _READ_TIMEOUT_S)
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                await lane.run(self._reload)
            except KvoltError as error:
                log.error("HTTPS certificate not reloaded: error=%s", error.message)

    def _reload(self) -> None:
        modified = self._modification_times()
        if modified == self._modified:
            return
        self._modified = modified
        self._context = self._load()
        log.info("HTTPS certificate reloaded: file=%s", self._chain)

    def _modification_times(self) -> tuple[object, ...]:
        paths = (self._chain, self._key, self._clients)
        return tuple(_modification(path) for path in paths if path is not None)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            _load_chain(
                context, read_regular(self._chain, MAX_FILE_BYTES), read_regular(self._key, MAX_FILE_BYTES)
            )
            if self._clients is not None:
                clients = read_regular(self._clients, _MAX_AUTHORITIES_BYTES)
                context.load_verify_locations(cadata=clients.decode("ascii", "ignore"))
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # also ssl.SSLError
            raise ConfigError(
                f"the HTTPS certificate {self._chain} cannot be used: {error}",
                key="frontend.tls_cert",
                remedy="set frontend.tls_cert and frontend.tls_key to PEM files that belong together",
            ) from None
        return context


def _read_leaf(chain: bytes) -> tuple[x509.Certificate | None, Identity | None]:
    """The first certificate of a PEM file and its identity, as far as they can be read."""
    try:
        leaf = x509.load_pem_x509_certificates(chain)[0]
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (ValueError, IndexError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return None, None
    identities = filter(None, map(parse_identity, uris))
    return leaf, next(identities, None)


def _no_password() -> str:
    raise ValueError("its private key is encrypted")


def _modification(path: Path) -> object:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ino, info.st_size


def _read(path: Path, key: str) -> bytes:
    try:
        return read_regular(path, _MAX_AUTHORITIES_BYTES)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: {reason}", key=key, remedy="set it to a readable PEM file") from None


def tls_context(
    protocol: int, certificate: Certificate, verify_mode: ssl.VerifyMode = ssl.CERT_REQUIRED
) -> ssl.SSLContext:
    """A context for mutual TLS 1.3. Raises ConfigError if the certificate cannot be used.

    Names are not compared with hosts: certificates belong to processes, and addresses change.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = verify_mode
    try:
        context.load_verify_locations(cadata=certificate.trusted_pem.decode("ascii"))
        _load_chain(context, certificate.chain_pem, certificate.key_pem)
    except (OSError, ValueError) as error:  # also ssl.SSLError, and too many open files
        raise ConfigError(
            f"the certificate cannot be used: {error}",
            key="cluster.certificate",
            remedy="check that the certificate, its private key and the authority are PEM and belong together",
        ) from None
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a resumed session would not present its certificate again
    return context


def _load_chain(context: ssl.SSLContext, chain_pem: bytes, key_pem: bytes) -> None:
    # The ssl module reads files only. This one exists in memory, and only this process can open it.
    descriptor = os.memfd_create("kvolt-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, chain_pem.rstrip() + b"\n" + key_pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=_no_password)
    finally:
        os.close(descriptor)
