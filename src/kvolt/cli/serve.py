"""`kvolt serve`: a whole kvolt on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import msgspec

from kvolt.cli.process import check_directory, run_loop
from kvolt.core.errors import ConfigError
from kvolt.engines.registry import check_arguments
from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.config import LoadedConfig, without_settings
from kvolt.runtime.config_toml import to_toml
from kvolt.runtime.cores import share_cores, thread_env, usable_cores
from kvolt.runtime.network import SocketNetwork, join_address, split_address
from kvolt.runtime.settings import Settings
from kvolt.runtime.stop import StopSignal
from kvolt.runtime.supervisor import ChildSpec, Supervisor, SupervisorConfig
from kvolt.runtime.supervisor_output import TerminalView
from kvolt.runtime.supervisor_plan import RestartRule
from kvolt.runtime.tasks import Scope

HELP = """
Start a frontend and the workers of the config as processes of this machine, keep them alive, and show
their logs merged. Ctrl-C stops all of it in order; a second Ctrl-C at once.

Examples:
  kvolt serve                          a frontend on 127.0.0.1:8000 and two simulated workers
  kvolt serve --port 8080 --workers 4
  kvolt serve --config cluster.toml    the [[workers]] of a config file
"""

_POLL_S = 0.1


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="processes of the first [[workers]] entry")
    parser.add_argument("--quiet", action="store_true", help="show only warnings and errors of the processes")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    given = _with_workers(loaded.settings, args.workers)
    for group in given.workers:
        check_arguments(group.engine, group.args)

    async def main() -> int:
        await check_directory(given)
        settings = await _with_port(given)
        with tempfile.TemporaryDirectory(prefix="kvolt-serve-") as folder:
            config = Path(folder) / "kvolt.toml"
            config.write_text(to_toml(settings))
            return await _Serve(settings, config, quiet=args.quiet).run()

    return run_loop(main)


def _with_workers(settings: Settings, count: int | None) -> Settings:
    if count is None:
        return settings
    if count < 1 or not settings.workers:
        raise ConfigError("serve needs at least one worker", key="workers", remedy="give --workers 1 or more")
    first = msgspec.structs.replace(settings.workers[0], count=count)
    return msgspec.structs.replace(settings, workers=[first, *settings.workers[1:]])


async def _with_port(settings: Settings) -> Settings:
    """The port known before anything is started: a taken one is told, and 0 becomes a free one."""
    frontend = settings.frontend
    listener = await SocketNetwork().listen(join_address(frontend.host, frontend.port), asyncio.Protocol)
    await listener.close()
    port = split_address(listener.address)[1]
    return msgspec.structs.replace(settings, frontend=msgspec.structs.replace(frontend, port=port))


def child_specs(settings: Settings, config: Path) -> list[ChildSpec]:
    """The processes. The frontend stops first (stage 1): its requests end while workers still serve."""
    command = (sys.executable, "-m", "kvolt")
    frontend = ChildSpec("frontend", (*command, "frontend", "--config", str(config)), stage=1)
    names = [
        (group.name, f"{group.name}-{index}") for group in settings.workers for index in range(group.count)
    ]
    cores = usable_cores()
    shares = share_cores(cores.ids, len(names), reserved=1)
    workers = [
        ChildSpec(
            name,
            (*command, "worker", "--config", str(config), "--group", group, "--name", name),
            env=thread_env(share),
        )
        for (group, name), share in zip(names, shares, strict=True)
    ]
    return [frontend, *workers]


class _Serve:
    """The supervisor, and a word to the user when a request would be answered."""

    def __init__(self, settings: Settings, config: Path, quiet: bool) -> None:
        self._settings = settings
        self._specs = child_specs(settings, config)
        self._quiet = quiet
        self._blocking = ThreadBlocking(2)

    async def run(self) -> int:
        settings = self._settings
        stop = StopSignal()
        stop.install()
        environ = without_settings(os.environ)
        for name in list(os.environ):
            if name not in environ:
                del os.environ[name]  # children get the resolved config, which must not be overruled
        supervisor_settings = settings.supervisor
        log_dir = Path(supervisor_settings.log_dir or tempfile.gettempdir())
        view = TerminalView(sys.stdout, [spec.name for spec in self._specs], quiet=self._quiet)
        supervisor = Supervisor(
            self._specs,
            log_dir,
            SystemClock(),
            stop,
            SupervisorConfig(
                restart=RestartRule(
                    backoff_initial_s=supervisor_settings.restart_backoff_s,
                    backoff_max_s=supervisor_settings.restart_backoff_max_s,
                ),
                # A process may take its whole drain time; only what comes after that is being stuck.
                stop_timeout_s=settings.runtime.drain_timeout_s + supervisor_settings.stop_timeout_s,
            ),
            view,
        )
        print(f"kvolt: starting {len(self._specs)} processes; logs in {log_dir}", flush=True)
        code = 1
        async with Scope("serve") as scope:
            scope.start(self._announce(), "announce")
            try:
                code = await supervisor.run()
            finally:
                scope.cancel()
        self._blocking.close()
        print("kvolt: stopped", flush=True)
        return code

    async def _announce(self) -> None:
        """Wait until a request would be answered, then say how to ask."""
        frontend = self._settings.frontend
        host = "127.0.0.1" if frontend.host in ("0.0.0.0", "::") else frontend.host
        base = f"http://{join_address(host, frontend.port)}"
        while True:
            try:
                models = await self._blocking.run(lambda: _ready_models(base), 5.0)
            except (OSError, ValueError):
                models = []
            if models:
                break
            await asyncio.sleep(_POLL_S)
        messages = [{"role": "user", "content": "Hello"}]
        body = json.dumps({"model": models[0], "messages": messages, "stream": True})
        print(
            f"\nkvolt: ready at {base} with {', '.join(models)}. Try:\n\n"
            f"  curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n\n"
            "Ctrl-C stops everything.\n",
            flush=True,
        )


def _ready_models(base: str) -> list[str]:
    with urllib.request.urlopen(f"{base}/health", timeout=2) as response:
        return list(json.load(response)["models"])
