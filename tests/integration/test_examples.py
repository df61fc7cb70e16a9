"""The programs and configurations of examples/, as their users run them: one cluster for all that need a server.

examples/json_schema.py needs grammars: tests/compat/sdk/test_native_grammar.py runs it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import runpy
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.processes import Bench, free_port, until

from kvolt import LLM, SamplingParams
from kvolt.testing.engines import check
from kvolt.testing.model_server import ModelServer, model_folder
from kvolt.testing.tiny_models import tiny_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINE = f"{EXAMPLES / 'engine.py'}:KIND"
POLICY = f"{EXAMPLES / 'routing_policy.py'}:cost"

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a program with arguments and returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    return run


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, str]]:
    """`kv_tiers.toml` with `routing_policy.py`, and the URL."""
    with Bench(tmp_path_factory.mktemp("examples")) as bench:
        flags = ["--config", str(EXAMPLES / "kv_tiers.toml"), "--router", POLICY]
        flags += [part for each in ("answer_from_prompt=true", "words=20") for part in ("--arg", each)]
        process, url = asyncio.run(bench.serve(*flags))
        yield bench, url
        process.send(signal.SIGINT)
        assert asyncio.run(process.ended()) == 0


@pytest.fixture
def url(cluster: tuple[Bench, str], monkeypatch: pytest.MonkeyPatch) -> str:
    _, url = cluster
    monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
    return url


def complete(url: str, prompt: str) -> dict[str, Any]:
    model = json.loads(read(f"{url}/v1/models"))["data"][0]["id"]
    body = json.dumps(
        {"model": model, "prompt": prompt, "max_tokens": 2, "nvext": {"extra_fields": ["timing"]}}
    )
    answer: dict[str, Any] = json.loads(read(f"{url}/v1/completions", body.encode()))
    return answer


def num_lines(path: Path) -> int:
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return len(text.splitlines())


def read(url: str, body: bytes | None = None) -> str:
    with urllib.request.urlopen(
        urllib.request.Request(url, body, {"content-type": "application/json"})
    ) as answer:
        return str(answer.read().decode())


def test_examples_are_listed_and_short() -> None:
    listed = re.findall(r"^\| \[([\w.]+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    files = [path for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md"]
    assert sorted(listed) == sorted(path.name for path in files)
    lengths = {path.name: num_lines(path) for path in files}
    assert [name for name, length in lengths.items() if length >= 60] == []


# --- with a server


def test_openai_streaming(url: str, run: Run) -> None:
    printed = run("openai_streaming.py", "<say>A cache of keys and values.</say>")
    assert printed.startswith("A cache of keys and values.\n\nprompt: ")
    assert re.search(
        r"^answer: \d+ tokens of sim-tiny\nworker: \w{16}\nfirst token after \d+ ms$", printed, re.M
    )


def test_tool_loop(url: str, run: Run) -> None:
    city = r"\u003csay\u003eIt is warm.\u003c/say\u003e"  # in the result, which the second answer repeats
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    printed = run("tool_loop.py", f"<say>{call}</say>")
    assert printed.splitlines()[0].startswith("get_weather(")
    assert printed.splitlines()[-1] == "It is warm."


def test_kv_tiers_and_routing_policy(cluster: tuple[Bench, str], url: str) -> None:
    """Prompts that were evicted from the small device return from the tiers."""
    bench, _ = cluster
    prompts = [f"{number} " + "word time water " * 300 for number in range(30)]
    again = [complete(url, prompt) for prompt in [*prompts, *prompts]][len(prompts) :]
    assert any(answer["nvext"]["timing"].get("kv_onboard_blocks") for answer in again)
    views = asyncio.run(bench.look())
    metrics = "".join(read(f"http://{views[name].admin}/metrics") for name in ("worker-0", "worker-1"))
    assert re.search(r'^kvolt_tier_stored_blocks_total\{.*tier="disk".*\} [1-9]', metrics, re.MULTILINE)
    decisions = re.findall(
        r'^kvolt_router_policy_decisions_total\{.*policy="(.*?)"', read(f"{url}/metrics"), re.M
    )
    assert set(decisions) == {POLICY}


# --- without


def test_batch(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("One\nTwo\n")
    assert run("batch.py", "prompts.txt", "answers.jsonl", "sim-tiny") == "2 answers in answers.jsonl\n"
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["One", "Two"]
    assert all(row["answer"] and row["tokens"] for row in rows)


def test_rag(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model, which finds the paragraph that is the question."""
    small = functools.partial(LLM, device="cpu", kv_blocks=128, threads=1, measure_steps=False)
    monkeypatch.setattr("kvolt.LLM", small)
    (tmp_path / "notes.txt").write_text("A cat.\n\nDogs bark.\n\nA river is long.\n\nIt rains.")
    printed = run("rag.py", "notes.txt", "Dogs bark.", str(tiny_checkpoint(tmp_path)))
    found, _, answer = printed.partition("\n\n")
    assert found.splitlines()[0] == " 1.00  Dogs bark."
    assert len(found.splitlines()) == 3
    assert answer.strip()


