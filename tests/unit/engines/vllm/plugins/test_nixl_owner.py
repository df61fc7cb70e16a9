"""The owner's scheduler: when blocks are held, when the workers are ordered to release them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from tests.unit.engines.vllm.plugins.nixl_lab import ENVS, LEASE_S, nixl_owner
from tests.waits import MUST_HAPPEN_S

from kvolt.engines.vllm.plugins.kv_holds import DEADLINE_S, HOLD_S, Holds

IDLE = SimpleNamespace(total_num_scheduled_tokens=0)
BUSY = SimpleNamespace(total_num_scheduled_tokens=7)


class Owner:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        monkeypatch.setattr(nixl_owner.time, "sleep", self.pauses.append)
        self.scheduler: Any = nixl_owner.OwnerScheduler(None, "engine", None)
        self.scheduler.holds = Holds(lambda: self.now)

    def finish(self, name: str, **params: Any) -> dict[str, Any] | None:
        request = SimpleNamespace(request_id=name, kv_transfer_params={"do_remote_decode": True, **params})
        is_held, ticket = self.scheduler.request_finished(request, ([1, 2],))
        assert is_held
        return ticket  # type: ignore[no-any-return]

    def orders(self, step: Any = IDLE) -> dict[str, float]:
        return dict(self.scheduler.build_connector_meta(step).reqs_to_send)


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Owner:
    return Owner(monkeypatch)


def test_the_workers_release_nothing_by_themselves(owner: Owner) -> None:
    assert owner.finish("a", **{HOLD_S: 5.0, DEADLINE_S: None}) == {"remote_request_id": "a", HOLD_S: 5.0}
    assert owner.orders() == {"a": math.inf}
    owner.now += 4.9
    assert owner.orders() == {}
    owner.now += 0.1
    assert owner.orders() == {"a": nixl_owner.EXPIRED}
    assert not owner.scheduler.holds.is_intact("a")
    assert owner.orders() == {}


def test_vllms_lease_where_none_was_asked_for(owner: Owner) -> None:
    assert owner.finish("a") == {"remote_request_id": "a", HOLD_S: float(LEASE_S)}


def test_a_deadline_ends_it_whatever_is_renewed(owner: Owner) -> None:
    owner.finish("a", **{HOLD_S: 5.0, DEADLINE_S: 8.0})
    owner.orders()
    owner.now += 4.0
    owner.scheduler.holds.renew(["a"])
    owner.now += 4.0
    assert owner.orders() == {"a": nixl_owner.EXPIRED}


def test_one_without_blocks_is_not_held(owner: Owner) -> None:
    request = SimpleNamespace(request_id="a", kv_transfer_params={"do_remote_decode": True})
    assert owner.scheduler.request_finished(request, ([],)) == (False, None)
    assert not owner.scheduler.holds


def test_a_released_one_is_gone_before_its_blocks_are(owner: Owner) -> None:
    owner.finish("a", **{HOLD_S: 5.0})
    owner.orders()
    owner.scheduler.release_hold("a")
    assert not owner.scheduler.holds.is_intact("a")
    assert owner.orders() == {"a": nixl_owner.RELEASED}
    owner.scheduler.release_hold("a")
    owner.scheduler.release_hold("unknown")
    assert owner.orders() == {}


def test_one_that_was_read_and_released_by_its_reader(owner: Owner) -> None:
    """vLLM releases the blocks right after."""
    owner.finish("a", **{HOLD_S: 5.0})
    owner.orders()
    output = SimpleNamespace(finished_sending={"a"})
    owner.scheduler.update_connector_output(output)
    assert not owner.scheduler.holds.is_intact("a")
    assert owner.scheduler.updates == [output]
    owner.scheduler.update_connector_output(SimpleNamespace(finished_sending=None))
    owner.now += 100.0
    assert owner.orders() == {}


def test_an_owner_that_only_holds_pauses_between_steps(owner: Owner) -> None:
    owner.orders()
    assert not owner.pauses, "it holds nothing"
    owner.finish("a", **{HOLD_S: 5.0})
    owner.orders()
    assert not owner.pauses, "its workers have orders"
    owner.orders()
    assert len(owner.pauses) == 1
    owner.orders(BUSY)
    owner.scheduler._heartbeat_req_engine["r"] = object()
    owner.orders()
    assert len(owner.pauses) == 1, "it computes, or reads from another"


def test_a_vllm_in_which_nothing_would_be_checked_is_refused() -> None:
    class Another:
        def request_finished(self) -> None: ...

    nixl_owner.require(Another, "request_finished")
    with pytest.raises(ImportError, match=r"no Another._pop_done_transfers, by which kvolt checks KV"):
        nixl_owner.require(Another, "request_finished", "_pop_done_transfers")


@pytest.fixture
def listening() -> Iterator[Callable[[], Any]]:
    """Starts schedulers that serve their side channel."""
    schedulers = []

    def listen() -> Any:
        schedulers.append(nixl_owner.OwnerScheduler(None, "engine", None))
        schedulers[-1].set_xfer_handshake_metadata({(0, 0): b"metadata"})
        return schedulers[-1]

    yield listen
    for each in schedulers:
        each.shutdown()


def handshake(port: int) -> bytes:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(MUST_HAPPEN_S * 1e3))
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart((b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 0))))
        return socket.recv_multipart()[1]


def test_each_side_channel_has_a_free_port(listening: Callable[[], Any]) -> None:
    ports = [listening().side_channel_port for _ in range(2)]
    assert [handshake(port) for port in ports] == [b"metadata"] * 2


def test_a_port_set_by_the_user_in_use_fails_the_start(
    listening: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = listening().side_channel_port
    monkeypatch.setattr(ENVS, "VLLM_NIXL_SIDE_CHANNEL_PORT", port - 1)
    with pytest.raises(zmq.ZMQError, match=f"in use.*{port}"):
        listening()
