"""Write docs/metrics.md: every metric that a running cluster exports, with type, labels and meaning.

python tools/metrics_page.py            start a simulated cluster, scrape all its processes, write the page
python tools/metrics_page.py --check    fail if the page is not current
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvolt.runtime.metric_aliases import aliases_of

_KVOLT = (sys.executable, "-m", "kvolt")
_SERVE = (*_KVOLT, "serve", "sim-tiny", "--prefill", "1", "--decode", "2", "--processes", "2")
PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
SECTIONS = (
    ("kvolt_frontend_", "Frontend", "HTTP API, per model."),
    ("kvolt_model_", "Models", "Workers of each model, exported by the frontend."),
    ("kvolt_tenant_", "Tenants", "Usage by tenant, exported by a frontend with `--api-keys`."),
    (
        "kvolt_journey_",
        "Retries, migrations and prefill",
        "Requests on their way through workers, exported by the frontend.",
    ),
    (
        "kvolt_router_http_",
        "Router over HTTP",
        "Exported by `kvolt router --http-port N`, at `/metrics` of that port and of the admin port.",
    ),
    (
        "kvolt_router_",
        "Router",
        "Exported by the process that routes: frontend or router process (`--processes`, `router.process=true`).",
    ),
    ("kvolt_worker_", "Worker", "Exported by every worker, whatever its engine."),
    ("kvolt_tier_", "KV tiers", "Host memory, disk, object store and peers (`--kv-host`, `--kv-disk`, ...)."),
    (
        "kvolt_handoff",
        "Handoffs",
        "Prompts computed by one worker and answered by another, exported by workers.",
    ),
    ("kvolt_transfer_", "KV transfer", "Connections and paths of KV transfers, exported by workers."),
    ("kvolt_", "Every process", "Runtime: request plane, event plane, discovery, HTTP server, event loop."),
)
INTRO = """# Metrics

After this page you can write a dashboard, an alert or an autoscaling rule for kvolt. Every process serves its metrics
at `/metrics` of its admin port (`kvolt status` shows the ports); the frontend serves those of all its processes at
`/metrics` of the API port. `deploy/grafana` has two dashboards.

With `--set metrics.aliases=dynamo` a process also serves the names of the column "Dynamo's name", with Dynamo's
labels, so that Dynamo's dashboards and alerts work. vLLM's, SGLang's and the operating system's own series (`vllm:`,
`sglang:`, `process_`) are passed on as they are and not listed here.

This page is generated: `python tools/metrics_page.py`.
"""


_RECORDER = """
import os
from prometheus_client import metrics, metrics_core

seen = set()


def wrap(kind, at):
    original = kind.__init__

    def init(self, name, documentation, *args, **kwargs):
        labels = kwargs.get("labels", kwargs.get("labelnames")) or (args[at] if len(args) > at else None) or ()
        if (name, *labels) not in seen:
            seen.add((name, *labels))
            with open(os.environ.get("METRIC_LABELS", os.devnull), "a") as file:
                file.write(" ".join((name, *labels)) + chr(10))
        original(self, name, documentation, *args, **kwargs)

    kind.__init__ = init


for kind in (metrics_core.CounterMetricFamily, metrics_core.GaugeMetricFamily, metrics_core.HistogramMetricFamily):
    wrap(kind, 1)
wrap(metrics.MetricWrapperBase, 0)
"""
"""Run at the start of each process: writes down the labels of families, which the text shows only with samples."""


class Entry(NamedTuple):
    kind: str
    labels: frozenset[str]
    help: str
    aliases: tuple[str, ...]


def entries(families: Iterable[Metric]) -> dict[str, Entry]:
    """kvolt's families by their name as exported."""
    entries_by_name: dict[str, Entry] = {}
    for family in families:
        if not family.name.startswith("kvolt_") or family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = frozenset(key for sample in family.samples for key in sample.labels if key != "le")
        known = entries_by_name.get(name)
        if known is not None:
            labels |= known.labels
        entries_by_name[name] = Entry(family.type, labels, family.documentation, _alias_names(family))
    return entries_by_name


def _alias_names(family: Metric) -> tuple[str, ...]:
    suffix = "_total" if family.type == "counter" else ""
    return tuple(each.name + (suffix if each.type == "counter" else "") for each in aliases_of(family))


