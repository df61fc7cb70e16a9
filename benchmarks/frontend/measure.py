"""Measurements of an edge in one round: requests in two forms, streamed tokens in two ways.

Requests: 200-word prompts, all different, one token each, streamed; every connection sends its next request when the
answer is complete. Once with prompts of few distinct words, once with prompts of real text: see `prompts`.

Paced tokens: every connection has one open stream, and the mock sends each of them a token per step. The step length
determines the tokens per second of all connections together. Measured while all streams are running: the result is CPU
over tokens, without requests.

At 12,500 tokens/s an edge finishes a step before the next one, so that each event has a write of its own, on both
sides.

Tokens flat out: answers of 512 tokens from a mock without delay. Both edges lag all the time and coalesce their writes.
The number of events per write depends on the speed of the edge, so compare events per read: the more, the cheaper. The
result is the slope from 1 to 512 tokens: CPU per answer, minus CPU per request of one token, over 511.

A read is a receive of the client with data: a substitute for the edge's writes, which cannot be counted for the peer.
On a machine whose cores are all busy the client reads late and gets several writes in one read.
"""

from __future__ import annotations

import time

import msgspec
import uvloop
from benchmarks.frontend.client import Measured, Shape, closed_load, shape_of_stream, steady_load
from benchmarks.frontend.edges import Edge
from benchmarks.frontend.prompts import Writer, few_words, passage, prompt_requests
from benchmarks.harness import BrokenRun

_LIGHT_TOKENS_PER_S = 12_500.0
FLAT_TOKENS = 512
_AFTER_ABORT_S = 1.0
_SHARE = 0.5
"""Duration of the other loads as a share of that of requests: there are far more tokens than requests."""
_MIN_EVENTS_PER_TOKEN = 0.98
"""A token that is part of a character has no text, hence no event; the peer's mock sends some."""


def light_step_s(num_connections: int) -> float:
    return num_connections / _LIGHT_TOKENS_PER_S


class Edges(msgspec.Struct, frozen=True):
    """One system, once for each kind of mock: alike but for the time that a step takes."""

    flat: Edge
    light: Edge


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
    flat: Measured
    rss_bytes: int
    """Resident set of the edge after the requests and the tokens flat out."""

    @property
    def flat_events_per_token(self) -> float:
        num_content = self.flat.events - self.flat.responses * self.shape.other_events
        return num_content / (self.flat.responses * FLAT_TOKENS)


class Bench:
    """One system under one number of connections. Knows from each load how much fills the next window."""

    def __init__(self, edges: Edges, num_connections: int, seconds: float, lead_s: float) -> None:
        self._edges = edges
        self.name = edges.flat.name
        self._num_connections = num_connections
        self._seconds = seconds
        self._lead_s = lead_s
        self._seed = 0
        self._requests_per_s = 0.0
        self._answers_per_s = 0.0
        self._shape = Shape(0.0, 0)

    def warm_up(self) -> None:
        """BrokenRun if a stream does not have one event for each token."""
        self._closed(1, 4)
        self._closed(1, 4, passage)
        requests = self._closed(1, 4)
        self._requests_per_s = requests.responses / requests.wall_s
        flat = self._closed(128, 1)
        self._answers_per_s = flat.responses / flat.wall_s * 128 / FLAT_TOKENS
        self._shape = shape_of_stream(self._edges.flat)
        self._check(self._shape.events_per_token)
        self._closed(1, 4, edge=self._edges.light)

    def round(self, number: int) -> Row:
        requests = self._closed(1, self._share(self._requests_per_s * self._seconds))
        self._requests_per_s = requests.responses / requests.wall_s
        text = self._closed(1, self._share(self._requests_per_s * self._seconds * _SHARE), passage)
        light = self._steady()
        flat = self._closed(FLAT_TOKENS, self._share(self._answers_per_s * self._seconds * _SHARE))
        self._answers_per_s = flat.responses / flat.wall_s
        rss_bytes = self._edges.flat.meter.rss_bytes()
        loads = (requests, text, light, flat)
        row = Row(number, self.name, self._num_connections, self._shape, *loads, rss_bytes)
        self._check(row.flat_events_per_token)
        return row

    def _steady(self) -> Measured:
        edge = self._edges.light
        assert edge.step_s is not None
        seconds = self._seconds * _SHARE
        num_tokens = int((seconds + self._lead_s) * 1.5 / edge.step_s)
        requests = prompt_requests(self._num_connections, num_tokens, self._next_seed(), head=edge.head)
        done = uvloop.run(steady_load(edge, requests, seconds))
        time.sleep(_AFTER_ABORT_S)
        return done

    def _closed(
        self, max_tokens: int, per_connection: int, write: Writer = few_words, edge: Edge | None = None
    ) -> Measured:
        edge = edge or self._edges.flat
        requests = [
            prompt_requests(per_connection, max_tokens, self._next_seed(), write, edge.head)
            for _ in range(self._num_connections)
        ]
        return uvloop.run(closed_load(edge, requests))

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
