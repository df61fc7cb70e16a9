"""Credentials of one test cluster, issued without files."""

from kvolt.runtime.clock import SystemClock
from kvolt.runtime.security.authority import Certificate, ClusterAuthority
from kvolt.runtime.security.credentials import Credentials
from kvolt.runtime.security.identity import Identity, ProcessRole

AUTHORITY = ClusterAuthority.create(SystemClock().wall())


class _Issued:
    """Source of certificates of the test cluster."""

    paths = ()

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def load(self, now: float) -> Certificate:
        return AUTHORITY.issue(self._identity, now)


def issued_credentials(name: str, role: ProcessRole = ProcessRole.FRONTEND) -> Credentials:
    return Credentials(_Issued(Identity.of(role, name)), SystemClock())
