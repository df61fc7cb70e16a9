"""The picture of the journey machine: all of its table is on it, and the page has it as it is."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools import journey_diagram
from tools.journey_diagram import IMAGE, diagram, transitions
from tools.state_diagram import state_diagram

from kvolt.journey.events import Event, JourneyState
from kvolt.journey.machine import _TRANSITIONS

PAGE = Path(__file__).parents[3] / "docs" / "journey.md"
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def arrows(svg: str) -> int:
    return sum("marker-end" in each.attrib for each in ElementTree.fromstring(svg).iter(f"{SVG}path"))


def test_the_page_shows_the_machine_as_it_is() -> None:
    assert IMAGE.read_text() == diagram(), "run `python -m tools.journey_diagram`"
    assert f"(images/{IMAGE.name})" in PAGE.read_text()


def test_every_row_of_the_table_is_drawn() -> None:
    drawn = {(before, event) for before, event, _ in transitions()}
    assert drawn == {(state, event.__name__) for state, event in _TRANSITIONS}
    edges = {(before, after) for before, _, after in transitions()}
    assert arrows(diagram()) == len(edges) + 1  # and the one to the first state
    assert {state.value for state in JourneyState} <= set(texts(diagram()))


def test_nothing_leads_out_of_the_end_and_everything_can_be_stopped() -> None:
    found = transitions()
    assert all(before is not JourneyState.DONE for before, _, _ in found)
    stopped = {before for before, event, after in found if (event, after) == ("Stopped", JourneyState.DONE)}
    assert stopped == set(JourneyState) - {JourneyState.DONE}


def test_a_move_that_is_never_tried_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: tuple[Event, ...] = tuple(
        each for each in journey_diagram._EVENTS if type(each).__name__ != "WithdrawalConfirmed"
    )
    assert "WithdrawalConfirmed" in texts(diagram())
    monkeypatch.setattr(journey_diagram, "_EVENTS", tried)
    assert "WithdrawalConfirmed" not in texts(diagram())


def test_the_image_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journey_diagram, "IMAGE", tmp_path / "machine.svg")
    journey_diagram.main()
    assert (tmp_path / "machine.svg").read_text() == diagram()


def test_arrows_of_all_directions_have_labels() -> None:
    edges = {
        ("a", "b"): "down",
        ("a", "c"): "skip",
        ("a", "d"): "end",
        ("c", "a"): "back",
        ("b", "b"): "<self>",
    }
    svg = state_diagram("abcd", edges)
    assert sorted(texts(svg)) == sorted([*"abcd", *edges.values()])
    assert arrows(svg) == len(edges) + 1
