"""A reader's worker: what it read is used if its owner confirms the hold after the read, and in no other case."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.engines.vllm.plugins.nixl_lab import nixl_owner, nixl_reader

from kvolt.engines.vllm.plugins.kv_holds import READS, Read, reads_of

OWNER = SimpleNamespace(host="192.0.2.1", port=5600, engine_id="owner", request_id="held")


class Checks:
    """The owner's answers, by request."""

    def __init__(self) -> None:
        self.answers: dict[str, bool | None] = {}
        self.asked: list[tuple[Any, ...]] = []

    def check(self, *question: Any) -> bool | None:
        self.asked.append(question)
        return self.answers.get(question[0])

    def close(self) -> None:
        pass


class Reader:
    def __init__(self) -> None:
        self.worker: Any = nixl_reader.ReaderWorker(None, "reader", None)
        self.checks = self.worker._checks = Checks()

    def read(self, name: str, *, rank: int = 0, num_blocks: int = 2) -> int | None:
        """Its handle."""
        meta = SimpleNamespace(remote=OWNER)
        self.worker._recving_metadata[name] = meta
        spec = SimpleNamespace(remote_rank=rank, local_block_ids=[list(range(num_blocks))])
        kwargs = {
            "request_id": name,
            "remote_request_id": "held",
            "dst_engine_id": "owner",
            "expected_consumers": 1,
        }
        assert self.worker._read_blocks(spec, **kwargs)
        handles = self.worker._recving_transfers.get(name)
        return handles[-1] if handles else None

    def poll(self) -> tuple[set[str], set[str]]:
        return self.worker._pop_done_transfers(self.worker._recving_transfers)  # type: ignore[no-any-return]

    @property
    def under_way(self) -> set[str]:
        return set(self.worker._recving_transfers)

    @property
    def reported(self) -> list[list[Any]]:
        return list(self.worker.xfer_stats.data[READS])


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.worker.shutdown()
    assert reader.worker.is_shut_down


def test_kv_is_used_once_its_owner_has_confirmed_it(reader: Reader) -> None:
    handle = reader.read("r")
    assert reader.poll() == (set(), set())
    assert not reader.checks.asked, "asked before the read was over"
    reader.worker.states[handle] = ("DONE", 4096)
    for _ in range(2):
        assert reader.poll() == (set(), set())
        assert reader.under_way == {"r"}, "vLLM takes it for lost"
        assert not reader.worker.sent, "released before it was confirmed"
    assert reader.checks.asked[0] == ("r", ("192.0.2.1", 5600), "owner", "held")
    reader.checks.answers["r"] = True
    assert reader.poll() == ({"r"}, set())
    assert not reader.under_way
    assert reader.worker._pending_recv_notifs["r"] == [("agent-0", b"held:1")], (
        "vLLM sends it, which releases the hold"
    )
    [(name, num_bytes, took_s)] = reader.reported
    assert (name, num_bytes) == ("r", 4096)
    assert took_s >= 0.0
    assert not reader.worker._reads


def test_kv_that_is_not_confirmed_has_failed(reader: Reader) -> None:
    handle = reader.read("r")
    reader.worker.states[handle] = ("DONE", 4096)
    reader.checks.answers["r"] = False
    assert reader.poll() == ({"r"}, {"r"})
    assert not reader.under_way
    assert not reader.reported
    assert not reader.worker.sent, "the owner logs it as KV that was used"


def test_the_read_itself_does_not_release_the_hold(reader: Reader) -> None:
    """What the owner gets when the bytes are here is a heartbeat of vLLM's."""
    reader.read("r")
    assert reader.worker.started == [("r", "HB:held,")]


def test_where_nothing_has_to_be_read_the_hold_is_released_at_once(reader: Reader) -> None:
    reader.read("r", num_blocks=0)
    assert reader.worker.started == [("r", "held")]
    reader.worker._recving_transfers["r"] = []
    assert reader.poll() == ({"r"}, set())
    assert not reader.checks.asked


def test_a_read_of_several_ranks_is_over_with_its_last(reader: Reader) -> None:
    first, second = reader.read("r"), reader.read("r", rank=1)
    reader.checks.answers["r"] = True
    reader.worker.states[first] = ("DONE", 1000)
    assert reader.poll() == (set(), set())
    assert not reader.checks.asked
    reader.worker.states[second] = ("DONE", 24)
    assert reader.poll() == ({"r"}, set())
    assert [each[:2] for each in reader.reported] == [["r", 1024]]
    ends = [("agent-0", b"held:1"), ("agent-1", b"held:1")]
    assert reader.worker._pending_recv_notifs["r"] == ends


def test_each_read_has_its_own_bytes_and_end(reader: Reader) -> None:
    good, bad, lost = (reader.read(name) for name in ("good", "bad", "lost"))
    reader.read("slow")
    reader.worker.states |= {good: ("DONE", 10), bad: ("ERR", 0), lost: ("DONE", 30)}
    reader.checks.answers |= {"good": True, "lost": False}
    assert reader.poll() == ({"good", "bad", "lost"}, {"bad", "lost"})
    assert reader.under_way == {"slow"}
    assert [each[:2] for each in reader.reported] == [["good", 10]]
    assert [each[0] for each in reader.checks.asked] == ["good", "lost"], "nothing is asked of a failed read"


def test_a_report_is_not_lost_between_steps(reader: Reader) -> None:
    """The bytes are counted in one step, the answer may come in a later one."""
    handle = reader.read("r")
    reader.worker.states[handle] = ("DONE", 4096)
    reader.poll()
    reader.worker.xfer_stats.reset()
    assert reader.worker.xfer_stats.is_empty()
    reader.checks.answers["r"] = True
    reader.poll()
    assert not reader.worker.xfer_stats.is_empty()
    statistics = reader.worker.xfer_stats.data
    [read] = reads_of(statistics)
    assert (read.engine_id, read.num_bytes) == ("r", 4096)
    assert list(reads_of({"KvoltNixlConnector": statistics, "KvoltTierConnector": {}})) == [read]


def test_releases_are_no_expiries(reader: Reader) -> None:
    worker, done = reader.worker, set[str]()
    worker._reqs_to_send = {"released": nixl_owner.RELEASED, "expired": nixl_owner.EXPIRED, "held": 5.0}
    worker._reqs_to_process = set(worker._reqs_to_send)
    worker._reap_expired_send_leases(done)
    assert done == {"released", "expired"}
    assert worker._reqs_to_process == set(worker._reqs_to_send) == {"held"}
    assert worker.xfer_stats.data["num_kv_expired_reqs"] == [1]


@pytest.mark.parametrize(
    "statistics",
    [
        None,
        {},
        {"KvoltNixlConnector": 3},
        {READS: None},
        {READS: [["r"], "x", ["r", "many", 1.0]]},
        {"other": []},
    ],
)
def test_statistics_without_reads(statistics: Any) -> None:
    assert list(reads_of(statistics)) == []


def test_a_reported_read() -> None:
    assert list(reads_of({READS: [["r", 10, 0.5]]})) == [Read("r", 10, 0.5)]
