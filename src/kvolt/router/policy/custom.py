"""CustomPolicy: a user-defined cost function as a policy: `FILE.py:FUNCTION` or `MODULE:FUNCTION`.

    def cost(request: RequestView, workers: WorkersView) -> np.ndarray:
        return workers.queue_s + workers.prefill_s

The function is tested before use. When its file changes, the new version is tested and replaces the old one; if the
test fails, the error is logged and the old version stays. Requests on which it fails are decided by a fallback policy
and counted.
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
from kvolt.router.policy.cost_model import Floats
from kvolt.router.policy.policy import Policy, RequestView, WorkersView

log = logging.getLogger(__name__)

_REMEDY = "give FILE.py:FUNCTION or MODULE:FUNCTION; docs/router.md shows one"
_ARRAYS = WorkersView.__struct_fields__

FAILURE_REASONS = ("raised", "malformed")
"""Reasons of `CustomPolicy.failures`."""

Function = Callable[[RequestView, WorkersView], Any]
_Stamp = tuple[int, int, int]


def is_custom(name: str) -> bool:
    """Whether the name of a router or policy denotes a function."""
    return ":" in name


def read_policy_source(name: str) -> bytes:
    """Read the file of a policy. Raises ConfigError if there is none."""
    source = _Source.of(name)
    source.stamp()
    return source.path.read_bytes()


class CustomPolicy:
    """See the module; a Policy. Single-threaded except for `reload_if_changed`."""

    def __init__(self, name: str, fallback: Policy) -> None:
        """Raises ConfigError if the function cannot be used."""
        self.name = name
        self._source = _Source.of(name)
        self._fallback = fallback
        self._stamp = self._source.stamp()
        self._function = _checked_function(name, self._source)
        self._has_logged_failure = False
        self.failures: Counter[str] = Counter()
        """Requests decided by the fallback policy, by reason (`FAILURE_REASONS`)."""
        self.num_reloads = 0
        self.num_failed_reloads = 0

    def __call__(self, request: RequestView, workers: WorkersView) -> Floats:
        costs = self.costs(request, workers)
        return self._fallback(request, workers) if costs is None else costs

    def costs(self, request: RequestView, workers: WorkersView) -> Floats | None:
        """Costs by the function; None if it fails, which is counted."""
        _protect(workers)
        try:
            result = self._function(request, workers)
        except Exception as error:  # user code may raise anything
            self._fail("raised", f"{type(error).__name__}: {error}")
            return None
        try:
            return _checked_costs(result, len(workers.requests))
        except ValueError as error:
            self._fail("malformed", str(error))
            return None

    def reload_if_changed(self) -> bool:
        """Load a new version if the file has changed; return whether it did. Reads files: may block."""
        try:
            stamp = self._source.stamp()
        except ConfigError:  # the file may be missing between two saves
            return False
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # report a broken edit once
        try:
            self._function = _checked_function(self.name, self._source)
        except ConfigError as error:
            self.num_failed_reloads += 1
            log.error("policy reload failed, the previous version stays in use: %s", error.message)
            return False
        self.num_reloads += 1
        self._has_logged_failure = False
        log.info("policy reloaded: name=%s", self.name)
        return True

    def _fail(self, reason: str, detail: str) -> None:
        self.failures[reason] += 1
        if not self._has_logged_failure:
            self._has_logged_failure = True
            log.error("policy failed, using the fallback for such requests: name=%s: %s", self.name, detail)


@dataclass(frozen=True, slots=True)
class _Source:
    """Location of a function."""

    path: Path
    function: str
    package: str

    @classmethod
    def of(cls, name: str) -> _Source:
        source, _, function = name.rpartition(":")
        if not source or not function.isidentifier():
            raise _unusable(name, "no function is named")
        if source.endswith(".py"):
            return cls(Path(source).expanduser(), function, "")
        try:
            spec = importlib.util.find_spec(source)
        except (ImportError, ValueError) as error:
            raise _unusable(name, f"cannot find the module {source}: {error}") from error
        if spec is None or not spec.has_location or spec.origin is None:
            raise _unusable(name, f"no module {source} with a source file")
        return cls(Path(spec.origin), function, source.rpartition(".")[0])

    def stamp(self) -> _Stamp:
        """Changes whenever the file may have changed."""
        try:
            stat = self.path.stat()
        except OSError as error:
            raise _unusable(f"{self.path}:{self.function}", f"{error.strerror}") from error
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def load(self) -> Any:
        """Execute the file as a new module and return the named attribute. Earlier versions stay intact."""
        name = f"kvolt_policy_{self.path.stem}"
        module = ModuleType(name)
        module.__file__ = str(self.path)
        module.__package__ = self.package
        code = compile(self.path.read_bytes(), str(self.path), "exec")
        before = sys.modules.get(name)
        sys.modules[name] = module  # dataclasses look up their module
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
    except Exception as error:  # user code may raise anything
        raise _unusable(name, f"{type(error).__name__}: {error}") from error
    if not callable(function):
        raise _unusable(name, f"{source.path} has no function {source.function}")
    for num_workers in (1, 3):
        request, workers = _example(num_workers)
        try:
            _checked_costs(function(request, workers), num_workers)
        except Exception as error:
            raise _unusable(
                name, f"test with {num_workers} workers failed: {type(error).__name__}: {error}"
            ) from error
    checked: Function = function
    return checked


def _checked_costs(result: Any, num_workers: int) -> Floats:
    try:
        costs = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"costs are not numbers: {error}") from error
    if costs.shape != (num_workers,):
        raise ValueError(f"costs have the shape {costs.shape}, expected ({num_workers},)")
    if not np.isfinite(costs).all():
        raise ValueError("a cost is not finite")
    return costs


def _example(num_workers: int) -> tuple[RequestView, WorkersView]:
    """Example workers that differ: idle and busy ones."""
    arrays = {name: np.arange(num_workers, dtype=np.float64) for name in _ARRAYS}
    workers = WorkersView(**{**arrays, "total_blocks": np.full(num_workers, 1000.0)})
    _protect(workers)
    return RequestView(prompt_tokens=1000, block_size=64, output_tokens=100.0), workers


def _protect(workers: WorkersView) -> None:
    """Make the arrays read-only: the decision uses them after the function has seen them."""
    for name in _ARRAYS:
        getattr(workers, name).flags.writeable = False


def _unusable(name: str, detail: str) -> ConfigError:
    return ConfigError(f"policy {name} cannot be used: {detail}", key="router", remedy=_REMEDY)
