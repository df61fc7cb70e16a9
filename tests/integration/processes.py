"""Real kvolt processes for the integration tests.

A Bench gives them a folder, a discovery directory and an environment of their own, and ends them all when
it is closed, whatever the test did. Closing also finds what the processes would not say by themselves:
one that was left behind, and a traceback in any log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import psutil
from tests.waits import unexpected_lines
from tokenizers import Tokenizer

from kvolt.api.cluster import ProcessView, visit
from kvolt.cli.process import running
from kvolt.core.card import card_hash
from kvolt.core.delta import Delta
from kvolt.core.endpoints import EndpointAddress, component_name
from kvolt.core.errors import DiscoveryLost
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.model import WORDS, tokenizer_json, word_token_ids
from kvolt.engines.sim.script import answer_tokens
from kvolt.runtime.config.loader import load
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.security.identity import ProcessRole
from kvolt.runtime.supervisor.process import die_with_parent
from kvolt.runtime.supervisor.supervisor import STATUS_FILE, SupervisorStatus

PATIENCE_S = 60.0
"""For what takes milliseconds on an idle machine and seconds on a busy one."""

POLL_S = 0.1
"""How often the processes look at the discovery directory."""

MODEL = "sim-tiny"
SIM_CARD = card_hash(SimEngine(EngineSpec(model=MODEL, role=Role.AGGREGATED), SimArguments()).card)
GENERATE = EndpointAddress("default", component_name(MODEL, Role.AGGREGATED, SIM_CARD), "generate")

_KVOLT = (sys.executable, "-m", "kvolt")
_MARK = "INTEGRATION_TEST_BENCH"

decode_delta = msgspec.msgpack.Decoder(Delta).decode


def read_status(log_dir: Path) -> SupervisorStatus | None:
    """The last snapshot of a supervisor; None if there is none."""
    try:
        return msgspec.json.decode((log_dir / STATUS_FILE).read_bytes(), type=SupervisorStatus)
    except FileNotFoundError:
        return None


class Kvolt:
    """One started `kvolt` command. What it says goes to files, so that it never waits for a reader."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], folder: Path, name: str) -> None:
        self.name = name
        self._out = folder / f"{name}.out"
        self._err = folder / f"{name}.err"
        with self._out.open("ab") as out, self._err.open("ab") as err:
            self._process = subprocess.Popen(
                die_with_parent(arguments),
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, once it has ended."""
        await until(lambda: self.exit_code is not None, timeout_s, f"the end of {self.name}")
        code = self.exit_code
        assert code is not None
        return code

    async def says(self, pattern: str, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """Wait for a pattern in what it printed or logged."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            match = re.search(pattern, self.out + self.err)
            if match is None:
                assert self.exit_code is None, f"{self.name} ended: {self.out}{self.err}"
                return False
            found.append(match)
            return True

        await until(look, timeout_s, f"{pattern!r} from {self.name}")
        return found[0]

    def kill(self) -> None:
        """SIGKILL, without a word to anybody."""
        self._process.kill()
        self._process.wait(PATIENCE_S)


class Bench:
    """All processes of one test."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.discovery = folder / "discovery"
        self._mark = uuid.uuid4().hex
        self._started: list[Kvolt] = []
        self._temp = folder / "tmp"
        self._temp.mkdir()
        # Found by every command that runs here and is given no other.
        (folder / "kvolt.toml").write_text(
            f'[[workers]]\nmodel = "{MODEL}"\ncount = 2\nargs = {{words = 120}}\n'
        )
        self.settings_env = {
            "KVOLT_DISCOVERY_PATH": str(self.discovery),
            "KVOLT_DISCOVERY_POLL_S": str(POLL_S),
            "KVOLT_SUPERVISOR_LOG_DIR": str(folder / "logs"),
            **settings,
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVOLT_")}
        self.env = {**inherited, _MARK: self._mark, "TMPDIR": str(self._temp), **self.settings_env}

    # --- processes

    def start(self, *arguments: str, name: str | None = None) -> Kvolt:
        """`kvolt ARGUMENTS`; the name tells its output files apart."""
        return self.start_command((*_KVOLT, *arguments), name or f"{arguments[0]}-{len(self._started)}")

    def start_command(self, command: Sequence[str], name: str) -> Kvolt:
        process = Kvolt(command, self.env, self.folder, name)
        self._started.append(process)
        return process

    def run(
        self, *arguments: str, timeout_s: float = PATIENCE_S, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """`kvolt ARGUMENTS` to its end."""
        return subprocess.run(
            [*_KVOLT, *arguments],
            cwd=self.folder,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def worker(self, name: str, *arguments: str, **engine: float) -> Kvolt:
        given = [part for key, value in engine.items() for part in ("--arg", f"{key}={value}")]
        return self.start("worker", "--name", name, *given, *arguments, name=name)

    async def frontend(self, *arguments: str, port: int = 0, name: str = "frontend") -> tuple[Kvolt, str]:
        """A frontend that listens, and its URL."""
        process = self.start("frontend", "--port", str(port), "--name", name, *arguments, name=name)
        found = await process.says(r"listening on (http://[\d.:]+)")
        return process, found[1]

    async def serve(self, *arguments: str) -> tuple[Kvolt, str]:
        """`kvolt serve` that is ready, and its URL."""
        process = self.start("serve", "--port", "0", "--set", "log.format=human", *arguments, name="serve")
        found = await process.says(r"ready at (http://[\d.:]+) ")
        return process, found[1]

    def child_pid(self, name: str) -> int:
        """The process that `kvolt serve` runs under this name now."""
        status = read_status(self.folder / "logs")
        assert status is not None
        [pid] = [child.pid for child in status.children if child.name == name]
        assert pid is not None
        return pid

    def left(self) -> list[psutil.Process]:
        """Every process that was started from here, by whomever, and lives."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def add_commands(self) -> None:
        """Let commands of this bench find `kvolt` and `python`, as in an active virtual environment."""
        folder = self.folder / "bin"
        folder.mkdir()
        for name, arguments in (("kvolt", " -m kvolt"), ("python", "")):
            (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable}{arguments} "$@"\n')
            (folder / name).chmod(0o755)
        self.env["PATH"] = f"{folder}:{self.env['PATH']}"

    async def nothing_left(self, timeout_s: float = PATIENCE_S) -> None:
        await until(lambda: not self.left(), timeout_s, "the end of every process")

    def close(self) -> None:
        for process in self._started:
            if process.exit_code is None:
                process.kill()
        # What a killed supervisor leaves is ended by its guard, which needs a moment.
        deadline = time.monotonic() + 5.0
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        assert not left, f"processes left behind: {left}"
        for log in (*self.folder.glob("*.out"), *self.folder.glob("*.err")):
            text = log.read_text()
            assert "Traceback" not in text, f"{log.name}: {text[-4000:]}"
            assert "never retrieved" not in text, f"{log.name}: {text[-4000:]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- from the test's own process

    def settings(self, **more: str) -> Settings:
        """The settings that the processes run with."""
        environ = {**self.settings_env, "KVOLT_ADMIN_ENABLED": "false", **more}
        return load(environ=environ, cwd=self.folder).settings

    @asynccontextmanager
    async def runtime(self, role: ProcessRole = ProcessRole.FRONTEND, **more: str) -> AsyncIterator[Runtime]:
        """A kvolt process inside the test."""
        async with running(self.settings(**more), "test", role) as process:
            yield process.runtime

    async def look(self, **more: str) -> dict[str, ProcessView]:
        """What `kvolt status` sees, by name of process."""
        async with visit(self.settings(**more)) as cluster:
            return {view.name: view for view in await cluster.list_processes()}

    async def until_seen(
        self, *names: str, timeout_s: float = PATIENCE_S, **more: str
    ) -> dict[str, ProcessView]:
        """Wait until exactly these processes are registered and answer, and the others have had time to see it."""
        async with asyncio.timeout(timeout_s), visit(self.settings(**more)) as cluster:
            while True:
                with contextlib.suppress(DiscoveryLost):
                    views = {view.name: view for view in await cluster.list_processes()}
                    if sorted(views) == sorted(names) and all(view.status for view in views.values()):
                        await asyncio.sleep(5 * POLL_S)
                        return views
                await asyncio.sleep(0.1)

    async def until_computing(self, num_requests: int, timeout_s: float = PATIENCE_S, **more: str) -> None:
        """Wait until the workers together have this many requests open."""
        async with asyncio.timeout(timeout_s), visit(self.settings(**more)) as cluster:
            while True:
                statuses = [view.status for view in await cluster.list_processes() if view.status is not None]
                engines = [status.details.get("engine", {}) for status in statuses]
                if sum(engine.get("open", 0) for engine in engines) == num_requests:
                    return
                await asyncio.sleep(0.05)

    async def open_requests(self, *names: str, **more: str) -> list[int]:
        """How many requests each of these workers has open."""
        views = await self.look(**more)
        statuses = [views[name].status for name in names]
        return [status.details["engine"]["open"] for status in statuses if status is not None]

    def status(self, *arguments: str) -> list[dict[str, Any]]:
        """What `kvolt status --json` prints."""
        printed = self.run("status", "--json", *arguments)
        assert unexpected_lines(printed.stderr) == []
        views: list[dict[str, Any]] = json.loads(printed.stdout)
        return views


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S, what: str = "it") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}"
        await asyncio.sleep(0.02)


