"""KvoltNixlConnector: vLLM's NixlConnector for kvolt's handoffs. Loaded by vLLM (`kv_connector_module_path`).

Differences from vLLM's connector:

- Decode reads the KV of the prompt only, so that its input can include the first token, which prefill has sampled.
- Blocks stay held until the reader has read them and asked whether the hold is intact (`nixl_reader`). vLLM's own
  reader uses what it read even if the blocks were released and overwritten before or during the read.
- The owner's scheduler decides when a hold ends (`nixl_owner`): at its release, at the request's deadline, or when no
  reader has renewed it for `kvolt_hold_s`. vLLM's readers renew between steps only, so that a long step loses the hold.
- On a CPU nothing spins (`cpu_patches`).

Runs in vLLM's processes: imports little of kvolt besides this package.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

from kvolt.engines.vllm.plugins.cpu_patches import patch_waits
from kvolt.engines.vllm.plugins.kv_holds import RELEASE
from kvolt.engines.vllm.plugins.nixl_owner import OwnerScheduler
from kvolt.engines.vllm.plugins.nixl_reader import ReaderStats, ReaderWorker

patch_waits()


class KvoltNixlConnector(NixlConnector):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = OwnerScheduler(vllm_config, self.engine_id, kv_cache_config)
        elif role == KVConnectorRole.WORKER:
            self.connector_worker = ReaderWorker(vllm_config, self.engine_id, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count, is_later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and params.get("remote_num_tokens"):
            count = min(count, max(params["remote_num_tokens"] - num_computed_tokens, 0))
        return (count, is_later) if count else (0, False)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._release(request):
            return False, None
        return super().request_finished(request, block_ids)  # type: ignore[no-any-return]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._release(request):
            return False, None
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[no-any-return]

    def _release(self, request: Any) -> bool:
        """Whether the request only names a hold to be released."""
        params = request.kv_transfer_params
        if not params or RELEASE not in params:
            return False
        self.connector_scheduler.release_hold(params[RELEASE])
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return ReaderStats() if data is None else ReaderStats(data=data)
