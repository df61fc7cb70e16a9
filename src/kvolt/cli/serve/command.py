"""`kvolt serve`: a whole kvolt on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvolt.cli.cluster import visit
from kvolt.cli.frontend.edge import EdgeGroup, edge_group, num_edge_processes
from kvolt.cli.health import Served, base_url, served_models
from kvolt.cli.process import check_directory, plane_host, process_options, run_loop
from kvolt.cli.serve.chat import HeldOutput, chat_in_terminal
from kvolt.cli.serve.placement import device_flags, place, visible_gpus
from kvolt.cli.serve.pools import pools_of
from kvolt.cli.serve.readiness import in_words, is_ready, missing
from kvolt.cli.worker.command import add_engine_flags, check_engine, with_arguments, with_model
from kvolt.cli.worker.tiers import add_tier_flags, with_tiers
from kvolt.core.errors import ConfigError, KvoltError
from kvolt.core.request import Role
from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.config.loader import LoadedConfig, without_settings
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.config.toml_writer import to_toml
from kvolt.runtime.host.cores import share_cores, thread_env, usable_cores
from kvolt.runtime.network import SocketNetwork, join_address, split_host
from kvolt.runtime.stop import StopSignal
from kvolt.runtime.supervisor.folder import own_folder, private_file
from kvolt.runtime.supervisor.output import TerminalView
from kvolt.runtime.supervisor.plan import RestartRule
from kvolt.runtime.supervisor.supervisor import ChildSpec, Supervisor, SupervisorConfig
from kvolt.runtime.tasks import Scope

HELP = """
Start a frontend and the workers of the config as processes of this machine, keep them alive, and show
their logs merged. Ctrl-C stops all of it in order; a second Ctrl-C at once.

Examples:
  kvolt serve                          SmolLM2-135M on 127.0.0.1:8000: a frontend and a worker
  kvolt serve Qwen/Qwen3-0.6B          another model: a name on the hub, a folder, a GGUF file
  kvolt serve --arg dtype=float32      an argument of the engine (`kvolt engine list native` tells them)
  kvolt serve Qwen/Qwen3-8B --engine vllm --arg engine_args.max_model_len=32768
                                       vLLM computes; its own arguments are engine_args (docs/engines.md)
  kvolt serve sim-tiny --workers 4     simulated workers: no weights, no torch
  kvolt serve --prefill 2 --decode 2   prompts computed by two workers, answers by two others
  kvolt serve --lora sql=./adapters/sql
                                       with a LoRA adapter: ask for model "sql", or for the model itself
  kvolt serve --kv-host 4GiB --kv-disk 50GiB
                                       keep KV that leaves the device, and find it again after a restart
  kvolt serve --processes 4            the frontend as four processes on one port, and a router
  kvolt serve --config cluster.toml    the [[workers]] of a config file
  kvolt serve --interactive            and a chat with it here; logs go to files, leaving stops everything
  kvolt serve --discovery-join-listen 10.0.0.5:7400
                                       others join with `kvolt worker --join 10.0.0.5:7400`
