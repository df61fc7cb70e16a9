"""KnownKeys: bounded cache of blocks that a shared tier was recently seen to have. Evicts the oldest. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence

from kvolt.core.ids import BlockKey

_MAX_KEYS = 1 << 18


class KnownKeys:
    """See the module."""

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def keys(self) -> KeysView[BlockKey]:
        return self._keys.keys()

    def num_known(self, keys: Sequence[BlockKey]) -> int:
        """Length of the known prefix."""
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def forget(self, keys: Iterable[BlockKey] | None = None) -> None:
        """Remove these keys, or all."""
        if keys is None:
            self._keys.clear()
            return
        for key in keys:
            self._keys.pop(key, None)
