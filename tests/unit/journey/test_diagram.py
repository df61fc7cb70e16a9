"""The picture of the journey machine: all of its table is on it, and the page has it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import journey_diagram as diagram
from tools.journey_diagram import BEGIN, END, mermaid, transitions, update_page

from kvolt.journey.events import Event, State
from kvolt.journey.machine import _TRANSITIONS

PAGE = Path(__file__).parents[3] / "docs" / "journey.md"


def test_the_page_shows_the_machine_as_it_is() -> None:
    page = PAGE.read_text()
    assert update_page(page) == page, "run `python tools/journey_diagram.py docs/journey.md`"


def test_every_row_of_the_table_is_drawn() -> None:
    drawn = {(before, event) for before, event, _ in transitions()}
    assert drawn == {(state, event.__name__) for state, event in _TRANSITIONS}


def test_nothing_leads_out_of_the_end_and_everything_can_be_stopped() -> None:
    found = transitions()
    assert all(before is not State.DONE for before, _, _ in found)
    stopped = {before for before, event, after in found if (event, after) == ("Stopped", State.DONE)}
    assert stopped == set(State) - {State.DONE}


def test_a_move_that_is_never_tried_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: tuple[Event, ...] = tuple(
        each for each in diagram._EVENTS if type(each).__name__ != "WithdrawalConfirmed"
    )
    whole = mermaid()
    assert "waiting --> opening: WithdrawalConfirmed" in whole
    monkeypatch.setattr(diagram, "_EVENTS", tried)
    assert mermaid() == whole.replace("    waiting --> opening: WithdrawalConfirmed\n", "")


def test_it_is_drawn_between_its_marks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr("sys.argv", ["diagram", str(page)])
    diagram.main()
    drawn = page.read_text()
    assert drawn == f"before\n{BEGIN}\n\n```mermaid\n{mermaid()}\n```\n\n{END}\nafter\n"
    assert update_page(drawn) == drawn
    with pytest.raises(ValueError, match="lacks the marks"):
        update_page("nothing here")
