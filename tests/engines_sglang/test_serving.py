"""kvolt in front of real SGLang workers, as a user starts it: routing by what they hold, and one that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from kept import SMALL

READY_S = 240.0
PATIENCE_S = 60.0
ENGINE_ARGS = SMALL | {"max_total_tokens": 8192}
PAGE = SMALL["page_size"]


class Served:
    """`kvolt serve`, until it is closed."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "serve.log"
        self.environ = os.environ | {
            "KVOLT_DISCOVERY_PATH": str(folder / "discovery"),
            "KVOLT_SUPERVISOR_LOG_DIR": str(folder / "logs"),
        }
        command = [sys.executable, "-m", "kvolt", "serve", str(model), "--engine", "sglang"]
        command += ["--port", str(port), "--arg", f"engine_args={json.dumps(ENGINE_ARGS)}"]
        command += ["--arg", "served_name=tiny", *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environ, cwd=folder)

    def until(self, is_so: Callable[[], bool], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while not is_so():
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)

    def num_workers(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                health = json.load(answer)
        except OSError:
            return 0
        return int(sum(health["workers"].values()))

    def metrics(self) -> str:
        return _read(f"{self.url}/metrics")

    def worker_metrics(self) -> list[str]:
        """Of each worker, at its admin port."""
        command = [sys.executable, "-m", "kvolt", "status", "--json"]
        told = json.loads(subprocess.check_output(command, env=self.environ, timeout=PATIENCE_S))
        return [_read(f"http://{each['admin']}/metrics") for each in told if each["name"] != "frontend"]

    def worker_ids(self) -> set[str]:
        return {found for each in self.worker_metrics() for found in re.findall(r'worker_id="(\w+)"', each)}

    def open(self, prompt: list[int], max_tokens: int, **fields: Any) -> Any:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["worker_id", "completion_token_ids"]},
        } | fields
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=120)

    def ask(self, prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        with self.open(prompt, max_tokens, **fields) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def expected(self, prompt: list[int]) -> tuple[str, int]:
        """Where a prompt would go, and how many of its blocks are thought to be there, once that is the same for a
        moment: what workers hold and what they are busy with comes to routers by other ways than answers."""
        found: list[tuple[str, int]] = []
        while len(found) < 20 and not (len(found) >= 3 and len(set(found[-3:])) == 1):
            time.sleep(0.1)
            told = self.ask(prompt, 4, nvext={"annotations": ["query_instance_id:"]})
            found.append((worker_of(told), int(told["nvext"]["routed"]["overlap_blocks"])))
        return found[-1]

    def worker_processes(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [each for each in children if "worker" in each.cmdline()]

    def close(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        _, left = psutil.wait_procs(family, 15)
        for each in left:
            each.kill()
        assert not left, f"processes that did not end: {left}"


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


class Streamed:
    """An answer as it comes; whole when `read` returns."""

    def __init__(self) -> None:
        self.text = ""
        self.num_events = 0
        self.finish: str | None = None

    def read(self, events: Any) -> str:
        with events:
            for line in events:
                _, _, data = line.decode().strip().partition("data: ")
                if data and data != "[DONE]":
                    self._take(json.loads(data))
        return self.text

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        for choice in event["choices"]:
            self.text += choice["text"]
            self.num_events += 1
            self.finish = choice["finish_reason"] or self.finish


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("pair"), tiny, "--workers", "2")
    try:
        served.until(lambda: served.num_workers() == 2, READY_S)
        yield served
    finally:
        served.close()


def cached_of(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def worker_of(answer: dict[str, Any]) -> str:
    return str(answer["nvext"]["worker_id"]["decode_worker_id"])


def num_migrated(metrics: str) -> float:
    """Answers that another worker has gone on with."""
    found = re.findall(r"^kvolt_journey_migrations_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, found))


def asked_at_once(pair: Served, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    """So that both workers have some of them."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: pair.ask(prompt, max_tokens), prompts))


def test_a_returning_prefix_goes_to_its_holder_and_is_found(pair: Served) -> None:
    """Sent to each in turn by name, so that nobody else has begun with them; they return without one."""
    holders = sorted(pair.worker_ids()) * 3
    prompts = [[10 + number, *range(100, 420)] for number in range(len(holders))]
    for prompt, holder in zip(prompts, holders, strict=True):
        named = {"backend_instance_id": holder, "extra_fields": ["worker_id"]}
        first = pair.ask(prompt, 4, nvext=named)
        assert (worker_of(first), cached_of(first)) == (holder, 0)
    for prompt, holder in zip(prompts, holders, strict=True):
        longer = [*prompt, 77, 78, 79]
        assert pair.expected(longer) == (holder, len(prompt) // PAGE)
        again = pair.ask(longer, 4)
        assert worker_of(again) == holder, "the holder is another one"
        assert cached_of(again) == len(prompt) // PAGE * PAGE, "SGLang found something else"


def test_an_answer_is_known_to_routers_as_well(pair: Served) -> None:
    """Of a conversation the next turn begins with the last answer."""
    prompt = [700, *range(430, 470)]
    before = pair.ask(prompt, 40)
    turn = [*prompt, *before["nvext"]["completion_token_ids"], 81, 82, 83]
    # The last token of an answer is not computed, and of the others whole pages are kept.
    num_pages = (len(prompt) + 40 - 1) // PAGE
    assert pair.expected(turn) == (worker_of(before), num_pages)
    again = pair.ask(turn, 4)
    assert (worker_of(again), cached_of(again)) == (worker_of(before), num_pages * PAGE)


def test_sglang_s_own_metrics_are_told_by_each_worker(pair: Served) -> None:
    told = pair.worker_metrics()
    assert len(told) == 2
    for each in told:
        found = re.search(r"^sglang:num_used_tokens\{.*worker_id=.*\} (\S+)$", each, re.MULTILINE)
        assert found is not None, [line for line in each.splitlines() if line.startswith("sglang:")]


def test_streams_of_a_killed_worker_go_on_as_if_nothing_had_happened(pair: Served) -> None:
    prompts = [[30 + number, *range(200, 260)] for number in range(6)]
    num_tokens = 300
    whole = asked_at_once(pair, prompts, num_tokens)
    assert len({worker_of(each) for each in whole}) == 2, "whoever is killed has some of them"
    assert num_migrated(pair.metrics()) == 0
    answers = [Streamed() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        texts = [
            threads.submit(
                lambda answer, prompt: answer.read(pair.open(prompt, num_tokens, stream=True)), *each
            )
            for each in zip(answers, prompts, strict=True)
        ]
        pair.until(lambda: all(answer.num_events > 3 for answer in answers), PATIENCE_S)
        assert all(answer.finish is None for answer in answers), "they are under way"
        os.kill(pair.worker_processes()[0].pid, signal.SIGKILL)
        assert [each.result(120) for each in texts] == [each["choices"][0]["text"] for each in whole]
    assert {answer.finish for answer in answers} == {"length"}
    assert num_migrated(pair.metrics()) > 0, "the one that was killed had none of them"
