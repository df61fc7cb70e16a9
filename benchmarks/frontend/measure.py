"""What a round measures of an edge: requests in two ways, streamed tokens in three.

Requests: 200-word prompts, all different, one token each, streamed; every connection asks its next one
when an answer has ended. Once with prompts of few words, once with prompts of text: see `prompts`.

Tokens at a pace: every connection has one stream open, and the mock gives each of them a token per step. Steps
are as long as it takes for all connections together to get so many tokens a second. Measured while all
streams are under way: the figure is CPU over tokens, and no request is in it.

- light, 12,500 tokens/s: an edge is done with a step before the next one comes, so that each event
  has a write of its own, on both sides.
- busy, 50,000 tokens/s: about what Dynamo can carry on two cores that it shares with mock and client. It begins
  to lag and so to put several events into one write, which makes each of them cheaper.

Tokens flat out: answers of 512 tokens from a mock that takes no time. Both edges lag all the while and
coalesce what they write. How much of a stream is ready by the next write depends on how fast an edge is, so
look at events per read: the more, the cheaper. The figure is the slope from 1 to 512 tokens: CPU per
answer, less CPU per request of one token, over 511.

A read is a receive of the client that had data in it: a stand-in for the edge's writes, which cannot be
counted on the peer's side. On a machine whose cores are all busy the client comes late and finds several
writes in one read.
"""

from __future__ import annotations

import time

import msgspec
import uvloop
from benchmarks.frontend.client import Measured, Shape, closed_load, shape_of_stream, steady_load
from benchmarks.frontend.delays import DelayRow, arrivals
from benchmarks.frontend.edges import Edge
from benchmarks.frontend.prompts import Writer, few_words, passage, prompt_requests
from benchmarks.frontend.wrk import WrkFigures
from benchmarks.harness import BrokenRun

_LIGHT_TOKENS_PER_S = 12_500.0
_BUSY_TOKENS_PER_S = 50_000.0
_FLAT_TOKENS = 512
_AFTER_ABORT_S = 1.0
_SHARE = 0.5
"""Of the seconds for requests: what the other loads get. There are far more tokens than requests."""
_DELAY_TOKENS = 32
_MIN_EVENTS_PER_TOKEN = 0.98
"""A token that is part of a character gives no text, hence no event; the peer's mock says some."""


def light_step_s(num_connections: int) -> float:
    return num_connections / _LIGHT_TOKENS_PER_S


def busy_step_s(num_connections: int) -> float:
    return num_connections / _BUSY_TOKENS_PER_S


class Edges(msgspec.Struct, frozen=True):
    """One system, once for each kind of mock: alike but for the time that a step takes."""

    flat: Edge
    light: Edge
    busy: Edge


class Row(msgspec.Struct, frozen=True):
    """One system at one number of connections in one round."""

    round: int
    system: str
    connections: int
    shape: Shape
    requests: Measured
    text: Measured
    """Requests whose prompts are text; all other loads have prompts of few words."""
    light: Measured
    busy: Measured
    flat: Measured
    rss_bytes: int
    """Of the edge that had the requests and the tokens flat out."""
    wrk: WrkFigures | None = None

    @property
    def cpu_us_per_request(self) -> float:
        return 1e6 * self.requests.edge_cpu_s / self.requests.responses

    @property
    def cpu_us_per_text_request(self) -> float:
        return 1e6 * self.text.edge_cpu_s / self.text.responses

    @property
    def requests_per_s(self) -> float:
        return self.requests.responses / self.requests.wall_s

    @property
    def light_cpu_us_per_token(self) -> float:
        return 1e6 * self.light.edge_cpu_s / self.light.events

    @property
    def busy_cpu_us_per_token(self) -> float:
        return 1e6 * self.busy.edge_cpu_s / self.busy.events

    @property
    def flat_cpu_us_per_token(self) -> float:
        per_answer = 1e6 * self.flat.edge_cpu_s / self.flat.responses
        return (per_answer - self.cpu_us_per_request) / (_FLAT_TOKENS - 1)

    @property
    def flat_tokens_per_s(self) -> float:
        return self.flat.responses * _FLAT_TOKENS / self.flat.wall_s

    @property
    def flat_events_per_token(self) -> float:
        told = self.flat.events - self.flat.responses * self.shape.other_events
        return told / (self.flat.responses * _FLAT_TOKENS)


