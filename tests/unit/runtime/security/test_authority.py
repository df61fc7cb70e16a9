"""Cluster keys: what they contain, what they refuse, and rotation."""

import errno
import os
import ssl
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509

from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.credentials import Credentials, KeySource
from kvolt.runtime.security.identity import Identity, ProcessRole, parse_identity

NOW = datetime(2026, 5, 1, tzinfo=UTC).timestamp()
WORKER = Identity(ProcessRole.WORKER, "worker-0")


def key_file(path: Path, authority: ClusterAuthority, mode: int = 0o600) -> Path:
    path.write_bytes(authority.to_pem())
    path.chmod(mode)
    return path


def test_a_certificate_names_the_role_and_the_process() -> None:
    issued = ClusterAuthority.create(NOW).issue(WORKER, NOW)
    leaf = x509.load_pem_x509_certificates(issued.chain_pem)[0]
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert parse_identity(uri) == WORKER
    assert issued.expires_at == NOW + 24 * 3600
    assert leaf.not_valid_before_utc.timestamp() < NOW, "a peer's clock may be behind"


def test_a_certificate_does_not_outlive_its_authority() -> None:
    authority = ClusterAuthority.create(NOW)
    issued = authority.issue(WORKER, authority.expires_at - 60)
    assert issued.expires_at == authority.expires_at


def test_a_key_survives_its_file(tmp_path: Path) -> None:
    authority = ClusterAuthority.create(NOW)
    loaded = ClusterAuthority.load(key_file(tmp_path / "key", authority))
    assert loaded.fingerprint == authority.fingerprint
    assert loaded.to_pem() == authority.to_pem()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a cluster key"),
        (b"\xff" * 100, "is not a cluster key"),
        (b"x" * 70_000, "larger than 65536 bytes"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "is not a cluster key"),
    ],
)
def test_other_files_are_refused_with_a_remedy(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=reason) as caught:
        ClusterAuthority.load(path)
    assert "kvolt cluster init" in caught.value.fields["remedy"]


def test_a_key_without_its_certificate_is_refused() -> None:
    pem, other = ClusterAuthority.create(NOW).to_pem(), ClusterAuthority.create(NOW).to_pem()
    key_end = pem.index(b"-----BEGIN CERTIFICATE-----")
    with pytest.raises(ConfigError, match="of another key"):
        ClusterAuthority.parse(pem[:key_end] + other[other.index(b"-----BEGIN CERTIFICATE-----") :], "key")


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path / "key", ClusterAuthority.create(NOW), mode=0o644)
    with pytest.raises(ConfigError, match="other users can read it") as caught:
        ClusterAuthority.load(path)
    assert "chmod 600" in caught.value.fields["remedy"]


def test_a_key_of_an_unknown_curve_is_refused() -> None:
    # Of curve SM2: `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:SM2`.
    other = (
        b"-----BEGIN PRIVATE KEY-----\n"
        b"MIGHAgEAMBMGByqGSM49AgEGCCqBHM9VAYItBG0wawIBAQQg0U9ecsoE01HFUlQN\n"
        b"R+RwTWS+ldDNg9r4Uhom3BObEpqhRANCAARpY3Tak03GYnY4HjINRYdLtubbD0VY\n"
        b"yQFC1edhwMQgxOFbl2dIorRLwmayMj6IG/eBlnNeypWEu1DDJWS2pRle\n"
        b"-----END PRIVATE KEY-----\n"
    )
    pem = ClusterAuthority.create(NOW).to_pem()
    with pytest.raises(ConfigError, match="not a cluster key"):
        ClusterAuthority.parse(other + pem[pem.index(b"-----BEGIN CERTIFICATE-----") :], "key")


def test_a_fifo_does_not_stop_the_process(tmp_path: Path) -> None:
    path = tmp_path / "key"
    os.mkfifo(path, 0o600)
    refused: list[str] = []

    def load() -> None:
        with pytest.raises(ConfigError, match="not a regular file"):
            ClusterAuthority.load(path)
        refused.append("fifo")

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(20)
    assert refused


def test_a_certificate_that_cannot_be_loaded_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_descriptor(*args: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    clock = SystemClock()
    path = key_file(tmp_path / "key", ClusterAuthority.create(clock.wall()))
    live = Credentials(KeySource(path, WORKER), clock)
    key_file(path, ClusterAuthority.create(clock.wall()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", no_descriptor)
        live.reload()
    assert "certificate not renewed" in caplog.text


def test_a_certificate_is_renewed_after_the_clock_was_set_back(tmp_path: Path) -> None:
    class Corrected(SystemClock):
        ahead_s = 30 * 24 * 3600.0

        def wall(self) -> float:
            return super().wall() + self.ahead_s

    clock = Corrected()
    path = key_file(tmp_path / "key", ClusterAuthority.create(SystemClock().wall()))
    live = Credentials(KeySource(path, WORKER), clock)
    clock.ahead_s = 0.0
    live.reload()
    assert live.expires_at < SystemClock().wall() + 2 * 24 * 3600
    renewed = live.server_context
    live.reload()
    assert live.server_context is renewed, "renewed once"


@pytest.mark.parametrize(
    "uri",
    ["https://worker/a", "kvolt://admin/a", "kvolt://worker/", "kvolt://worker/a/b", "kvolt://worker/é", ""],
)
def test_other_names_are_no_identities(uri: str) -> None:
    assert parse_identity(uri) is None


def test_names_of_processes_are_made_safe() -> None:
    assert Identity.of(ProcessRole.WORKER, "gpu 0/é").uri == "kvolt://worker/gpu-0--"
    assert Identity.of(ProcessRole.WORKER, "..").process == "worker"
    assert Identity.of(ProcessRole.WORKER, "../a").process == "a"
    assert parse_identity(Identity.of(ProcessRole.POOL, "").uri) == Identity(ProcessRole.POOL, "pool")


def test_certificates_pass_strict_verification() -> None:
    assert ssl.OPENSSL_VERSION_INFO >= (3, 0)
    authority = ClusterAuthority.create(NOW)
    issued = authority.rotate(NOW).issue(WORKER, NOW)
    chain = x509.load_pem_x509_certificates(issued.chain_pem)
    old_root = x509.load_pem_x509_certificates(authority.to_pem())[0]
    chain[0].verify_directly_issued_by(chain[1])
    chain[1].verify_directly_issued_by(old_root)
