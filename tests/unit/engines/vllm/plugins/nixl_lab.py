"""The halves of KvoltNixlConnector without a vLLM: its base classes, shaped as those of 0.32."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import zmq
from tests.unit.engines.vllm.plugins.tier_lab import stood_in
from tests.waits import MUST_HAPPEN_S

LEASE_S = 30
ENVS = SimpleNamespace(VLLM_NIXL_SIDE_CHANNEL_PORT=0)


@dataclass
class NixlKVConnectorStats:
    data: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {"bytes_transferred": [], "num_kv_expired_reqs": []}

    def is_empty(self) -> bool:
        return not self.data["bytes_transferred"] and not self.data["num_kv_expired_reqs"]


class NixlPullConnectorScheduler:
    dp_index = 1

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self.engine_id = engine_id
        self.side_channel_host = "127.0.0.1"
        self.side_channel_port = ENVS.VLLM_NIXL_SIDE_CHANNEL_PORT + self.dp_index
        self._listener: threading.Thread | None = None
        self._stop_event = threading.Event()
        self._kv_lease_duration = LEASE_S
        self._reqs_need_send: dict[str, float] = {}
        self._reqs_need_recv: dict[str, Any] = {}
        self._heartbeat_req_engine: dict[str, Any] = {}
        self.updates: list[Any] = []

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if not any(block_ids):
            return False, None
        self._reqs_need_send[request.request_id] = 1234.5
        return True, {"remote_request_id": request.request_id}

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders, self._reqs_need_send = self._reqs_need_send, {}
        return SimpleNamespace(reqs_to_send=orders)

    def update_connector_output(self, connector_output: Any) -> None:
        self.updates.append(connector_output)

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], bytes]) -> None:
        is_ready = threading.Event()
        address = (self.side_channel_host, self.side_channel_port)
        self._listener = threading.Thread(
            target=self._nixl_handshake_listener, args=(metadata, is_ready, self._stop_event, *address)
        )
        self._listener.start()
        assert is_ready.wait(MUST_HAPPEN_S), "vLLM would wait forever"

    def shutdown(self) -> None:
        self._stop_event.set()
        if self._listener is not None:
            self._listener.join()

    def _nixl_handshake_listener(self, *args: Any) -> None:
        raise AssertionError("kvolt has its own")


class NixlPullConnectorWorker:
    """Reads are handles with a state; a request is under way as long as one of its handles is."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self.xfer_stats = NixlKVConnectorStats()
        self._remote_agents = {"owner": {(0, 0): "agent-0", (0, 1): "agent-1"}}
        self._recving_metadata: dict[str, Any] = {}
        self._recving_transfers: dict[str, list[int]] = {}
        self._recv_failures: set[str] = set()
        self._pending_recv_notifs: dict[str, list[tuple[str, bytes]]] = {}
        self._reqs_to_send: dict[str, float] = {}
        self._reqs_to_process: set[str] = set()
        self.consumer_notification_counts_by_req: dict[str, int] = defaultdict(int)
        self.expected_consumer_notifications_by_req: dict[str, int] = {}
        self.states: dict[int, tuple[str, int]] = {}
        self.started: list[tuple[str, str]] = []
        self.sent: list[tuple[str, bytes]] = []
        self.is_shut_down = False

    def _read_blocks(self, read_spec: Any, **kwargs: Any) -> bool:
        self.started.append((kwargs["request_id"], kwargs["remote_request_id"]))
        if any(read_spec.local_block_ids):
            handle = len(self.states)
            self.states[handle] = ("PROC", 0)
            self._recving_transfers.setdefault(kwargs["request_id"], []).append(handle)
        return True

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = set(), set()
        for request_id, handles in list(transfers.items()):
            left = []
            for handle in handles:
                state, num_bytes = self.states[handle]
                if state == "PROC":
                    left.append(handle)
                elif state == "DONE":
                    self.xfer_stats.data["bytes_transferred"].append(num_bytes)
                else:
                    failed.add(request_id)
            if left:
                transfers[request_id] = left
            else:
                done.add(request_id)
                del transfers[request_id]
        return done, failed

    def _send_pending_recv_notifs(self, request_id: str) -> None:
        self.sent += self._pending_recv_notifs.pop(request_id, [])

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        for name in [each for each, expires in self._reqs_to_send.items() if expires <= 0.0]:
            self.xfer_stats.data["num_kv_expired_reqs"].append(1)
            self._reqs_to_process.remove(name)
            del self._reqs_to_send[name]
            done_sending.add(name)

    def shutdown(self) -> None:
        self.is_shut_down = True


def make_zmq_socket(context: zmq.Context[Any], path: str, kind: int, bind: bool) -> zmq.Socket[bytes]:
    assert bind
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.bind(path)
    return socket


_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_MODULES: dict[str, dict[str, Any]] = {
    f"{_NIXL}.metadata": {"GET_META_MSG": b"get_meta_msg"},
    f"{_NIXL}.pull_scheduler": {"NixlPullConnectorScheduler": NixlPullConnectorScheduler},
    f"{_NIXL}.pull_worker": {"NixlPullConnectorWorker": NixlPullConnectorWorker},
    f"{_NIXL}.stats": {"NixlKVConnectorStats": NixlKVConnectorStats},
    "vllm": {"envs": ENVS},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
    "vllm.utils.network_utils": {
        "make_zmq_path": lambda scheme, host, port: f"{scheme}://{host}:{port}",
        "make_zmq_socket": make_zmq_socket,
    },
}

with stood_in(_MODULES):
    from kvolt.engines.vllm.plugins import nixl_owner, nixl_reader

__all__ = ["ENVS", "LEASE_S", "nixl_owner", "nixl_reader"]
