"""Every tier below the host keeps what `testing.lower_tier_suite` says, and one that does not is found out."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.kv.tiers.tier_lab import in_eight_bits

from kvolt.core.ids import BlockKey
from kvolt.kv.disk.files import DiskFiles, file_of
from kvolt.kv.disk.fp8 import Fp8
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.object_store.blocks import ObjectBlocks, open_store
from kvolt.kv.object_store.tier import ObjectTier
from kvolt.kv.shared_pool.server import PoolServer
from kvolt.kv.shared_pool.tier import PoolTier
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.kv.tiers.lower_tier import LowerTier, TierStats
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.testing import lower_tier_suite
from kvolt.testing.lower_tier_suite import CASES, NUM_SLOTS, SHAPE, Case, run_case
from kvolt.transfer.memory.slabs import Numbers

_SERVER = """
import sys
import boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
_, port = server.get_host_and_port()
boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="kv-blocks")
print(port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 server with conditional puts, and the environment for its clients."""
    environ = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield {**environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        process.stdin.close()


class Lossless:
    def expected_bytes(self, data: bytes) -> bytes:
        return data


class DiskHarness(Lossless):
    form: Fp8 | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tier: DiskTier | None = None

    async def open(self) -> LowerTier:
        self._tier = DiskTier(DiskFiles(self._folder, SHAPE, 4 * NUM_SLOTS, self.form))
        return self._tier

    def corrupt(self, key: BlockKey) -> None:
        assert self._tier is not None
        slot = self._tier.slot_table.slot(key)
        with open(file_of(self._tier.folder, 0), "r+b") as file:
            _flip(file, slot * self._tier.shape.slot_bytes + 700)

    async def close(self) -> None:
        pass


class EightBitsHarness(DiskHarness):
    form = Fp8.of(SHAPE)

    def expected_bytes(self, data: bytes) -> bytes:
        return in_eight_bits(data, SHAPE)


class PoolHarness(Lossless):
    """The pool stays while a worker comes, goes and comes again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "pool.sock"
        self._server: PoolServer | None = None

    async def open(self) -> LowerTier:
        if self._server is None:
            self._server = PoolServer(self._path, lambda shape: HostTier(shape, 4 * NUM_SLOTS))
            await self._server.start()
        return PoolTier(self._path, SHAPE, time.monotonic)

    def corrupt(self, key: BlockKey) -> None:
        assert self._server is not None
        host = self._server.host
        assert host is not None
        with host.memory.block(host.slot_table.slot(key)) as view:
            view[700] ^= 4

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()


class ObjectHarness(Lossless):
    def __init__(self, url: str) -> None:
        self._url = url
        self._blocks: ObjectBlocks | None = None

    async def open(self) -> LowerTier:
        self._blocks = ObjectBlocks(self._url, SHAPE)
        return ObjectTier(self._blocks, time.monotonic)

    def corrupt(self, key: BlockKey) -> None:
        assert self._blocks is not None
        library, store, path = (
            importlib.import_module("obstore"),
            open_store(self._url),
            self._blocks.path(key),
        )
        data = bytearray(library.get(store, path).bytes())
        data[700] ^= 4
        library.put(store, path, bytes(data))

    async def close(self) -> None:
        pass


def _flip(file: Any, at: int) -> None:
    file.seek(at)
    byte = file.read(1)[0]
    file.seek(at)
    file.write(bytes([byte ^ 4]))
    file.flush()
    os.fsync(file.fileno())


@pytest.mark.parametrize("case", CASES, ids=lower_tier_suite.name)
async def test_disk(case: Case, tmp_path: Path) -> None:
    await run_case(case, DiskHarness(tmp_path))


@pytest.mark.parametrize("case", CASES, ids=lower_tier_suite.name)
async def test_disk_in_eight_bits(case: Case, tmp_path: Path) -> None:
    await run_case(case, EightBitsHarness(tmp_path))


@pytest.mark.parametrize("case", CASES, ids=lower_tier_suite.name)
async def test_pool(case: Case, tmp_path: Path) -> None:
    await run_case(case, PoolHarness(tmp_path))


@pytest.mark.parametrize("case", CASES, ids=lower_tier_suite.name)
async def test_shared_folder(case: Case, tmp_path: Path) -> None:
    await run_case(case, ObjectHarness(str(tmp_path)))


@pytest.mark.parametrize("case", CASES, ids=lower_tier_suite.name)
async def test_s3(case: Case, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    await run_case(case, ObjectHarness(f"s3://kv-blocks/{lower_tier_suite.name(case)}"))


class _Careless(DiskTier):
    """Says of each block that it came."""

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        came = await super().read(blocks, memory, slots)
        return [0 if each is None else each for each in came]


class _Forgetful(DiskTier):
    """Finds nothing after a restart."""

    async def start(self) -> None:
        await super().start()
        self.slot_table.forget(self.slot_table)


class _Mistaken(DiskTier):
    """Keeps blocks with another's checksums."""

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        wrong = [0] * len(checksums)
        await super().write(blocks, wrong, memory, slots)


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        (_Careless, lower_tier_suite.corrupt_block_is_not_returned),
        (_Forgetful, lower_tier_suite.blocks_survive_reopening),
        (_Forgetful, lower_tier_suite.partial_prefix_is_found),
        (_Mistaken, lower_tier_suite.written_blocks_are_read_back),
        (_Mistaken, lower_tier_suite.reads_during_writes_are_correct),
    ],
)
async def test_a_broken_tier_is_found_out(broken: type[DiskTier], case: Case, tmp_path: Path) -> None:
    class Broken(DiskHarness):
        async def open(self) -> LowerTier:
            self._tier = broken(DiskFiles(self._folder, SHAPE, 4 * NUM_SLOTS))
            return self._tier

    with pytest.raises(AssertionError):
        await run_case(case, Broken(tmp_path))


def test_a_few_slow_blocks_do_not_make_a_tier_slow() -> None:
    stats = TierStats()
    stats.record_loaded(1000, 0.05)
    for _ in range(5):
        stats.record_loaded(2, 0.02)  # two hundred times as long for each
    assert stats.block_s is not None
    assert stats.block_s < 12 * 0.05 / 1000
    for _ in range(20):
        stats.record_loaded(1000, 1.0)
    assert stats.block_s > 0.9e-3, "many are believed"
    stats.record_loaded(4, 4 * 0.00005)
    assert stats.block_s <= 0.0001, "and so is a quick one"
