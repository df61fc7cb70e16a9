"""Result file of a sweep: one JSON line per point, so that points are not run again.

Lines are keyed by a digest of everything that determines their results. An incomplete last line is ignored.
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
from kvolt.router.policy.custom import is_custom, read_policy_source
from kvolt.twin.axes import Point, PointSetup
from kvolt.twin.objectives import PointStats

FORMAT = "kvolt-sweep/1"
"""Part of every digest, so that results of incompatible versions are not reused."""

_encode = msgspec.json.Encoder(order="sorted").encode


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a sweep with its results."""

    digest: str
    point: Point
    figures: PointStats


_decode = msgspec.json.Decoder(PointResult).decode


def trace_digest(records: Iterable[TraceRecord]) -> str:
    sha = hashlib.sha256()
    encoder = msgspec.msgpack.Encoder()
    for record in records:
        sha.update(encoder.encode(record))
    return sha.hexdigest()


def point_digest(setup: PointSetup, trace: str, sla: Sla | None) -> str:
    """Digest of everything that determines the results, including the contents of preset and policy files."""
    model = step_model_of(setup.settings.engine)
    determining: dict[str, Any] = {
        "format": FORMAT,
        "setup": msgspec.to_builtins(setup),
        "model": [type(model).__name__, msgspec.to_builtins(model)],
        "policies": [_policy_digest(name) for name in (setup.settings.router, setup.settings.routing.shadow)],
        "trace": trace,
        "sla": None if sla is None else sla.limits,
    }
    return hashlib.sha256(_encode(determining)).hexdigest()[:32]


def _policy_digest(name: str | None) -> str | None:
    """Digest of a policy file's contents; other policies are identified by name."""
    return (
        hashlib.sha256(read_policy_source(name)).hexdigest() if name is not None and is_custom(name) else None
    )


class PointsFile:
    """Result file in a directory: call `read`, then `append`, and `close` at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab")

    def read(self) -> dict[str, PointResult]:
        """Results by digest. Raises ConfigError with the line number of an invalid line."""
        *lines, incomplete = self._path.read_bytes().split(b"\n")
        results: dict[str, PointResult] = {}
        for number, line in enumerate(lines, 1):
            try:
                result = _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{self._path} line {number} is not a sweep result: {error}",
                    key="out",
                    remedy="remove the line, or choose another directory",
                ) from error
            results[result.digest] = result
        if incomplete:
            self._file.truncate(self._path.stat().st_size - len(incomplete))
        return results

    def append(self, result: PointResult) -> None:
        self._file.write(_encode(result) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
