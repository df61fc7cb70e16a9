"""The file of a sweep: a line of JSON for each point that was run, so that none has to be run again.

Lines are appended as points end and known by a digest of all that decides their figures. A last line that was torn,
by a kill or a full disk, is as if it had not been written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvolt.bench.load.sla import Sla
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.arguments import step_model_of
from kvolt.router.policy.custom import is_custom, policy_text
from kvolt.twin.axes import Point, Setup
from kvolt.twin.objectives import Figures

FORMAT = "kvolt-sweep/1"
"""In every digest: figures of a twin that counts otherwise are not taken for its own."""

_encode = msgspec.json.Encoder(order="sorted").encode


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a sweep, with what came of it."""

    digest: str
    point: Point
    figures: Figures


_decode = msgspec.json.Decoder(PointResult).decode


def trace_digest(records: Iterable[TraceRecord]) -> str:
    sha = hashlib.sha256()
    encoder = msgspec.msgpack.Encoder()
    for record in records:
        sha.update(encoder.encode(record))
    return sha.hexdigest()


def point_digest(setup: Setup, trace: str, sla: Sla | None) -> str:
    """Of all that decides the figures; of a preset and a policy what is in them, for a file may change."""
    model = step_model_of(setup.settings.engine)
    told: dict[str, Any] = {
        "format": FORMAT,
        "setup": msgspec.to_builtins(setup),
        "model": [type(model).__name__, msgspec.to_builtins(model)],
        "policies": [_policy_digest(name) for name in (setup.settings.router, setup.settings.routing.shadow)],
        "trace": trace,
        "sla": None if sla is None else sla.limits,
    }
    return hashlib.sha256(_encode(told)).hexdigest()[:32]


def _policy_digest(name: str | None) -> str | None:
    """Of a policy in a file, what is in it; of others their name is enough."""
    return hashlib.sha256(policy_text(name)).hexdigest() if name is not None and is_custom(name) else None


class PointsFile:
    """The results in a folder. `read`, then `append` to it; `close` at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab")

    def read(self) -> dict[str, PointResult]:
        """What is there, by digest. ConfigError names the line that is no result."""
        whole, torn = _split(self._path.read_bytes())
        results: dict[str, PointResult] = {}
        for number, line in enumerate(whole, 1):
            try:
                result = _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{self._path} line {number} is no result of a sweep: {error}",
                    key="out",
                    remedy="take the line out, or name another folder",
                ) from error
            results[result.digest] = result
        if torn:
            self._file.truncate(self._path.stat().st_size - torn)
        return results

    def append(self, result: PointResult) -> None:
        self._file.write(_encode(result) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _split(data: bytes) -> tuple[list[bytes], int]:
    """The lines that have their ends, and how many bytes come after them."""
    *whole, rest = data.split(b"\n")
    return whole, len(rest)
