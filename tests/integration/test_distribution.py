"""What a release has: the wheel serves by itself, and the lock has what pyproject.toml and constraints.txt say."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.processes import MODEL, Bench

ROOT = Path(__file__).parents[2]
MODULES = ("_index_native", "_cost_model_native", "_fp8_native", "_bytes_native")
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as made:
        yield made


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_the_wheel_serves_outside_the_source_tree(bench: Bench, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run("hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    [wheel] = tmp_path.glob("kvolt-*.whl")
    run("pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    compiled = {path.name.split(".")[0] for path in site.rglob("*.so")}
    assert compiled == set(MODULES) or wheel.name.endswith("-none-any.whl")

    bench.env["PYTHONPATH"] = str(site)
    serve, url = await bench.serve(MODEL)
    assert str(site / "kvolt") in Path(f"/proc/{serve.pid}/maps").read_text() or not compiled
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "alpha beta", "max_tokens": 4}
        )
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_the_lock_agrees_with_what_it_was_made_from() -> None:
    """`make lock` writes it."""
    pins = dict(PIN.findall((ROOT / "constraints.txt").read_text().lower()))
    locked = dict(PIN.findall((ROOT / "requirements.lock").read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[><=\[; ]", each)[0] for each in project["dependencies"]}
    assert needed <= locked.keys()
    assert {name: pins[_in(pins, name)] for name in locked} == locked
    assert (ROOT / "requirements.lock").read_text().count("--hash=sha256:") > len(locked)


def _in(pins: dict[str, str], name: str) -> str:
    """The name as constraints.txt spells it."""
    return next(each for each in pins if re.sub(r"[-_.]+", "-", each) == name)
