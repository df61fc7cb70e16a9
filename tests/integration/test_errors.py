"""What a user can get wrong at the start: one line that names the remedy, exit code 2, within seconds."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.processes import Bench

SECONDS = 12.0
"""A generous "at once": starting Python on a busy machine is most of it."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that somebody else listens on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield str(holder.getsockname()[1])


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of the result that is no log record."""
    said = []
    for line in result.stderr.splitlines():
        try:
            assert json.loads(line)["level"] in ("info", "warning")
        except ValueError:
            said.append(line)
    assert len(said) == 1, result.stderr
    assert said[0].startswith("kvolt: ")
    assert said[0].endswith(")"), "no remedy"
    assert result.returncode == 2, said[0]
    assert "Traceback" not in result.stdout
    return said[0]


WRONG = {
    "a flag": ("serve", "--prot", "1", "unknown flag --prot; did you mean --port?"),
    "a value": ("frontend", "--port", "99999", "--port: expected a whole number from 0 to 65535"),
    "an address to join": ("worker", "--join", "nonsense", "--join: expected HOST:PORT"),
    "an engine": ("worker", "--engine", "vlm", "unknown engine 'vlm' (known engines: native, remote, sglang"),
    "an engine argument": ("worker", "--arg", "spee=2", "no argument 'spee' (did you mean 'speed'?)"),
    "an engine argument's value": ("worker", "--arg", "speed=0", "engine 'sim': Expected `float` > 0"),
    "a role": ("worker", "--role", "boss", "unknown choice boss; known: aggregated, prefill, decode, encode"),
    "a port for three processes": (
        "serve",
        "--set",
        "admin.port=9000",
        "admin.port is 9000, but 3 processes cannot share a port (set it to 0",
    ),
    "nowhere to reach it": (
        "frontend",
        "--discovery-join-listen",
        "0.0.0.0:0",
        "but the address of this machine is not set (set runtime.host or",
    ),
    "no workers": ("serve", "--workers", "0", "serve needs at least one worker (set --workers to 1 or more)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_command(bench: Bench, what: str) -> None:
    *command, expected = WRONG[what]
    assert expected in complaint(bench.run(*command, timeout_s=SECONDS))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[frontend]\nprot = 1\n", "wrong.toml:frontend.prot: unknown key; did you mean frontend.port?"),
        ('[[workers]]\nrole = "boss"\n', "wrong.toml:workers.0.role: expected one of aggregated"),
        (
            '[[workers]]\nmodel = "sim-tiny"\nargs = {spee = 1}\n',
            "no argument 'spee' (did you mean 'speed'?)",
        ),
    ],
)
def test_wrong_file(bench: Bench, text: str, expected: str) -> None:
    (bench.folder / "wrong.toml").write_text(text)
    assert expected in complaint(bench.run("serve", "--config", "wrong.toml", timeout_s=SECONDS))


def test_wrong_environment(bench: Bench) -> None:
    result = bench.run("serve", timeout_s=SECONDS, KVOLT_FRONTEND_PROT="1")
    assert "KVOLT_FRONTEND_PROT: unknown setting; did you mean KVOLT_FRONTEND_PORT?" in complaint(result)


@pytest.mark.parametrize(
    ("verb", "key"),
    [("serve", "frontend.port"), ("frontend", "frontend.port"), ("worker", "runtime.port")],
)
def test_taken_port(bench: Bench, taken: str, verb: str, key: str) -> None:
    result = bench.run(verb, "--set", f"{key}={taken}", timeout_s=SECONDS)
    said = complaint(result)
    assert f"127.0.0.1:{taken} is already in use" in said
    assert "choose another port, or 0 for any free one" in said
    assert not list(bench.discovery.glob("keys/*")), "it registered before it failed"


def test_nobody_to_join(bench: Bench) -> None:
    result = bench.run(
        "worker", "--join", "127.0.0.1:1", "--set", "runtime.start_timeout_s=1", timeout_s=SECONDS
    )
    said = complaint(result)
    assert "discovery unreachable" in said
    assert "127.0.0.1:1" in said
    assert "start the process that serves it" in said


@pytest.mark.parametrize(("verb", "inside"), [("serve", ""), ("worker", "below"), ("status", "")])
def test_discovery_path_is_a_file(bench: Bench, verb: str, inside: str) -> None:
    place = bench.folder / "file"
    place.touch()
    said = complaint(bench.run(verb, "--discovery-path", str(place / inside), timeout_s=SECONDS))
    assert f"{place} is not a directory" in said
