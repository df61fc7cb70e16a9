"""The file of a sweep: what was run is known again, by what decides its figures and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvolt.bench.load.sla import Sla
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.twin.axes import PointSetup
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.points import PointResult, PointsFile, point_digest, trace_digest

SETUP = PointSetup(settings=TwinSettings(num_workers=2))
SLA = Sla({"ttft": 1.0})


def result(number: int) -> PointResult:
    figures = {"goodput": number / 3, "itl_p90": None}
    return PointResult(digest=f"d{number}", point={"workers": number}, figures=figures)


def saved(path: Path, *results: PointResult) -> None:
    file = PointsFile(path)
    for each in results:
        file.append(each)
    file.close()


def read(path: Path) -> dict[str, PointResult]:
    file = PointsFile(path)
    try:
        return file.read()
    finally:
        file.close()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    assert read(path) == {}
    saved(path, result(1), result(2))
    saved(path, result(3))
    assert read(path) == {f"d{number}": result(number) for number in (1, 2, 3)}


@pytest.mark.parametrize(
    "torn", [b'{"digest":"d3","poi', b"\x80", b'{"digest":"d3","point":{},"figures":{}}']
)
def test_a_torn_last_line_is_as_if_it_were_not_there(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "points.jsonl"
    saved(path, result(1), result(2))
    path.write_bytes(path.read_bytes() + torn)
    file = PointsFile(path)
    assert list(file.read()) == ["d1", "d2"]
    file.append(result(3))
    file.close()
    assert list(read(path)) == ["d1", "d2", "d3"]


def test_a_broken_line_before_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    saved(path, result(1))
    path.write_bytes(path.read_bytes() + b"nonsense\n")
    saved(path, result(2))
    with pytest.raises(ConfigError, match=r"points\.jsonl line 2 is not a sweep result"):
        read(path)


def test_the_digest_is_of_all_that_decides_the_figures(tmp_path: Path) -> None:
    first = point_digest(SETUP, "trace", SLA)
    assert first == point_digest(
        PointSetup(settings=TwinSettings(num_workers=2)), "trace", Sla({"ttft": 1.0})
    )
    settings = SETUP.settings
    preset = tmp_path / "preset.json"
    preset.write_text('{"name": "mine", "latency": {"base_s": 0.1}}')
    of_file = replace(SETUP, settings=replace(settings, engine=SimArguments(preset=str(preset))))
    others = {
        point_digest(SETUP, "other trace", SLA),
        point_digest(SETUP, "trace", None),
        point_digest(SETUP, "trace", Sla({"ttft": 2.0})),
        point_digest(replace(SETUP, arrivals=2.0), "trace", SLA),
        point_digest(replace(SETUP, settings=replace(settings, seed=1)), "trace", SLA),
        point_digest(replace(SETUP, settings=replace(settings, router="least-loaded")), "trace", SLA),
        point_digest(
            replace(SETUP, settings=replace(settings, engine=SimArguments(kv_blocks=7))), "trace", SLA
        ),
        point_digest(of_file, "trace", SLA),
    }
    preset.write_text('{"name": "mine", "latency": {"base_s": 0.2}}')
    others.add(point_digest(of_file, "trace", SLA))
    assert len(others) == 9
    assert first not in others


def test_the_digest_of_a_trace_is_of_its_records() -> None:
    one = TraceRecord(timestamp=0.0, input_length=5, output_length=2)
    two = replace(one, hash_ids=(1,))
    assert trace_digest([one, two]) == trace_digest([one, two])
    assert len({trace_digest(each) for each in ([one], [two], [one, two], [two, one], [])}) == 5
