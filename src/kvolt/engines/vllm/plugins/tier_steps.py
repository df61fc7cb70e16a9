"""Time of a step on the device, in vLLM's workers."""

from __future__ import annotations

from typing import Any

from kvolt.runtime.clock import SystemClock

_clock = SystemClock()


class Mark:
    """Point in the device's work queue. On a CPU all work before it is done already."""

    def __init__(self, tensor: Any) -> None:
        """`tensor`: memory on the device."""
        self._at = _clock.monotonic()
        self._event: Any = None
        if tensor.device.type != "cpu":
            import torch

            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    @property
    def needs_wait(self) -> bool:
        """Whether `wait` must be called before the work is used."""
        return self._event is not None

    def wait(self) -> None:
        """Block until the device has reached it. Not for vLLM's main thread, which prepares the next step."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_from(self, start: Mark) -> float:
        """Seconds between two points that the device has passed."""
        if self._event is not None:
            return float(start._event.elapsed_time(self._event)) / 1e3
        return self._at - start._at
