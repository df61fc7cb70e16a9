"""Sleep mode of vLLM: needs a GPU and `enable_sleep_mode`; without them vLLM only warns and frees nothing."""

from __future__ import annotations

from typing import Any

from kvolt.core.errors import InvalidRequest, Unavailable, Unsupported

_LEVELS = (1, 2)
_WITHOUT_WEIGHTS = 2
"""Level at which weights are discarded and must be reloaded."""


class SleepState:
    """See the module."""

    def __init__(self) -> None:
        self._level: int | None = None
        """Level of sleep, at least as deep as the real one; None while awake."""
        self._is_confirmed = False
        """Whether vLLM has confirmed the level."""

    @property
    def is_asleep(self) -> bool:
        return self._level is not None

    async def sleep(self, core: Any, level: int, num_running: int) -> None:
        if level not in _LEVELS:
            raise InvalidRequest(f"vLLM sleeps at level 1 or 2, not {level}", param="level")
        if self._level is not None and level > self._level:  # vLLM would ignore it
            raise InvalidRequest(
                f"vLLM sleeps at level {self._level}: for level {level} it must be woken first", param="level"
            )
        if self._level is not None and self._is_confirmed:
            return  # asleep at this level or deeper
        if num_running:
            raise Unavailable("vLLM cannot sleep while requests run", reason="busy")
        # From here on requests are refused, since vLLM would abort them. If this call is interrupted, vLLM counts as
        # asleep until it is woken, which is harmless if it is awake.
        self._level, self._is_confirmed = self._level or level, False
        try:
            await core.sleep_async(level)
        except Exception:  # other workers may be asleep, and nothing is scheduled
            if not await core.is_sleeping_async():
                self._level = None
            raise
        self._is_confirmed = True

    async def wake(self, core: Any) -> None:
        if self._level == _WITHOUT_WEIGHTS:
            await core.wake_up_async(["weights"])
            await core.collective_rpc_async("reload_weights")
        await core.wake_up_async()
        self._level, self._is_confirmed = None, False


def check_sleep_supported(features: tuple[str, ...]) -> None:
    if "Sleep" not in features:
        raise Unsupported("vLLM was started without enable_sleep_mode (GPUs only)", feature="sleep")
