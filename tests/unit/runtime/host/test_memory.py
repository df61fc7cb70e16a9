"""What large blocks leave behind in a process that has freed them."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from kvolt.runtime.host.memory import free_bytes, return_freed_memory

MIB = 1024 * 1024

LEFT_BEHIND = """
import sys, psutil
from kvolt.runtime.host.memory import return_freed_memory
if sys.argv[1] == "returned":
    assert return_freed_memory()
rss = psutil.Process().memory_info
number = len(sys.argv)
number * b"x" * (10 * 2**20)
before = rss().rss
blocks = [(number * b"x" * 2**19, number * b"x" * 1000) for _ in range(48)]
small = [each for _, each in blocks]
del blocks
print(rss().rss - before)
"""


def left_behind(how: str) -> int:
    printed = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND, how], check=True, capture_output=True, text=True, timeout=30
    )
    return int(printed.stdout)


def test_large_blocks_do_not_stay() -> None:
    if platform.libc_ver()[0] != "glibc":
        assert not return_freed_memory()
        return
    assert left_behind("returned") < 4 * MIB < left_behind("kept")


def test_the_collector_leaves_alone_what_is_loaded() -> None:
    program = (
        "import gc; from kvolt.runtime.host.memory import settle_garbage_collector; settle_garbage_collector(); "
        "assert gc.get_freeze_count() > 1000; assert gc.isenabled(); assert gc.get_threshold()[0] == 10_000"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_containers_limit_counts_where_it_is_nearer(tmp_path: Path) -> None:
    meminfo, root, membership = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "membership"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    membership.write_text("0::/pod/box\n")
    box = root / "pod" / "box"
    box.mkdir(parents=True)
    assert free_bytes(meminfo, root, membership) == 4000 * 1024, "no limit anywhere"
    (box / "memory.max").write_text("max\n")
    (box / "memory.current").write_text("5000\n")
    assert free_bytes(meminfo, root, membership) == 4000 * 1024
    (root / "pod" / "memory.max").write_text("10000\n")
    (root / "pod" / "memory.current").write_text("7000\n")
    assert free_bytes(meminfo, root, membership) == 3000
    (root / "pod" / "memory.stat").write_text("anon 1\ninactive_file 2000\n")
    assert free_bytes(meminfo, root, membership) == 5000, "files can be dropped"
    (root / "pod" / "memory.current").write_text("70000\n")
    assert free_bytes(meminfo, root, membership) == 0


def test_a_system_that_does_not_say_has_something(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "absent", tmp_path, tmp_path / "absent") > 0
