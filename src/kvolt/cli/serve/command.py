"""`kvolt serve`: start and supervise a frontend and workers on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
from pathlib import Path

import msgspec

from kvolt.api.cluster import visit
from kvolt.cli.cache.pool_command import pools_of
from kvolt.cli.flags import option, optional, switch
from kvolt.cli.health import Served, base_url, registered_models, served_models
from kvolt.cli.process import run_loop
from kvolt.cli.serve.chat import HeldOutput, chat_in_terminal
from kvolt.cli.serve.edge import EdgeGroup, edge_group, num_edge_processes
from kvolt.cli.serve.placement import device_flags, place, visible_gpus
from kvolt.cli.serve.readiness import is_ready, missing, models_text
from kvolt.cli.serve.worker_groups import apply_flags
from kvolt.cli.worker.command import add_engine_flags, check_engine
from kvolt.cli.worker.served_model import served_model
from kvolt.cli.worker.tier_settings import add_tier_flags
from kvolt.core.errors import ConfigError, KvoltError
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.loader import LoadedConfig, without_settings
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.config.toml_writer import to_toml
from kvolt.runtime.host.cores import share_cores, thread_env, usable_cores
from kvolt.runtime.network import SocketNetwork, join_address, split_host
from kvolt.runtime.stop import StopSignal
from kvolt.runtime.supervisor.folder import own_folder, private_file, private_folder
from kvolt.runtime.supervisor.output import TerminalView, json_record
from kvolt.runtime.supervisor.plan import Level, RestartRule
from kvolt.runtime.supervisor.supervisor import ChildSpec, Supervisor, SupervisorConfig
from kvolt.runtime.system_ports import check_directory, plane_host, process_options
from kvolt.runtime.tasks import Scope

HELP = """
Start a frontend and workers on this machine, restart failed processes, and
show their merged logs. By default one worker computes prompts and answers.
Ctrl-C drains and stops everything; a second Ctrl-C stops at once.

Examples:
  kvolt serve                          SmolLM2-135M on 127.0.0.1:8000
  kvolt serve Qwen/Qwen3-0.6B          a Hugging Face name, folder or GGUF file
  kvolt serve Qwen/Qwen3-8B --engine vllm --arg engine_args.max_model_len=32768
  kvolt serve sim-tiny --workers 4     simulated workers: no weights, no torch
  kvolt serve --prefill 1 --decode 1   disaggregated prefill
  kvolt serve --kv-host 4GiB --kv-disk 50GiB          offload KV blocks
  kvolt serve --discovery-join-listen 10.0.0.5:7400   let other machines join
"""

_FOR_WORKERS = "workers.toml"
"""Config file of workers and pools, in the supervisor's directory."""
_LORA_STATE = ".lora-state"
"""Directory of `child_specs`' `loras`, in the supervisor's directory."""
_POLL_S = 0.1
_CORES_PER_EDGE = 4
"""Machines with fewer cores reserve none for the frontend."""
_DISCOVERY_TIMEOUT_S = 5.0
_FIXED_PORTS = range(20_000, 32_000)
"""Below the ephemeral ports, so that no outgoing connection takes one before the frontend starts."""
_MAX_PORT_ATTEMPTS = 20


def configure(parser: argparse.ArgumentParser) -> None:
    optional(parser, "model", "MODEL", "Name, folder or GGUF file. Default: smollm2-135m.")
    add_engine_flags(parser)
    workers = parser.add_argument_group("workers (of the first [[workers]] entry)")
    option(workers, "--workers", "N", "Number of worker processes.", int)
    option(workers, "--prefill", "N", "Number of prefill workers; requires --decode.", int)
    option(workers, "--decode", "N", "Number of decode workers.", int)
    option(workers, "--aggregated", "N", "Number of workers that do both.", int)
    switch(
        add_tier_flags(parser, is_brief=True),
        "--kv-shared",
        "One host and disk tier for all workers together.",
    )
    output = parser.add_argument_group("terminal")
    switch(output, "--quiet", "Show only warnings and errors.")
    switch(output, "--interactive", "Chat in this terminal; stop when the chat ends.")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    settings = apply_flags(loaded.settings, args)
    for group in settings.workers:
        check_engine(group)
        served_model(group)
    return serve(settings, args.quiet, args.interactive)


def serve(settings: Settings, quiet: bool = False, interactive: bool = False) -> int:
    """Run all processes of these settings until a stop signal; return the exit code."""
    check_shared(settings)
    _check_router(settings)

    async def main() -> int:
        await check_directory(settings)
        resolved = await _with_port(settings)
        base = resolved.supervisor.log_dir
        assert base is not None, "the config loader sets it"
        with (
            own_folder(Path(base)) as folder,
            pools_of(resolved, folder, folder / _FOR_WORKERS) as (pooled, pools),
            # The children read their config again at every restart.
            private_file(folder / "frontend.toml", to_toml(pooled)) as for_frontend,
            private_file(folder / _FOR_WORKERS, to_toml(worker_settings(pooled))) as for_workers,
            edge_group(pooled, folder) as group,
            private_folder(folder / _LORA_STATE) as loras,
        ):
            await _report_running_processes(pooled)
            specs = [*pools, *child_specs(pooled, for_frontend, for_workers, group, loras)]
            # The chat must not read a kvolt.toml in the current directory.
            chat = ["--config", str(for_frontend)] if interactive else None
            return await _Serve(pooled, specs, folder, quiet, chat, group).run()

    return run_loop(main)


