"""The transfer agent of a process: made when the first worker of it moves KV, shared by all of them."""

from __future__ import annotations

from kvolt.engines.contract import KvPlaced
from kvolt.engines.kv_moving import AgentMover, KvMover
from kvolt.runtime.network import split_address
from kvolt.runtime.runtime import Runtime
from kvolt.transfer.agent import TransferAgent, TransferOptions


class Transfers:
    """`close` it after the workers."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._agent: TransferAgent | None = None

    def mover(self, engine: KvPlaced) -> KvMover:
        if self._agent is None:
            listen, told = self._runtime.options.listen, self._runtime.plane.address
            host = split_address(listen)[0]
            options = TransferOptions(host=host, advertise=split_address(told or listen)[0])
            self._agent = TransferAgent(options, self._runtime.ports.clock)
        return AgentMover(self._agent, engine.kv_slab())

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
