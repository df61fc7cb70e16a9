"""kvolt in front of real vLLM workers, as a user starts it: routing by what they hold, and one that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

READY_S = 240.0
ENGINE_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "max_num_seqs": 16,
}


class Served:
    """`kvolt serve`, until it is closed."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "serve.log"
        environ = os.environ | {
            "KVOLT_DISCOVERY_PATH": str(folder / "discovery"),
            "KVOLT_SUPERVISOR_LOG_DIR": str(folder / "logs"),
        }
        command = [
            sys.executable,
            "-m",
            "kvolt",
            "serve",
            str(model),
            "--engine",
            "vllm",
            "--port",
            str(port),
        ]
        command += ["--arg", f"engine_args={json.dumps(ENGINE_ARGS)}", "--arg", "served_name=tiny", *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=folder)

    def ready(self, num_workers: int) -> None:
        deadline = time.monotonic() + READY_S
        while self.num_workers() < num_workers:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)

    def num_workers(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                health = json.load(answer)
        except OSError:
            return 0
        return int(sum(health["workers"].values()))

    def ask(self, prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["worker_id", "timing"]},
        } | fields
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

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


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("pair"), tiny, "--workers", "2", "--router", "latency")
    served.ready(2)
    yield served
    served.close()


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def cached_of(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def worker_of(answer: dict[str, Any]) -> str:
    return str(answer["nvext"]["worker_id"]["decode_worker_id"])


def test_a_returning_prefix_goes_to_its_holder_and_is_found(pair: Served) -> None:
    prompts = [[10 + number, *range(100, 420)] for number in range(6)]
    first = [pair.ask(prompt, 4) for prompt in prompts]
    assert {worker_of(each) for each in first}, "somebody answers"
    assert [cached_of(each) for each in first] == [0] * 6
    for prompt, before in zip(prompts, first, strict=True):
        longer = [*prompt, 77, 78, 79]
        again = pair.ask(longer, 4)
        assert worker_of(again) == worker_of(before), "the holder is another one"
        assert cached_of(again) == len(prompt) // 32 * 32, "vLLM found something else than was predicted"


def test_streams_of_a_killed_worker_go_on_as_if_nothing_had_happened(pair: Served) -> None:
    prompts = [[30 + number, *range(200, 260)] for number in range(4)]
    expected = [text_of(pair.ask(prompt, 120)) for prompt in prompts]

    async def killed_in_the_middle() -> list[dict[str, Any]]:
        asking = [asyncio.to_thread(pair.ask, prompt, 120) for prompt in prompts]
        answers = [asyncio.ensure_future(each) for each in asking]
        await asyncio.sleep(1.0)  # they are under way: each takes some seconds
        os.kill(pair.worker_processes()[0].pid, signal.SIGKILL)
        return await asyncio.gather(*answers)

    answers = asyncio.run(killed_in_the_middle())
    assert [text_of(each) for each in answers] == expected
    assert {each["choices"][0]["finish_reason"] for each in answers} == {"length"}
