"""ReaderWorker: worker half of KvoltNixlConnector. Reads held blocks, and uses them if the hold is intact afterwards.

vLLM's reader ends the hold by a notification when the bytes have arrived. This one asks the owner's scheduler first
and ends the hold after the answer. If the hold has ended or the owner does not answer, the read has failed and vLLM
computes the prompt (`kv_load_failure_policy`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from kvolt.engines.vllm.plugins.kv_holds import READS, HoldChecks, connect
from kvolt.engines.vllm.plugins.nixl_owner import RELEASED, require
from kvolt.runtime.clock import SystemClock

log = logging.getLogger(__name__)

_now = SystemClock().monotonic

require(
    NixlPullConnectorWorker,
    "_read_blocks",
    "_pop_done_transfers",
    "_send_pending_recv_notifs",
    "_reap_expired_send_leases",
)


@dataclass
class ReaderStats(NixlKVConnectorStats):  # type: ignore[misc]
    """vLLM's statistics, and name, bytes and seconds of each read."""

    def reset(self) -> None:
        super().reset()
        self.data[READS] = []

    def is_empty(self) -> bool:
        return super().is_empty() and not self.data[READS]


@dataclass(slots=True)
class _Read:
    began_at: float
    num_bytes: int = 0


class ReaderWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = ReaderStats()
        self._zmq = zmq.Context()
        self._checks = HoldChecks(partial(connect, self._zmq), _now)
        self._reads: dict[str, _Read] = {}
        """Reads in progress, including the check of the hold."""

    def _read_blocks(self, read_spec: Any, **kwargs: Any) -> bool:
        """As vLLM's, but the notification of the completed read does not end the hold: it is sent as a heartbeat, which
        has no effect here. The one that ends the hold is deferred in vLLM's list of pending notifications."""
        request_id, held = kwargs["request_id"], kwargs["remote_request_id"]
        if any(len(group) for group in read_spec.local_block_ids):
            agent = self._remote_agents[kwargs["dst_engine_id"]][(0, read_spec.remote_rank)]
            end = f"{held}:{kwargs['expected_consumers']}".encode()
            self._pending_recv_notifs.setdefault(request_id, []).append((agent, end))
            self._reads.setdefault(request_id, _Read(_now()))
            kwargs["remote_request_id"] = f"HB:{held},"
        return bool(super()._read_blocks(read_spec, **kwargs))

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done: set[str] = set()
        failed: set[str] = set()
        for request_id in list(transfers):
            single = {request_id: transfers[request_id]}
            done_now, failed_now = self._pop_one(single, request_id)
            done |= done_now
            failed |= failed_now
            if request_id in single:
                transfers[request_id] = single[request_id]
            else:
                del transfers[request_id]
        return done, failed

    def _pop_one(self, single: dict[str, list[int]], request_id: str) -> tuple[set[str], set[str]]:
        sizes = self.xfer_stats.data["bytes_transferred"]
        num_before = len(sizes)
        done, failed = super()._pop_done_transfers(single)
        read = self._reads.get(request_id)
        if read is None:
            return done, failed  # nothing was read: all blocks were cached
        read.num_bytes += sum(sizes[num_before:])
        if not done:
            return done, failed
        if failed or request_id in self._recv_failures:
            del self._reads[request_id]
            return done, failed
        is_intact = self._check(request_id)
        if is_intact is None:
            single[request_id] = []  # for vLLM the transfer is still in progress
            return set(), failed
        del self._reads[request_id]
        if not is_intact:
            return done, failed | {request_id}  # the hold of a slow owner expires by itself
        self.xfer_stats.data[READS].append([request_id, read.num_bytes, _now() - read.began_at])
        return done, failed

    def _check(self, request_id: str) -> bool | None:
        remote = self._recving_metadata[request_id].remote
        owner = (remote.host, remote.port)
        is_intact = self._checks.check(request_id, owner, remote.engine_id, remote.request_id)
        if is_intact is False:
            log.warning(
                "KV discarded after the read, recomputing: request_id=%s owner=%s:%s hold=%s "
                "reason=hold expired or not confirmed",
                request_id,
                *owner,
                remote.request_id,
            )
        return is_intact

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        """Handle released holds here; vLLM logs and counts expired ones."""
        for name in [each for each, expires in self._reqs_to_send.items() if expires == RELEASED]:
            self.consumer_notification_counts_by_req.pop(name, None)
            self.expected_consumer_notifications_by_req.pop(name, None)
            self._reqs_to_process.discard(name)
            del self._reqs_to_send[name]
            done_sending.add(name)
        super()._reap_expired_send_leases(done_sending)

    def shutdown(self) -> None:
        self._checks.close()
        self._zmq.destroy(linger=0)
        super().shutdown()
