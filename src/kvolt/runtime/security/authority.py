"""Cluster authority: the cluster key, and the certificates that it issues.

The cluster key is one PEM file. Every process that has it issues its own certificate at start, so the key is what makes
a process a member of the cluster.

    kvolt.key    private key     signs certificates
                 certificate 1   of that key, signed by itself
                 certificate 2   after a rotation: of that key, signed by the previous one
                 certificate 3   after a rotation: of the previous key

A process with a rotated key presents certificate 2 with its own, so that processes which still have the old file accept
it. Files can therefore be replaced machine by machine.
"""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvolt.core.errors import ConfigError
from kvolt.runtime.host.safe_files import open_regular, read_bounded
from kvolt.runtime.security.identity import Identity

LIFETIME_S = 24 * 3600.0
"""Lifetime of the certificate of a process, which is renewed while it runs."""
_AUTHORITY_LIFETIME = timedelta(days=3650)
_CLOCK_SKEW = timedelta(minutes=10)
"""Certificates are valid from this much earlier, for machines whose clock is behind."""
MAX_FILE_BYTES = 64 * 1024
"""Of a cluster key, a certificate chain with its authorities, or a private key."""
_REMEDY = "create one with `kvolt cluster init FILE`, and copy it to all machines of the cluster"


class Certificate(msgspec.Struct, frozen=True):
    """Certificate and private key of a process, with the certificates of the authorities that it trusts."""

    chain_pem: bytes
    """Its own certificate, and those that lead to an authority."""
    key_pem: bytes
    trusted_pem: bytes
    expires_at: float
    """Wall-clock time."""


class ClusterAuthority:
    """A loaded cluster key."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificates: list[x509.Certificate]) -> None:
        """`certificates`: the key's own first."""
        self._key = key
        self._own = certificates[0]
        own_subject = self._own.subject
        others = [each for each in certificates[1:] if each.subject != own_subject]
        self._cross = [each for each in certificates[1:] if each.subject == own_subject]
        self._trusted = [self._own, *others]

    @classmethod
    def create(cls, now: float) -> ClusterAuthority:
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(key, [_authority_certificate(key, key, None, now)])

    @classmethod
    def parse(cls, pem: bytes, source: str) -> ClusterAuthority:
        """Raises ConfigError if it is not a cluster key. `source`: its name in errors."""
        try:
            key = serialization.load_pem_private_key(pem, None)
            certificates = x509.load_pem_x509_certificates(pem)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise _not_a_key(source, str(error)) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise _not_a_key(source, "its private key is not of the curve P-256")
        if certificates[0].public_key() != key.public_key():
            raise _not_a_key(source, "its first certificate is of another key")
        return cls(key, certificates)

    @classmethod
    def load(cls, path: Path) -> ClusterAuthority:
        """Raises ConfigError if the file cannot be read, is not a cluster key, or is readable by other users."""
        return cls.parse(read_secret(path), str(path))

    def rotate(self, now: float) -> ClusterAuthority:
        """An authority with a new key that trusts this one, and whose certificates holders of this one accept."""
        key = ec.generate_private_key(ec.SECP256R1())
        own = _authority_certificate(key, key, None, now)
        cross = _authority_certificate(key, self._key, self._own, now, own.subject)
        return ClusterAuthority(key, [own, cross, self._own])

    def to_pem(self) -> bytes:
        return private_pem(self._key) + _pem([self._own, *self._cross, *self._trusted[1:]])

    @property
    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of its certificate, by which operators compare files."""
        return hashlib.sha256(self.certificate_der).hexdigest()[:16]

    @property
    def expires_at(self) -> float:
        return self._own.not_valid_after_utc.timestamp()

    @property
    def certificate_der(self) -> bytes:
        return self._own.public_bytes(serialization.Encoding.DER)

    def derive(self, purpose: str) -> bytes:
        """A secret that only holders of this key can compute, 32 bytes."""
        value = self._key.private_numbers().private_value.to_bytes(32)
        return HKDF(hashes.SHA256(), 32, salt=None, info=f"kvolt {purpose}".encode()).derive(value)

    def issue(self, identity: Identity, now: float, lifetime_s: float = LIFETIME_S) -> Certificate:
        """A certificate for a process of this cluster, with a new private key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self.sign(key.public_key(), identity, now, lifetime_s)
        return msgspec.structs.replace(certificate, key_pem=private_pem(key))

    def sign(
        self, key: ec.EllipticCurvePublicKey, identity: Identity, now: float, lifetime_s: float = LIFETIME_S
    ) -> Certificate:
        """A certificate of another process's key, without the private key."""
        start = datetime.fromtimestamp(now, UTC)
        end = min(start + timedelta(seconds=lifetime_s), self._own.not_valid_after_utc)
        certificate = (
            _builder(key, _name(f"kvolt {identity.role}"), self._own.subject, start - _CLOCK_SKEW, end)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)]), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(_authority_key_id(self._key), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Certificate(
            chain_pem=_pem([certificate, *self._cross]),
            key_pem=b"",
            trusted_pem=_pem(self._trusted),
            expires_at=end.timestamp(),
        )


def read_secret(path: Path, key: str = "cluster.key", remedy: str = _REMEDY) -> bytes:
    """Contents of a file with a secret. Raises ConfigError if other users can read it.

    `key`: the setting with the path; `remedy`: where to get such a file.
    """
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = read_bounded(file, MAX_FILE_BYTES)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: {reason}", key=key, remedy=remedy) from None
    if mode & 0o077:
        raise ConfigError(f"{path}: other users can read it", key=key, remedy=f"run `chmod 600 {path}`")
    return content


def _not_a_key(source: str, reason: str) -> ConfigError:
    return ConfigError(f"{source} is not a cluster key: {reason}", key="cluster.key", remedy=_REMEDY)


def _authority_certificate(
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    now: float,
    subject: x509.Name | None = None,
) -> x509.Certificate:
    """Certificate of an authority's key, signed by itself or by the previous authority."""
    start = datetime.fromtimestamp(now, UTC)
    # A name of its own for each key: verification finds issuers by name.
    subject = subject or _name(f"kvolt cluster {key.public_key().public_numbers().x & 0xFFFFFFFF:08x}")
    end = start + _AUTHORITY_LIFETIME if issuer is None else issuer.not_valid_after_utc
    return (
        _builder(
            key.public_key(), subject, subject if issuer is None else issuer.subject, start - _CLOCK_SKEW, end
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_key_usage(is_authority=True), critical=True)
        .add_extension(_authority_key_id(signer), critical=False)
        .sign(signer, hashes.SHA256())
    )


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority_key_id(signer: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificates: list[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key as unencrypted PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
