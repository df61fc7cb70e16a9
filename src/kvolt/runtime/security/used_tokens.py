"""Used join tokens, remembered until they expire: beside the cluster key, so that a restart forgets none.

Join servers on one machine share the file. One that cannot write beside its key, because that is mounted read-only,
remembers tokens in memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from kvolt.core.errors import AccessDenied, KvoltError
from kvolt.runtime.blocking_lane import BlockingLane
from kvolt.runtime.clock import Blocking, SystemClock
from kvolt.runtime.host.safe_files import locked, read_regular, replace_file

log = logging.getLogger(__name__)

MAX_USED_TOKENS = 16_384
"""Beyond this number tokens are refused until some have expired."""
_MAX_BYTES = 4 << 20
_TIMEOUT_S = 5.0


class UsedToken(msgspec.Struct, frozen=True, array_like=True):
    """Token that was exchanged for a certificate."""

    id: bytes
    until: float
    """Wall-clock time from which it is not accepted any more."""
    key_hash: bytes
    """Of the public key that it was used for."""


_decode = msgspec.json.Decoder(tuple[UsedToken, ...]).decode


class UsedTokens:
    """See the module."""

    def __init__(self, key: Path | None = None, blocking: Blocking | None = None) -> None:
        """`key`: file of the cluster key. None: in memory."""
        self._path = None if key is None else key.with_name(f"{key.name}.used-tokens")
        self._lane = None if blocking is None else BlockingLane(blocking, SystemClock(), _TIMEOUT_S)
        self._tokens: dict[bytes, UsedToken] = {}
        self._lock = asyncio.Lock()
        if self._path is not None and not os.access(self._path.parent, os.W_OK):
            log.warning(
                "used join tokens are forgotten at a restart: folder=%s reason=not writable",
                self._path.parent,
            )
            self._path = None

    async def use(self, token: UsedToken, now: float) -> None:
        """Record the use of a token. Raises AccessDenied if it was used for another key, or cannot be recorded."""
        async with self._lock:
            if self._path is None or self._lane is None:
                self._add(token, now)
                return
            path = self._path
            try:
                await self._lane.run(lambda: self._add_to_file(path, token, now))
            except AccessDenied:
                raise
            except (KvoltError, OSError, msgspec.MsgspecError) as error:
                log.error("join token refused: file=%s error=%s", path, error)
                raise AccessDenied("the use of the join token cannot be recorded") from None

    def _add_to_file(self, path: Path, token: UsedToken, now: float) -> None:
        with locked(path):
            content = _decode(read_regular(path, _MAX_BYTES)) if path.exists() else ()
            self._tokens = {each.id: each for each in content}
            if self._add(token, now):
                replace_file(path, msgspec.json.encode(tuple(self._tokens.values())))

    def _add(self, token: UsedToken, now: float) -> bool:
        """Whether the token is new."""
        used = self._tokens.get(token.id)
        if used is not None:
            if used.key_hash != token.key_hash:
                raise AccessDenied("the join token was used before: it is for one process")
            return False
        self._tokens = {each.id: each for each in self._tokens.values() if each.until >= now}
        if len(self._tokens) >= MAX_USED_TOKENS:
            raise AccessDenied("too many join tokens were used: try again when some have expired")
        self._tokens[token.id] = token
        return True
