"""Discovery: a small key-value store with leases, behind one Protocol.

Keys are slash-separated paths; values are opaque bytes. What is put under a lease lives as long as
the process that holds the lease keeps it alive; keeping it alive, and putting everything back after
the store was lost, is the implementation's work, not the caller's.

Losing the store is never news about the cluster: a watch reports no deletes for it. It goes on with
the last known state and catches up when the store is back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import NewType, Protocol

import msgspec

LeaseId = NewType("LeaseId", str)


class Put(msgspec.Struct, frozen=True):
    """A key appeared or changed its value."""

    key: str
    value: bytes


class Delete(msgspec.Struct, frozen=True):
    """A key is gone: revoked, or its lease expired."""

    key: str


class Synced(msgspec.Struct, frozen=True):
    """All that existed when the watch began has been reported. Sent once per watch."""


WatchEvent = Put | Delete | Synced


class Discovery(Protocol):
    """The port. All methods raise DiscoveryLost when the store does not answer in time, except where said."""

    async def lease(self, ttl_s: float) -> LeaseId:
        """A new lease, kept alive until revoked, closed, or this process dies."""
        ...

    async def put(self, key: str, value: bytes, lease: LeaseId) -> None:
        """Set a key. Once it returned, the key is put back by itself if the store loses it.

        A key has one owner: a second lease that puts it takes it over.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove a key of one's own before its lease ends. Removing what is not there is no error."""
        ...

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        """What lies under the prefix now, in key order."""
        ...

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """The present content as Puts, then Synced, then changes in order, without end.

        Never raises DiscoveryLost: it waits and catches up. Ends when the discovery is closed.
        """
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease and all its keys at once. Unknown leases are no error."""
        ...

    async def close(self) -> None:
        """Revoke this process's leases (as far as the store answers) and end its watches."""
        ...
