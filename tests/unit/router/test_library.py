"""`kvolt.router` as a library: needs no runtime, and the examples of the page run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvolt.router
from kvolt.router.service.http_service import RouterHttp
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.network import SocketNetwork

PAGE = (Path(__file__).parents[3] / "docs" / "router.md").read_text()
FORBIDDEN = ("asyncio", "http", "prometheus_client", "socket", "ssl", "torch", "uvloop", "zmq")

_LOOK = """
import json, sys
from kvolt.router import *
print(json.dumps(sorted(sys.modules)))
"""


def test_importing_it_starts_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, check=True, text=True)
    loaded = json.loads(done.stdout)
    assert "kvolt.router.selection.selector" in loaded
    assert [name for name in loaded if name.partition(".")[0] in FORBIDDEN] == []


def test_all_that_is_named_is_there() -> None:
    for name in kvolt.router.__all__:
        assert getattr(kvolt.router, name) is not None
    assert kvolt.router.__all__ == sorted(kvolt.router.__all__)


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    assert found is not None, f"docs/router.md has no section {title}"
    return found[1]


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", section("As a library"), re.S)
    assert len(examples) == 2
    for example in examples:
        names: dict[str, Any] = {}
        exec(example, names)
        documented = [line.partition("  # ")[2] for line in example.splitlines() if line.startswith("print(")]
        assert capsys.readouterr().out.splitlines() == documented


async def test_the_page_lists_every_path_of_the_http_service() -> None:
    service = RouterHttp(SocketNetwork(), SystemClock(), lambda block_size: pytest.fail("not asked"))
    routes = service._routes()
    served = {(method, path) for path, methods in routes._exact.items() for method in methods}
    served |= {(method, path) for path, pattern in routes._patterns.items() for method in pattern.methods}
    documented = set(re.findall(r"^\| `([A-Z]+) (/\S*?)`", section("Over HTTP"), re.M))
    assert documented == served
    await service.close()
