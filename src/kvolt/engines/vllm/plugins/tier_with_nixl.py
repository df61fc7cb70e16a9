"""KvoltTieredNixlConnector: a vLLM that moves KV to others and has tiers. Loaded by vLLM (`kv_connector_module_path`).

vLLM's MultiConnector over our two. KV that is handed over comes from who computed it; what else a prompt begins with,
here or at a prefill worker, is brought from tiers. Blocks go free when both are done with them.
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
        """vLLM's own looks for its parts among the connectors that come with vLLM."""
        parts: dict[str, Any] = {}
        for name, said in (data or {}).items():
            is_made = isinstance(said, KVConnectorStats)
            parts[name] = said if is_made else _PARTS[name].build_kv_connector_stats(said)
        return MultiKVConnectorStats(data=parts)