class Bench:
    """One system under one number of connections. Knows from each load how much fills the next window."""

    def __init__(self, edges: Edges, num_connections: int, seconds: float, lead_s: float = 4.0) -> None:
        self.edges = edges
        self._num_connections = num_connections
        self._seconds = seconds
        self._lead_s = lead_s
        self._seed = 0
        self._requests_per_s = 0.0
        self._answers_per_s = 0.0
        self._shape = Shape(0.0, 0)

    @property
    def name(self) -> str:
        return self.edges.flat.name

    def warm_up(self) -> None:
        """BrokenRun if a stream does not have one event for each token."""
        self._closed(1, 4)
        self._closed(1, 4, passage)
        requests = self._closed(1, 4)
        self._requests_per_s = requests.responses / requests.wall_s
        flat = self._closed(128, 1)
        self._answers_per_s = flat.responses / flat.wall_s * 128 / _FLAT_TOKENS
        self._shape = shape_of_stream(self.edges.flat)
        self._check(self._shape.events_per_token)
        for edge in (self.edges.light, self.edges.busy):
            requests_of_one = [prompt_requests(4, 1, self._next_seed()) for _ in range(self._num_connections)]
            uvloop.run(closed_load(edge, requests_of_one))

    def round(self, number: int) -> Row:
        requests, text = self.requests(), self.text()
        light, busy, flat = self.light(), self.busy(), self.flat()
        row = Row(
            number,
            self.name,
            self._num_connections,
            self._shape,
            requests,
            text,
            light,
            busy,
            flat,
            self.edges.flat.meter.rss_bytes(),
        )
        self._check(row.flat_events_per_token)
        return row

    def requests(self) -> Measured:
        done = self._closed(1, self._share(self._requests_per_s * self._seconds))
        self._requests_per_s = done.responses / done.wall_s
        return done

    def text(self) -> Measured:
        return self._closed(1, self._share(self._requests_per_s * self._seconds * _SHARE), passage)

    def light(self) -> Measured:
        return self._steady(self.edges.light)

    def busy(self) -> Measured:
        return self._steady(self.edges.busy)

    def flat(self) -> Measured:
        done = self._closed(_FLAT_TOKENS, self._share(self._answers_per_s * self._seconds * _SHARE))
        self._answers_per_s = done.responses / done.wall_s
        return done

    def delays(self, number: int, rate_per_s: float, seconds: float) -> list[DelayRow]:
        """With a mock that takes no time, and with the light one."""
        rows = []
        for edge in (self.edges.flat, self.edges.light):
            count = max(round(rate_per_s * seconds), 10)
            requests = prompt_requests(count, _DELAY_TOKENS, self._next_seed())
            waits = uvloop.run(arrivals(edge, requests, rate_per_s, seed=number))
            rows.append(waits.row(number, edge))
        return rows

    # ---

    def _steady(self, edge: Edge) -> Measured:
        assert edge.step_s is not None
        seconds = self._seconds * _SHARE
        num_tokens = int((seconds + self._lead_s) * 1.5 / edge.step_s)
        requests = prompt_requests(self._num_connections, num_tokens, self._next_seed())
        done = uvloop.run(steady_load(edge, requests, seconds))
        time.sleep(_AFTER_ABORT_S)
        return done

    def _closed(self, max_tokens: int, per_connection: int, write: Writer = few_words) -> Measured:
        requests = [
            prompt_requests(per_connection, max_tokens, self._next_seed(), write)
            for _ in range(self._num_connections)
        ]
        return uvloop.run(closed_load(self.edges.flat, requests))

    def _share(self, num_requests: float) -> int:
        return max(round(num_requests / self._num_connections), 1)

    def _next_seed(self) -> int:
        """Prompts of a load are new to the edge; the systems of a run are given the same, as far as they get."""
        self._seed += 1
        return self._seed

    def _check(self, events_per_token: float) -> None:
        if not _MIN_EVENTS_PER_TOKEN <= events_per_token <= 1.0 + 1e-9:
            raise BrokenRun(
                f"{self.name}: {events_per_token:.3f} events per token: no figures for single tokens"
            )
