"""kvolt in front of real engines, as a user starts it: for the tests of `engines_vllm` and `engines_sglang`."""

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

READY_S = 600.0
PATIENCE_S = 60.0


class Served:
    """`kvolt serve`, until it is closed."""

    def __init__(
        self, folder: Path, model: Path, engine: str, engine_args: dict[str, Any], *flags: str
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "serve.log"
        self.environ = os.environ | {
            "KVOLT_DISCOVERY_PATH": str(folder / "discovery"),
            "KVOLT_SUPERVISOR_LOG_DIR": str(folder / "logs"),
        }
        command = [sys.executable, "-m", "kvolt", "serve", str(model), "--engine", engine]
        command += ["--port", str(port), "--arg", f"engine_args={json.dumps(engine_args)}"]
        # Tests expect placement by KV: on a busy machine the router would learn that one worker is slower.
        command += ["--arg", "served_name=tiny", "--set", "router.correct_times=false", *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environ, cwd=folder)

    def until(self, is_so: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not is_so():
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.02)

    def ready(self, num_workers: int) -> None:
        self.until(lambda: self.num_workers() == num_workers, READY_S)

    def num_workers(self) -> int:
        try:
            health = json.loads(_read(f"{self.url}/health"))
        except OSError:
            return 0
        return int(sum(health["workers"].values()))

    def num_migrated(self) -> float:
        """Answers that another worker has gone on with."""
        told = _read(f"{self.url}/metrics")
        found = re.findall(r"^kvolt_journey_migrations_total\{.*\} (\S+)$", told, re.MULTILINE)
        return sum(map(float, found))

    def worker_admins(self) -> list[str]:
        """URLs of the workers' admin ports."""
        command = [sys.executable, "-m", "kvolt", "status", "--json"]
        told = json.loads(subprocess.check_output(command, env=self.environ, timeout=PATIENCE_S))
        return [f"http://{each['admin']}" for each in told if each["name"] != "frontend"]

    def worker_metrics(self) -> list[str]:
        return [_read(f"{admin}/metrics") for admin in self.worker_admins()]

    def worker_ids(self) -> set[str]:
        return {found for each in self.worker_metrics() for found in re.findall(r'worker_id="(\w+)"', each)}

    def open(self, prompt: list[int] | str | None, max_tokens: int, **fields: Any) -> Any:
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

    def ask(self, prompt: list[int] | str | None, max_tokens: int, **fields: Any) -> dict[str, Any]:
        with self.open(prompt, max_tokens, **fields) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def ask_all(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """At once, so that all workers have some of them."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.ask(prompt, max_tokens), prompts))

    def expected(self, prompt: list[int]) -> tuple[str, int]:
        """Where a prompt would go, and how many of its blocks are thought to be there, once that is the same for a
        moment: what workers hold and what they are busy with comes to routers by other ways than answers."""
        found: list[tuple[str, int]] = []
        while len(found) < 20 and not (len(found) >= 3 and len(set(found[-3:])) == 1):
            time.sleep(0.1)
            told = self.ask(prompt, 4, nvext={"annotations": ["query_instance_id:"]})
            found.append((worker_of(told), int(told["nvext"]["routed"]["overlap_blocks"])))
        return found[-1]

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def cached_of(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def worker_of(answer: dict[str, Any]) -> str:
    return str(answer["nvext"]["worker_id"]["decode_worker_id"])


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


def busiest_worker(admins: list[str]) -> int:
    """Process id of the worker with most streams."""
    workers = [json.loads(_read(f"{admin}/status")) for admin in admins]

    def num_streams(worker: dict[str, Any]) -> int:
        return sum(each["active_streams"] for each in worker["endpoints"])

    return int(max(workers, key=num_streams)["pid"])


# --- what holds of every engine


def check_a_returning_prefix_goes_to_its_holder(pair: Served, block_size: int) -> None:
    """Sent to each in turn by name, so that nobody else has begun with them; they return without one."""
    holders = sorted(pair.worker_ids()) * 3
    assert len(holders) == 6, "two workers"
    prompts = [[10 + number, *range(100, 420)] for number in range(len(holders))]
    for prompt, holder in zip(prompts, holders, strict=True):
        named = {"backend_instance_id": holder, "extra_fields": ["worker_id"]}
        first = pair.ask(prompt, 4, nvext=named)
        assert (worker_of(first), cached_of(first)) == (holder, 0)
    for prompt, holder in zip(prompts, holders, strict=True):
        longer = [*prompt, 77, 78, 79]
        num_blocks = len(prompt) // block_size
        expected = pair.expected(longer)
        assert expected == (holder, num_blocks), (expected, holder)
        again = pair.ask(longer, 4)
        assert worker_of(again) == holder, "the holder is another one"
        assert cached_of(again) == num_blocks * block_size, "the engine found something else"


def check_streams_of_a_killed_worker_go_on(pair: Served, num_tokens: int) -> None:
    """As if nothing had happened."""
    prompts = [[30 + number, *range(200, 260)] for number in range(6)]
    whole = pair.ask_all(prompts, num_tokens)
    assert pair.num_migrated() == 0
    admins = pair.worker_admins()
    answers = [Streamed() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        texts = [
            threads.submit(
                lambda answer, prompt: answer.read(pair.open(prompt, num_tokens, stream=True)), *each
            )
            for each in zip(answers, prompts, strict=True)
        ]
        pair.until(lambda: all(answer.num_events > 3 for answer in answers))
        assert all(answer.finish is None for answer in answers), "they are under way"
        os.kill(busiest_worker(admins), signal.SIGKILL)
        assert [each.result(120) for each in texts] == [text_of(each) for each in whole]
    assert {answer.finish for answer in answers} == {"length"}
    assert pair.num_migrated() > 0, "the one that was killed had none of them"
