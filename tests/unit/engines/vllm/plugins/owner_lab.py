"""An owner of held blocks at a port of this host: the thread that serves its side channel, without a vLLM."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import zmq

from kvolt.engines.vllm.plugins.kv_holds import HoldAnswers, Holds, serve

HOLD_S = 60.0


class CountedHolds(Holds):
    num_renewals = 0

    def renew(self, names: object) -> None:
        super().renew(names)  # type: ignore[arg-type]
        self.num_renewals += 1


class Owner:
    """Bound at once; answers from `serve` on. Handshakes are echoed."""

    def __init__(self) -> None:
        self.holds = CountedHolds(time.monotonic)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, 20)
        self.port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_renewals(self) -> int:
        return self.holds.num_renewals

    def serve(self, engine_id: str, *names: str) -> None:
        for name in names:
            self.holds.begin(name, HOLD_S)
        answers = HoldAnswers(engine_id, self.holds)

        def handshake(message: bytes) -> tuple[bytes, ...]:
            if b"bad" in message:
                raise ValueError("no handshake")
            return b"hello", message

        self._thread = threading.Thread(
            target=serve, args=(self._socket, answers, handshake, self._over.is_set), daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Owner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close(0)
        self._context.term()
