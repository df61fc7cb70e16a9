"""Blocks of KV: their life in a pool, and who may use them. Knows no engine, no memory and no clock."""

from kvolt.kv.changes import Change
from kvolt.kv.lifecycle import BlockId, BlockState, IllegalMove
from kvolt.kv.names import BlockName, Names
from kvolt.kv.pool import BlockPool
from kvolt.kv.sealed import SealedLog

__all__ = ["BlockId", "BlockName", "BlockPool", "BlockState", "Change", "IllegalMove", "Names", "SealedLog"]
