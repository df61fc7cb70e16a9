"""Limit on the bytes that a process buffers for incomplete messages of its peers.

Any peer can start a message and never finish it. All connections of a process share one budget, and connections
from one address (IPv6: one /64, the smallest block assigned to a host) share a part of it. When the budget is
exceeded, the largest holder of the address with the most bytes is shed, so a large sender pays and small requests
pass. Pure; single-threaded.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Protocol

from kvolt.runtime.logs import is_logged
from kvolt.runtime.network import peer_group

log = logging.getLogger(__name__)


class Holder(Protocol):
    """Buffers bytes for a peer: a connection, or a queue of one."""

    @property
    def peer_host(self) -> str:
        """Peer address without the port."""
        ...

    def shed(self) -> None:
        """Free the buffered bytes: refuse the messages, or close the connection."""
        ...


class ByteBudget:
    """Bytes of incomplete messages by holder, by address and in total."""

    def __init__(self, limit_bytes: int, peer_limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peer_limit_bytes = peer_limit_bytes
        self.used_bytes = 0
        self.num_shed = 0
        self._holders: dict[str, dict[Holder, int]] = {}
        self._by_peer: Counter[str] = Counter()
        self._is_shedding = False

    def set_held_bytes(self, holder: Holder, num_bytes: int) -> None:
        """Set the bytes held by a holder. May shed it, or others, before it returns."""
        peer = peer_group(holder.peer_host)
        held = self._holders.setdefault(peer, {})
        change = num_bytes - held.pop(holder, 0)
        if num_bytes:
            held[holder] = num_bytes
        elif not held:
            del self._holders[peer]
        self.used_bytes += change
        self._by_peer[peer] += change
        if not self._by_peer[peer]:
            del self._by_peer[peer]
        if change > 0 and not self._is_shedding:
            self._shed_excess(peer)

    def _shed_excess(self, peer: str) -> None:
        self._is_shedding = True
        try:
            while self._by_peer[peer] > self.peer_limit_bytes:
                self._shed_largest(peer)
            while self.used_bytes > self.limit_bytes:
                self._shed_largest(max(self._by_peer, key=self._by_peer.__getitem__))
        finally:
            self._is_shedding = False

    def _shed_largest(self, peer: str) -> None:
        held = self._holders[peer]
        victim = max(held, key=held.__getitem__)
        if is_logged(self.num_shed + 1):
            log.warning(
                "incomplete messages shed: peer=%s bytes=%d limit=%d shed_bytes=%d shed=%d",
                peer,
                self._by_peer[peer],
                self.peer_limit_bytes,
                held[victim],
                self.num_shed + 1,
            )
        self.num_shed += 1
        victim.shed()
        self.set_held_bytes(victim, 0)
