"""What `kvolt doctor` says of the paths that KV takes: tried out between two agents, not there and why, or untested.

A path is tried by its self-test, the same that workers do. What cannot be tried here without a second machine is
judged by the facts of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping

from kvolt.cli.doctor.finding import Finding
from kvolt.core.card import Link
from kvolt.core.errors import KvoltError
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.nixl import library as nixl_library
from kvolt.transfer.paths.capabilities import UNTESTED, MachineFacts, missing_paths
from kvolt.transfer.paths.self_test import new_slab

_FIRST_READ_S = 10.0
"""NIXL alone takes most of a second to begin with."""
_TRIES = 3
"""On a busy machine a test may run out of its time."""
_PATHS: Mapping[str, TransferOptions] = {
    "shm": TransferOptions(self_test=True),
    "tcp": TransferOptions(self_test=True, shared_memory=False),
    "nixl": TransferOptions(self_test=True, nixl=True, shared_memory=False),
}
"""How two agents are to be made that use the path."""


def transfer_findings(facts: MachineFacts, wants_nixl: bool = False) -> list[Finding]:
    """Of every path. `wants_nixl`: the settings turn it on, so without it workers do not start."""
    missing = missing_paths(facts)
    findings = []
    for path, options in _PATHS.items():
        why = missing.get(path)
        if why is None:
            findings.append(tried_finding(path, options, facts))
        else:
            blocks = path == "nixl" and wants_nixl and facts.nixl_package is None
            found = f"not available: {why.cause}"
            findings.append(Finding(_name(path), "missing" if blocks else "warn", found, why.remedy, blocks))
    return [*findings, *_untested(facts)]


def tried_finding(path: str, options: TransferOptions, facts: MachineFacts) -> Finding:
    """Between two agents of this process."""
    with _overheard() as said:
        try:
            links = asyncio.run(_try(options, facts))
        except (KvoltError, OSError, TimeoutError) as error:
            said.insert(0, str(error) or "no answer in time")
            links = {}
    link = next((each for each in links.values() if each.path == path), None)
    if link is None:
        return Finding(
            _name(path), "warn", f"does not work: {said[0] if said else 'not taken'}", _remedy(path)
        )
    return Finding(_name(path), "ok", f"works: {link.bytes_per_s / 1e9:.2g} GB/s between two agents here")


async def _try(options: TransferOptions, facts: MachineFacts) -> dict[str, Link]:
    """What was measured."""
    links: dict[str, Link] = {}
    for _ in range(_TRIES):
        links = links or await _try_once(options, facts)
    return links


async def _try_once(options: TransferOptions, facts: MachineFacts) -> dict[str, Link]:
    loop, tested = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.ExitStack() as stack:
        source, target = new_slab(), new_slab()
        here, there = (TransferAgent(options, facts=facts) for _ in range(2))
        for each in (source, target, here, there):
            stack.callback(each.close)
        here.paths.on_tested = lambda: loop.call_soon_threadsafe(tested.set)
        offer = there.offer(source, [0], _FIRST_READ_S)
        await here.read(offer.ticket, target, [0], _FIRST_READ_S)
        await asyncio.wait_for(tested.wait(), _FIRST_READ_S)
        return here.paths.links()


@contextlib.contextmanager
def _overheard() -> Iterator[list[str]]:
    """What agents complain of: it belongs into a finding, and not on the screen beside it."""
    said: list[str] = []
    ear = logging.Handler(logging.WARNING)
    ear.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    agents = logging.getLogger("kvolt.transfer")
    propagates = agents.propagate
    agents.addHandler(ear)
    agents.propagate = False
    try:
        yield said
    finally:
        agents.removeHandler(ear)
        agents.propagate = propagates


def _untested(facts: MachineFacts) -> list[Finding]:
    why = missing_paths(facts).get("rdma")
    findings = []
    for name, what in UNTESTED.items():
        if name == "rdma" and why is not None:
            found = f"not available, and untested by us: {why.cause}"
            findings.append(Finding(_name(name), "warn", found, why.remedy))
        else:
            devices = f" ({', '.join(facts.rdma_devices)})" if name == "rdma" else ""
            findings.append(Finding(_name(name), "untested", f"{what}{devices}: no test of ours has run it"))
    return findings


def _name(path: str) -> str:
    return f"transfer {path}"


def _remedy(path: str) -> str:
    if path == "nixl":
        return nixl_library.REMEDY
    return "blocks take another path meanwhile; please tell us"
