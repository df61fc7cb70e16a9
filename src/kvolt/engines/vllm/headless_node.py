"""vLLM processes of a node other than node 0 (`vllm serve --headless`).

For a model that spans hosts (`engine_args.nnodes`) only the worker of node 0 registers and takes requests. Workers of
the other nodes start vLLM's processes on their host, which node 0 controls, and end with them.
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


class NodeProcesses(NamedTuple):
    """vLLM processes on this host."""

    wait: Callable[[], Any]
    """Blocks until one of them has ended."""
    stop: Callable[[], Any]


class VllmHeadlessNode:
    """See the module."""

    def __init__(
        self,
        spec: EngineSpec,
        arguments: VllmArguments,
        start: Callable[[EngineSpec, VllmArguments, Path], NodeProcesses] | None = None,
    ) -> None:
        """`start`: replaced in tests."""
        self._spec = spec
        self._arguments = arguments
        self._start = start or start_node
        self._lock = threading.Lock()
        self._processes: NodeProcesses | None = None
        self._is_stopped = False

    async def run(self) -> None:
        """Run until cancelled. EngineFailed when vLLM's processes end by themselves."""
        over: Future[None] = Future()
        over.set_running_or_notify_cancel()
        # Not a thread of the loop's executor, which is joined at exit: waiting for node 0 cannot be interrupted.
        threading.Thread(
            target=self._run_in_folder, args=(over,), name="kvolt-vllm-processes", daemon=True
        ).start()
        try:
            await asyncio.wrap_future(over)
        finally:
            await asyncio.to_thread(self._stop)
        raise EngineFailed("vLLM's processes of this node have ended: check node 0", engine="vllm")

    def _run_in_folder(self, over: Future[None]) -> None:
        """Main function of the thread; owns the socket folder."""
        try:
            with socket_folder() as folder:
                self._run(Path(folder))
        except BaseException as error:  # raised in `run`
            over.set_exception(error)
        else:
            over.set_result(None)

    def _run(self, folder: Path) -> None:
        processes = self._start(self._spec, self._arguments, folder)
        with self._lock:
            self._processes = processes
            is_over = self._is_stopped
        if is_over:  # stopped while it started
            processes.stop()
            return
        args = self._arguments.engine_args
        log.info("headless node started: node=%s of=%s", args.get("node_rank"), args.get("nnodes", 1))
        processes.wait()

    def _stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            processes = self._processes
        if processes is not None:
            processes.stop()


def headless_node_of(spec: EngineSpec, arguments: VllmArguments) -> VllmHeadlessNode | None:
    """The headless node for these arguments; None for node 0, which runs the engine."""
    return VllmHeadlessNode(spec, arguments) if arguments.engine_args.get("node_rank", 0) else None


def start_node(spec: EngineSpec, arguments: VllmArguments, folder: Path) -> NodeProcesses:
    """Start the processes as `vllm serve --headless` does. Blocks until node 0 is reached and the model is loaded."""
    _, config = configure(spec, arguments, folder, SystemClock(), headless=True)
    parallel = config.parallel_config
    if parallel.node_rank_within_dp > 0:  # one replica spans several hosts
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        executor = MultiprocExecutor(config, monitor_workers=False)
        return NodeProcesses(lambda: executor.start_worker_monitor(inline=True), executor.shutdown)
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
    return NodeProcesses(manager.monitor_engine_liveness, manager.shutdown)
