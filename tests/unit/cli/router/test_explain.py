"""`kvolt router explain`: the question from flags, and the answer for people."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console
from tests.unit.engines.remote.fake_server import FakeServer

from kvolt.cli.main import main
from kvolt.cli.router import explain as router_explain
from kvolt.cli.router.explain import body_of, reasons, show
from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import ConfigError
from kvolt.core.ids import InstanceId
from kvolt.frontend.admin.explain import FRONTEND_EXPLAIN_ENDPOINT, ExplainRoute
from kvolt.router.choice import CandidateCost
from kvolt.router.explanation import Candidate, ExcludedWorker, Explanation, PrefillExplanation
from kvolt.runtime.admin import AdminServer
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.health import Health
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import SocketNetwork
from kvolt.runtime.plane.port import Destination


def asked(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    router_explain.configure(parser)
    return dict(json.loads(body_of(parser.parse_args(argv))))


def test_prompts_are_text_tokens_or_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked("hello") == {"prompt": "hello"}
    assert asked("hello", "--model", "m") == {"prompt": "hello", "model": "m"}
    assert asked("--tokens", "1,2, 3") == {"prompt": [1, 2, 3]}
    (tmp_path / "ids").write_text("[4, 5]")
    assert asked("--tokens", f"@{tmp_path / 'ids'}") == {"prompt": [4, 5]}
    (tmp_path / "chat.json").write_text('{"messages": []}')
    assert asked("--chat", str(tmp_path / "chat.json"), "--model", "m") == {"messages": [], "model": "m"}
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert asked("-") == {"prompt": "from a pipe"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "no prompt is specified"),
        (("a", "--tokens", "1"), "several prompts are specified"),
        (("--tokens", "1,x"), "invalid token ids"),
        (("--chat", "/nowhere/at/all"), "cannot be read"),
    ],
)
def test_what_is_no_question_is_refused(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asked(*argv)


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        asked("--chat", str(tmp_path / "list.json"))


# --- the answer


def candidate(name: str, cost: float, **terms: Any) -> Candidate:
    given: dict[str, Any] = dict.fromkeys(
        (field.name for field in msgspec.structs.fields(CandidateCost) if field.name != "instance"), 0.0
    )
    given |= {
        "cost_terms": {},
        "dp_rank": 0,
        "is_saturated": False,
        "is_chosen": False,
        "pace": 1.0,
        "has_step_model": True,
        "cost": cost,
    }
    known = given | terms
    return Candidate(
        process=name,
        index_source="events, exact",
        terms=CandidateCost(instance=InstanceId(f"id-{name}"), **known),
    )


def told(*candidates: Candidate, **more: Any) -> Explanation:
    given: dict[str, Any] = {
        "endpoint": "e",
        "policy": "latency",
        "decided_by": "frontend",
        "prompt_tokens": 100,
        "block_size": 16,
        "num_blocks": 6,
        "output_tokens": 50.0,
        "candidates": candidates,
        "excluded_workers": (),
        "num_waiting": 0,
    }
    return Explanation(**given | more)


def shown(explanation: Explanation) -> str:
    out = io.StringIO()
    show(explanation, Console(file=out, width=140))
    return out.getvalue()


def test_the_table_has_every_term_and_marks_the_choice() -> None:
    first = candidate(
        "w0",
        0.012,
        is_chosen=True,
        overlap_blocks=5.0,
        held_blocks=3.0,
        cost_terms={"queue": 0.001, "prefill": 0.01, "in_flight": 0.001, "copy": 0.0},
        pace=1.5,
        blocks=9.0,
        total_blocks=100.0,
    )
    second = msgspec.structs.replace(
        candidate("w1", 0.5, dp_rank=2, is_saturated=True),
        index_source="own decisions: its engine publishes no events",
    )
    left = ExcludedWorker(instance=InstanceId("id-w2"), process="w2", reason="it is not reachable")
    text = shown(told(first, second, excluded_workers=(left,)))
    assert "100 prompt tokens, 6 full blocks of 16; about 50 output tokens expected" in text
    row = next(line for line in text.splitlines() if "w0" in line)
    assert row.split() == [
        "→",
        "w0",
        "5",
        "(+2)",
        "0",
        "9/100",
        "1.50",
        "0.001",
        "0.01",
        "0.001",
        "0.012",
    ]
    head = next(line for line in text.splitlines() if "worker" in line)
    assert " ".join(head.split()) == "worker overlap decoding blocks pace fails queue prefill in flight cost"
    assert "w1 rank 2 (full)" in text
    assert "w1: cached blocks are known from own decisions: its engine publishes no events." in text
    assert "w2 (id-w2): it is not reachable" in text


@pytest.mark.parametrize(
    ("explanation", "words"),
    [
        (told(problem="no worker is registered"), "No worker can take the request: no worker is registered"),
        (told(candidate("w0", 1.0, is_chosen=True)), "the only candidate"),
        (
            told(candidate("w0", 1.0, is_chosen=True), candidate("w1", 2.0)),
            "w0 has the lowest cost: 1; the next is 2",
        ),
        (told(candidate("w0", 1.0, is_chosen=True), candidate("w1", 1.0)), "2 workers have the same cost"),
        (told(candidate("w0", 1.0), candidate("w1", 2.0, is_chosen=True)), "router.temperature is above 0"),
        (
            told(candidate("w0", 1.0, is_saturated=True), candidate("w1", 2.0, is_chosen=True)),
            "of the workers that are not saturated",
        ),
        (
            told(candidate("w0", 1.0, is_saturated=True, is_chosen=True), num_waiting=3),
            "would wait in the router queue behind 3 others",
        ),
        (
            told(candidate("w0", 1.0, is_chosen=True), candidate("w1", 2.0, overlap_blocks=4.0)),
            "Another worker holds 4 blocks of the prompt, 4 more",
        ),
        (told(candidate("w0", 1.0, is_chosen=True, affinity=0.5)), "Session affinity: w0"),
    ],
)
def test_the_reason_is_told_in_words(explanation: Explanation, words: str) -> None:
    assert words in "\n".join(reasons(explanation))


def test_prefill_workers_and_their_mode_are_shown() -> None:
    prefill = PrefillExplanation(
        mode="remote",
        mode_costs={"local": 0.5, "remote": 0.125, "prefill_worker": 1.0},
        workers=told(candidate("p0", 0.1, is_chosen=True)),
    )
    text = shown(told(candidate("d0", 0.2, is_chosen=True), prefill=prefill))
    assert "Prefill mode remote: a prefill worker computes the prompt" in text
    assert "seconds: remote 0.125, local 0.5, prefill_worker 1." in " ".join(text.split())
    assert text.index("Prefill workers:") < text.index("p0 is the only candidate")
    assert (
        text.index("p0 is") < text.index("Decode workers, after the transfer:") < text.index("d0 is the only")
    )
    local = msgspec.structs.replace(prefill, mode="local", mode_costs={})
    text = shown(told(candidate("d0", 0.2, is_chosen=True), prefill=local))
    assert (
        "Prefill mode local: the decode worker computes the prompt. Predicted costs did not decide." in text
    )
    assert "Decode workers:" in text


def test_estimated_step_times_are_named() -> None:
    rough = msgspec.structs.replace(candidate("w0", 1.0, is_chosen=True), has_estimated_times=True)
    explanation = told(rough, candidate("w1", 2.0))
    assert "Estimated from a few measured steps: the times of w0." in "\n".join(reasons(explanation))
    assert "Estimated" not in "\n".join(reasons(msgspec.structs.replace(explanation, policy="classic")))


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "explain", "--help"]) == 0
    text = capsys.readouterr().out
    assert "kvolt router explain --chat request.json" in text
    assert "sum of the terms" in text
    assert "--router-temperature" not in text, "settings of a router process are not for who asks"


# --- both


class Frontend:
    """A cluster with one frontend, which answers as told."""

    def __init__(self, answers: list[Explanation]) -> None:
        self.answers = iter(answers)
        self.asked: list[tuple[Destination, ExplainRoute]] = []

    async def open(self, to: Destination, question: ExplainRoute, *rest: object) -> Frontend:
        self.asked.append((to, question))
        return self

    async def __aenter__(self) -> Frontend:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    def __aiter__(self) -> Frontend:
        return self

    async def __anext__(self) -> Explanation:
        for answer in self.answers:
            return answer
        raise StopAsyncIteration


def answered(monkeypatch: pytest.MonkeyPatch, *answers: Explanation) -> Frontend:
    frontend = Frontend(list(answers))

    async def found(*given: object) -> list[Instance]:
        at = EndpointAddress("default", "frontend", "http")
        return [Instance(id=InstanceId("f"), endpoint=at, address="10.0.0.1:7", process="frontend")]

    @asynccontextmanager
    async def visited(settings: object) -> AsyncIterator[Frontend]:
        yield frontend

    monkeypatch.setattr(router_explain, "visit", visited)
    monkeypatch.setattr(router_explain, "find_frontends", found)
    return frontend


class _Controls:
    def __init__(self, answer: Explanation) -> None:
        self.answer = answer
        self.commands: list[tuple[str, bytes]] = []

    async def status(self) -> dict[str, str]:
        return {}

    async def command(self, name: str, body: bytes) -> Explanation:
        self.commands.append((name, body))
        return self.answer


async def test_the_url_of_an_admin_port_needs_no_discovery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    controls = _Controls(told(candidate("w0", 1.0, is_chosen=True)))
    admin = AdminServer(
        SocketNetwork(), SystemClock(), Health(), Metrics(CollectorRegistry()), cast(Any, controls)
    )
    address = await admin.start("127.0.0.1:0")
    argv = ["router", "explain", "hello", "--url", f"http://{address}", "--discovery-path", str(tmp_path)]
    assert await asyncio.to_thread(main, argv) == 0
    await admin.close()
    assert controls.commands == [("explain_route", b'{"prompt":"hello"}')]
    assert "w0 is the only candidate" in capsys.readouterr().out


async def test_a_public_url_that_is_not_registered_names_the_admin_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeServer("vllm") as server:
        argv = ["router", "explain", "hello", "--url", server.url, "--discovery-path", str(tmp_path / "d")]
        assert await asyncio.to_thread(main, argv) == 1
    assert "use the URL of the frontend's admin port" in capsys.readouterr().err


def test_a_frontend_is_asked_and_its_answer_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = told(candidate("w0", 1.0, is_chosen=True))
    frontend = answered(monkeypatch, one, one, told(problem="all are gone"))
    assert main(["router", "explain", "hello"]) == 0
    assert "w0 is the only candidate" in capsys.readouterr().out
    assert frontend.asked == [
        (Destination("10.0.0.1:7", FRONTEND_EXPLAIN_ENDPOINT), ExplainRoute(b'{"prompt":"hello"}'))
    ]
    assert main(["router", "explain", "hello", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Explanation) == one
    assert main(["router", "explain", "hello"]) == 1
    assert "all are gone" in capsys.readouterr().out
    assert main(["router", "explain", "hello"]) == 1
    assert "closed the stream without a response" in capsys.readouterr().err


def test_times_without_a_step_model_are_called_assumed() -> None:
    candidates = (candidate("w0", 1.0, is_chosen=True), candidate("w1", 2.0, has_step_model=False))
    assert "Assumed, not measured: the times of w1 are those of an 8B model" in shown(told(*candidates))
    assert "Assumed" not in shown(told(*candidates, policy="classic"))
    assert "Assumed" not in shown(told(candidates[0]))


def test_times_of_attached_servers_are_assumed_since_they_publish_none() -> None:
    server = msgspec.structs.replace(candidate("http://a:1", 1.0, has_step_model=False), engine="remote")
    lines = " ".join(shown(told(server, candidate("w1", 2.0, is_chosen=True, has_step_model=False))).split())
    assumed = "are those of an 8B model on a large GPU, since"
    assert f"the times of http://a:1 {assumed} attached servers publish no step times." in lines
    assert f"the times of w1 {assumed} no step model is registered (see the log of the worker)." in lines
