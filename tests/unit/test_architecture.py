"""The pure modules import no I/O, clock or environment, and only `runtime.tasks` makes tasks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "kvolt"

IMPURE = {
    "asyncio",
    "concurrent",
    "fcntl",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uvloop",
    "zmq",
}

PURE_MODULES = {
    "bench/load": "answer bodies compare histogram page report report_text sample schedules sla svg tally workloads",
    "bench/traces": "analysis prefixes reuse tiers tokens transforms",
    "core": "*",
    "engines": "kv_exchange prefills",
    "engines/kv_formats": "*",
    "engines/sim": "links",
    "frontend/admin": "trace_ids",
    "frontend/answers": "choice stops",
    "frontend/detokenizer": "*",
    "frontend/openai_api": "serializer",
    "frontend/parsers": "*",
    "frontend/tenants": "leases limits",
    "journey": "machine migration",
    "kv": "*",
    "kv/tiers": "eviction sizes slot_table",
    "latency": "fit least_squares",
    "router": "breaker choice stats worker_rank",
    "router/gossip": "loads",
    "router/index": "approximate health pending_blocks prefix_index prefix_index_python",
    "router/ingest": "feed slots",
    "router/policy": "affinity cost_model load output_lengths shadow step_fit",
    "router/queue": "priority_level waiting_queue",
    "router/selection": "learning lookup overlap roster",
    "router/service": "builders standalone_state",
    "runtime": "histogram metric_aliases",
    "runtime/config": "leaves router_settings settings",
    "runtime/discovery": "view",
    "runtime/http": "sse",
    "runtime/plane": "bulk outbox port sending served_stream session stats steps streams wire",
    "runtime/supervisor": "plan",
    "scheduler": "*",
    "transfer/memory": "layout",
    "transfer/paths": "lanes link_speeds routes",
    "transfer/peer": "offers",
    "transfer/reads": "read_request wire",
    "worker/kv": "held_blocks",
}
"""Folder below src/kvolt -> its pure modules."""

PURE = sorted(
    path
    for folder, names in PURE_MODULES.items()
    for name in names.split()
    for path in (SOURCE / folder).glob(f"{name}.py")
)


def test_every_pure_module_exists() -> None:
    listed = {
        (folder, name) for folder, names in PURE_MODULES.items() for name in names.split() if name != "*"
    }
    missing = {(folder, name) for folder, name in listed if not (SOURCE / folder / f"{name}.py").exists()}
    assert not missing


def imports_between(sources: dict[str, str]) -> dict[str, set[str]]:
    """Modules of `sources` (source text by module name) that each module imports, in functions and under
    TYPE_CHECKING too."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    names.add(name if name in sources else node.module)
        graph[module] = (names & sources.keys()) - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reachable: dict[str, set[str]] = {}
    for module, imports in graph.items():
        found: set[str] = set()
        stack = list(imports)
        while stack:
            name = stack.pop()
            if name not in found:
                found.add(name)
                stack.extend(graph[name])
        reachable[module] = found
    groups = {
        tuple(sorted(other for other in reachable[module] if module in reachable[other]))
        for module in graph
        if module in reachable[module]
    }
    return sorted(map(list, groups))


def test_no_modules_import_each_other() -> None:
    sources = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    assert circles(imports_between(sources)) == []


def test_a_circle_is_found() -> None:
    sources = {
        "a": "def f():\n    import b\n",
        "b": "from c import x\n",
        "c": "import a\n",
        "d": "import a\n",
    }
    assert circles(imports_between(sources)) == [["a", "b", "c"]]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and ast.unparse(node) == "from io import BytesIO":
            continue  # a buffer, and no I/O
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", PURE, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_pure_modules_stay_pure(path: Path) -> None:
    allowed = (
        {"signal"} if path.parent.name == "supervisor" else set()
    )  # the names of signals, for its messages
    assert not imported(path) & IMPURE - allowed


def test_the_check_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def now():\n    import time\n    return time.time()\n")
    assert imported(bad) & IMPURE == {"time"}


def sources_with(*words: str) -> Iterator[tuple[Path, ast.Module]]:
    """Source files that contain one of the words, parsed."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if any(word in text for word in words):
            yield path, ast.parse(text)


def test_tasks_are_made_in_one_module() -> None:
    makers = []
    for path, tree in sources_with("create_task", "ensure_future"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
                "create_task",
                "ensure_future",
            ):
                makers.append(str(path.relative_to(SOURCE)))
    # The virtual loop starts its own main task.
    assert sorted(set(makers)) == ["runtime/tasks.py", "testing/virtual/loop.py"]


def test_processes_are_started_in_one_module() -> None:
    starters = {
        str(path.relative_to(SOURCE))
        for path, tree in sources_with("Popen", "create_subprocess_exec")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") in ("Popen", "create_subprocess_exec")
    }
    assert starters == {"runtime/supervisor/process.py"}


def test_the_environment_and_the_wall_clock_have_one_reader_each() -> None:
    readers: dict[str, set[str]] = {"environ": set(), "time.time": set()}
    for path, tree in sources_with("environ", "getenv", "time.time", "time.monotonic"):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "os" and node.attr in ("environ", "getenv"):
                    readers["environ"].add(name.split("/", maxsplit=1)[0])
                if node.value.id == "time" and node.attr in ("time", "monotonic"):
                    readers["time.time"].add(name)
    assert readers["environ"] <= {"cli", "testing", "runtime"}
    assert readers["time.time"] == {"runtime/clock.py"}