"""

ROLES = (Role.PREFILL.value, Role.DECODE.value, Role.AGGREGATED.value)
_FOR_WORKERS = "workers.toml"
"""The config of workers and their pools, in the supervisor's folder."""
_POLL_S = 0.1
_CORES_PER_EDGE = 4
"""On machines with fewer, a core kept free for the frontend would idle while the workers lack it."""
_LOOK_TIMEOUT_S = 5.0
_LASTING_PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections: none takes one between our look and the frontend's start."""
_MAX_PORT_LOOKS = 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="model of the first [[workers]] entry (default: smollm2-135m)"
    )
    parser.add_argument(
        "--engine",
        help="what computes: native, vllm, sglang ... (default: as the config says, or by the model)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes of the first [[workers]] entry")
    parser.add_argument(
        "--prefill",
        type=int,
        metavar="N",
        help="workers that compute prompts for those of --decode, which go on with them: the first [[workers]] entry "
        "in each of these roles",
    )
    parser.add_argument("--decode", type=int, metavar="N", help="see --prefill")
    parser.add_argument(
        "--aggregated",
        type=int,
        metavar="N",
        help="workers that do both: the same as --workers",
    )
    add_engine_flags(parser)
    add_tier_flags(parser)
    parser.add_argument(
        "--kv-shared",
        action="store_true",
        help="one pool of what --kv-host, --kv-disk and --kv-object say for all workers, in place of one for each",
    )
    parser.add_argument("--quiet", action="store_true", help="show only warnings and errors of the processes")
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="chat with the model here once it is ready; implies --quiet",
    )


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    given = with_workers(with_model_served(loaded.settings, args.model, args.engine), args.workers)
    given = with_engine_flags(given, args.arg, args.lora)
    if given.workers:
        given = msgspec.structs.replace(
            given, workers=[with_tiers(given.workers[0], args), *given.workers[1:]]
        )
    given = with_roles(given, {role: getattr(args, role) for role in ROLES})
    for group in given.workers:
        check_engine(group)
    return serve(given, args.quiet, args.interactive)


def serve(given: Settings, quiet: bool = False, interactive: bool = False) -> int:
    """All processes of these settings, until they are told to stop; the exit code."""
    check_shared(given)
    _check_router(given)

    async def main() -> int:
        await check_directory(given)
        settings = await _with_port(given)
        base = settings.supervisor.log_dir
        assert base is not None, "the config loader sets it"
        with (
            own_folder(Path(base)) as folder,
            pools_of(settings, folder, folder / _FOR_WORKERS) as (settings, pools),
            # The children read their config again at every restart.
            private_file(folder / "frontend.toml", to_toml(settings)) as for_frontend,
            private_file(folder / _FOR_WORKERS, to_toml(worker_settings(settings))) as for_workers,
            edge_group(settings, folder) as group,
        ):
            await _tell_of_others(settings)
            specs = [*pools, *child_specs(settings, for_frontend, for_workers, group)]
            # The chat is to read no config but ours: not what lies in this folder by chance.
            chat = ["--config", str(for_frontend)] if interactive else None
            return await _Serve(settings, specs, folder, quiet, chat, group).run()

    return run_loop(main)


def _check_router(settings: Settings) -> None:
    """ConfigError for a policy of one's own that does not work, before anything is started."""
    if ":" in settings.frontend.router or settings.router.shadow is not None:
        # Not at the top: it is of no use in the process that supervises.
        from kvolt.router.registry import find_router

        find_router(settings.frontend.router, settings.router)


def check_shared(settings: Settings) -> None:
    """ConfigError for what only one process can have when there are several."""
    process_options(settings, "serve")
    if settings.discovery.kind == "mem":
        raise ConfigError(
            "discovery.kind is mem, which one process cannot share with another",
            key="discovery.kind",
            remedy="use file on one machine",
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
                f"{key} is {port}, but {num_processes} processes of one machine cannot share a port",
                key=key,
                remedy="leave it 0, and each takes a free one that `kvolt status --json` shows",
            )
    advertise = settings.runtime.advertise
    if advertise is not None and split_host(advertise)[1] is not None:
        raise ConfigError(
            f"runtime.advertise is {advertise}, but {num_processes} processes have a port each",
            key="runtime.advertise",
            remedy=f"give the host alone, {split_host(advertise)[0]}",
        )


def worker_settings(settings: Settings) -> Settings:
    """One process alone serves discovery to other machines; those must reach the others all the same."""
    return msgspec.structs.replace(
        settings,
        runtime=msgspec.structs.replace(settings.runtime, host=plane_host(settings)),
        discovery=msgspec.structs.replace(settings.discovery, join_listen=None),
    )