def render(entries_by_name: dict[str, Entry]) -> str:
    lines, rest = [INTRO], dict(entries_by_name)
    for prefix, title, about in SECTIONS:
        names = sorted(name for name in rest if name.startswith(prefix))
        if not names:
            continue
        lines.append(f"## {title}\n\n{about}\n")
        lines.append("| name | type | labels | meaning | Dynamo's name |\n| --- | --- | --- | --- | --- |")
        for name in names:
            entry = rest.pop(name)
            labels = ", ".join(f"`{label}`" for label in sorted(entry.labels))
            aliases = ", ".join(f"`{alias}`" for alias in entry.aliases)
            lines.append(f"| `{name}` | {entry.kind} | {labels} | {entry.help} | {aliases} |")
        lines.append("")
    return "\n".join(lines)


def scrape_cluster() -> dict[str, Entry]:
    """Start a simulated cluster with every part that has metrics, send requests, and read all processes."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
        unused.close()
        where = ("--namespace", "metrics-page", "--discovery-path", f"{folder}/discovery")
        tiers = (
            "--kv-host",
            "1000blocks",
            "--kv-disk",
            "64MiB",
            "--kv-disk-dir",
            f"{folder}/kv",
            "--kv-peers",
        )
        Path(folder, "sitecustomize.py").write_text(_RECORDER)
        keys = ("--api-keys", f"{folder}/api-keys.jsonl")
        created = subprocess.run(
            [*_KVOLT, "key", "create", "--tenant", "a", *keys], capture_output=True, check=True
        )
        key = created.stdout.decode().split()[-1]
        process = subprocess.Popen(
            [*_SERVE, "--port", str(port), *tiers, *where, *keys],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": _path_with(folder), "METRIC_LABELS": f"{folder}/labels"},
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if b"Ctrl-C stops everything" in line:
                    break
            else:
                raise SystemExit("kvolt serve did not start; run it by hand to see why: " + " ".join(_SERVE))
            threading.Thread(target=process.stdout.read, daemon=True).start()
            for number in range(4):
                _chat(port, key, f"Tell me about the number {number}. " * 40)
            shown = subprocess.run([*_KVOLT, "status", "--json", *where], capture_output=True, check=True)
            entries_by_name: dict[str, Entry] = {}
            for each in json.loads(shown.stdout):
                _merge(entries_by_name, _scrape(each["admin"]))
            # Merged metrics have labels of their own; only families that no single process has are taken.
            merged = _scrape(f"127.0.0.1:{port}")
            _merge(
                entries_by_name,
                {name: entry for name, entry in merged.items() if name not in entries_by_name},
            )
            for line in Path(folder, "labels").read_text().splitlines():
                name, *labels = line.split()
                for exported in {name, f"{name}_total"} & entries_by_name.keys():
                    _merge(
                        entries_by_name,
                        {exported: entries_by_name[exported]._replace(labels=frozenset(labels))},
                    )
            _merge(entries_by_name, scrape_http_router())
            return entries_by_name
        finally:
            process.terminate()
            process.wait(60)


def scrape_http_router() -> dict[str, Entry]:
    """Metrics of a router that serves HTTP and has a worker."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_KVOLT, "router", "--http-port", "0", "--set", "log.format=human"]
        process = subprocess.Popen(
            [*command, "--namespace", "metrics-page", "--discovery-path", f"{folder}/discovery"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if listening := re.search(r"listening on http://(\S+)", line):
                    break
            else:
                raise SystemExit(
                    "kvolt router did not start; run it by hand to see why: " + " ".join(command)
                )
            threading.Thread(target=process.stdout.read, daemon=True).start()
            _post(f"http://{listening[1]}/v1/workers", {"worker": "a", "block_size": 16})
            scraped = _scrape(listening[1])
            return {name: entry for name, entry in scraped.items() if name.startswith("kvolt_router_http_")}
        finally:
            process.terminate()
            process.wait(60)


def _path_with(folder: str) -> str:
    """PYTHONPATH with a folder in front."""
    return os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


def _scrape(address: str) -> dict[str, Entry]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return entries(text_string_to_metric_families(answer.read().decode()))


def _merge(into: dict[str, Entry], more: dict[str, Entry]) -> None:
    for name, entry in more.items():
        labels = entry.labels | (into[name].labels if name in into else frozenset())
        into[name] = entry._replace(labels=labels)


def _chat(port: int, key: str, text: str) -> None:
    body = {"model": "sim-tiny", "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
    _post(f"http://127.0.0.1:{port}/v1/chat/completions", body, authorization=f"Bearer {key}")


def _post(url: str, body: dict[str, Any], **headers: str) -> None:
    content = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), content)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if docs/metrics.md is not current")
    check = parser.parse_args().check
    page = render(scrape_cluster())
    if not check:
        PAGE.write_text(page)
    elif page != PAGE.read_text():
        print("docs/metrics.md is not current: run `python tools/metrics_page.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
