"""Renews holds of KV on other vLLM workers for requests that have not started.

Runs in kvolt's worker process, which computes nothing: vLLM's readers renew only between steps, and a step may take
longer than a hold. Also covers requests that vLLM's core has not seen yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from kvolt.engines.vllm.plugins.kv_holds import HOLD_S, Address, connect, renew_message

_PER_HOLD = 3
"""Renewals per hold time."""
_MIN_S, _MAX_S = 0.01, 1.0
"""Bounds of the renewal interval. The maximum is short since a shorter hold may be added."""


@dataclass(frozen=True, slots=True)
class _Hold:
    owner: Address
    engine_id: str
    name: str
    hold_s: float


class HoldRenewals:
    """See the module. `close` it after `run` has ended."""

    def __init__(self) -> None:
        self._holds: dict[str, _Hold] = {}
        self._sockets: dict[Address, Any] = {}
        self._context: Any = None
        self._is_waiting = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._holds)

    def start(self, request: str, ticket: Mapping[str, Any]) -> None:
        """Renew the hold of a ticket now and until `stop`. `request`: its id in the engine."""
        hold = self._holds[request] = _Hold(
            (ticket["remote_host"], ticket["remote_port"]),
            ticket["remote_engine_id"],
            ticket["remote_request_id"],
            ticket[HOLD_S],
        )
        self._renew([hold])
        self._is_waiting.set()

    def stop(self, request: str) -> None:
        """The request has started or ended."""
        self._holds.pop(request, None)

    async def run(self) -> None:
        while True:
            await self._is_waiting.wait()
            while self._holds:
                shortest_s = min(hold.hold_s for hold in self._holds.values())
                await asyncio.sleep(min(max(shortest_s / _PER_HOLD, _MIN_S), _MAX_S))
                self._renew(list(self._holds.values()))
            self._is_waiting.clear()
            self._close_sockets()

    def _renew(self, holds: list[_Hold]) -> None:
        names: dict[tuple[Address, str], list[str]] = {}
        for hold in holds:
            names.setdefault((hold.owner, hold.engine_id), []).append(hold.name)
        for (owner, engine_id), held in names.items():
            message = renew_message(engine_id, held)
            with contextlib.suppress(zmq.ZMQError):  # not sent: the hold expires, and the reader finds out
                self._socket(owner).send_multipart((b"", message), zmq.DONTWAIT)

    def _socket(self, owner: Address) -> Any:
        if owner not in self._sockets:
            self._context = self._context or zmq.Context()
            self._sockets[owner] = connect(self._context, *owner)
        return self._sockets[owner]

    def _close_sockets(self) -> None:
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()

    def close(self) -> None:
        self._holds.clear()
        self._close_sockets()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
