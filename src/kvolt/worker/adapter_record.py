"""File with the LoRA adapters that were loaded while a worker runs, so that it has them again after a restart.

Adapters of the worker's arguments are not in it: the engine loads these itself. The file is a cache of commands, not a
configuration: a damaged file, or an adapter that cannot be loaded again, is logged and dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from kvolt.core.errors import MALFORMED, KvoltError
from kvolt.engines.contract import Lora
from kvolt.runtime.clock import Blocking

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_MAX_BYTES = 16 << 20


class AdapterRecord:
    """See the module. Changes are written one after the other."""

    def __init__(self, file: Path, blocking: Blocking) -> None:
        self._file = file
        self._blocking = blocking
        self._paths: dict[str, str] = {}
        self._lock = asyncio.Lock()

    async def restore(self, engine: Lora) -> None:
        """Load the recorded adapters that the engine does not have."""
        try:
            recorded = await self._blocking.run(self._read, _TIMEOUT_S)
        except (KvoltError, OSError, *MALFORMED) as error:
            log.warning("adapters not restored: file=%s error=%s", self._file, error)
            return
        for name, path in recorded.items():
            if name in engine.loras():
                continue
            try:
                await engine.load_lora(name, path)
            except Exception as error:  # of any engine; a bad adapter must not keep the worker from its start
                log.warning("adapter not restored: name=%s path=%s error=%r", name, path, error)
            else:
                self._paths[name] = path
                log.info("adapter restored: name=%s path=%s", name, path)

    async def set_path(self, name: str, path: str | None) -> None:
        """Record a loaded adapter, or forget an unloaded one. A failure is logged: the adapter itself is loaded."""
        async with self._lock:
            if path is None:
                self._paths.pop(name, None)
            else:
                self._paths[name] = path
            data = msgspec.json.encode(self._paths)
            try:
                await self._blocking.run(lambda: self._write(data), _TIMEOUT_S)
            except (KvoltError, OSError) as error:
                log.warning("adapters not recorded: file=%s error=%s", self._file, error)

    def _read(self) -> dict[str, str]:
        try:
            with self._file.open("rb") as file:
                return msgspec.json.decode(file.read(_MAX_BYTES), type=dict[str, str])
        except FileNotFoundError:
            return {}

    def _write(self, data: bytes) -> None:
        part = self._file.with_name(f"{self._file.name}.part")
        part.write_bytes(data)
        os.replace(part, self._file)