async def until_ready(url: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait until a frontend would route."""
    async with asyncio.timeout(timeout_s), httpx.AsyncClient(base_url=url) as client:
        while True:
            if (await client.get("/health")).status_code == 200:
                return
            await asyncio.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remove(path: Path) -> None:
    """Whatever it is, also while somebody writes into it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_SIM_PROMPT = (1, 2, 3)


def sim_request(number: int, max_tokens: int) -> Request:
    """A request of whose answer every token is known beforehand: see `sim_tokens`."""
    return Request(
        request_id=RequestId(f"{uuid.uuid4().hex[:8]}-{number}"),
        model=MODEL,
        token_ids=_SIM_PROMPT,
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        sampling=Sampling(seed=number),
    )


def sim_tokens(number: int, num_tokens: int) -> list[int]:
    return answer_tokens(_SIM_PROMPT, number, num_tokens, word_token_ids())


def sim_text(prompt: str, seed: int, num_tokens: int) -> str:
    """The answer of the sim model to a rendered prompt, as words."""
    token_ids = Tokenizer.from_buffer(tokenizer_json()).encode(prompt).ids
    by_token = dict(zip(word_token_ids(), WORDS, strict=True))
    answer = answer_tokens(token_ids, seed, num_tokens, word_token_ids())
    return "".join(f" {by_token[token]}" for token in answer)
