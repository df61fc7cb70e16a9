"""A request that is over is freed at once: nothing of it waits in a circle for the garbage collector.

Run among the tests without coverage: slipcover looks at the locals of all frames whenever it takes its probes out, and
what it finds there stays in a circle of slipcover's own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections import Counter
from typing import Any

import pytest
from tests.unit.engines.lab import MODEL, Frontend, Lab, RunningWorker
from tests.unit.frontend.serving import TOOL, served

from kvolt.frontend.answers.answer import Answer, ChoiceState
from kvolt.journey.journey import Journey
from kvolt.runtime.endpoint.call import Call
from kvolt.runtime.plane.streams import CallerStream

_OF_A_REQUEST = (Answer, ChoiceState, Journey, Call, CallerStream)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def _in_circles() -> Counter[str]:
    """What only the collector could free, of the classes that come with every request."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage if isinstance(each, _OF_A_REQUEST))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("after_s", [None, 0.001, 0.05], ids=["to its end", "left at once", "left midway"])
def test_nothing_of_a_request_is_left_in_a_circle(stream: bool, after_s: float | None) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "model": MODEL}
        kinds = [
            {"max_tokens": 40},
            {"max_tokens": 40, "n": 2, "logprobs": True, "stop": ["never said"]},
            {"max_tokens": 40, "tools": [TOOL]},
        ]
        for kind in kinds:
            await _ask(edge, {**fields, **kind, "stream": stream}, None)  # what stays is made now
        gc.collect()
        gc.freeze()  # what earlier tests left, and something else may still let go of, is not looked at
        gc.disable()
        try:
            for kind in kinds:
                await _ask(edge, {**fields, **kind, "stream": stream}, after_s)
            await asyncio.sleep(1.0)
            assert _in_circles() == {}
        finally:
            gc.enable()

    served(body)


async def _ask(edge: Frontend, fields: dict[str, Any], after_s: float | None) -> None:
    if after_s is None:
        assert (await edge.ask("/v1/chat/completions", fields)).status == 200
        return
    async with edge.send("POST", "/v1/chat/completions", json.dumps(fields).encode()):
        await asyncio.sleep(after_s)
