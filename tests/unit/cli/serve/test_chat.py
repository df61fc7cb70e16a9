"""What a supervisor says while its terminal belongs to the chat; the chat itself is tested with real processes."""

from __future__ import annotations

import io

from kvolt.cli.serve.chat import HeldOutput
from kvolt.runtime.supervisor.output import TerminalView
from kvolt.runtime.supervisor.plan import Level


async def test_what_is_said_meanwhile_comes_afterwards() -> None:
    out = io.StringIO()
    held = HeldOutput(out)
    view = TerminalView(held, ["worker"], quiet=True)
    view.show_own(Level.WARNING, "before")
    held.hold()
    view.show_own(Level.INFO, "not even afterwards")
    view.show_own(Level.WARNING, "during")
    assert out.getvalue() == "kvolt  | before\n"
    held.release()
    view.show_own(Level.WARNING, "after")
    assert out.getvalue() == "kvolt  | before\nkvolt  | during\nkvolt  | after\n"
    held.release()
    await view.close()


def test_only_the_last_lines_are_kept() -> None:
    out = io.StringIO()
    held = HeldOutput(out)
    held.hold()
    for number in range(1000):
        held.write(f"{number}\n")
    held.release()
    assert out.getvalue().split() == [str(number) for number in range(950, 1000)]
