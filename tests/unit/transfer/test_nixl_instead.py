"""NIXL, the real one: where it is no way, blocks go another one, and the log says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from tests.unit.transfer.nixl_lab import BLOCK, NUM, SOON_S, Side, new_sides, private_slab

from kvolt.core.errors import ConfigError, Unsupported
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.nixl.path import Nixl
from kvolt.transfer.paths import nixl_library
from kvolt.transfer.reads.wire import NixlSlab

if nixl_library.find_package() is None:
    pytest.skip(f"NIXL is not installed: {nixl_library.REMEDY}", allow_module_level=True)


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    with new_sides() as new:
        yield new


@pytest.fixture
def source(sides: Callable[..., Side]) -> Side:
    return sides(seed=1)


@pytest.fixture
def target(sides: Callable[..., Side]) -> Side:
    return sides()


async def test_a_read_that_would_be_emulated_goes_another_way(
    sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With nothing but TCP UCX emulates, and a reader's death can end the process of the source."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, target = sides(seed=1), sides(shared_memory=False)
    for _ in range(2):
        offer = source.agent.offer(source.slab, range(NUM), SOON_S)
        assert await target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S) == "tcp"
        await offer
    assert (target.rows == source.rows).all()
    assert caplog.text.count("emulates") == 1


async def test_a_peer_without(source: Side, target: Side, sides: Callable[..., Side]) -> None:
    plain = sides(seed=3, nixl=False)
    for one, other in ((source, plain), (plain, target)):
        offer = one.agent.offer(one.slab, [1], SOON_S)
        assert await other.agent.read(offer.ticket, other.slab, [1], SOON_S) == "tcp"


@pytest.mark.parametrize("whose", ["source", "target"])
async def test_nixl_that_does_not_work(
    source: Side, target: Side, whose: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"source": source, "target": target}[whose].agent.address.agent
    new_agent = nixl_library.new_agent

    def maybe(name: str) -> object:
        if name.startswith(broken):
            raise Unsupported("NIXL does not work here", feature="nixl")
        return new_agent(name)

    monkeypatch.setattr(nixl_library, "new_agent", maybe)
    for _ in range(2):
        offer = source.agent.offer(source.slab, range(NUM), SOON_S)
        assert await target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S) == "tcp"
        await offer
    assert "NIXL disabled" in caplog.text


async def test_memory_that_cannot_be_registered(
    source: Side, target: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    offer = source.agent.offer(source.slab, [1], SOON_S)
    await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    source.nixl._agent.register_memory = refuse
    fresh = private_slab(NUM, BLOCK)
    offer = source.agent.offer(fresh, [1], SOON_S)
    assert await target.agent.read(offer.ticket, target.slab, [1], SOON_S) == "tcp"
    assert "locked memory" in caplog.text


async def test_a_peer_that_describes_its_memory_wrongly(
    source: Side, target: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    describe = Nixl.describe

    def wrong(self: Nixl, slab: Slab, number: int) -> NixlSlab:
        told = describe(self, slab, number)
        return NixlSlab(told.slab, told.address, told.device, b"nonsense")

    monkeypatch.setattr(Nixl, "describe", wrong)
    offer = source.agent.offer(source.slab, [1], SOON_S)
    assert await target.agent.read(offer.ticket, target.slab, [1], SOON_S) == "tcp"
    assert "NIXL not used with peer" in caplog.text


def test_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_library, "_NAMES", ("missing_nixl",))
    with pytest.raises(ConfigError, match="not installed") as raised:
        TransferAgent(TransferOptions(nixl=True))
    assert "--no-deps" in str(raised.value.fields["remedy"])
    with pytest.raises(Unsupported, match="--no-deps"):
        nixl_library.new_agent("agent")


def test_ucx_that_has_no_way_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def nixl_agent_config(self, **options: object) -> None: ...

        def nixl_agent(self, *arguments: object) -> object:
            return type("Agent", (), {"backends": {}})()

    monkeypatch.setattr(nixl_library, "_load", Library)
    with pytest.raises(Unsupported, match="no backend UCX"):
        nixl_library.new_agent("agent")


def test_the_logging_of_the_process_stays_as_it_is() -> None:
    code = """if True:
        import logging
        from kvolt.transfer.paths import nixl_library as library
        library._load()
        print(logging.raiseExceptions, logging.getLogger("nixl").handlers)
    """
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == "True []\n"
