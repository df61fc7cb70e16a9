"""OwnerScheduler: scheduler half of KvoltNixlConnector on prefill workers.

Its holds (`kv_holds`) decide when blocks are released: the workers release when the scheduler orders it, and never by
themselves. Readers reach the holds over the side channel at any time, also during a long step.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import msgspec
import zmq
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.platforms import current_platform
from vllm.utils.network_utils import make_zmq_path, make_zmq_socket

from kvolt.engines.vllm.plugins.kv_holds import DEADLINE_S, HOLD_S, HoldAnswers, Holds, serve
from kvolt.runtime.clock import SystemClock

log = logging.getLogger(__name__)

RELEASED, EXPIRED = -math.inf, -1e18
"""Orders to the workers, as expiry times: clocks of hosts differ by less."""
_now = SystemClock().monotonic
_LISTEN_MS = 1000
_PAUSE_S = 0.02
"""Pause between empty steps of an owner on a CPU that only holds blocks."""


def require(base: type, *names: str) -> None:
    """ImportError if a vLLM base class lacks an overridden or called method: the checks would be skipped silently."""
    missing = [name for name in names if not callable(getattr(base, name, None))]
    if missing:
        message = f"this vLLM has no {base.__name__}.{missing[0]}, by which kvolt checks KV that was read"
        raise ImportError(f"{message}; use vLLM 0.32, or serve without prefill and decode workers")


require(
    NixlPullConnectorScheduler,
    "request_finished",
    "build_connector_meta",
    "update_connector_output",
    "set_xfer_handshake_metadata",
    "_nixl_handshake_listener",
)


class SideChannel:
    """The bound socket of vLLM's side channel. `port` 0: any free one. ZMQError if the port is in use."""

    def __init__(self, host: str, port: int) -> None:
        self._context = zmq.Context()
        try:
            self.socket = make_zmq_socket(
                self._context, make_zmq_path("tcp", host, port), zmq.ROUTER, bind=True
            )
        except zmq.ZMQError:
            self.close()
            raise
        self.socket.setsockopt(zmq.RCVTIMEO, _LISTEN_MS)
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def close(self) -> None:
        self._context.destroy(linger=0)


class OwnerScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.holds = Holds(_now)
        self._is_cpu = current_platform.is_cpu()
        self._side_channel: SideChannel | None = None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        is_held, ticket = super().request_finished(request, block_ids)
        if is_held and ticket is not None:
            params = request.kv_transfer_params
            hold_s = float(params.get(HOLD_S) or self._kv_lease_duration)
            self.holds.begin(request.request_id, hold_s, params.get(DEADLINE_S))
            self._reqs_need_send[request.request_id] = math.inf
            ticket[HOLD_S] = hold_s
        return is_held, ticket

    def release_hold(self, name: str) -> None:
        """No reader will read the blocks of request `name`: the workers release them with the next step."""
        if self.holds.end(name):
            self._reqs_need_send[name] = RELEASED

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for name in self.holds.end_expired():
            log.warning("hold expired: request_id=%s: no reader has read or renewed it", name)
            self._reqs_need_send[name] = EXPIRED
        if self._is_cpu and self._only_holds(scheduler_output):
            time.sleep(_PAUSE_S)
        return super().build_connector_meta(scheduler_output)

    def _only_holds(self, scheduler_output: Any) -> bool:
        is_reading = self._reqs_need_recv or self._heartbeat_req_engine
        has_orders = self._reqs_need_send or scheduler_output.total_num_scheduled_tokens
        return bool(self.holds) and not is_reading and not has_orders

    def update_connector_output(self, connector_output: Any) -> None:
        """End the holds of finished sends before their blocks are released."""
        for name in connector_output.finished_sending or ():
            self.holds.end(name)
        super().update_connector_output(connector_output)

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Bind the side channel, then start vLLM's thread that serves it. ZMQError if the port is in use: vLLM, which
        binds in the thread, would wait for it forever."""
        if self._side_channel is None:
            # vLLM has added the number of the data parallel rank.
            port: int = self.side_channel_port if envs.VLLM_NIXL_SIDE_CHANNEL_PORT else 0
            self._side_channel = SideChannel(self.side_channel_host, port)
            self.side_channel_port: int = self._side_channel.port
        super().set_xfer_handshake_metadata(metadata)

    def _nixl_handshake_listener(
        self,
        encoded_data: dict[tuple[int, int], Any],
        ready_event: Any,
        stop_event: Any,
        host: str,
        port: int,
    ) -> None:
        """Replaces vLLM's listener: answers handshakes, checks and renewals."""
        assert self._side_channel is not None

        def handshake(message: bytes) -> tuple[bytes, bytes]:
            kind, pp_rank, tp_rank = msgspec.msgpack.decode(message)
            if kind != GET_META_MSG:
                raise ValueError(f"unexpected message {kind!r}")
            return encoded_data[(pp_rank, tp_rank)], msgspec.msgpack.encode(time.perf_counter())

        ready_event.set()
        try:
            serve(
                self._side_channel.socket,
                HoldAnswers(self.engine_id, self.holds),
                handshake,
                stop_event.is_set,
            )
        finally:
            self._side_channel.close()
