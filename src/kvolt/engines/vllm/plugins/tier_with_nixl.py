"""KvoltTieredNixlConnector: handoffs and tiers in one vLLM. Loaded by vLLM (`kv_connector_module_path`).

vLLM's MultiConnector over both of kvolt's connectors: KV of a handoff comes from the prefill worker, other prefixes
from the tiers. Blocks are released when both connectors are done with them.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats

from kvolt.engines.vllm.plugins.nixl_connector import KvoltNixlConnector
from kvolt.engines.vllm.plugins.tier_connector import KvoltTierConnector

_PARTS: dict[str, Any] = {each.__name__: each for each in (KvoltNixlConnector, KvoltTierConnector)}


class KvoltTieredNixlConnector(MultiConnector):  # type: ignore[misc]
    """See the module."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """vLLM's implementation only finds its own connectors."""
        parts: dict[str, Any] = {}
        for name, stats in (data or {}).items():
            is_built = isinstance(stats, KVConnectorStats)
            parts[name] = stats if is_built else _PARTS[name].build_kv_connector_stats(stats)
        return MultiKVConnectorStats(data=parts)
