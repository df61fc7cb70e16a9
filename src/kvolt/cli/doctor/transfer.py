"""Checks of the KV transfer paths for `kvolt doctor`.

A path is tested between two agents by the self-test of workers. Paths that need a second machine are judged by the
facts of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from kvolt.core.card import MeasuredLink
from kvolt.core.errors import KvoltError
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.paths import nixl_library
from kvolt.transfer.paths.capabilities import UNTESTED, MachineFacts, missing_paths
from kvolt.transfer.reads.self_test import new_slab

_FIRST_READ_S = 10.0
"""NIXL takes most of a second to start."""
_TRIES = 3
"""A test can time out on a busy machine."""
_PATHS: Mapping[str, TransferOptions] = {
    "shm": TransferOptions(self_test=True),
    "tcp": TransferOptions(self_test=True, shared_memory=False),
    "nixl": TransferOptions(self_test=True, nixl=True, shared_memory=False),
}
"""Agent options that force each path."""


class Finding(msgspec.Struct, frozen=True):
    """Result of one check.

    `blocks`: `kvolt serve` cannot start. `running`: a kvolt process already runs here. State `untested`: may work, but
    is not covered by kvolt's tests.
    """

    name: str
    state: Literal["ok", "warn", "missing", "untested"]
    found: str
    remedy: str = ""
    blocks: bool = False
    running: bool = False


def transfer_findings(facts: MachineFacts, wants_nixl: bool = False) -> list[Finding]:
    """Findings for all paths. With `wants_nixl`, workers cannot start without NIXL."""
    missing = missing_paths(facts)
    findings = []
    for path, options in _PATHS.items():
        why = missing.get(path)
        if why is None:
            findings.append(tried_finding(path, options, facts))
        else:
            blocks = path == "nixl" and wants_nixl and facts.nixl_package is None
            state = f"not available: {why.cause}"
            findings.append(Finding(_name(path), "missing" if blocks else "warn", state, why.remedy, blocks))
    return [*findings, *_untested(facts)]


def tried_finding(path: str, options: TransferOptions, facts: MachineFacts) -> Finding:
    """Test a path between two agents of this process."""
    with _captured_warnings() as warnings:
        try:
            links = asyncio.run(_try(options, facts))
        except (KvoltError, OSError, TimeoutError) as error:
            warnings.insert(0, str(error) or "no answer in time")
            links = {}
    link = next((each for each in links.values() if each.path == path), None)
    if link is None:
        return Finding(
            _name(path), "warn", f"does not work: {warnings[0] if warnings else 'not used'}", _remedy(path)
        )
    return Finding(_name(path), "ok", f"works: {link.bytes_per_s / 1e9:.2g} GB/s between two agents here")


async def _try(options: TransferOptions, facts: MachineFacts) -> dict[str, MeasuredLink]:
    links: dict[str, MeasuredLink] = {}
    for _ in range(_TRIES):
        links = links or await _try_once(options, facts)
    return links


async def _try_once(options: TransferOptions, facts: MachineFacts) -> dict[str, MeasuredLink]:
    loop, tested = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.ExitStack() as stack:
        source, target = new_slab(), new_slab()
        first, second = (TransferAgent(options, facts=facts) for _ in range(2))
        for each in (source, target, first, second):
            stack.callback(each.close)
        first.paths.on_tested = lambda: loop.call_soon_threadsafe(tested.set)
        offer = second.offer(source, [0], _FIRST_READ_S)
        await first.read(offer.ticket, target, [0], _FIRST_READ_S)
        await asyncio.wait_for(tested.wait(), _FIRST_READ_S)
        return first.paths.links()


@contextlib.contextmanager
def _captured_warnings() -> Iterator[list[str]]:
    """Capture the agents' warnings for the finding and keep them off the screen."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    agents = logging.getLogger("kvolt.transfer")
    propagates = agents.propagate
    agents.addHandler(handler)
    agents.propagate = False
    try:
        yield warnings
    finally:
        agents.removeHandler(handler)
        agents.propagate = propagates


def _untested(facts: MachineFacts) -> list[Finding]:
    why = missing_paths(facts).get("rdma")
    findings = []
    for name, what in UNTESTED.items():
        if name == "rdma" and why is not None:
            state = f"not available, and untested: {why.cause}"
            findings.append(Finding(_name(name), "warn", state, why.remedy))
        else:
            devices = f" ({', '.join(facts.rdma_devices)})" if name == "rdma" else ""
            findings.append(Finding(_name(name), "untested", f"{what}{devices}: not covered by tests"))
    return findings


def _name(path: str) -> str:
    return f"transfer {path}"


def _remedy(path: str) -> str:
    if path == "nixl":
        return nixl_library.REMEDY
    return "another path is used; please report this"
