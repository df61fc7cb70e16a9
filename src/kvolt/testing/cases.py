"""Cases of conformance suites: how they are collected, and the checks that all suites share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

SOON_S = 30.0
"""Timeout of waits for an expected event."""


def cases_in(module: str) -> tuple[Any, ...]:
    """The cases of a module in source order: its public async functions of a `harness`."""
    return tuple(
        value
        for name, value in vars(sys.modules[module]).items()
        if inspect.iscoroutinefunction(value)
        and value.__module__ == module
        and not name.startswith("_")
        and list(inspect.signature(value).parameters) == ["harness"]
    )


def name(case: object) -> str:
    return getattr(case, "__name__", repr(case))


def expect(condition: bool, message: str) -> None:
    # Not an assert statement: users may run the suite with -O, where assertions are removed.
    if not condition:
        raise AssertionError(message)


async def fails(kind: type[E], work: Awaitable[Any]) -> E:
    """Return the error that `work` raises; its type must be `kind`, not a subclass."""
    try:
        result = await work
    except BaseException as error:
        if type(error) is kind:
            return error
        raise
    raise AssertionError(f"no {kind.__name__} but {result!r:.200}")
