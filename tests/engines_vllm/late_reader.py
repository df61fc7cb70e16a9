"""KvoltNixlConnector with a gate in its reader: a read, or the check after it, waits until a test opens the gate.

Loaded by vLLM in place of kvolt's module. The worker stands still meanwhile, as it does in a long step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kvolt.engines.vllm.plugins import nixl_connector
from kvolt.engines.vllm.plugins.nixl_reader import ReaderWorker

FOLDER = "LATE_READER_FOLDER"
READ, CHECK = "read", "check"
_PATIENCE_S = 120.0


def close_gate(folder: Path, gate: str) -> None:
    for name in ("reached", "open"):
        (folder / name).unlink(missing_ok=True)
    (folder / "gate").write_text(gate)


def is_reached(folder: Path) -> bool:
    return (folder / "reached").exists()


def open_gate(folder: Path) -> None:
    (folder / "open").touch()


def _wait_at(gate: str) -> None:
    folder = Path(os.environ[FOLDER])
    if not (folder / "gate").exists() or (folder / "gate").read_text() != gate:
        return
    (folder / "reached").touch()
    deadline = time.monotonic() + _PATIENCE_S
    while not (folder / "open").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


class LateReader(ReaderWorker):
    def _read_blocks(self, read_spec: Any, **kwargs: Any) -> bool:
        _wait_at(READ)
        return super()._read_blocks(read_spec, **kwargs)

    def _check(self, request_id: str) -> bool | None:
        _wait_at(CHECK)
        return super()._check(request_id)


nixl_connector.ReaderWorker = LateReader  # type: ignore[misc]
KvoltNixlConnector = nixl_connector.KvoltNixlConnector
