"""When a step's work on the device is done, and how long it took. For vLLM's workers."""

from __future__ import annotations

from typing import Any

from kvolt.runtime.clock import SystemClock

_clock = SystemClock()


class Mark:
    """A place in what the device does: all that was given to it until now. On a CPU that is done already."""

    def __init__(self, tensor: Any) -> None:
        """`tensor`: some memory of the device."""
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
    def is_waited_for(self) -> bool:
        """Whether who needs it must `wait`."""
        return self._event is not None

    def wait(self) -> None:
        """Until the device is there. For any thread but vLLM's, which has the next step to prepare."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_from(self, start: Mark) -> float:
        """Between two that the device has passed."""
        if self._event is not None:
            return float(start._event.elapsed_time(self._event)) / 1e3
        return self._at - start._at
