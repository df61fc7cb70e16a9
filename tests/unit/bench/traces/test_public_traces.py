"""The traces that are here: the project's own one always, the public ones where KVOLT_TRACES names their folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.unit.bench.traces.trace_lab import Present, lru_hits, present_traces, shared_blocks, shared_tokens

from kvolt.bench.traces import (
    PUBLIC_TRACES,
    analyze,
    find_public,
    read_trace,
    reblock,
    renumber,
    tokens_of,
    write_trace,
)
from kvolt.bench.traces import sources as sources_module
from kvolt.bench.traces.sources import FileState
from kvolt.core.errors import ConfigError

TRACES = present_traces()
every_trace = pytest.mark.parametrize("trace", TRACES, ids=[trace.name for trace in TRACES])


@every_trace
def test_it_reads_whole_and_fast(trace: Present) -> None:
    begun = time.process_time()
    assert len(trace.records()) == trace.requests
    assert time.process_time() - begun < 1.0


@every_trace
def test_it_survives_writing(trace: Present, tmp_path: Path) -> None:
    records = trace.records()
    write_trace(tmp_path / "copy.jsonl.gz", records)
    for one, other in zip(records, read_trace(tmp_path / "copy.jsonl.gz"), strict=True):
        assert other.timestamp == pytest.approx(one.timestamp, abs=0.001)
        assert replace(other, timestamp=one.timestamp) == one


@every_trace
def test_hit_rates_are_those_of_real_caches(trace: Present) -> None:
    records = trace.records()[:300]
    found = analyze(records, (100, 1000)).reuse
    if found is None:
        assert trace.name.startswith("azure"), "which says nothing of prefixes"
        return
    for each in found.lru:
        assert each.hit_rate == lru_hits(records, each.blocks) / found.blocks
    assert found.hit_rate == lru_hits(records, None) / found.blocks


@every_trace
def test_blocks_and_tokens_of_any_size_share_the_same(trace: Present) -> None:
    records = trace.records()[:60]
    small = list(reblock(records, 64))
    tokens = [tokens_of(each, 49152, seed=1, index=index) for index, each in enumerate(records)]
    for index in range(1, len(records)):
        for other in (0, index - 1):
            common = shared_tokens(records[index], records[other]) if other != index else 0
            assert shared_blocks(small[index].hash_ids, small[other].hash_ids) == common // 64
            assert common <= shared_blocks(tokens[index], tokens[other]) < common + 4


@every_trace
def test_new_numbers_change_no_rate(trace: Present) -> None:
    records = trace.records()
    assert analyze(renumber(records)) == analyze(records)


FACTS = {
    "small": (123_379, 17_054, 7_854, 2_113),
    "mooncake-conversation": (144_793_823, 4_122_048, 288_500, 182_790),
    "azure-conversation-2023": (22_361_870, 4_088_665, None, None),
}
"""Tokens in and out, blocks, different blocks: the public ones' counted without kvolt, our own's recorded."""


@every_trace
def test_facts(trace: Present) -> None:
    found = analyze(trace.records())
    blocks = (None, None) if found.reuse is None else (found.reuse.blocks, found.reuse.distinct_blocks)
    assert (found.input_tokens, found.output_tokens, *blocks) == FACTS[trace.name]


def test_a_folder_is_searched_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    mooncake, azure = PUBLIC_TRACES
    content = b"the published bytes"
    published = replace(mooncake, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    monkeypatch.setattr(sources_module, "PUBLIC_TRACES", (published, azure))
    assert [each.state for each in find_public(tmp_path)] == [FileState.MISSING] * 2
    (tmp_path / "any_name").write_bytes(content)
    (tmp_path / "a_name").write_bytes(content[::-1])
    (tmp_path / Path(azure.path).name).write_bytes(b"other bytes")
    first, second = find_public(tmp_path)
    assert (first.state, first.path) == (FileState.SAME, str(tmp_path / "any_name"))
    assert (second.state, second.path) == (FileState.DIFFERS, str(tmp_path / Path(azure.path).name))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        find_public(tmp_path / "nowhere")
