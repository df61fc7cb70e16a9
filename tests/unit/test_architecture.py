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

PURE = [
    *sorted(SOURCE.glob("core/*.py")),
    *sorted(SOURCE.glob("frontend/detokenizer*.py")),
    *sorted(SOURCE.glob("frontend/parsers/*.py")),
    SOURCE / "frontend" / "choice.py",
    SOURCE / "frontend" / "stops.py",
    SOURCE / "frontend" / "trace_ids.py",
    SOURCE / "frontend" / "openai_api" / "wording.py",
    SOURCE / "journey" / "machine.py",
    SOURCE / "journey" / "resuming.py",
    *sorted(SOURCE.glob("kv/*.py")),
    *(SOURCE / "kv" / "tiers" / f"{name}.py" for name in ("books", "eviction", "sizes")),
    SOURCE / "kv" / "tiers" / "hit_window.py",
    *sorted(SOURCE.glob("router/index*.py")),
    *(
        SOURCE / "transfer" / f"{name}.py"
        for name in ("lanes", "layout", "link_speeds", "offered", "operation", "routes", "wanted", "wire")
    ),
    SOURCE / "runtime" / "histogram.py",
    *(
        SOURCE / "router" / f"{name}.py"
        for name in ("approximate", "learning", "output_lengths", "stats", "step_fit", "trust")
    ),
    *(
        SOURCE / "router" / f"{name}.py"
        for name in (
            "affinity",
            "breaker",
            "by_hand",
            "expected",
            "gossip",
            "load",
            "lookup",
            "place",
            "posted",
            "prices",
            "queue",
            "queue_level",
            "queue_stats",
            "roster",
            "shadow",
        )
    ),
    SOURCE / "router" / "ingest_state.py",
    SOURCE / "router" / "ingest_slots.py",
    *sorted(SOURCE.glob("engines/kv_formats/*.py")),
    *(
        SOURCE / "bench" / "load" / f"{name}.py"
        for name in (
            "schedules",
            "workloads",
            "bodies",
            "http_reader",
            "sse",
            "answer",
            "exchange",
            "histogram",
            "timeline",
            "sla",
            "sample",
            "tally",
            "report",
            "compare",
            "svg",
            "page",
            "wording",
        )
    ),
    *sorted(SOURCE.glob("scheduler/*.py")),
    *(SOURCE / "latency" / f"{name}.py" for name in ("fit", "least_squares")),
    *(SOURCE / "engines" / f"{name}.py" for name in ("kv_exchange", "prefills", "sim/links")),
    SOURCE / "worker" / "held_blocks.py",
]
PURE += [
    SOURCE / "bench" / "traces" / f"{name}.py"
    for name in ("analysis", "distribution", "prefixes", "reuse", "tiers", "tokens", "transforms")
]
PURE += [
    SOURCE / "runtime" / f"{name}.py"
    for name in (
        "wire",
        "bulk",
        "backlog",
        "streams",
        "session",
        "outbox",
        "stalls",
        "steps",
        "plane",
        "plane_stats",
        "supervisor_plan",
        "discovery_view",
        "address",
        "settings",
        "settings_router",
    )
]


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
        {"signal"} if path.stem == "supervisor_plan" else set()
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
    assert sorted(set(makers)) == ["runtime/tasks.py", "testing/loop.py"]


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
