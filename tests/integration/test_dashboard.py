"""The dashboard of all engines: real processes tell every figure that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
from tests.integration.processes import MODEL, Bench

DASHBOARDS = Path(__file__).parents[2] / "deploy" / "grafana"


def shown() -> set[str]:
    panels = json.loads((DASHBOARDS / "kvolt.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return {name for query in queries for name in re.findall(r"\b(?:kvolt|dynamo)_\w+", query)}


async def test_every_figure_that_is_shown_is_told(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        _, url = await bench.serve()
        async with httpx.AsyncClient(timeout=60) as client:
            for _ in range(2):
                asked = {"model": MODEL, "prompt": "to be or not to be, that is " * 20, "max_tokens": 8}
                (await client.post(f"{url}/v1/completions", json=asked)).raise_for_status()
            told = (await client.get(f"{url}/metrics")).text
            for view in (await bench.look()).values():
                told += (await client.get(f"http://{view.admin}/metrics")).text
    names = set(re.findall(r"^([a-z_]+)(?:\{| )", told, re.MULTILINE))
    assert len(shown()) > 20
    assert shown() <= names, "a dashboard shows what nobody tells"
