"""The same loads from wrk, as a second opinion of the client's figures (`--wrk`).

wrk stops at a time, not at an answer's end, so that the answers it cuts off are counted as CPU and not
as tokens: with many connections and long answers its figures per token are too high, for both systems.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
from benchmarks.frontend import tiny_model
from benchmarks.frontend.edges import Edge
from benchmarks.harness import BrokenRun

_SCRIPT = Path(__file__).with_name("load.lua")
_NUM_TOKENS = 512


class WrkFigures(msgspec.Struct, frozen=True):
    cpu_us_per_request: float
    cpu_us_per_token: float
    requests_per_s: float
    tokens_per_s: float


def wrk_command() -> str:
    found = shutil.which("wrk")
    if found is None:
        raise BrokenRun("there is no wrk: install it (Debian, Ubuntu: `apt install wrk`) or leave --wrk out")
    return found


def wrk_round(edge: Edge, num_connections: int, seconds: float) -> WrkFigures:
    request_cpu_s, requests_per_s = _load(edge, num_connections, seconds, 1)
    answer_cpu_s, answers_per_s = _load(edge, num_connections, seconds, _NUM_TOKENS)
    return WrkFigures(
        cpu_us_per_request=1e6 * request_cpu_s,
        cpu_us_per_token=1e6 * (answer_cpu_s - request_cpu_s) / (_NUM_TOKENS - 1),
        requests_per_s=requests_per_s,
        tokens_per_s=answers_per_s * _NUM_TOKENS,
    )


def _load(edge: Edge, num_connections: int, seconds: float, max_tokens: int) -> tuple[float, float]:
    """CPU seconds per answer, and answers per second."""
    command = [
        *(wrk_command(), "-t1", f"-c{num_connections}", f"-d{max(round(seconds), 1)}s", "--timeout", "60s"),
        *("-s", str(_SCRIPT), f"http://127.0.0.1:{edge.port}"),
    ]
    before = edge.meter.cpu_s()
    done = subprocess.run(
        command,
        env={**os.environ, "MODEL": tiny_model.NAME, "MAX_TOKENS": str(max_tokens)},
        capture_output=True,
        text=True,
        check=False,
    )
    used = edge.meter.cpu_s() - before
    count = re.search(r"(\d+) requests in", done.stdout)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    if done.returncode or count is None or rate is None or "Non-2xx" in done.stdout or not int(count[1]):
        raise BrokenRun(f"wrk against {edge.name} failed:\n{done.stdout}{done.stderr}")
    return used / int(count[1]), float(rate[1])