def test_async_streams(run: Run) -> None:
    first, cancelled = run("async_streams.py", "sim-tiny").splitlines()
    assert first.startswith("first: Name a colour. ")
    assert cancelled == "cancelled: 2"


async def test_twin_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """With a running loop, as Jupyter has one."""
    notebook = json.loads((EXAMPLES / "twin_sweep.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    namespace: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
    enough = [number for number, found in namespace["results"].items() if found["good_share"] >= 0.95]
    assert 1 not in enough, "the first cluster must be too small"
    assert capsys.readouterr().out.splitlines()[-1] == f"{min(enough)} workers are enough"


def test_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n\nthe dog sat on the cat\n\na rat sat\n\nthe mat")
    assert check.main([ENGINE, "--model", str(text)]) == 0, capsys.readouterr().out
    with LLM(str(text), engine=ENGINE, order=20) as llm:
        [result] = llm.generate("the dog", SamplingParams(max_tokens=100, temperature=0), progress=False)
    assert result.outputs[0].text == " sat on the cat"
    assert result.outputs[0].finish_reason == "stop"


# --- with processes of their own


async def test_two_machines(tmp_path: Path) -> None:
    join, script = str(free_port()), str(EXAMPLES / "two_machines.sh")
    with Bench(tmp_path, KVOLT_FRONTEND_PORT="0", JOIN_PORT=join) as bench:
        bench.add_commands()
        frontend = bench.start_command([script, "frontend"], "frontend")
        listening = await frontend.says(r"listening on http://0.0.0.0:(\d+)")
        worker = bench.start_command([script, "worker", "sim-tiny"], "worker")
        await frontend.says("model ready")
        status = bench.start_command([script, "status"], "status")
        assert await status.ended() == 0
        assert re.search(r"frontend .*ready", status.out)
        assert re.search(r"sim-tiny +aggregated +sim +ready", status.out)
        url = f"http://127.0.0.1:{listening[1]}"
        assert (await asyncio.to_thread(complete, url, "Hello"))["usage"]["completion_tokens"] == 2
        for process in (worker, frontend):
            process.send(signal.SIGTERM)
            assert await process.ended() == 0


async def test_attach(tmp_path: Path) -> None:
    """To a stand-in for vLLM's server."""
    async with ModelServer("vllm") as server:
        with Bench(tmp_path) as bench:
            arguments = [f"url={server.url}", f"tokenizer={model_folder(tmp_path / 'model')}"]
            arguments += [
                f"{name}=tcp://127.0.0.1:{free_port()}" for name in ("kv_events", "kv_events_replay")
            ]
            flags = [part for each in arguments for part in ("--arg", each)]
            process, url = await bench.serve("--config", str(EXAMPLES / "attach.toml"), *flags)
            answer = await asyncio.to_thread(complete, url, "Hello")
            assert answer["usage"]["completion_tokens"] in (1, 2)
            assert [path for path, _ in server.requests] == ["/v1/completions"]
            process.send(signal.SIGINT)
            await until(lambda: process.exit_code == 0)
