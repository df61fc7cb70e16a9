"""Progress of long commands, and signals that end them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rich.text import Text
from tests.waits import MUST_HAPPEN_S

from kvolt.cli import progress


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_written_to_stderr(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")

    async def scenario() -> None:
        shown, num_pictures = asyncio.Event(), 0

        def line() -> str:
            shown.set()
            return "3 requests"

        def picture() -> Text:
            nonlocal num_pictures
            num_pictures += 1
            if num_pictures > 1:  # the first one is drawn before the wait
                shown.set()
            return Text("3 requests, Ctrl-C stops")

        showing = asyncio.ensure_future(progress.show_live(line, picture, 0.01))
        await asyncio.wait_for(shown.wait(), MUST_HAPPEN_S)
        showing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await showing

    asyncio.run(scenario())
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "3 requests" in printed.err
    assert ("Ctrl-C stops" in printed.err) is terminal


def test_a_signal_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[Any] = []

    class Stop(progress.StopSignal):
        def __init__(self) -> None:
            super().__init__()
            stops.append(self)

    monkeypatch.setattr(progress, "StopSignal", Stop)

    async def scenario() -> bool:
        ended = asyncio.Event()

        async def work() -> None:
            stops[0].request_stop("test")
            await ended.wait()

        return await progress.run_until_signal(work(), ended.set, asyncio.sleep(60))

    assert asyncio.run(scenario())


def test_work_that_ends_ends_its_progress() -> None:
    assert not asyncio.run(progress.run_until_signal(asyncio.sleep(0), lambda: None, asyncio.sleep(60)))
