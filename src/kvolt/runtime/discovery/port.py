"""Discovery: a small key-value store with leases, behind one Protocol.

Keys are slash-separated paths; values are opaque bytes. What is put under a lease lives as long as
the process that holds the lease keeps it alive; keeping it alive, and putting everything back after
the store was lost, is the implementation's work, not the caller's.

A key belongs to the lease that put it until it is deleted or the lease ends. A put by any other lease
raises KeyConflict. A key should contain its owner's id (an instance, a process): then a restarted owner
need not wait until the lease it left behind has expired.

Losing the store is never news about the cluster: a watch reports no deletes for it. It goes on with
the last known state and catches up when the store is back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import NewType, Protocol

import msgspec

from kvolt.core.errors import InvalidRequest

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


def check_key(key: str) -> None:
    """For implementations: InvalidRequest unless it is a key."""
    try:
        if key.encode():
            return
    except UnicodeEncodeError:
        pass
    raise InvalidRequest("a discovery key is not empty and has a UTF-8 form", param="key")


class Discovery(Protocol):
    """The port. All methods raise DiscoveryLost when the store does not answer in time, except where said.

    After `close()` every call raises DiscoveryLost, but for those that have nothing left to do: `revoke`
    and `close` return, and a watch ends at once.
    """

    async def lease(self, ttl_s: float, name: LeaseId | None = None) -> LeaseId:
        """A new lease, kept alive until revoked, closed, or this process dies.

        With a `name`, a lease of that name which an earlier process left behind goes on with its keys. The
        name must be known to its owner only: letters and digits, at most 64.
        """
        ...

    async def put(
        self, key: str, value: bytes, lease: LeaseId, on_lost: Callable[[], None] | None = None
    ) -> None:
        """Set a key. Once it returned, the key is put back by itself if the store loses it.

        A key of another live lease is a KeyConflict, also when both leases are this client's. A key that is
        empty or has no UTF-8 form is an InvalidRequest; a lease that this client does not have (another's,
        revoked) is NotFound. When it raises DiscoveryLost the key is, in the end, what it was before: a late
        write is undone.

        `on_lost` is called once if the key passes to another lease later, which can happen only after this
        lease expired unnoticed (the process or its network stood still). The key is then not put back: the
        caller puts it again.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove a key of one's own before its lease ends. Removing what is not there is no error.

        When it raises DiscoveryLost the key goes once the store is back.
        """
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
