"""How a real SGLang begins and ends: with its processes, and with nothing left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from kept import SMALL, spec_of
from msgspec.structs import replace

from kvolt.core.errors import ConfigError, EngineDied, EngineFailed
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.engine import SglangEngine
from kvolt.engines.sglang.host_supervisor import HostProcess


def _request() -> Request:
    return Request(
        request_id=RequestId("r"),
        model="tiny",
        token_ids=tuple(range(5, 45)),
        stop=StopConditions(max_tokens=1000, ignore_eos=True),
        sampling=Sampling(temperature=0.0),
    )


def _processes() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True)}


def _shared() -> set[Path]:
    return set(Path("/dev/shm").glob("sglang_loads_*"))


async def _gone(pids: set[int]) -> None:
    async with asyncio.timeout(10):
        while any(psutil.pid_exists(pid) for pid in pids):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("victim", "words"), [("scheduler", "has ended"), ("host", "killed by SIGKILL")])
async def test_a_killed_process_is_the_engine_s_death(
    tiny: Path, arguments: SglangArguments, victim: str, words: str
) -> None:
    before, shared = _processes(), _shared()
    engine = SglangEngine(spec_of(tiny), arguments)
    await engine.start()
    folder = Path(engine._launched.facts.metrics_folder or "")
    started = _processes() - before
    engine.submit(_request())
    steps = engine.steps()
    await anext(steps)
    host = engine._host.host
    assert isinstance(host, HostProcess)
    pids = {"host": host.pid}
    pids["scheduler"] = next(pid for pid in started if "scheduler" in psutil.Process(pid).name())
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(EngineFailed, match=words):
        async for _ in steps:
            pass
    with pytest.raises(EngineDied):
        engine.submit(replace(_request(), request_id=RequestId("late")))
    await engine.close()
    await _gone(started)
    assert not folder.parent.exists()
    if victim != "host":  # who is killed takes nothing away: SGLang does so at its next start
        assert _shared() == shared


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("mem_fraction_statik", 0.1, "mem_fraction_static"),
        ("disable_radix_cache", True, "kv_events=false"),
        ("kv_events_config", {"publisher": "null"}, "kv_events=false"),
        ("model_path", "/elsewhere", "model"),
    ],
)
async def test_wrong_arguments_are_reported_before_loading(
    tiny: Path, name: str, value: object, hint: str
) -> None:
    before = _processes()
    engine = SglangEngine(spec_of(tiny), SglangArguments(engine_args={**SMALL, name: value}))
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    assert caught.value.fields["key"] == f"args.engine_args.{name}"
    assert hint in str(caught.value.fields["remedy"])
    await engine.close()
    assert not _processes() - before


async def test_answers_are_those_of_sglang_by_itself(tiny: Path, arguments: SglangArguments) -> None:
    prompts = [list(range(start, start + 30)) for start in (5, 40, 300)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "own_engine.py"),
        str(tiny),
        json.dumps(SMALL),
        json.dumps(prompts),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    own = json.loads(output.splitlines()[-1])
    engine = SglangEngine(spec_of(tiny), arguments)
    try:
        await engine.start()
        told: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            asked = replace(_request(), request_id=RequestId(str(number)), token_ids=tuple(prompt))
            engine.submit(replace(asked, stop=StopConditions(max_tokens=16, ignore_eos=True)))
        num_left = len(prompts)
        async for step in engine.steps():
            for name, delta in step.deltas:
                told.setdefault(name, []).extend(delta.token_ids)
                num_left -= delta.finish is not None
            for name, token in zip(step.plain_ids, step.plain_tokens, strict=True):
                told.setdefault(name, []).append(token)
            if not num_left:
                break
    finally:
        await engine.close()
    assert [told[str(number)] for number in range(len(prompts))] == own