async def _tell_of_others(settings: Settings) -> None:
    try:
        async with asyncio.timeout(_LOOK_TIMEOUT_S), visit(settings) as cluster:
            running = [view for view in await cluster.look() if view.status is not None]
    except (KvoltError, TimeoutError):
        return  # a courtesy: what is wrong with discovery, the children will say
    if running:
        noun = "process" if len(running) == 1 else "processes"
        print(
            f"kvolt: joins {len(running)} {noun} already in namespace {settings.namespace}; "
            "use --namespace to keep apart",
            flush=True,
        )


def with_model_served(settings: Settings, model: str | None, engine: str | None = None) -> Settings:
    if (model is None and engine is None) or not settings.workers:
        return settings
    first = with_model(settings.workers[0], model or settings.workers[0].model, engine)
    return msgspec.structs.replace(settings, workers=[first, *settings.workers[1:]])


def with_workers(settings: Settings, count: int | None) -> Settings:
    if count is None:
        return settings
    if count < 1 or not settings.workers:
        raise ConfigError("serve needs at least one worker", key="workers", remedy="give --workers 1 or more")
    first = msgspec.structs.replace(settings.workers[0], count=count)
    return msgspec.structs.replace(settings, workers=[first, *settings.workers[1:]])


def with_roles(settings: Settings, counts: Mapping[str, int | None]) -> Settings:
    """So many workers of each role that is named, each as the first [[workers]] entry; None leaves all as it is."""
    wanted = {role: count for role, count in counts.items() if count is not None}
    if not wanted:
        return settings
    remedy = "for example --prefill 1 --decode 1, or --aggregated 2"
    if min(wanted.values()) < 0 or not any(wanted.values()) or not settings.workers:
        raise ConfigError("serve needs at least one worker", key="workers", remedy=remedy)
    if wanted.get("prefill") and not wanted.get("decode"):
        raise ConfigError("nobody goes on with what prefill workers compute", key="workers", remedy=remedy)
    if wanted.get("decode") and wanted.get("aggregated"):
        # They are two components of the model, and a frontend asks the newest of them.
        raise ConfigError(
            "workers that decode and workers that do both would not share the requests for one model",
            key="workers",
            remedy=remedy,
        )
    first = settings.workers[0]
    groups = [
        msgspec.structs.replace(first, name=role, role=role, count=count)
        for role, count in wanted.items()
        if count
    ]
    return msgspec.structs.replace(settings, workers=[*groups, *settings.workers[1:]])


def with_engine_flags(settings: Settings, arguments: Sequence[str], loras: Sequence[str]) -> Settings:
    """What `--arg` and `--lora` say, at the first [[workers]] entry."""
    if not arguments and not loras:
        return settings
    if not settings.workers:
        raise ConfigError(
            "--arg and --lora are for workers, and there are none", key="workers", remedy="add [[workers]]"
        )
    first = with_arguments(settings.workers[0], arguments, loras)
    return msgspec.structs.replace(settings, workers=[first, *settings.workers[1:]])


async def _with_port(settings: Settings) -> Settings:
    """The port known before anything is started: a taken one is told, and 0 becomes a free one."""
    frontend = settings.frontend
    port = frontend.port or await _free_port(frontend.host)
    await _check_free(frontend.host, port)
    return msgspec.structs.replace(settings, frontend=msgspec.structs.replace(frontend, port=port))


async def _free_port(host: str) -> int:
    *others, last = random.sample(_LASTING_PORTS, _MAX_PORT_LOOKS)
    for port in others:
        with contextlib.suppress(ConfigError):
            await _check_free(host, port)
            return port
    return last  # the caller looks at it, and says what is wrong


async def _check_free(host: str, port: int) -> None:
    """ConfigError where somebody listens there, or nobody can."""
    listener = await SocketNetwork().listen(join_address(host, port), asyncio.Protocol)
    await listener.close()


