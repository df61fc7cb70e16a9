"""A process that is stopped as by SIGSTOP: nothing of it runs, its host goes on taking in bytes."""

from __future__ import annotations

import asyncio
import random

from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.virtual.loop import in_process, run_virtual
from kvolt.testing.virtual.network import VirtualNetwork
from kvolt.testing.virtual.ports import resume_process, stall_process


class Inbox(asyncio.Protocol):
    """Notes what arrives and when, in the log of its process."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.log.append(f"{asyncio.get_running_loop().time():g} got {data.decode()}")

    def connection_lost(self, error: Exception | None) -> None:
        self.log.append(f"{asyncio.get_running_loop().time():g} lost")


def test_a_stalled_process_runs_nothing_and_its_timers_fire_late() -> None:
    log: list[str] = []

    async def tick() -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            log.append(f"tick {asyncio.get_running_loop().time():g}")

    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        network.host("a"), network.host("b")
        task_group = TaskGroup("all")
        stalled = in_process("a", lambda: task_group.start(tick(), "a"))
        other = in_process("b", lambda: task_group.start(tick(), "b"))
        await asyncio.sleep(0.5)
        stall_process(network, "a")
        await other
        assert log == ["tick 1", "tick 2", "tick 3"]
        await asyncio.sleep(2)
        assert not stalled.done()
        resume_process(network, "a")
        await stalled
        assert log[3:] == ["tick 5", "tick 6", "tick 7"]
        await task_group.close()

    run_virtual(main)


def test_what_peers_sent_arrives_before_the_timers_that_came_due() -> None:
    log: list[str] = []

    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        a, b = network.host("a"), network.host("b")
        task_group = TaskGroup("all")

        async def serve() -> None:
            await a.listen("a:1", lambda: Inbox(log))
            await asyncio.sleep(3)
            log.append(f"{asyncio.get_running_loop().time():g} timer")

        serving = in_process("a", lambda: task_group.start(serve(), "serve"))
        await asyncio.sleep(0.1)
        client = await b.connect("a:1", lambda: Inbox([]), 1.0)
        await asyncio.sleep(0.1)
        stall_process(network, "a")
        assert isinstance(client, Inbox)
        assert isinstance(client.transport, asyncio.WriteTransport)
        await asyncio.sleep(4)
        client.transport.write(b"late")
        late = await b.connect("a:1", lambda: Inbox([]), 1.0)
        assert isinstance(late, Inbox)
        assert isinstance(late.transport, asyncio.WriteTransport)
        late.transport.write(b"accepted by the host")
        await asyncio.sleep(1.8)
        assert log == []
        resume_process(network, "a")
        await serving
        times, events = zip(*(line.split(maxsplit=1) for line in log), strict=True)
        assert events == ("got late", "got accepted by the host", "timer")
        assert len(set(times)) == 1
        await task_group.close()
        network.close()

    run_virtual(main)


def test_a_connection_that_was_reset_during_a_stall_is_seen_lost_after_it() -> None:
    log: list[str] = []

    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        a, b = network.host("a"), network.host("b")
        task_group = TaskGroup("all")

        async def serve() -> None:
            await a.listen("a:1", lambda: Inbox(log))

        await in_process("a", lambda: task_group.start(serve(), "serve"))
        await b.connect("a:1", lambda: Inbox([]), 1.0)
        await asyncio.sleep(1)
        stall_process(network, "a")
        network.crash("b", silent=False)
        await asyncio.sleep(1)
        assert log == []
        resume_process(network, "a")
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        assert [line.split()[1] for line in log] == ["lost"]
        await task_group.close()
        network.close()

    run_virtual(main)


def test_a_cancelled_task_of_a_stalled_process_ends_when_it_runs_again() -> None:
    async def forever() -> None:
        await asyncio.sleep(1e6)

    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        network.host("a")
        task_group = TaskGroup("all")
        task = in_process("a", lambda: task_group.start(forever(), "a"))
        await asyncio.sleep(0)
        stall_process(network, "a")
        task.cancel()
        await asyncio.sleep(1)
        assert not task.done()
        resume_process(network, "a")
        await task_group.close()
        assert task.cancelled()

    run_virtual(main)
