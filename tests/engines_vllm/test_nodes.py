"""A model over two nodes: the first registers and answers, the second follows. Both are on this machine here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from tests.engines_vllm.test_serving import ENGINE_ARGS
from tests.served import Served, free_port, text_of


def over_two_nodes(port: int, rank: int) -> dict[str, object]:
    return ENGINE_ARGS | {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "node_rank": rank,
        "master_addr": "127.0.0.1",
        "master_port": port,
    }


def test_the_leader_answers_for_both(tiny: Path, tmp_path: Path) -> None:
    alone = Served(tmp_path, tiny, "vllm", ENGINE_ARGS)
    try:
        alone.ready(1)
        expected = text_of(alone.ask(list(range(50, 90)), 12))
    finally:
        alone.close()
    port = free_port()
    folder = tmp_path / "two"
    folder.mkdir()
    environ = os.environ | {"KVOLT_DISCOVERY_PATH": str(folder / "discovery")}
    log = folder / "follower.log"
    command = [sys.executable, "-m", "kvolt", "worker", str(tiny), "--engine", "vllm", "--name", "second"]
    command += ["--arg", f"engine_args={json.dumps(over_two_nodes(port, 1))}"]
    leader = Served(folder, tiny, "vllm", over_two_nodes(port, 0))
    with log.open("wb") as written:
        follower = subprocess.Popen(command, stdout=written, stderr=written, env=environ, cwd=folder)
    try:
        leader.ready(1)
        assert follower.poll() is None, log.read_text(errors="replace")[-3000:]
        assert text_of(leader.ask(list(range(50, 90)), 12)) == expected
        assert leader.num_workers() == 1, "the follower has registered"
    finally:
        family = psutil.Process(follower.pid).children(recursive=True)
        follower.send_signal(signal.SIGTERM)
        try:
            follower.wait(60)
        finally:
            leader.close()
        _, left = psutil.wait_procs(family, 15)
        for each in left:
            each.kill()
    assert not left, f"processes of the follower that did not end: {left}"