def _check_router(settings: Settings) -> None:
    """Raise ConfigError for an invalid custom routing policy before anything is started."""
    if ":" in settings.frontend.router or settings.router.shadow is not None:
        # Imported here to keep it out of the supervisor's memory.
        from kvolt.router.registry import find_router

        find_router(settings.frontend.router, settings.router)


def check_shared(settings: Settings) -> None:
    """Raise ConfigError for settings that several processes cannot share."""
    process_options(settings, "serve")
    if settings.discovery.kind == "mem":
        raise ConfigError(
            "discovery.kind is mem, which works within one process only",
            key="discovery.kind",
            remedy="use file on one machine",
        )
    if settings.cluster.join_token is not None:
        raise ConfigError(
            "cluster.join_token is for one start of one process, and `kvolt serve` starts and restarts several",
            key="cluster.join_token",
            remedy="use --cluster-key, or start a worker with `kvolt worker MODEL --join HOST:PORT`",
        )
    num_processes = num_edge_processes(settings) + sum(group.count for group in settings.workers)
    if num_processes == 1:
        return
    ports = {"runtime.port": settings.runtime.port}
    if settings.admin.enabled:
        ports["admin.port"] = settings.admin.port
    for key, port in ports.items():
        if port:
            raise ConfigError(
                f"{key} is {port}, but {num_processes} processes cannot share a port",
                key=key,
                remedy="set it to 0: each process uses a free port, shown by `kvolt status --json`",
            )
    advertise = settings.runtime.advertise
    if advertise is not None and split_host(advertise)[1] is not None:
        raise ConfigError(
            f"runtime.advertise is {advertise}, but each of {num_processes} processes has its own port",
            key="runtime.advertise",
            remedy=f"set it to the host only: {split_host(advertise)[0]}",
        )


def worker_settings(settings: Settings) -> Settings:
    """Settings of workers: no join server, but a listen address that other machines can reach."""
    return msgspec.structs.replace(
        settings,
        runtime=msgspec.structs.replace(settings.runtime, host=plane_host(settings)),
        discovery=msgspec.structs.replace(settings.discovery, join_listen=None),
    )


async def _report_running_processes(settings: Settings) -> None:
    try:
        async with asyncio.timeout(_DISCOVERY_TIMEOUT_S), visit(settings) as cluster:
            running = [view for view in await cluster.list_processes() if view.status is not None]
    except (KvoltError, TimeoutError):
        return  # the child processes report discovery errors
    if running:
        noun = "process" if len(running) == 1 else "processes"
        text = (
            f"joins {len(running)} {noun} already in namespace {settings.namespace}; "
            "use --namespace to keep apart"
        )
        is_json = settings.log.format == "json"
        line = json_record(SystemClock(), "kvolt", None, text).decode() if is_json else f"kvolt: {text}\n"
        print(line, end="", flush=True)


async def _with_port(settings: Settings) -> Settings:
    """Resolve frontend.port before anything is started: 0 becomes a free port, a port in use is an error."""
    frontend = settings.frontend
    port = frontend.port or await _free_port(frontend.host)
    await _check_free(frontend.host, port)
    return msgspec.structs.replace(settings, frontend=msgspec.structs.replace(frontend, port=port))


async def _free_port(host: str) -> int:
    *others, last = random.sample(_FIXED_PORTS, _MAX_PORT_ATTEMPTS)
    for port in others:
        with contextlib.suppress(ConfigError):
            await _check_free(host, port)
            return port
    return last  # the caller checks it and reports the error


async def _check_free(host: str, port: int) -> None:
    """Raise ConfigError if the address cannot be listened on."""
    listener = await SocketNetwork().listen(join_address(host, port), asyncio.Protocol)
    await listener.close()


