"""One worker and one frontend that is ready, for tests that speak HTTP to it on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, Frontend, Lab, RunningWorker, ScriptedEngine, sim

from kvolt.core.delta import Delta, FinishReason, StepOutput
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.sim.engine import SimEngine
from kvolt.testing import run_virtual

Body = Callable[[Lab, Frontend, RunningWorker], Coroutine[Any, Any, None]]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def served(body: Body, engine: Callable[[], Any] = sim, **frontend: Any) -> None:
    """Run `body`; further arguments are those of `Lab.frontend`."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine())
            edge = await lab.frontend(**frontend)
            await edge.ready()
            await body(lab, edge, running)
            assert edge.admission.num_running == 0
            assert lab.errors == []

    run_virtual(scenario)


def saying(text: str, **arguments: Any) -> Callable[[], SimEngine]:
    return lambda: sim(replace(ARGUMENTS, answer_text=text, **arguments))


class Answering(ScriptedEngine):
    """Gives every request the same deltas, a step each, then what it is told."""

    def __init__(self, *deltas: Delta) -> None:
        super().__init__()
        self.deltas = deltas

    def submit(self, request: Request) -> None:
        super().submit(request)
        for delta in self.deltas:
            self.put(StepOutput(((RequestId(request.request_id), delta),)))


WHOLE = (Delta((300,), cached_tokens=8), Delta((301,)), Delta((302,), finish=FinishReason.LENGTH))
