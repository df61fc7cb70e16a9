"""Rest: vLLM while it sleeps, and how it is woken. It can on GPUs only, and where it was started with
`enable_sleep_mode`; elsewhere its workers would pass it over with a warning, and nothing would be freed."""

from __future__ import annotations

from typing import Any

from kvolt.core.errors import InvalidRequest, Unavailable, Unsupported

_LEVELS = (1, 2)
_WITHOUT_WEIGHTS = 2
"""The level from which they have to be read again."""


class Rest:
    """See the module."""

    def __init__(self) -> None:
        self._level: int | None = None
        """None while it is awake. The deepest at which it may sleep."""
        self._is_heard = False
        """Whether vLLM has said that it sleeps."""

    @property
    def is_asleep(self) -> bool:
        return self._level is not None

    async def begin(self, core: Any, level: int, num_running: int) -> None:
        if level not in _LEVELS:
            raise InvalidRequest(f"vLLM sleeps at level 1 or 2, not {level}", param="level")
        if self._level is not None and level > self._level:  # vLLM would pass it over
            raise InvalidRequest(
                f"vLLM sleeps at level {self._level}: for level {level} it must be woken first", param="level"
            )
        if self._level is not None and self._is_heard:
            return  # it is asleep, and perhaps deeper
        if num_running:
            raise Unavailable("vLLM cannot sleep while requests run", reason="busy")
        # From here on nothing is taken: vLLM would end it. Where nobody hears how it went, vLLM counts as asleep until
        # it is woken, which does no harm to one that is not.
        self._level, self._is_heard = self._level or level, False
        try:
            await core.sleep_async(level)
        except Exception:  # whatever a worker raised: the others may sleep, and nothing is scheduled
            if not await core.is_sleeping_async():
                self._level = None
            raise
        self._is_heard = True

    async def end(self, core: Any) -> None:
        if self._level == _WITHOUT_WEIGHTS:
            await core.wake_up_async(["weights"])
            await core.collective_rpc_async("reload_weights")
        await core.wake_up_async()
        self._level, self._is_heard = None, False


def check_sleeps(features: tuple[str, ...]) -> None:
    if "Sleep" not in features:
        raise Unsupported(
            "vLLM was started without enable_sleep_mode, which it has on GPUs only", feature="sleep"
        )
