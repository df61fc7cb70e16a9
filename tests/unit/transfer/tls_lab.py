"""Credentials of processes of one test cluster, without files."""

from __future__ import annotations

from functools import cache

from kvolt.runtime.clock import SystemClock
from kvolt.runtime.security.authority import Certificate, ClusterAuthority
from kvolt.runtime.security.credentials import Credentials
from kvolt.runtime.security.identity import Identity, ProcessRole


@cache
def authority() -> ClusterAuthority:
    return ClusterAuthority.create(SystemClock().wall())


class Issued:
    """Source of certificates of an authority. `issuer` may be replaced, as by a changed file."""

    paths = ()

    def __init__(
        self, role: ProcessRole, issuer: ClusterAuthority | None = None, name: str = "a-process"
    ) -> None:
        self.identity = Identity.of(role, name)
        self.issuer = issuer or authority()

    def load(self, now: float) -> Certificate:
        return self.issuer.issue(self.identity, now)


def credentials(
    role: ProcessRole = ProcessRole.WORKER, issuer: ClusterAuthority | None = None, name: str = "a-process"
) -> Credentials:
    return Credentials(Issued(role, issuer, name), SystemClock())


@cache
def of_worker() -> Credentials:
    """Of all processes in tests that do not tell them apart."""
    return credentials()
