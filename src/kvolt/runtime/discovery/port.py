"""Discovery port: a small key-value store with leases.

Keys are slash-separated paths; values are opaque bytes. A key put under a lease lives as long as the process that
holds the lease. Implementations keep leases alive and restore all keys after the store was lost.

A key belongs to the lease that put it until it is deleted or the lease ends. A put by another lease raises
KeyConflict. A key should contain its owner's id (instance, process), so that a restarted owner need not wait for its
previous lease to expire.

Loss of the store is no information about the cluster: a watch reports no deletes for it. It keeps the last known
state and catches up when the store is back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import NewType, Protocol

import msgspec

from kvolt.core.errors import InvalidRequest

LeaseId = NewType("LeaseId", str)


class Put(msgspec.Struct, frozen=True, tag="put"):
    """A key was created or changed its value."""

    key: str
    value: bytes


class Delete(msgspec.Struct, frozen=True, tag="delete"):
    """A key was deleted: its lease was revoked or expired, or its owner deleted it."""

    key: str


class Synced(msgspec.Struct, frozen=True, tag="synced"):
    """The initial content of the watch has been reported. Sent once per watch."""


WatchEvent = Put | Delete | Synced
"""Tagged, because a join server sends them."""


def check_key(key: str) -> None:
    """Raise InvalidRequest unless `key` is valid. For implementations."""
    try:
        if key.encode():
            return
    except UnicodeEncodeError:
        pass
    raise InvalidRequest("a discovery key must be non-empty and encodable as UTF-8", param="key")


class Discovery(Protocol):
    """The port. All methods raise DiscoveryLost when the store does not answer in time, unless stated otherwise.

    After `close()` every call raises DiscoveryLost, except that `revoke` and `close` return and a watch ends at
    once.
    """

    async def lease(self, ttl_s: float, name: LeaseId | None = None) -> LeaseId:
        """Create a lease, kept alive until it is revoked, this client closes, or the process dies.

        With a `name`, continue the lease of that name left by an earlier process, with its keys. The name (letters
        and digits, at most 64) must be known to its owner only.
        """
        ...

    async def put(
        self, key: str, value: bytes, lease: LeaseId, on_lost: Callable[[], None] | None = None
    ) -> None:
        """Set a key. After it returns, the key is restored automatically if the store loses it.

        Raises KeyConflict for a key of another live lease, even if this client holds both; InvalidRequest for a key
        that is empty or not encodable as UTF-8; NotFound for a lease that this client does not hold. After
        DiscoveryLost the key eventually has its previous value: a late write is undone.

        `on_lost` is called once if another lease acquires the key later, which can happen only after this lease
        expired unnoticed (the process or its network was stalled). The key is then not restored: the caller has to
        put it again.
        """
        ...

    async def delete(self, key: str) -> None:
        """Delete an own key before its lease ends. Deleting a missing key is no error.

        After DiscoveryLost the key is deleted once the store is back.
        """
        ...

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        """Current entries under the prefix, in key order."""
        ...

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """Yield the current content as Puts, then Synced, then changes in order, without end.

        Never raises DiscoveryLost: it waits and catches up. Ends when this client is closed.
        """
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease and delete its keys. Unknown leases are no error."""
        ...

    async def close(self) -> None:
        """Revoke this client's leases (best effort) and end its watches."""
        ...
