"""What large blocks leave behind in a process that has freed them."""

from __future__ import annotations

import platform
import subprocess
import sys

from kvolt.runtime.memory import return_freed_memory

MIB = 1024 * 1024

LEFT_BEHIND = """
import sys, psutil
from kvolt.runtime.memory import return_freed_memory
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
    assert left_behind("kept") > 40 * MIB, "then it is not needed any more"
    assert left_behind("returned") < 4 * MIB


def test_the_collector_leaves_alone_what_is_loaded() -> None:
    program = (
        "import gc; from kvolt.runtime.memory import settle_garbage_collector; settle_garbage_collector(); "
        "assert gc.get_freeze_count() > 1000; assert gc.isenabled(); assert gc.get_threshold()[0] == 10_000"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
