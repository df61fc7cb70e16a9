"""Rendering in a process that can be lost: bounded in memory and time, replaced when it is gone."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, Frontend, Lab, RunningWorker, sim
from tests.unit.frontend.serving import served

from kvolt.core.errors import InvalidRequest, Unavailable
from kvolt.frontend.openai_api.templating import TemplateInput
from kvolt.frontend.templates import process as template_process
from kvolt.frontend.templates.process import Renderer, RenderJob, RenderProcess
from kvolt.frontend.templates.template import ChatTemplate
from kvolt.runtime.clock import ThreadBlocking

HELLO = [{"role": "user", "content": "hello é"}]


def job(source: str, now: float | None = None, **kwargs: Any) -> RenderJob:
    given = TemplateInput(HELLO, None, True, False, kwargs)
    return RenderJob(source, "<s>", "</s>", now, given)


@pytest.fixture
def process() -> Iterator[RenderProcess]:
    made = RenderProcess(memory_bytes=512 * 1024 * 1024, cpu_s=1)
    yield made
    made.close()
    assert made.pid is None


def test_it_renders_what_the_template_renders_here(process: RenderProcess) -> None:
    source = "{{ bos_token }}{{ messages[0].content.center(20) }}{{ strftime_now('%Y') }}{{ depth }}"
    here = ChatTemplate(source, "<s>", "</s>", wall=lambda: 0.0).render(HELLO, depth=2**65)
    assert process.render(job(source, now=0.0, depth=2**65)) == here
    first = process.pid
    assert process.render(job("{{ add_generation_prompt }}")) == "True"
    assert process.pid == first


def test_a_refusal_is_the_templates_own_and_costs_no_process(process: RenderProcess) -> None:
    with pytest.raises(InvalidRequest, match="no system role") as caught:
        process.render(job("{{ raise_exception('no system role') }}"))
    assert caught.value.fields["param"] == "messages"
    first = process.pid
    with pytest.raises(InvalidRequest, match="repeats"):
        process.render(job("{{ 'a' * 1000000000 }}"))
    assert process.pid == first


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.center(1500000000) }}",
        "{{ 'a' | center(1500000000) }}",
        "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 40 + "{{ x }}",
        "{{ '{:>1500000000}'.format(1) }}",
    ],
)
def test_memory_is_bounded_and_the_next_request_is_served(process: RenderProcess, source: str) -> None:
    with pytest.raises(InvalidRequest, match="too much memory"):
        process.render(job(source))
    assert process.render(job("fine")) == "fine"


def test_a_job_that_does_not_fit_into_the_process_is_refused_and_the_process_replaced(
    process: RenderProcess,
) -> None:
    assert process.render(job("fine")) == "fine"
    first = process.pid
    large = bytes(600 * 1024 * 1024)  # more than the process may have, so that it cannot even be received
    with pytest.raises(InvalidRequest, match="too much memory"):
        process._exchange(large)
    assert process.pid is None
    assert process.render(job("fine")) == "fine"
    assert process.pid != first


def test_a_reply_that_is_too_large_is_refused_and_the_process_replaced(
    process: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.render(job("fine")) == "fine"
    first = process.pid
    monkeypatch.setattr(template_process, "_MAX_REPLY_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="more than 1000") as caught:
        process.render(job("{{ 'a' * 2000 }}"))
    assert caught.value.fields["param"] == "messages"
    assert process.pid is None
    assert process.render(job("fine")) == "fine"
    assert process.pid != first


def test_a_frontend_without_memory_for_a_reply_reports_it_and_replaces_the_process(
    process: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(template_process, "receive_message", fail)
        with pytest.raises(Unavailable, match="out of memory"):
            process.render(job("fine"))
    assert process.pid is None
    assert process.render(job("next")) == "next", "and not the reply to the job before"


def test_time_is_bounded_and_the_next_request_gets_a_fresh_process(process: RenderProcess) -> None:
    assert process.render(job("fine")) == "fine"
    first = process.pid
    nested = "".join(f"{{% set x{n + 1} = [x{n}, x{n}] %}}" for n in range(60))
    with pytest.raises(InvalidRequest, match="1 s of CPU time"):
        process.render(
            job("{% set x0 = 1 %}" + nested + "{{ x60 == x60 | list }}{{ x59 | tojson | length }}")
        )
    assert process.pid is None
    assert process.render(job("fine")) == "fine"
    assert process.pid != first


def test_a_process_killed_from_outside_costs_no_request(process: RenderProcess) -> None:
    process.render(job("fine"))
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert process.render(job("fine again")) == "fine again"
    assert process.pid != pid


def test_a_process_that_keeps_dying_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "false")
    dead = RenderProcess()
    with pytest.raises(Unavailable, match="died twice"):
        dead.render(job("fine"))
    assert dead.pid is None


def test_text_that_cannot_be_sent_is_refused_and_costs_no_process(process: RenderProcess) -> None:
    assert process.render(job("fine")) == "fine"
    first = process.pid
    for source in (r"{{ '\ud800' }}", r"{{ raise_exception('\ud800') }}"):
        with pytest.raises(InvalidRequest, match="UnicodeEncodeError") as caught:
            process.render(job(source))
        assert caught.value.fields["param"] == "messages"
    assert process.pid == first


@pytest.mark.parametrize("name", ["continue_final_message", "given"])
def test_a_variable_may_have_any_name_that_is_not_reserved(process: RenderProcess, name: str) -> None:
    assert process.render(job(f"{{{{ {name} }}}}", **{name: "x"})) == "x"


def test_a_reserved_variable_is_refused(process: RenderProcess) -> None:
    with pytest.raises(InvalidRequest, match="tools is reserved"):
        process.render(job("fine", tools=[]))


def test_closing_ends_a_rendering_instead_of_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.frontend.templates.process.WALL_S", 5.0)
    process = RenderProcess()
    process.render(job("fine"))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(process.render, job("fine"))
        while not process._lock.locked():
            time.sleep(0.001)
        process.close()
        assert isinstance(rendering.exception(), Unavailable), "not its own timeout"
    assert process.pid is None
    with pytest.raises(Unavailable, match="stopping"):
        process.render(job("fine"))


LOW = """
import resource, sys
from kvolt.frontend.openai_api.templating import TemplateInput
from kvolt.frontend.templates import process as template_process

resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
process = template_process.RenderProcess(memory_bytes=4 << 30)
given = TemplateInput([{"role": "user", "content": "x"}], None, True, False, {})
job = template_process.RenderJob("fine", "", "", None, given)
print(process.render(job))
process.close()
"""


def test_lower_hard_limits_of_the_machine_are_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOW], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_a_limit_that_cannot_be_set_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    template_process._set_limit(resource.RLIMIT_AS, 1 << 30)
    assert "render process limit not set" in caplog.text


def test_the_loop_runs_while_a_template_renders() -> None:
    async def scenario() -> None:
        blocking = ThreadBlocking(1)
        renderer = Renderer(blocking)
        slow = "{% for i in range(99999) %}{{ 'x'.center(9) }}{% endfor %}"
        rendering = asyncio.ensure_future(renderer.render(job(slow)))
        ticks = 0
        try:
            while not rendering.done():
                ticks += 1
                await asyncio.sleep(0)
            assert len(rendering.result()) == 9 * 99_999
            assert ticks > 10
        finally:
            renderer.close()
            blocking.close()

    asyncio.run(scenario())


def test_a_hostile_request_is_refused_and_others_are_answered(tmp_path: Path) -> None:
    path = tmp_path / "wide.jinja"
    path.write_text("{{ messages[0].content.center(1500000000 if wide is defined else 9) }}")

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        refused = await edge.chat(messages=HELLO, chat_template_kwargs={"wide": True})
        assert refused.status == 400
        assert "memory" in refused.json["error"]["message"]
        assert (await edge.chat(messages=HELLO, max_tokens=1)).status == 200
        assert (await edge.ask("/tokenize", {"messages": HELLO})).status == 200

    served(body, lambda: sim(replace(ARGUMENTS, chat_template=str(path))))
