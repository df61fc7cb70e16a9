"""The same items over grpc.aio server streaming: what a Python service would use otherwise.

Generic handlers, so no generated code; the messages are the same msgpack bytes that kvolt sends, and
all streams share one channel.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
from benchmarks.runtime.workload import Job, SteppedHandlers, Tally

from kvolt.core.delta import Delta
from kvolt.runtime.tasks import TaskGroup

_SERVICE, _METHOD = "bench.Worker", "Generate"

_encode = msgspec.msgpack.Encoder().encode
_decode_delta = msgspec.msgpack.Decoder(Delta).decode
_decode_number = msgspec.msgpack.Decoder(int).decode


class GrpcServer(SteppedHandlers):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._server = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(
            self._generate, request_deserializer=_decode_number, response_serializer=_encode
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def start(self) -> None:
        await self._server.start()

    async def _generate(self, request: int, context: Any) -> None:
        async for delta in self.deltas():
            await context.write(delta)

    def counters(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        await self._server.stop(None)


class GrpcClient:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._tally = Tally(job.streams)
        self.consume = self._tally.consume
        self._task_group = TaskGroup("readers")
        self._channel = grpc.aio.insecure_channel(job.address)

    async def open(self) -> None:
        generate = self._channel.unary_stream(
            f"/{_SERVICE}/{_METHOD}", request_serializer=_encode, response_deserializer=_decode_delta
        )
        for number in range(self._job.streams):
            self._task_group.start(self._read(generate(number)), "reader")

    async def _read(self, answers: AsyncIterator[Delta]) -> None:
        try:
            async for delta in answers:
                self._tally.add(len(delta.token_ids))
        except grpc.aio.AioRpcError as error:
            self._tally.fail(error)

    def counters(self) -> dict[str, int]:
        return {"tokens": self._tally.tokens}

    async def close(self) -> None:
        await self._task_group.close()
        await self._channel.close()


async def serve(job: Job) -> GrpcServer:
    server = GrpcServer(job)
    await server.start()
    return server


async def connect(job: Job) -> GrpcClient:
    return GrpcClient(job)