def child_specs(
    settings: Settings,
    for_frontend: Path,
    for_workers: Path,
    group: EdgeGroup | None = None,
    loras: Path | None = None,
) -> list[ChildSpec]:
    """Child processes. The frontend stops first (stage 1), while workers still serve its requests.

    `loras`: directory where workers keep the adapters that are loaded at run time, for their restarts.
    """
    command = (sys.executable, "-m", "kvolt")
    if group is None:
        edge = [ChildSpec("frontend", (*command, "frontend", "--config", str(for_frontend)), stage=1)]
    else:
        edge = group.specs(for_frontend, for_workers)
    names = [
        (group.name, f"{group.name}-{index}") for group in settings.workers for index in range(group.count)
    ]
    cores = usable_cores()
    reserved = min(settings.frontend.processes, len(cores) // _CORES_PER_EDGE)
    shares = share_cores(cores, len(names), reserved)
    placed = place(settings.workers, visible_gpus(os.environ))
    workers = []
    for (kind, name), share, gpus in zip(names, shares, placed, strict=True):
        worker = [*command, "worker", "--config", str(for_workers), "--group", kind, "--name", name]
        if loras is not None:
            worker += ["--lora-state", str(loras / f"{name}.json")]
        devices, visible = device_flags(gpus)
        workers.append(ChildSpec(name, (*worker, *devices), env={**thread_env(share), **visible}))
    return [*edge, *workers]


class _Serve:
    """Runs the supervisor, prints a message when the cluster is ready, and starts the chat if requested."""

    def __init__(
        self,
        settings: Settings,
        specs: list[ChildSpec],
        folder: Path,
        quiet: bool,
        chat: list[str] | None = None,
        group: EdgeGroup | None = None,
    ) -> None:
        self._settings = settings
        self._specs = specs
        self._folder = folder
        self._quiet = quiet or chat is not None
        self._chat = chat
        self._group = group
        self._out = HeldOutput(sys.stdout)
        self._json_view: TerminalView | None = None
        """With JSON logs, all output goes there."""
        self._chat_code = 0

    async def run(self) -> int:
        settings = self._settings
        stop = StopSignal()
        stop.install()
        environ = without_settings(os.environ)
        for name in list(os.environ):
            if name not in environ:
                del os.environ[name]  # children use the resolved config only
        supervisor_settings = settings.supervisor
        out = sys.stdout if self._chat is None else self._out
        clock = SystemClock()
        as_json = settings.log.format == "json" and self._chat is None
        view = TerminalView(
            out,
            [spec.name for spec in self._specs],
            quiet=self._quiet or settings.log.level in ("warning", "error"),
            json_clock=clock if as_json else None,
        )
        self._json_view = view if as_json else None
        supervisor = Supervisor(
            self._specs,
            self._folder,
            clock,
            stop,
            SupervisorConfig(
                restart=RestartRule(
                    backoff_initial_s=supervisor_settings.restart_backoff_s,
                    backoff_max_s=supervisor_settings.restart_backoff_max_s,
                ),
                # A process may use its whole drain time; it counts as stuck only after that.
                stop_timeout_s=settings.runtime.drain_timeout_s + supervisor_settings.stop_timeout_s,
            ),
            view,
            on_event=self._group.on_event if self._group is not None else None,
        )
        self._say(f"starting {len(self._specs)} processes; logs in {self._folder}")
        code = 1
        async with Scope("serve") as scope:
            scope.start(self._announce(stop), "announce")
            try:
                code = await supervisor.run()
            finally:
                scope.cancel()
        self._say("stopped")
        return code or self._chat_code

    def _say(self, text: str, level: Level = Level.INFO) -> None:
        if self._json_view is None:
            print(f"kvolt: {text}", flush=True)
        else:
            self._json_view.show_own(level, text)

    async def _announce(self, stop: StopSignal) -> None:
        """Wait until the cluster is ready and print how to use it.

        Waits for every worker until `start_timeout_s`, then for one worker of each role.
        """
        frontend = self._settings.frontend
        base = base_url(frontend)
        clock = SystemClock()
        warn_at: float | None = clock.monotonic() + self._settings.runtime.start_timeout_s
        while True:
            models = await self._ready_models(base)
            if models and is_ready(self._settings, models, every_worker=warn_at is not None):
                break
            if warn_at is not None and clock.monotonic() >= warn_at:
                warn_at = None
                if models and is_ready(self._settings, models, every_worker=False):
                    continue
                what = missing(self._settings, models)
                waited_s = self._settings.runtime.start_timeout_s
                self._say(f"not ready after {waited_s:g} s: {what}; still waiting", Level.WARNING)
            await asyncio.sleep(_POLL_S)
        if self._chat is not None:
            await self._chat_with_model(base, models, stop)
            return
        if self._json_view is not None:
            self._say(f"ready at {base} with {models_text(models)}")
            return
        messages = [{"role": "user", "content": "Hello"}]
        body = json.dumps({"model": next(iter(models)), "messages": messages, "stream": True})
        print(
            f"\nkvolt: ready at {base} with {models_text(models)}. Try:\n\n"
            f"  curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n\n"
            f"or `kvolt chat --url {base}`; API documentation: {base}/docs. Ctrl-C stops everything.\n",
            flush=True,
        )

    async def _chat_with_model(self, base: str, models: Served, stop: StopSignal) -> None:
        assert self._chat is not None
        print(
            f"kvolt: ready at {base} with {models_text(models)}; leaving the chat stops everything\n",
            flush=True,
        )
        self._out.hold()
        try:
            self._chat_code = await chat_in_terminal(["--url", base, *self._chat], stop)
        finally:
            self._out.release()
        stop.request_stop("the chat has ended")

    async def _ready_models(self, base: str) -> Served | None:
        try:
            if self._settings.frontend.tls_client_authority is not None:  # HTTP requires a client certificate
                return await registered_models(self._settings)
            models = await served_models(base, 2.0)
            if models and self._group is not None:  # the process that responded knows only its own models
                async with asyncio.timeout(_DISCOVERY_TIMEOUT_S):
                    return await self._group.served_by_all()
            return models
        except (KvoltError, TimeoutError):
            return None
