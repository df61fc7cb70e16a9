"""KV blocks: lifecycle, pools and tiers. Knows no engine, memory or clock."""

from kvolt.kv.changes import Change
from kvolt.kv.lifecycle import BlockId, BlockState, IllegalMove
from kvolt.kv.names import BlockName, BlockNames
from kvolt.kv.pool import BlockPool
from kvolt.kv.sealed import SealedLog

__all__ = [
    "BlockId",
    "BlockName",
    "BlockNames",
    "BlockPool",
    "BlockState",
    "Change",
    "IllegalMove",
    "SealedLog",
]