def child_specs(
    settings: Settings, for_frontend: Path, for_workers: Path, group: EdgeGroup | None = None
) -> list[ChildSpec]:
    """The processes. The frontend stops first (stage 1): its requests end while workers still serve."""
    command = (sys.executable, "-m", "kvolt")
    if group is None:
        edge = [ChildSpec("frontend", (*command, "frontend", "--config", str(for_frontend)), stage=1)]
    else:
        edge = group.specs(for_frontend, for_workers)
    names = [
        (group.name, f"{group.name}-{index}") for group in settings.workers for index in range(group.count)
    ]
    cores = usable_cores().ids
    reserved = min(settings.frontend.processes, len(cores) // _CORES_PER_EDGE)
    shares = share_cores(cores, len(names), reserved)
    placed = place(settings.workers, visible_gpus(os.environ))
    workers = []
    for (kind, name), share, gpus in zip(names, shares, placed, strict=True):
        worker = (*command, "worker", "--config", str(for_workers), "--group", kind, "--name", name)
        devices, visible = device_flags(gpus)
        workers.append(ChildSpec(name, (*worker, *devices), env={**thread_env(share), **visible}))
    return [*edge, *workers]


class _Serve:
    """The supervisor, and a word to the user when a request would be answered, or a chat (given its flags)."""

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
        self._chat_code = 0
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
        out = sys.stdout if self._chat is None else self._out
        view = TerminalView(out, [spec.name for spec in self._specs], quiet=self._quiet)
        supervisor = Supervisor(
            self._specs,
            self._folder,
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
            on_event=self._group.on_event if self._group is not None else None,
        )
        print(f"kvolt: starting {len(self._specs)} processes; logs in {self._folder}", flush=True)
        code = 1
        async with Scope("serve") as scope:
            scope.start(self._announce(stop), "announce")
            try:
                code = await supervisor.run()
            finally:
                scope.cancel()
        self._blocking.close()
        print("kvolt: stopped", flush=True)
        return code or self._chat_code

    async def _announce(self, stop: StopSignal) -> None:
        """Wait until requests would be answered by every role, by every worker if that does not take too long; say how
        to ask."""
        frontend = self._settings.frontend
        base = base_url(frontend.host, frontend.port)
        clock = SystemClock()
        complain_at: float | None = clock.monotonic() + self._settings.runtime.start_timeout_s
        while True:
            models = await self._ready_models(base)
            if models and is_ready(self._settings, models, every_worker=complain_at is not None):
                break
            if complain_at is not None and clock.monotonic() >= complain_at:
                complain_at = None
                if models and is_ready(self._settings, models, every_worker=False):
                    continue
                what = missing(self._settings, models)
                waited_s = self._settings.runtime.start_timeout_s
                print(f"kvolt: not ready after {waited_s:g} s: {what}; still waiting", flush=True)
            await asyncio.sleep(_POLL_S)
        if self._chat is not None:
            await self._converse(base, models, stop)
            return
        messages = [{"role": "user", "content": "Hello"}]
        body = json.dumps({"model": next(iter(models)), "messages": messages, "stream": True})
        print(
            f"\nkvolt: ready at {base} with {in_words(models)}. Try:\n\n"
            f"  curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n\n"
            f"or `kvolt chat --url {base}`; {base}/docs tells the rest. Ctrl-C stops everything.\n",
            flush=True,
        )

    async def _converse(self, base: str, models: Served, stop: StopSignal) -> None:
        assert self._chat is not None
        print(f"kvolt: ready at {base} with {in_words(models)}; leaving stops everything\n", flush=True)
        self._out.hold()
        try:
            self._chat_code = await chat_in_terminal(["--url", base, *self._chat], stop)
        finally:
            self._out.release()
        stop.request_stop("the chat has ended")

    async def _ready_models(self, base: str) -> Served | None:
        try:
            models = await self._blocking.run(lambda: served_models(base, 2.0), 5.0)
            if models and self._group is not None:  # whichever process answered speaks for itself only
                async with asyncio.timeout(_LOOK_TIMEOUT_S):
                    return await self._group.served_by_all()
            return models
        except (KvoltError, TimeoutError):
            return None
