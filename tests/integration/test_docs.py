"""README and docs, run as written: commands in order, with the servers that they start, and Python snippets.

Ports, addresses of machines and the model's name are replaced. A page that only has clients gets a server.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from tests.doc_blocks import Block, Command, blocks, missing_output
from tests.integration.processes import MODEL, Bench, Kvolt, free_port

from kvolt.bench.traces import small_trace, write_trace

_TIMEOUT_S = 120
_READY = {
    "serve": "ready at http",
    "frontend": "listening on http",
    "router": "listening on http",
    "worker": "worker serving",
    "cache serve": "serving a KV pool",
    "-m kvolt.testing.model_server": "listening on http",
}
_PORT = re.compile(r"(?:(?<=:)|(?<=port ))(8[01]\d\d|7\d00)\b")
_NAMED = re.compile(r"# ([\w-]+\.(?:py|toml))\n")
_CLIENT = re.compile(r":8000|kvolt (status|top|chat|router explain)\b")

PAGES = {
    page: [
        block
        for block in found
        if block.reason is None and block.language in ("console", "bash", "python", "toml")
    ]
    for page, found in groupby(blocks(), key=lambda block: block.page)
}


class PageRun:
    """The blocks of one page, in a folder of their own."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._ports: dict[str, int] = {}
        self._servers: list[tuple[str, Kvolt]] = []
        self._num_started = 0
        (bench.folder / "kvolt.toml").unlink()  # the pages begin with no configuration
        bench.add_commands()
        (bench.folder / ".curlrc").write_text("fail-with-body\n")
        bench.env["CURL_HOME"] = str(bench.folder)
        bench.env["KVOLT_FRONTEND_PORT"] = str(self._port("8000"))
        write_trace(bench.folder / "trace.jsonl", small_trace())

    async def run(self, block: Block) -> None:
        if block.language in ("python", "toml"):
            self._run_file(block)
            return
        for command in block.commands:
            text = self._adapt(command.text)
            if command.is_server:
                await self._start(command, text)
                continue
            if not self._servers and _CLIENT.search(command.text):
                await self._start(Command("kvolt serve"), f"kvolt serve {MODEL}")
            done = self._execute(["bash", "-c", f"set -o pipefail; {text}"])
            shown = [line for line in command.output if line.strip(" .")]
            missing = missing_output(tuple(shown), f"{done.stdout}\n{done.stderr}")
            assert not missing, (
                f"{block.place}: {text}\nnot in the output: {missing}\n{done.stdout}{done.stderr}"
            )

    async def stop(self) -> None:
        for _, server in reversed(self._servers):
            if server.exit_code is None:
                server.send(signal.SIGINT)
            assert await server.ended() == 0, server.err

    async def _start(self, command: Command, text: str) -> None:
        """Start a server; a second `kvolt serve` replaces the first."""
        if command.verb == "serve":
            await self.stop()
            self._servers.clear()
        self._num_started += 1
        server = self._bench.start_command(("bash", "-c", f"exec {text}"), f"server-{self._num_started}")
        await server.says(_READY[command.verb])
        self._servers.append((command.verb, server))
        if "--attach" in command.text:
            await server.says("model ready")
        for verb, other in self._servers:
            if command.verb == "worker" and verb == "frontend":
                await other.says("model ready")

    def _run_file(self, block: Block) -> None:
        name = _NAMED.match(block.text)
        if name is not None:
            (self._bench.folder / name[1]).write_text(self._adapt(block.text))
        elif block.language == "python":
            self._execute(["python", "-c", self._adapt(block.text)])

    def _execute(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words,
            cwd=self._bench.folder,
            env=self._bench.env,
            input="Hello\n",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{words[-1]}\n{done.stdout}{done.stderr}"
        return done

    def _adapt(self, text: str) -> str:
        text = re.sub(r"\b10\.0\.0\.\d+\b", "127.0.0.1", text.replace(".venv/bin/", ""))
        text = _PORT.sub(lambda match: str(self._port(match[0])), text)
        return text.replace("smollm2-135m", MODEL)

    def _port(self, documented: str) -> int:
        if documented not in self._ports:
            self._ports[documented] = free_port()
        return self._ports[documented]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, KVOLT_LOG_FORMAT="human") as bench:
        yield bench


@pytest.mark.parametrize("page", [page for page, runnable in PAGES.items() if runnable])
async def test_page_runs_as_written(page: str, bench: Bench) -> None:
    run = PageRun(bench)
    for block in PAGES[page]:
        await run.run(block)
    await run.stop()
