"""Event secrets: of a cluster key, and the setting `cluster.event_secret` beside own certificates."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.config.settings import ClusterSettings, EventsSettings, Settings
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.events.mem import MemEvents
from kvolt.runtime.events.zmq_plane import ZmqEvents
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.runtime import Ports
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.system_ports import load_credentials, make_ports

WORKER = Identity(ProcessRole.WORKER, "worker-0")
ONE, TWO = (base64.b64encode(secrets.token_bytes(32)) for _ in range(2))


def private(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.fixture
def own_certificates(tmp_path: Path) -> ClusterSettings:
    now = SystemClock().wall()
    issued = ClusterAuthority.create(now).issue(WORKER, now)
    return ClusterSettings(
        certificate=str(private(tmp_path / "chain", issued.chain_pem)),
        private_key=str(private(tmp_path / "key", issued.key_pem)),
        authority=str(private(tmp_path / "ca", issued.trusted_pem)),
    )


def with_secret(cluster: ClusterSettings, path: Path) -> ClusterSettings:
    return ClusterSettings(
        certificate=cluster.certificate,
        private_key=cluster.private_key,
        authority=cluster.authority,
        event_secret=str(path),
    )


@pytest.fixture
def blocking() -> Iterator[ThreadBlocking]:
    blocking = ThreadBlocking(1)
    yield blocking
    blocking.close()


def ports(cluster: ClusterSettings, blocking: ThreadBlocking, kind: str = "zmq") -> Ports:
    settings = Settings(cluster=cluster, events=EventsSettings(kind=kind))  # type: ignore[arg-type]
    return make_ports(settings, Metrics(CollectorRegistry()), blocking, WORKER)


def discovery(ports: Ports) -> MemDiscovery:
    return MemDiscovery(MemStore(), ports.clock, ports.rng)


def test_own_certificates_without_a_secret_are_refused_at_start(
    own_certificates: ClusterSettings, blocking: ThreadBlocking
) -> None:
    made = ports(own_certificates, blocking)
    with pytest.raises(ConfigError) as caught:
        made.events(discovery(made))
    assert caught.value.fields["key"] == "cluster.event_secret"
    assert "set it to a file" in str(caught.value.fields["remedy"])


def test_events_within_one_process_need_no_secret(
    own_certificates: ClusterSettings, blocking: ThreadBlocking
) -> None:
    made = ports(own_certificates, blocking, kind="mem")
    assert isinstance(made.events(discovery(made)), MemEvents)


def test_own_certificates_with_a_secret_start(
    own_certificates: ClusterSettings, blocking: ThreadBlocking, tmp_path: Path
) -> None:
    made = ports(with_secret(own_certificates, private(tmp_path / "events", ONE + b"\n")), blocking)
    assert isinstance(made.events(discovery(made)), ZmqEvents)


def test_a_second_line_is_accepted_from_when_the_file_changes(
    own_certificates: ClusterSettings, tmp_path: Path
) -> None:
    path = private(tmp_path / "events", ONE + b"\n")
    credentials = load_credentials(with_secret(own_certificates, path), WORKER, SystemClock())
    assert credentials is not None
    private(path, ONE + b"\n" + TWO + b"\n")
    assert credentials.reload()
    both = (base64.b64decode(ONE), base64.b64decode(TWO))
    assert credentials.event_secrets == both
    private(path, b"broken")
    assert not credentials.reload()
    assert credentials.event_secrets == both


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (ONE, 0o640, "other users can read it"),
        (b"", 0o600, "32 bytes in base64"),
        (ONE[:20], 0o600, "32 bytes in base64"),
        (b"not base64 at all!", 0o600, "32 bytes in base64"),
        (b"\n".join([ONE, TWO, ONE]), 0o600, "one or two lines"),
        (b"x" * 100_000, 0o600, "larger than"),
    ],
    ids=["readable", "empty", "short", "text", "three", "long"],
)
def test_other_files_are_refused(
    own_certificates: ClusterSettings, tmp_path: Path, content: bytes, mode: int, reason: str
) -> None:
    cluster = with_secret(own_certificates, private(tmp_path / "events", content, mode))
    with pytest.raises(ConfigError, match=reason) as caught:
        load_credentials(cluster, WORKER, SystemClock())
    assert caught.value.fields["key"] == "cluster.event_secret"


def test_a_missing_file_is_named(own_certificates: ClusterSettings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing: no such file"):
        load_credentials(with_secret(own_certificates, tmp_path / "missing"), WORKER, SystemClock())


@pytest.mark.parametrize(
    "cluster", [ClusterSettings(event_secret="f"), ClusterSettings(event_secret="f", key="k")]
)
def test_a_secret_belongs_to_own_certificates(cluster: ClusterSettings) -> None:
    with pytest.raises(ConfigError, match="a cluster key has its own"):
        load_credentials(cluster, WORKER, SystemClock())
