"""CustomPolicy: somebody's own function over arrays as a policy: `FILE.py:FUNCTION` or `MODULE:FUNCTION`.

    def cost(request: RequestView, workers: WorkersView) -> np.ndarray:
        return workers.queue_s + workers.prefill_s

It is tried out before it is used. When its file changes, the new one is tried out too and takes its place; one that
does not pass is told of and the old one goes on. What it fails on is decided by another policy, and counted.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from kvolt.core.errors import ConfigError
from kvolt.core.latency import Floats
from kvolt.router.policy.policy import Policy, RequestView, WorkersView

log = logging.getLogger(__name__)

_REMEDY = "give FILE.py:FUNCTION or MODULE:FUNCTION; docs/router.md shows one"
_ARRAYS = WorkersView.__struct_fields__

REASONS = ("raised", "malformed")
"""Why a function's word was not taken."""

Function = Callable[[RequestView, WorkersView], Any]
_Stamp = tuple[int, int, int]


def is_custom(name: str) -> bool:
    """Whether a router's or policy's name is that of a function."""
    return ":" in name


def policy_text(name: str) -> bytes:
    """What its file says. ConfigError where there is none."""
    source = _Source.of(name)
    source.stamp()
    return source.path.read_bytes()


class CustomPolicy:
    """See the module; a Policy. Not to be called by several threads, but for `reload_if_changed`."""

    def __init__(self, name: str, fallback: Policy) -> None:
        """ConfigError says why it cannot be used."""
        self.name = name
        self._source = _Source.of(name)
        self._fallback = fallback
        self._stamp = self._source.stamp()
        self._function = _checked_function(name, self._source)
        self._was_told = False
        self.failures: Counter[str] = Counter()
        """Requests that were decided by the other policy, by reason (`REASONS`)."""
        self.num_reloads = 0
        self.num_broken_edits = 0

    def __call__(self, request: RequestView, workers: WorkersView) -> Floats:
        costs = self.costs(request, workers)
        return self._fallback(request, workers) if costs is None else costs

    def costs(self, request: RequestView, workers: WorkersView) -> Floats | None:
        """Its own word; None where it fails, which is counted."""
        _protect(workers)
        try:
            told = self._function(request, workers)
        except Exception as error:  # whatever somebody else's function does
            self._fail("raised", f"{type(error).__name__}: {error}")
            return None
        try:
            return _checked_costs(told, len(workers.requests))
        except ValueError as error:
            self._fail("malformed", str(error))
            return None

    def reload_if_changed(self) -> bool:
        """Whether there is a new one. Reads files: for a thread that may wait."""
        try:
            stamp = self._source.stamp()
        except ConfigError:  # between two saves it may be gone
            return False
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # a broken edit is told of once
        try:
            self._function = _checked_function(self.name, self._source)
        except ConfigError as error:
            self.num_broken_edits += 1
            log.error("the edited policy is not used, the one before it goes on: %s", error.message)
            return False
        self.num_reloads += 1
        self._was_told = False
        log.info("the policy %s was loaded anew", self.name)
        return True

    def _fail(self, reason: str, why: str) -> None:
        self.failures[reason] += 1
        if not self._was_told:
            self._was_told = True
            log.error("the policy %s fails, another decides such requests: %s", self.name, why)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a function is."""

    path: Path
    function: str
    package: str

    @classmethod
    def of(cls, name: str) -> _Source:
        where, _, function = name.rpartition(":")
        if not where or not function.isidentifier():
            raise _unusable(name, "it names no function")
        if where.endswith(".py"):
            return cls(Path(where).expanduser(), function, "")
        try:
            spec = importlib.util.find_spec(where)
        except (ImportError, ValueError) as error:
            raise _unusable(name, f"the module {where} cannot be found: {error}") from error
        if spec is None or not spec.has_location or spec.origin is None:
            raise _unusable(name, f"there is no module {where} with a file")
        return cls(Path(spec.origin), function, where.rpartition(".")[0])

    def stamp(self) -> _Stamp:
        """Another one whenever the file may have changed."""
        try:
            told = self.path.stat()
        except OSError as error:
            raise _unusable(f"{self.path}:{self.function}", f"{error.strerror}") from error
        return told.st_mtime_ns, told.st_size, told.st_ino

    def load(self) -> Any:
        """What the file has under the function's name, from a module of its own: the old one stays as it is."""
        name = f"kvolt_policy_{self.path.stem}"
        module = ModuleType(name)
        module.__file__ = str(self.path)
        module.__package__ = self.package
        code = compile(self.path.read_bytes(), str(self.path), "exec")
        before = sys.modules.get(name)
        sys.modules[name] = module  # dataclasses look for their module
        try:
            exec(code, module.__dict__)
        except BaseException:
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before
            raise
        return getattr(module, self.function, None)


def _checked_function(name: str, source: _Source) -> Function:
    try:
        function = source.load()
    except Exception as error:  # whatever is in somebody else's file
        raise _unusable(name, f"{type(error).__name__}: {error}") from error
    if not callable(function):
        raise _unusable(name, f"{source.path} has no function {source.function}")
    for num_workers in (1, 3):
        asked, workers = _example(num_workers)
        try:
            _checked_costs(function(asked, workers), num_workers)
        except Exception as error:
            raise _unusable(
                name, f"tried out with {num_workers} workers it fails: {type(error).__name__}: {error}"
            ) from error
    checked: Function = function
    return checked


def _checked_costs(told: Any, num_workers: int) -> Floats:
    try:
        costs = np.asarray(told, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"its costs are no numbers: {error}") from error
    if costs.shape != (num_workers,):
        raise ValueError(f"its costs have the shape {costs.shape}, and there are {num_workers} workers")
    if not np.isfinite(costs).all():
        raise ValueError("a cost is not finite")
    return costs


def _example(num_workers: int) -> tuple[RequestView, WorkersView]:
    """Workers that differ: some idle, some busy."""
    arrays = {name: np.arange(num_workers, dtype=np.float64) for name in _ARRAYS}
    workers = WorkersView(**{**arrays, "total_blocks": np.full(num_workers, 1000.0)})
    _protect(workers)
    return RequestView(prompt_tokens=1000, block_size=64, output_tokens=100.0), workers


def _protect(workers: WorkersView) -> None:
    """What is booked later must be what was seen."""
    for name in _ARRAYS:
        getattr(workers, name).flags.writeable = False


def _unusable(name: str, why: str) -> ConfigError:
    return ConfigError(f"the policy {name} cannot be used: {why}", key="router", remedy=_REMEDY)
