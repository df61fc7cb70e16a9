"""Runs loads against a scripted server on virtual time: delays are exact, and nothing waits for real."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.unit.bench.load.scripted_server import ScriptedServer, Scripter

from kvolt.bench.load.bodies import Endpoint, RequestMaker, parse_target
from kvolt.bench.load.client import ClientLimits, HttpClient
from kvolt.bench.load.runner import LoadRun, Pace
from kvolt.bench.load.sample import Sample
from kvolt.bench.load.sla import Sla
from kvolt.bench.load.tally import Tally
from kvolt.bench.load.workloads import Lengths, PromptShape, Synthetic, Workload
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.loop import VirtualClock, run_virtual
from kvolt.testing.virtual.network import VirtualNetwork

TARGET = parse_target("http://server:80")
QUICK = LinkProfile(latency_s=0.0)
SMALL = PromptShape(input=Lengths(8, 8), output=Lengths(4, 4))


@dataclass
class Outcome:
    """A run that is over."""

    tally: Tally
    server: ScriptedServer
    samples: list[Sample] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)
    was_cut: bool = False
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
    limits: ClientLimits = field(default_factory=ClientLimits)
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
        client = HttpClient(network.host("client"), clock, TARGET.address, setup.limits)
        tally = Tally(setup.sla, random.Random(0).random)
        outcome = Outcome(tally, server)

        def keep(sample: Sample, counted: bool) -> None:
            outcome.samples.append(sample)
            outcome.counted.append(counted)

        maker = RequestMaker(TARGET, "tiny", Endpoint.CHAT, setup.fields)
        load = LoadRun(client, clock, setup.workload, maker, setup.pace, tally, keep)
        try:
            setup.meanwhile(load, network, server)
            await load.run()
        finally:
            await client.close()
            server.close()
            network.close()
        outcome.was_cut = load.was_cut
        outcome.took_s = clock.monotonic()
        outcome.connections_left = client.num_connections
        return outcome

    return run_virtual(main)
