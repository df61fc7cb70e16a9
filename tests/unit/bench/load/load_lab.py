"""Runs loads against a scripted server on virtual time: delays are exact, and nothing waits for real."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.unit.bench.load.scripted_server import ScriptedServer, Scripter

from kvolt.bench.load.bodies import Endpoint, RequestMaker
from kvolt.bench.load.runner import LoadRun, Pace
from kvolt.bench.load.sample import Sample
from kvolt.bench.load.sla import Sla
from kvolt.bench.load.tally import Tally
from kvolt.bench.load.workloads import Lengths, PromptShape, Synthetic, Workload
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.server_url import ServerUrl
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.loop import VirtualClock, run_virtual
from kvolt.testing.virtual.network import VirtualNetwork

SERVER = ServerUrl.parse("http://server:80").of_api()
QUICK = LinkProfile(latency_s=0.0)
SMALL = PromptShape(input=Lengths(8, 8), output=Lengths(4, 4))


@dataclass
class Outcome:
    """A run that is over."""

    tally: Tally
    server: ScriptedServer
    samples: list[Sample] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)
    is_interrupted: bool = False
    took_s: float = 0.0
    connections_left: int = 0

    @property
    def errors(self) -> list[str | None]:
        return [sample.error for sample in sorted(self.samples, key=lambda sample: sample.number)]


@dataclass
class Setup:
    """All that can be chosen."""

    pace: Pace
    workload: Workload = field(default_factory=lambda: Synthetic(SMALL, 0))
    connect_s: float = 10.0
    max_connections: int = 10_000
    sla: Sla | None = None
    profile: LinkProfile = QUICK
    fields: dict[str, Any] = field(default_factory=dict)
    meanwhile: Callable[[LoadRun, VirtualNetwork, ScriptedServer], None] = lambda load, network, server: None
    on_accept: Callable[[Any], None] = lambda connection: None
    listens: bool = True


def measured(script: Scripter, setup: Setup) -> Outcome:
    """Run it to its end; nothing may be left on the loop."""

    async def main() -> Outcome:
        network = VirtualNetwork(random.Random(0), profile=setup.profile)
        server = ScriptedServer(script, on_accept=setup.on_accept)
        host = network.host("server")
        if setup.listens:
            await host.listen("server:80", server.protocol)
        clock = VirtualClock()
        client = HttpClient(
            SERVER,
            connect_s=setup.connect_s,
            max_connections=setup.max_connections,
            max_idle=setup.max_connections,
            network=network.host("client"),
            now=clock.monotonic,
        )
        tally = Tally(setup.sla, random.Random(0).random)
        outcome = Outcome(tally, server)

        def keep(sample: Sample, counted: bool) -> None:
            outcome.samples.append(sample)
            outcome.counted.append(counted)

        maker = RequestMaker("tiny", Endpoint.CHAT, setup.fields)
        load = LoadRun(client, setup.workload, maker, setup.pace, tally)
        load.on_sample = keep
        try:
            setup.meanwhile(load, network, server)
            await load.run()
        finally:
            await client.close()
            server.close()
            network.close()
        outcome.is_interrupted = load.is_interrupted
        outcome.took_s = clock.monotonic()
        outcome.connections_left = client.num_connections
        return outcome

    return run_virtual(main)
