"""VllmFollower: the part of a vLLM that runs on another host than its leader.

A model that is spread over hosts (`engine_args.nnodes`) has one kvolt worker that registers, that of node 0. The
others start vLLM's processes on their host, which are led from there, and end with them. They take no requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from kvolt.core.errors import EngineFailed
from kvolt.engines.contract import EngineSpec
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.launch import configure, socket_folder
from kvolt.runtime.clock import SystemClock

log = logging.getLogger(__name__)


class Part(NamedTuple):
    """Processes of a vLLM on one host."""

    wait: Callable[[], Any]
    """Until one of them has ended."""
    stop: Callable[[], Any]


class VllmFollower:
    """See the module."""

    def __init__(
        self,
        spec: EngineSpec,
        arguments: VllmArguments,
        start: Callable[[EngineSpec, VllmArguments, Path], Part] | None = None,
    ) -> None:
        """`start`: in place of a real vLLM."""
        self._spec = spec
        self._arguments = arguments
        self._start = start or start_part
        self._lock = threading.Lock()
        self._part: Part | None = None
        self._is_over = False

    async def run(self) -> None:
        """Until it is cancelled. EngineFailed when vLLM's processes here end by themselves."""
        over: Future[None] = Future()
        over.set_running_or_notify_cancel()
        # Not one of the loop's threads, whose ends are waited for: one that waits for its leader cannot be stopped.
        threading.Thread(target=self._live, args=(over,), name="kvolt-vllm-part", daemon=True).start()
        try:
            await asyncio.wrap_future(over)
        finally:
            await asyncio.to_thread(self._stop)
        raise EngineFailed("vLLM's processes of this node have ended: is its leader gone?", engine="vllm")

    def _live(self, over: Future[None]) -> None:
        """The thread, which has the folder for as long as it needs it."""
        try:
            with socket_folder() as folder:
                self._run(Path(folder))
        except BaseException as error:  # the end of a thread: it goes on in the caller's
            over.set_exception(error)
        else:
            over.set_result(None)

    def _run(self, folder: Path) -> None:
        part = self._start(self._spec, self._arguments, folder)
        with self._lock:
            self._part = part
            is_over = self._is_over
        if is_over:  # stopped while it started
            part.stop()
            return
        given = self._arguments.engine_args
        log.info("node %s of %s: its leader takes requests", given.get("node_rank"), given.get("nnodes", 1))
        part.wait()

    def _stop(self) -> None:
        with self._lock:
            self._is_over = True
            part = self._part
        if part is not None:
            part.stop()


def follower_of(spec: EngineSpec, arguments: VllmArguments) -> VllmFollower | None:
    """None for node 0, which leads."""
    return VllmFollower(spec, arguments) if arguments.engine_args.get("node_rank", 0) else None


def start_part(spec: EngineSpec, arguments: VllmArguments, folder: Path) -> Part:
    """As `vllm serve --headless` does it. Blocks until the leader is there, and the model is loaded."""
    _, config = configure(spec, arguments, folder, SystemClock(), headless=True)
    parallel = config.parallel_config
    if parallel.node_rank_within_dp > 0:  # of a replica that is spread over hosts
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        executor = MultiprocExecutor(config, monitor_workers=False)
        return Part(lambda: executor.start_worker_monitor(inline=True), executor.shutdown)
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    manager = CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
        executor_class=Executor.get_class(config),
        log_stats=True,
    )
    return Part(manager.monitor_engine_liveness, manager.shutdown)
